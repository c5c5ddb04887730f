"""Where the KV of a prompt may come from, besides being computed: the one seam of admission for all of it.

    device prefix cache   a hit is there at once: the request begins with its blocks        ``BlockPool.find_prefix``
    decode worker         P reads the blocks that D has; the hand-off says which            ``HeldByPeer``
    another request       the same blocks are on their way into the pool                    ``Arriving``
    tiers                 host memory and disks                                             ``kvrelay.tiers``
    another worker        its prefix cache has what this one lacks                          ``worker/prefixes.py``
    remote prefill        the whole prompt, written by P                                    ``PrefillMode.REMOTE``

A source is asked in the step that places a request, and answers at once:

    None        nothing that is worth loading: it is computed as fast
    Hit         ``load`` would have so many blocks here in so many seconds
    pending     so many blocks can be had in so many seconds, but not yet: waiting for them is cheaper than computing

The request of a hit is then LOADING_KV, without a slot, and steps go on. What has arrived, the engine hears by
``kv_loaded``; the next source is asked for what is left, and the rest is computed. A request whose next blocks are
pending stays in the queue, without blocks, and others pass it (``AdmissionQueue``).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence, Sized
from typing import NamedTuple, Protocol

from kvrelay.core.clock import Clock
from kvrelay.core.events import KvEvent
from kvrelay.core.step_cost import StepCost
from kvrelay.core.tier_stats import TierStats
from kvrelay.engine.block_pool import BlockPool, Evicted
from kvrelay.engine.request import Request
from kvrelay.engine.step import KvLoad, StepOutput


class Hit(NamedTuple):
    """The KV of so many blocks can be here in so many seconds, by what has been measured. ``is_pending``: not by
    ``load``; ask again later. ``media``: of sources beyond the engine, where each block is."""

    num_blocks: int
    seconds: float
    is_pending: bool = False
    media: tuple[str, ...] = ()


class KvSource(Protocol):
    """All methods on the engine's thread; none may wait."""

    @property
    def pending(self) -> Sized:
        """Not empty while ``find`` may answer with something pending; the same object always."""

    def find(self, request: Request, first_block: int) -> Hit | None:
        """What it has of the request's blocks from ``first_block`` on. None: nothing that is worth loading, because to
        compute it takes no longer. What is pending ends by itself, and the engine takes a turn then."""

    def load(self, request: Request, load: KvLoad, output: StepOutput) -> None:
        """Begin. ``kv_loaded`` follows exactly once, and until then the blocks are the load's. Never after a pending
        answer."""


Loaded = Callable[[str, bool, int], None]
"""``loaded(request_id, is_whole, num_blocks)``: a load has ended, and so many leading blocks have arrived. From any
thread."""


class SourceBeyond(KvSource, Protocol):
    """A source beyond the engine: its loads end on other threads. Nothing that goes wrong there is a fault of a
    request: a load ends with what has arrived and proved itself, and the rest is computed."""

    def start(self, loaded: Loaded, changed: Callable[[], None] = lambda: None) -> None:
        """Before the first ``load``. ``changed()``, on any thread: there are events, or something is pending no
        more."""

    def stats(self) -> TierStats:
        """From any thread."""


class Sources:
    """The sources of an engine, in the order in which they are asked. ``own``: those that every engine has."""

    def __init__(self, *own: KvSource) -> None:
        self._all = list(own)
        self.beyond: list[SourceBeyond] = []
        """Those that were added."""
        self._pending = [source.pending for source in own]

    def add(self, source: SourceBeyond) -> None:
        """Asked after those that there are."""
        self._all.append(source)
        self.beyond.append(source)
        self._pending.append(source.pending)

    @property
    def has_pending(self) -> bool:
        """Whether ``find`` may give something that is pending now. Cheap: every step asks."""
        return any(self._pending)

    def find(self, request: Request, first_block: int) -> tuple[KvSource, Hit] | None:
        """The first that has the block ``first_block``."""
        for source in self._all:
            hit = source.find(request, first_block)
            if hit is not None:
                return source, hit
        return None

    def reach(self, request: Request, first_block: int) -> Hit:
        """What those beyond have, one after the other, from ``first_block`` on."""
        num_blocks, seconds = 0, 0.0
        media: tuple[str, ...] = ()
        for source in self.beyond:
            hit = source.find(request, first_block + num_blocks)
            if hit is not None:
                num_blocks += hit.num_blocks
                seconds += hit.seconds
                media += hit.media
        return Hit(num_blocks, seconds, media=media)


