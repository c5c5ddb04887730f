"""An estimate of a server's prefix cache: the prompts and answers that it was sent, least recently used out first.

Routing by prefix also works for a server without cache events, as in Dynamo's and SGLang's routers, which use what they
have placed. The estimate is wrong if the server evicts earlier, or if others use it too; that costs a prefill in the
wrong place, never a wrong token.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from kvrelay.core.events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent


class PlacedPrefixes:
    """At most ``capacity`` blocks, identified by their sequence hashes. Not thread-safe."""

    def __init__(self, block_size: int, capacity: int) -> None:
        self._block_size = block_size
        self._capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()
        """Oldest first. A block is used after those that follow it in a prompt, so it leaves after them."""

    def __len__(self) -> int:
        return len(self._blocks)

    def num_leading(self, hashes: Sequence[int]) -> int:
        """How many of these consecutive blocks of a prompt are cached, from the first on."""
        return next((number for number, block in enumerate(hashes) if block not in self._blocks), len(hashes))

    def hashes(self) -> list[int]:
        return list(self._blocks)

    def place(self, hashes: Sequence[int], local_hashes: Sequence[int], token_ids: Sequence[int]) -> list[KvEvent]:
        """The server has computed these consecutive blocks, from the first of a prompt on. Returns the changes.

        ``token_ids`` has at least ``len(hashes) * block_size`` tokens. Blocks beyond the capacity are left out.
        """
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
                    parent_hash=hashes[held - 1] if held else None,
                    block_hashes=tuple(hashes[held:]),
                    local_hashes=tuple(local_hashes[held : len(hashes)]),
                    token_ids=tuple(token_ids[held * size : len(hashes) * size]),
                    block_size=size,
                )
            )
        return events

    def clear(self) -> list[KvEvent]:
        if not self._blocks:
            return []
        self._blocks.clear()
        return [AllBlocksCleared()]
