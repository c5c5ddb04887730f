"""What is known of a backend's prefix cache, in kvrelay's hashes: estimated, or mirrored from the backend's own events.

``PlacedPrefixes`` is the estimate: the prompts and answers that the backend was sent, least recently used out first. So
routing by prefix also works for a server without cache events, as in Dynamo's and SGLang's routers, which use what they
have placed. The estimate is wrong if the server evicts earlier, or if others use it too; that costs a prefill in the
wrong place, never a wrong token.

``MirroredCache`` follows events. vLLM names blocks by hashes of its own; its events carry the tokens, so ours are
computed from them. Its blocks may be a multiple of ours. A block whose predecessor is unknown, because events were
lost, cannot be named and is left out, which costs a hit and never a token.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, MutableMapping, Sequence
from typing import Any

import msgspec

from kvrelay.core.decoding import UNREADABLE
from kvrelay.core.events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from kvrelay.core.hashing import compute_sequence_hashes
from kvrelay.errors import KvrelayError

ServerHash = int | bytes
"""vLLM's name of a block: a number, or 32 bytes."""

MAX_BLOCKS_PER_EVENT = 65536
STORED_FIELDS = (
    *("block_hashes", "parent_block_hash", "token_ids", "block_size"),
    *("lora_id", "medium", "lora_name", "extra_keys", "group_idx"),
)
REMOVED_FIELDS = ("block_hashes", "medium", "group_idx")
WHOLE_ATTENTION = ("full_attention", "mla_attention", "sink_full_attention")
"""vLLM's names of kinds of layers that keep the KV of the whole prompt."""


class KnownBlocks:
    """Blocks by their sequence hashes. Not thread-safe."""

    _blocks: MutableMapping[int, Any]

    def __len__(self) -> int:
        return len(self._blocks)

    def num_leading(self, hashes: Sequence[int]) -> int:
        """How many of these consecutive blocks of a prompt are cached, from the first on."""
        return next((number for number, block in enumerate(hashes) if block not in self._blocks), len(hashes))

    def hashes(self) -> list[int]:
        return list(self._blocks)

    def clear(self) -> list[KvEvent]:
        """Forget everything."""
        had_any = bool(self._blocks)
        self._blocks.clear()
        return [AllBlocksCleared()] if had_any else []


class PlacedPrefixes(KnownBlocks):
    """At most ``capacity`` blocks."""

    def __init__(self, block_size: int, capacity: int) -> None:
        self._block_size = block_size
        self._capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()
        """Oldest first. A block is used after those that follow it in a prompt, so it leaves after them."""

    def place(self, hashes: Sequence[int]) -> list[KvEvent]:
        """The server has computed these consecutive blocks, from the first of a prompt on. Returns the changes. Blocks
        beyond the capacity are left out."""
        hashes = hashes[: self._capacity]
        held = self.num_leading(hashes)
        for block in reversed(hashes):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        events: list[KvEvent] = []
        excess = len(self._blocks) - self._capacity
        if excess > 0:
            events.append(BlockRemoved(tuple(self._blocks.popitem(last=False)[0] for _ in range(excess))))
        if held < len(hashes):
            size = self._block_size
            events.append(
                BlockStored(
                    parent_hash=hashes[held - 1] if held else None, block_hashes=tuple(hashes[held:]), block_size=size
                )
            )
        return events


class EventsError(KvrelayError):
    """The data is no batch of events."""


class _Batch(msgspec.Struct, array_like=True):
    """More fields may follow, and do in some versions."""

    published_unix_s: float
    events: list[dict[str, object] | list[object]]


class _Held(msgspec.Struct):
    """A block of the server: our blocks in it, in order. The server may hold it several times. ``salt`` is that of the
    requests that may use it."""

    blocks: tuple[int, ...]
    salt: str | None = None
    num_copies: int = 1