class KvStorage(SourceBeyond, Protocol):
    """A source that keeps what the pool evicts. Its life is that of the engine's thread."""

    @property
    def has_events(self) -> bool: ...

    def drain_events(self) -> list[KvEvent]:
        """Blocks that it has or has lost since the last call, with their medium. A clear is told by the pool."""

    def load_s(self, sequence_hash: int) -> float | None:
        """In how many seconds a block could be here again that is evicted now; None: it would be lost."""

    def evicted(self, blocks: Sequence[Evicted]) -> None:
        """These blocks leave the prefix cache now. They may be read during this call only."""

    def clear(self) -> None:
        """Forget everything: the operator clears the cache."""

    def flush(self, pool: BlockPool) -> None:
        """The worker leaves: keep what its pool has cached. Waits a little."""

    def close(self) -> None:
        """After it the pool's memory is not touched. Idempotent."""


class Arriving:
    """Blocks that another request of this engine is loading. Two prompts that begin alike and come together load their
    beginning once: the second finds it in the prefix cache, or computes if that is sooner."""

    def __init__(self, block_size: int, clock: Clock, cost: Callable[[], StepCost]) -> None:
        self._block_size = block_size
        self._clock = clock
        self._cost = cost
        self._loads: dict[str, tuple[tuple[int, ...], float, float]] = {}
        """By request: the blocks' hashes, when the load began, and when it should have ended."""
        self._of_hash: dict[int, str] = {}

    @property
    def pending(self) -> Sized:
        return self._loads

    def begun(self, request: Request, load: KvLoad, seconds: float) -> None:
        """``seconds``: by estimate."""
        hashes = tuple(request.sequence_hashes[load.first_block : load.first_block + len(load.block_ids)])
        now_s = self._clock.now()
        self._loads[request.request_id] = hashes, now_s, now_s + seconds
        self._of_hash.update(dict.fromkeys(hashes, request.request_id))

    def ended(self, request: Request) -> None:
        hashes, *_ = self._loads.pop(request.request_id, ((),))
        for block in hashes:
            if self._of_hash.get(block) == request.request_id:
                del self._of_hash[block]

    def find(self, request: Request, first_block: int) -> Hit | None:
        if not self._loads:
            return None
        wanted = request.sequence_hashes[first_block : (len(request.token_ids) - 1) // self._block_size]
        loader = self._of_hash.get(wanted[0]) if wanted else None
        if loader is None:
            return None
        hashes, began_s, due_s = self._loads[loader]
        coming = hashes[hashes.index(wanted[0]) :]
        num_blocks = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(wanted, coming)))
        size, now_s = self._block_size, self._clock.now()
        # One that is late may last as long again as it has lasted.
        left_s = due_s - now_s if due_s > now_s else now_s - began_s
        if self._cost().extra_seconds(num_blocks * size, first_block * size) <= left_s:
            return None
        return Hit(num_blocks, left_s, is_pending=True)

    def load(self, request: Request, load: KvLoad, output: StepOutput) -> None:
        raise AssertionError("what is pending is not loaded")


class HeldByPeer:
    """Blocks that the decode worker of a hand-off has: the worker reads them."""

    pending: Sized = ()

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size

    def find(self, request: Request, first_block: int) -> Hit | None:
        """The decode worker has decided that it pays."""
        num_held = request.num_load_tokens // self._block_size
        return Hit(num_held - first_block, 0.0) if num_held > first_block else None

    def load(self, request: Request, load: KvLoad, output: StepOutput) -> None:
        output.kv_loads.append(load)
