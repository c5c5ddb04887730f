"""KvEventLog: a worker's record of its cache events, from which indexes get the events that they missed.

It owns the numbering of events, a ring of the latest ones, and the set of blocks in the cache now. If the ring does not
reach back far enough, it answers with a full dump of that set. It does not know the bus: ``serve_replay`` takes a frame
and returns one.

    numbers    0 ........ 71 72 73 ................... 99 | 100 = next_seq
    ring                     └──── the latest events ────┘
    replay(80): events 80..99;  replay(3): a dump of what is held, valid as of 100
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice, repeat

from kvrelay.core.event_codec import ReplayReply, decode_replay_request, encode_frame
from kvrelay.core.events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent, KvEventBatch

DEFAULT_CAPACITY = 8192
MAX_REPLY_BLOCKS = 25_000
MAX_KEPT_DUMPS = 4


class KvEventLog:
    """``capacity`` is the number of events kept for replay; ``max_reply_blocks`` bounds the blocks in one answer
    (about 19 bytes each; NATS takes a megabyte). ``only_numbers``: no one will ask for a replay."""

    def __init__(
        self,
        worker_id: str,
        epoch: int,
        capacity: int = DEFAULT_CAPACITY,
        max_reply_blocks: int = MAX_REPLY_BLOCKS,
        *,
        only_numbers: bool = False,
    ) -> None:
        self._worker_id = worker_id
        self._epoch = epoch
        self._only_numbers = only_numbers
        self._max_reply_blocks = max_reply_blocks
        self._ring: deque[KvEvent] = deque(maxlen=capacity)
        self._next_seq = 0
        self._parents: dict[int, int | None] = {}
        """Of the blocks in the pool."""
        self._in_tiers: dict[str, dict[int, None]] = {}
        """Blocks in each other medium."""
        self._block_size = 1
        self._dumps: dict[int, list[KvEventBatch]] = {}

    @property
    def next_seq(self) -> int:
        """The number of the next event."""
        return self._next_seq

    @property
    def _oldest(self) -> int:
        return self._next_seq - len(self._ring)

    @property
    def num_blocks(self) -> int:
        """Blocks held now, according to the events."""
        return len(self._parents)

    def append(self, events: Sequence[KvEvent]) -> KvEventBatch:
        """Number the events and return them as a batch to publish."""
        batch = KvEventBatch(self._worker_id, self._epoch, self._next_seq, tuple(events))
        for event in () if self._only_numbers else batch.events:
            self._ring.append(event)
            self._track(event)
        self._next_seq += len(batch.events)
        return batch

    def replay(self, from_seq: int) -> list[KvEventBatch]:
        """All events from ``from_seq`` on; a dump if the ring lacks some of them or ``from_seq`` is FULL_DUMP."""
        if not self._oldest <= from_seq <= self._next_seq:
            return self.dump()
        return self._ring_batches(from_seq)

    def dump(self) -> list[KvEventBatch]:
        """The blocks held now as stored events, parents first, then those of tiers, in batches of a bounded size
        numbered ``next_seq``.

        A block whose parent has been evicted keeps its parent's hash. Local hashes and tokens are left out.
        """
        batches: list[KvEventBatch] = []
        events: list[KvEvent] = []
        room = self._max_reply_blocks
        chains: list[tuple[str | None, list[int]]] = [(None, chain) for chain in self._chains()]
        chains += [(medium, list(held)) for medium, held in self._in_tiers.items() if held]
        for medium, chain in chains:
            for at in range(0, len(chain), self._max_reply_blocks):
                part = chain[at : at + self._max_reply_blocks]
                if len(part) > room:
                    batches.append(self._batch(self._next_seq, events))
                    events, room = [], self._max_reply_blocks
                parent = self._parents[part[0]] if medium is None else None
                events.append(BlockStored(parent, tuple(part), self._block_size, medium=medium))
                room -= len(part)
        batches.append(self._batch(self._next_seq, events))
        return batches

    def serve_replay(self, frame: bytes) -> bytes:
        """Answer a ReplayRequest frame with a ReplayReply frame. Raises ProtocolError for a malformed request."""
        request = decode_replay_request(frame)
        if not self._oldest <= request.from_seq <= self._next_seq:
            return encode_frame(self._dump_page(request.dump_seq, request.page))
        batches = tuple(self._ring_batches(request.from_seq)[:1])
        return encode_frame(ReplayReply(self._worker_id, self._epoch, self._next_seq, batches))

    def _dump_page(self, dump_seq: int, page: int) -> ReplayReply:
        """A page of the dump as of ``dump_seq``, or the first page of a new one if that is no longer kept."""
        pages = self._dumps.get(dump_seq, [])
        if page >= len(pages) or page < 0:
            dump_seq, page = self._next_seq, 0
            pages = self._dumps.get(dump_seq) or self.dump()
            if len(pages) > 1:
                self._dumps[dump_seq] = pages
                while len(self._dumps) > MAX_KEPT_DUMPS:
                    del self._dumps[next(iter(self._dumps))]
        return ReplayReply(
            worker_id=self._worker_id,
            epoch=self._epoch,
            next_seq=self._next_seq,
            batches=(pages[page],),
            is_dump=True,
            dump_seq=dump_seq,
            page=page,
            num_pages=len(pages),
        )

    def _ring_batches(self, from_seq: int) -> list[KvEventBatch]:
        batches: list[KvEventBatch] = []
        events: list[KvEvent] = []
        first, room = from_seq, self._max_reply_blocks
        for seq, event in enumerate(islice(self._ring, from_seq - self._oldest, None), from_seq):
            size = _num_blocks(event)
            if events and size > room:
                batches.append(self._batch(first, events))
                events, first, room = [], seq, self._max_reply_blocks
            events.append(event)
            room -= size
        if events:
            batches.append(self._batch(first, events))
        return batches

    def _batch(self, first_seq: int, events: Sequence[KvEvent]) -> KvEventBatch:
        return KvEventBatch(self._worker_id, self._epoch, first_seq, tuple(events))

    def _track(self, event: KvEvent) -> None:
        medium = None if isinstance(event, AllBlocksCleared) else event.medium
        if medium is not None:
            self._track_tier(event, self._in_tiers.setdefault(medium, {}))
        elif isinstance(event, BlockStored):
            self._block_size = event.block_size
            self._parents.update(zip(event.block_hashes, (event.parent_hash, *event.block_hashes)))
        elif isinstance(event, BlockRemoved):
            for _ in map(self._parents.pop, event.block_hashes, repeat(None)):
                pass
        else:
            self._parents.clear()
            self._in_tiers.clear()

    def _track_tier(self, event: KvEvent, held: dict[int, None]) -> None:
        if isinstance(event, BlockStored):
            self._block_size = event.block_size
            held.update(dict.fromkeys(event.block_hashes))
        elif isinstance(event, BlockRemoved):
            for block in event.block_hashes:
                held.pop(block, None)

    def _chains(self) -> Iterator[list[int]]:
        """The held blocks as chains of parent and child. A chain comes after the one with its first block's parent."""
        done: set[int] = set()
        chain: list[int] = []
        for block in self._parents:
            way = []
            at: int | None = block
            while at is not None and at in self._parents and at not in done:
                done.add(at)
                way.append(at)
                at = self._parents[at]
            for found in reversed(way):
                if chain and self._parents[found] != chain[-1]:
                    yield chain
                    chain = []
                chain.append(found)
        if chain:
            yield chain

    def __repr__(self) -> str:
        return f"KvEventLog({self._worker_id}, next_seq={self._next_seq}, blocks={len(self._parents)})"


def _num_blocks(event: KvEvent) -> int:
    return len(event.block_hashes) if isinstance(event, BlockStored | BlockRemoved) else 1