class MirroredCache(KnownBlocks):
    """``apply`` takes one batch as the server published it. Of a server with adapters (LoRA) only the
    blocks of ``adapters`` count, by name; an empty one: those of the model itself. Others may be added."""

    def __init__(self, block_size: int, adapters: Collection[str] = ("",)) -> None:
        self._block_size = block_size
        self.adapters = set(adapters)
        self._held: dict[ServerHash, _Held] = {}
        self._group: object = None
        """The number of the server's group of layers whose blocks count: that with whole attention, if there is one."""
        self._blocks: dict[int, int] = {}
        """Our blocks, and how many of the server's blocks hold each: two images may lead to one hash."""
        self.num_unknown = 0
        """Blocks without a known hash."""

    def place(self, hashes: Sequence[int]) -> list[KvEvent]:
        """The server itself reports its contents."""
        return []

    def clear(self) -> list[KvEvent]:
        self._held.clear()
        return super().clear()

    def apply(self, payload: bytes) -> list[KvEvent]:
        """Apply a batch and return the changes. Raises EventsError; later events of the batch are then not applied."""
        try:
            batch = msgspec.msgpack.decode(payload, type=_Batch)
        except UNREADABLE as exc:
            raise EventsError(f"no batch of events: {exc}") from exc
        events: list[KvEvent] = []
        for told in batch.events:
            event = _named(told)
            if event.get("medium") not in (None, "GPU"):
                continue  # a copy in another tier
            group = event.get("group_idx") or 0
            if self._group is None and event.get("kv_cache_spec_kind") in WHOLE_ATTENTION:
                self._group = group
                events += self.clear()
            if group != (self._group or 0):
                continue  # blocks of another kind of layer
            match event:
                case {
                    "type": "BlockStored",
                    "block_hashes": list() as names,
                    "parent_block_hash": parent,
                    "token_ids": list() as tokens,
                    "block_size": int() as size,
                }:
                    adapter = _adapter_of(event)
                    own = event if adapter is None else _without_adapter(event, adapter)
                    salt = _salt(own)
                    if adapter in self.adapters and not _has_keys(own, salt):
                        events += self._stored(names, parent, tokens, size, salt, adapter or None)
                case {"type": "BlockRemoved", "block_hashes": list() as names}:
                    events += self._removed(names)
                case {"type": "AllBlocksCleared"}:
                    events += self.clear()
                case _:
                    raise EventsError(f"an event that is not known: {str(told)[:100]}")
        return events

    def _stored(
        self,
        names: Sequence[object],
        parent: object,
        tokens: Sequence[object],
        size: int,
        salt: str | None,
        adapter: str | None,
    ) -> list[BlockStored]:
        if size <= 0 or size % self._block_size:
            raise EventsError(f"blocks of {size} tokens, no multiple of {self._block_size}: set --block-size to fit")
        if len(names) * size < len(tokens):
            # Layers with a window have only the last blocks of a prompt that has come from elsewhere.
            self.num_unknown += len(names)
            return []
        is_whole = len(tokens) == len(names) * size and len(names) <= MAX_BLOCKS_PER_EVENT
        if not is_whole or not all(type(token) is int and 0 <= token < 2**32 for token in tokens):
            raise EventsError("the tokens do not fit the blocks")
        before = None
        if parent is not None:
            held = self._held.get(_server_hash(parent))
            if held is None:
                self.num_unknown += len(names)
                return []
            before, salt = held.blocks[-1], held.salt
        ids: list[int] = tokens  # type: ignore[assignment]  # each was looked at
        hashes = compute_sequence_hashes(ids, self._block_size, lora=adapter, parent=before, salt=salt)
        per_block = size // self._block_size
        events = []
        for number, name in enumerate(names):
            own = slice(number * per_block, (number + 1) * per_block)
            blocks = hashes[own]
            first, before = before, blocks[-1]
            key = _server_hash(name)
            known = self._held.get(key)
            if known is not None:
                known.num_copies += 1
                continue
            self._held[key] = _Held(blocks, salt)
            num_known = self.num_leading(blocks)
            for block in blocks:
                self._blocks[block] = self._blocks.get(block, 0) + 1
            if num_known < per_block:
                # Different blocks of the server may begin with equal blocks of ours.
                events.append(
                    BlockStored(
                        parent_hash=blocks[num_known - 1] if num_known else first,
                        block_hashes=blocks[num_known:],
                        block_size=self._block_size,
                    )
                )
        return events

    def _removed(self, names: Sequence[object]) -> list[BlockRemoved]:
        gone: list[int] = []
        for name in names:
            key = _server_hash(name)
            held = self._held.get(key)
            if held is None:
                continue
            held.num_copies -= 1
            if held.num_copies:
                continue
            del self._held[key]
            for block in held.blocks:
                self._blocks[block] -= 1
                if not self._blocks[block]:
                    del self._blocks[block]
                    gone.append(block)
        return [BlockRemoved(tuple(gone))] if gone else []


def _named(event: dict[str, object] | list[object]) -> dict[str, object]:
    """Newer versions send fields by name, older ones in this order."""
    if isinstance(event, dict):
        return event
    kind = event[0] if event else None
    names = STORED_FIELDS if kind == "BlockStored" else REMOVED_FIELDS
    return {"type": kind, **dict(zip(names, event[1:]))}


def _adapter_of(event: dict[str, object]) -> str | None:
    """The name of the blocks' adapter; empty: there is none; None: it has no name."""
    name = event.get("lora_name") or ""
    return name if isinstance(name, str) and (name or event.get("lora_id") is None) else None


def _without_adapter(event: dict[str, object], adapter: str) -> dict[str, object]:
    """The event as if its blocks had none. vLLM's keys begin with its name."""
    keys = event.get("extra_keys")
    if not adapter or not isinstance(keys, list):
        return event
    bare = [key[1:] or None if isinstance(key, list) and key[:1] == [adapter] else key for key in keys]
    return event | {"extra_keys": bare}


def _salt(event: dict[str, object]) -> str | None:
    """The salt of blocks that begin a prompt: the only key of the first one, which those after it inherit."""
    match event:
        case {"extra_keys": [[str() as salt], *_], "parent_block_hash": None}:
            return salt
    return None


def _has_keys(event: dict[str, object], salt: str | None) -> bool:
    """Whether the server's hashes depend on more than the tokens and this salt: an image."""
    keys = event.get("extra_keys")
    return isinstance(keys, list) and any(keys if salt is None else keys[1:])


def _server_hash(name: object) -> ServerHash:
    if isinstance(name, int | bytes):
        return name
    raise EventsError(f"a block is named {str(name)[:50]!r}")
