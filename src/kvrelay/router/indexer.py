"""KvIndexer: one frontend's index, kept true to the workers' caches by their events.

It owns the position in each worker's event stream, and the index built from the events. It applies batches in order and
drops duplicates. After a gap, a late join, a new epoch or a missing parent it asks the worker for the events again, or
for a dump of what the worker holds. Every frontend does this for itself and arrives at the same state. The indexer does
not know the bus: requests for a replay leave by a callback, answers come in as frames.

    add_worker ──> CATCHING_UP ──contiguous batch, or the answer──> SYNCED ──gap──> CATCHING_UP ...
                        └──answer is a dump, page by page──> DUMPING ──last page──> SYNCED

While a worker is catching up, batches that follow the gap wait in a bounded buffer. Load samples drive the timers (one
a second from a worker at work, one in 16 s from an idle one): when one arrives, the indexer repeats a request without
an answer, and now and then asks a synced worker for more events, because its very last batch may have been lost.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Sequence

import msgspec

from kvrelay.core.clock import Clock
from kvrelay.core.event_codec import FULL_DUMP, ReplayReply, ReplayRequest, decode_replay_reply, encode_frame
from kvrelay.core.events import AllBlocksCleared, BlockStored, KvEvent, KvEventBatch
from kvrelay.core.workers import WorkerInfo
from kvrelay.errors import ProtocolError
from kvrelay.router.base import IndexState, ReplayRequester
from kvrelay.router.beyond import TierTable
from kvrelay.router.knowledge import Indexer
from kvrelay.router.overlap import ParentNotFoundError, WorkerGroup
from kvrelay.router.prefix_index import PrefixIndex

_log = logging.getLogger(__name__)

REPLAY_TIMEOUT_S = 2.0
DUMP_INTERVAL_S = 2.0
VERIFY_INTERVAL_S = 30.0
MAX_BUFFERED_BATCHES = 256


class _StreamState(enum.Enum):
    SYNCED = "synced"
    CATCHING_UP = "catching up"
    DUMPING = "dumping"


class _Stream(msgspec.Struct):
    """One worker's events. ``epoch`` -1: none heard yet. ``wants_dump``: the indexed blocks cannot be trusted."""

    epoch: int = -1
    expected: int = 0
    state: _StreamState = _StreamState.CATCHING_UP
    asked_at: float = float("-inf")
    dump_asked_at: float = float("-inf")
    heard_at: float = float("-inf")
    wants_dump: bool = False
    dump_seq: int = -1
    next_page: int = 0
    buffered: dict[int, KvEventBatch] = {}


