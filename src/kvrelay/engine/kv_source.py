"""Where the KV of a prompt may come from, besides being computed: the one seam of admission for all of it.

    device prefix cache   a hit is there at once: the request begins with its blocks        ``BlockPool.find_prefix``
    decode worker         P reads the blocks that D has; the hand-off says which            ``HeldByPeer``
    tiers                 host memory and disks                                             ``kvrelay.tiers``
    remote prefill        the whole prompt, written by P                                    ``PrefillMode.REMOTE``

A source is asked in the step that places a request, and answers at once. The request is then LOADING_KV, without a
slot, and steps go on. What has arrived, the engine hears by ``kv_loaded``; the next source is asked for what is left,
and the rest is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from kvrelay.core.tier_stats import TierStats
from kvrelay.engine.block_pool import BlockPool, CachedBlock
from kvrelay.engine.request import Request
from kvrelay.engine.step import KvLoad, StepOutput


class Hit(NamedTuple):
    """The KV of so many blocks can be here in so many seconds, by what has been measured."""

    num_blocks: int
    seconds: float


class KvSource(Protocol):
    """All methods on the engine's thread; none may wait."""

    def find(self, request: Request, first_block: int) -> Hit | None:
        """What it has of the request's blocks from ``first_block`` on. None: nothing that is worth loading, because to
        compute it takes no longer."""

    def load(self, request: Request, load: KvLoad, output: StepOutput) -> None:
        """Begin. ``kv_loaded`` follows exactly once, and until then the blocks are the load's."""


class KvStorage(KvSource, Protocol):
    """A source that keeps what the pool evicts. Its life is that of the engine's thread."""

    def start(self, loaded: Callable[[str, bool, int], None]) -> None:
        """``loaded(request_id, is_whole, num_blocks)``, on another thread: a load has ended, and so many leading blocks
        have arrived."""

    def evicted(self, blocks: Sequence[tuple[int, CachedBlock]]) -> None:
        """These blocks leave the prefix cache now. They may be read during this call only."""

    def clear(self) -> None:
        """Forget everything: the operator clears the cache."""

    def flush(self, pool: BlockPool) -> None:
        """The worker leaves: keep what its pool has cached. Waits a little."""

    def stats(self) -> TierStats:
        """From any thread."""

    def close(self) -> None:
        """After it the pool's memory is not touched. Idempotent."""


class HeldByPeer:
    """Blocks that the decode worker of a hand-off has: the worker reads them."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size

    def find(self, request: Request, first_block: int) -> Hit | None:
        """The decode worker has decided that it pays."""
        num_held = request.num_load_tokens // self._block_size
        return Hit(num_held - first_block, 0.0) if num_held > first_block else None

    def load(self, request: Request, load: KvLoad, output: StepOutput) -> None:
        output.kv_loads.append(load)