class KvIndexer(Indexer):
    """Without ``request_replay`` gaps cannot be healed: after a gap the indexer forgets the worker's blocks and learns
    them anew."""

    def __init__(self, block_size: int, clock: Clock, request_replay: ReplayRequester | None = None) -> None:
        self._block_size = block_size
        self._clock = clock
        self._request_replay = request_replay
        self.index = PrefixIndex()
        self.tiers: TierTable = TierTable()
        """Which ``index`` does not know."""
        self._streams: dict[str, _Stream] = {}
        self._logged: set[str] = set()

    def index_state(self, worker_id: str) -> IndexState:
        stream = self._streams.get(worker_id)
        if stream is None:
            return IndexState.NONE
        return IndexState.SYNCED if stream.state is _StreamState.SYNCED else IndexState.CATCHING_UP

    def indexed_blocks(self, worker_id: str) -> list[int]:
        return self.index.blocks_of(worker_id)

    # -- workers ------------------------------------------------------------------------------------------------------

    def follow(self, info: WorkerInfo) -> None:
        """A worker with another block size can be chosen, but not for its prefixes."""
        if info.block_size == self._block_size:
            self.add_worker(info.worker_id)
        else:
            _log.warning(
                "worker %s has blocks of %d tokens, not %d: its prefixes are not indexed",
                info.worker_id,
                info.block_size,
                self._block_size,
            )

    def add_worker(self, worker_id: str) -> None:
        """Begin to follow a worker: ask for its events so far. Idempotent."""
        if worker_id not in self._streams:
            stream = self._streams[worker_id] = _Stream()
            self._catch_up(worker_id, stream)

    def remove_worker(self, worker_id: str) -> None:
        """Forget the worker; ignore its events from now on."""
        if self._streams.pop(worker_id, None) is not None:
            self._forget_blocks(worker_id)

    def _forget_blocks(self, worker_id: str) -> None:
        self.index.clear_worker(worker_id)
        self.tiers.remove_worker(worker_id)

    def heard(self, worker_id: str) -> None:
        """The worker is alive: repeat a request without an answer, or ask whether its last batch was lost."""
        stream = self._streams.get(worker_id)
        if stream is None or self._request_replay is None:
            return
        now = self._clock.now()
        if stream.state is _StreamState.SYNCED and not stream.wants_dump:
            if now - max(stream.heard_at, stream.asked_at) >= VERIFY_INTERVAL_S:
                self._ask(worker_id, stream, ReplayRequest(stream.expected))
        elif now - stream.asked_at >= REPLAY_TIMEOUT_S:
            self._catch_up(worker_id, stream)

    # -- look up ------------------------------------------------------------------------------------------------------

    def find_holders(self, sequence: Sequence[int]) -> list[tuple[int, WorkerGroup]]:
        """Pairs: a number of leading blocks of ``sequence``, and the workers that hold exactly those."""
        return self.index.find_holders(sequence)

    # -- events -------------------------------------------------------------------------------------------------------

    def apply(self, batch: KvEventBatch) -> None:
        """Apply a batch that the worker has published."""
        stream = self._streams.get(batch.worker_id)
        if stream is None or batch.epoch < stream.epoch:
            return
        stream.heard_at = self._clock.now()
        if batch.epoch > stream.epoch:
            self._begin_epoch(batch.worker_id, stream, batch.epoch)
        if stream.state is _StreamState.DUMPING or batch.first_seq > stream.expected:
            self._hold_back(batch, stream)
            return
        self._apply_in_order(batch, stream)
        self._drain(batch.worker_id, stream)

    def apply_replay(self, worker_id: str, frame: bytes) -> None:
        """Apply the answer to a request for a replay."""
        stream = self._streams.get(worker_id)
        if stream is None:
            return
        try:
            reply = decode_replay_reply(frame)
            if reply.worker_id != worker_id:
                raise ProtocolError(f"replay of {reply.worker_id} under the name of {worker_id}")
        except ProtocolError as exc:
            self._log_once(f"replay of {worker_id}", exc.message)
            return
        if reply.epoch < stream.epoch:
            return
        stream.heard_at = self._clock.now()
        if reply.epoch > stream.epoch:
            self._begin_epoch(worker_id, stream, reply.epoch)
        if reply.is_dump:
            self._apply_dump_page(worker_id, stream, reply)
        elif not stream.wants_dump:
            self._apply_replayed(worker_id, stream, reply)

    def _apply_replayed(self, worker_id: str, stream: _Stream, reply: ReplayReply) -> None:
        if stream.state is _StreamState.DUMPING:
            return
        before = stream.expected
        for batch in reply.batches:
            if batch.first_seq <= stream.expected:
                self._apply_in_order(batch, stream)
        self._drain(worker_id, stream)
        if stream.state is _StreamState.SYNCED and before < stream.expected < reply.next_seq:
            self._catch_up(worker_id, stream)  # answers are bounded: there is more

    def _apply_dump_page(self, worker_id: str, stream: _Stream, reply: ReplayReply) -> None:
        if reply.page == 0:
            if reply.dump_seq < stream.expected and not stream.wants_dump:
                return  # an outdated answer: the events have arrived meanwhile
            self._forget_blocks(worker_id)
            stream.state, stream.dump_seq, stream.next_page = _StreamState.DUMPING, reply.dump_seq, 0
        place = (stream.state, stream.dump_seq, stream.next_page)
        if place != (_StreamState.DUMPING, reply.dump_seq, reply.page):
            return
        for batch in reply.batches:
            for event in batch.events:
                if not isinstance(event, BlockStored) or not self._fits(worker_id, event):
                    continue
                if event.medium is None:
                    self.index.store(worker_id, event.parent_hash, event.block_hashes, detached=True)
                else:
                    self.tiers.store(worker_id, event.medium, event.block_hashes)
        stream.next_page += 1
        if stream.next_page < reply.num_pages:
            self._ask(worker_id, stream, ReplayRequest(FULL_DUMP, stream.dump_seq, stream.next_page))
            return
        overtaken = stream.expected > reply.dump_seq
        stream.state, stream.wants_dump, stream.expected = _StreamState.SYNCED, False, reply.dump_seq
        self._drain(worker_id, stream)
        if overtaken and stream.state is _StreamState.SYNCED:
            self._catch_up(worker_id, stream)  # the dump lacks events that arrived before it

    def _apply_in_order(self, batch: KvEventBatch, stream: _Stream) -> None:
        """Apply the new events of a batch that begins at or before the expected number."""
        known = stream.expected - batch.first_seq
        events = batch.events[known:] if known else batch.events
        for event in events:
            self._apply_event(batch.worker_id, stream, event)
        stream.expected += len(events)

    def _apply_event(self, worker_id: str, stream: _Stream, event: KvEvent) -> None:
        if isinstance(event, BlockStored) and not self._fits(worker_id, event):
            return
        try:
            if isinstance(event, AllBlocksCleared):
                self._forget_blocks(worker_id)
            elif event.medium is None:
                self.index.apply_event(worker_id, event)
            elif isinstance(event, BlockStored):
                self.tiers.store(worker_id, event.medium, event.block_hashes)
            else:
                self.tiers.remove(worker_id, event.medium, event.block_hashes)
        except ParentNotFoundError as exc:
            self._log_once(f"parents of {worker_id}", exc.message)
            stream.wants_dump = True

    def _fits(self, worker_id: str, event: BlockStored) -> bool:
        if event.block_size == self._block_size:
            return True
        self._log_once(
            f"block size of {worker_id}",
            f"worker {worker_id} has blocks of {event.block_size} tokens, not {self._block_size}: not indexed",
        )
        return False

    # -- healing ------------------------------------------------------------------------------------------------------

    def _begin_epoch(self, worker_id: str, stream: _Stream, epoch: int) -> None:
        if stream.epoch >= 0:
            self._forget_blocks(worker_id)
            stream.asked_at = float("-inf")
        stream.epoch, stream.expected, stream.wants_dump = epoch, 0, False
        stream.state = _StreamState.CATCHING_UP
        stream.buffered.clear()

    def _hold_back(self, batch: KvEventBatch, stream: _Stream) -> None:
        """The batch follows a gap: keep it until the gap is closed."""
        if self._request_replay is None:
            self._forget_blocks(batch.worker_id)
            stream.expected, stream.state = batch.first_seq, _StreamState.SYNCED
            self._apply_in_order(batch, stream)
            return
        stream.buffered[batch.first_seq] = batch
        if len(stream.buffered) > MAX_BUFFERED_BATCHES:
            del stream.buffered[min(stream.buffered)]
        if stream.state is _StreamState.SYNCED:
            self._catch_up(batch.worker_id, stream)
        else:
            self.heard(batch.worker_id)

    def _drain(self, worker_id: str, stream: _Stream) -> None:
        """Apply the buffered batches that are next; if a gap remains, ask for its events."""
        for first in sorted(stream.buffered):
            if first > stream.expected:
                break
            batch = stream.buffered.pop(first)
            if first + len(batch.events) > stream.expected:
                self._apply_in_order(batch, stream)
        if stream.state is _StreamState.DUMPING:
            return
        if stream.wants_dump:
            self._ask_for_dump(worker_id, stream)
        elif stream.buffered:
            self._catch_up(worker_id, stream)
        else:
            stream.state = _StreamState.SYNCED

    def _catch_up(self, worker_id: str, stream: _Stream) -> None:
        if self._request_replay is None:
            stream.state = _StreamState.SYNCED
            return
        if stream.wants_dump or stream.state is _StreamState.DUMPING:
            self._ask_for_dump(worker_id, stream)
            return
        stream.state = _StreamState.CATCHING_UP
        self._ask(worker_id, stream, ReplayRequest(stream.expected))

    def _ask_for_dump(self, worker_id: str, stream: _Stream) -> None:
        """Ask for a dump, at most once every DUMP_INTERVAL_S: a worker whose events never fit costs time."""
        now = self._clock.now()
        if self._request_replay is None:
            stream.wants_dump = False
        elif now - stream.dump_asked_at >= DUMP_INTERVAL_S:
            stream.dump_asked_at = now
            stream.wants_dump = True
            stream.state = _StreamState.CATCHING_UP
            self._ask(worker_id, stream, ReplayRequest(FULL_DUMP))

    def _ask(self, worker_id: str, stream: _Stream, request: ReplayRequest) -> None:
        stream.asked_at = self._clock.now()
        if self._request_replay is not None:
            self._request_replay(worker_id, encode_frame(request))

    def _log_once(self, about: str, message: str) -> None:
        """Log one line per worker and kind of fault; later ones are only counted."""
        if about not in self._logged and len(self._logged) < 1000:
            self._logged.add(about)
            _log.warning("%s", message)

    def __repr__(self) -> str:
        synced = sum(stream.state is _StreamState.SYNCED for stream in self._streams.values())
        return f"KvIndexer(workers={len(self._streams)}, synced={synced}, {self.index!r})"
