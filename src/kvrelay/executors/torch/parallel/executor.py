"""The executor of an engine whose model is distributed over several processes.

    engine ──execute──> ParallelExecutor ──StepMessage, shared memory──> rank 0 ── rank 1 ── ...   one process each
                                         <──tokens── the rank that samples; "done" from the others

It computes nothing itself and does not import torch. It owns the rank processes, the step memory and, on the CPU, the
memory of all KV pools: block b of the worker is the ranks' blocks b side by side, so that a block of the worker is one
piece for the engine and for a transport.

    pool    [ block 0: rank 0 | rank 1 | ... ][ block 1: rank 0 | rank 1 | ... ] ...

If one rank ends or hangs, the whole executor fails: ``execute`` and ``check`` then raise EngineDeadError with the
reason. The end of a rank is noticed at once, because its socket closes. A hang is noticed if no rank has finished a
layer for ``rank_timeout_s``.
"""

from __future__ import annotations

import logging
import mmap
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import numpy as np
from msgspec.structs import replace as replace_struct

from kvrelay.config.settings import EngineConfig, GroupConfig, RunnerConfig
from kvrelay.core.checksums import unit_checksums
from kvrelay.core.cores import usable_cores
from kvrelay.core.layout import KVLayout, MemoryRegion, paged_kv
from kvrelay.core.sampling import SamplingParams
from kvrelay.engine.holding import num_holding_blocks
from kvrelay.engine.step import ModelOutput, SchedulerOutput
from kvrelay.errors import CheckpointError, ConfigError, EngineDeadError, KvrelayError, PeerLostError
from kvrelay.executors.host_memory import ANYWHERE, HostMemory, require_host_memory
from kvrelay.executors.torch.config import load_model_config
from kvrelay.executors.torch.parallel.causes import error_of, first_cause
from kvrelay.executors.torch.parallel.channel import StepMemory
from kvrelay.executors.torch.parallel.messages import (
    AllocatePool,
    Answer,
    Command,
    DummyStep,
    Prepare,
    Question,
    RankFailed,
    RankPing,
    ShowBlocks,
    Start,
    StepDone,
    Stop,
    WarmUp,
    WeightsLoaded,
    encode_step,
)
from kvrelay.executors.torch.parallel.processes import RankProcesses
from kvrelay.executors.torch.parallel.rank import ParallelRank, check_sizes
from kvrelay.executors.torch.parallel.rank_progress import RankHangDetector
from kvrelay.transfer.ranks.channel import ChannelClosedError
from kvrelay.transfer.ranks.link import RankLink

_log = logging.getLogger(__name__)

LOOKS_PER_TIMEOUT = 12
BLAME_WAIT_S = 0.5
"""How long to wait, after a first failure, for the reasons of other ranks: the first one heard may be a consequence."""
PING_INTERVAL_S = 0.4
"""Ranks without a message for this long get a ping, so that a hang is noticed while nothing is computed."""
STOP_WAIT_S = 2.0
KILL_WAIT_S = 10.0
PREPARE_TIMEOUT_S = 60.0

_NO_INTS = np.zeros(0, dtype=np.int32)


class ParallelExecutor:
    """Implements ``kvrelay.engine.step.Executor`` with ``runner.tp * runner.pp`` rank processes."""

    def __init__(
        self,
        model_dir: Path,
        runner: RunnerConfig,
        engine: EngineConfig,
        memory: HostMemory = ANYWHERE,
        group: GroupConfig | None = None,
        holding_bytes: int = 0,
        *,
        joins_pools: bool = True,
    ) -> None:
        """Start the ranks and load the model. ``joins_pools`` False: each rank's pool is memory of its own, as on CUDA.
        The holding area lies behind the joined pools, and the ranks do not map it.

        Raises CheckpointError, UnsupportedModelError or ConfigError.
        """
        if sys.platform != "linux":
            raise ConfigError("several ranks need Linux; leave out tp and pp", param="tp")
        config = load_model_config(model_dir)
        self._group = group or GroupConfig()
        check_sizes(config, runner.tp, runner.pp, self._group)
        self._ranks = [ParallelRank.numbered(i, runner.tp, runner.pp) for i in range(runner.tp * runner.pp)]
        self._sampler = next(rank.index for rank in self._ranks if rank.samples)
        self._failure: KvrelayError | None = None
        self._is_warm = False
        self._is_closed = False
        self.num_spill_blocks = 0
        self._last_contact_s = 0.0
        self._drawn_slots, self._drawn_tokens = _NO_INTS, list[int]()
        self._side_lock = threading.Lock()
        self._memory = StepMemory.create(len(self._ranks))
        self._allocate = memory.allocate
        self._pool_fd = os.memfd_create("kvrelay-kv-pool") if memory.reserve is None else os.dup(memory.reserve())
        self._store_fd = os.memfd_create("kvrelay-ranks")
        """Where the ranks find each other. Open as long as they live: they look at it once more when they end."""
        self._detector = RankHangDetector(self._memory.progress, LOOKS_PER_TIMEOUT)
        self._look_ms = max(1, int(runner.rank_timeout_s * 1000 / LOOKS_PER_TIMEOUT))
        self._timeout_s = runner.rank_timeout_s
        self._poller = select.poll()
        self._by_fd: dict[int, int] = {}
        self._processes = RankProcesses(len(self._ranks), (self._memory.fd, self._pool_fd))
        try:
            self._connect()
            loaded, self.num_blocks = self._load(model_dir, runner, engine, holding_bytes, joins_pools=joins_pools)
        except BaseException:
            self.shutdown()
            raise
        facts, self._device = loaded.facts, loaded.device
        self.kv_layout = self._layout(loaded.layout, config.num_kv_heads)
        self.max_model_len, self.vocab_size = facts.max_model_len, facts.vocab_size
        self.eos_token_ids, self.weights_fingerprint = facts.eos_token_ids, facts.weights_fingerprint
        self._offers_ranks = memory.offer_ranks is not None
        if memory.offer_ranks is not None:
            memory.offer_ranks(
                [
                    RankLink(str(rank), self._processes.ranks[rank.index].moves, self._kill(rank))
                    for rank in self._ranks
                ],
                self._memory.fence,
            )

    def __repr__(self) -> str:
        pids = ", ".join(str(rank.pid) for rank in self._processes.ranks)
        return f"ParallelExecutor({len(self._ranks)} ranks (pids {pids}), {self.num_blocks} blocks)"

    # -- what it says of itself ---------------------------------------------------------------------------------------

    @property
    def kv_region(self) -> MemoryRegion:
        """The joined pool. If ranks have pools of their own, peers reach those through the ranks only."""
        is_reached = self._is_joined or self._offers_ranks
        return MemoryRegion(self._bytes.ctypes.data, self._bytes.size, self._device, is_pool=is_reached)

    @property
    def rank_pids(self) -> tuple[int, ...]:
        return tuple(rank.pid for rank in self._processes.ranks)

    # -- work ---------------------------------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """Each rank warms up by itself, so that one may wait for the kernels that another compiles. Raises
        EngineDeadError."""
        self._tell_all(WarmUp())
        self._collect()
        self._is_warm = True

    def execute(self, work: SchedulerOutput) -> ModelOutput:
        """Raises EngineDeadError if a rank has ended or hangs."""
        if self._failure is not None:
            raise self._failure
        self._tell_all(self._memory.write(encode_step(work, self._drawn_slots, self._drawn_tokens)))
        done = self._collect()[self._sampler]
        assert isinstance(done, StepDone)
        self._drawn_slots, self._drawn_tokens = work.slots[work.samples], done.token_ids
        return done

    def execute_dummy(self) -> None:
        """A step without a batch, for the other ranks of the group. Raises EngineDeadError as ``execute`` does."""
        if self._failure is not None:
            raise self._failure
        self._tell_all(DummyStep())
        self._collect()

    def check(self) -> None:
        """Raises EngineDeadError if a rank has ended or does not answer, also while there is nothing to compute."""
        if self._failure is not None:
            raise self._failure
        if any(rank.ending is not None for rank in self._processes.ranks):
            self._fail({})
        if self._is_warm and time.monotonic() - self._last_contact_s > PING_INTERVAL_S:
            self._tell_all(RankPing())
            self._collect()

    def prepare(self, sampling: SamplingParams) -> None:
        """Compile the grammar on the sampling rank. Raises InvalidInputError, EngineDeadError."""
        if sampling.grammar is None:
            return
        with self._side_lock:
            self._ask_aside(Prepare(sampling), self._ranks[self._sampler])

    def checksum_blocks(self, block_ids: Sequence[int]) -> tuple[int, ...]:
        if self._is_joined:
            return self._checksums(block_ids)
        with self._side_lock:
            for rank in self._ranks:
                self._ask_aside(ShowBlocks(list(block_ids)), rank)
            checksums = self._checksums(block_ids)
            self._pool.madvise(mmap.MADV_REMOVE)
        return checksums

    def _checksums(self, block_ids: Sequence[int]) -> tuple[int, ...]:
        blocks = (self._bytes[block_id] for block_id in block_ids)
        return tuple(checksum for block in blocks for checksum in unit_checksums(block, self.kv_layout))

    def copy_blocks(self, source_ids: Sequence[int], target_ids: Sequence[int]) -> None:
        for source_id, target_id in zip(source_ids, target_ids, strict=True):
            self._bytes[target_id] = self._bytes[source_id]

    def _ask_aside(self, question: Question, rank: ParallelRank) -> None:
        """While a step may run. Under the lock. Raises what the rank raises, EngineDeadError."""
        side = self._processes.ranks[rank.index].side
        try:
            side.send(question)
            answer = side.receive()
        except ChannelClosedError as exc:
            raise EngineDeadError(f"{rank} does not answer: {exc}") from exc
        if isinstance(answer, RankFailed):
            raise error_of(answer, answer.message)

    def shutdown(self) -> None:
        """End the ranks. Idempotent. The pool's memory is freed with its last reference, because a transport may still
        hold it."""
        if self._failure is None:
            self._failure = EngineDeadError("the executor is shut down")
            for rank in self._processes.ranks:
                try:
                    rank.commands.send(Stop())
                except ChannelClosedError:
                    pass
        if not self._processes.wait(STOP_WAIT_S):
            self._processes.kill()
            self._processes.wait(KILL_WAIT_S)
        self._processes.close()
        if not self._is_closed:
            self._is_closed = True
            self._memory.close()
            os.close(self._pool_fd)
            os.close(self._store_fd)

    # -- start --------------------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        for number, rank in enumerate(self._processes.ranks):
            rank.commands.set_timeout(self._timeout_s)
            rank.side.set_timeout(PREPARE_TIMEOUT_S)
            self._by_fd[rank.commands.fileno()] = number
            self._poller.register(rank.commands.fileno(), select.POLLIN)

    def _load(
        self, model_dir: Path, runner: RunnerConfig, engine: EngineConfig, holding_bytes: int, *, joins_pools: bool
    ) -> tuple[WeightsLoaded, int]:
        own = replace(runner, num_threads=threads_per_rank(runner.num_threads, len(self._ranks)))
        # A file without a name: nothing is left if this process is killed.
        store = f"/proc/{os.getpid()}/fd/{self._store_fd}"
        for rank in self._ranks:
            self._tell(rank.index, Start(str(model_dir.absolute()), own, engine, rank.index, store, self._group))
        answers = self._collect()
        loaded = [answer for rank in self._ranks if isinstance(answer := answers[rank.index], WeightsLoaded)]
        facts, num_blocks = loaded[0], min(each.max_blocks for each in loaded)
        require_agreement(self._ranks, loaded)
        self._is_joined = joins_pools and facts.device == "cpu"
        block_bytes = len(self._ranks) * facts.layout.block_bytes
        if facts.device == "cpu":
            require_host_memory(num_blocks * block_bytes, engine)
        self.num_holding_blocks = num_holding_blocks(holding_bytes if self._is_joined else 0, block_bytes, num_blocks)
        num_all_blocks = num_blocks + self.num_holding_blocks
        self._pool = self._map_pool(num_all_blocks * block_bytes)
        self._bytes = np.frombuffer(self._pool, dtype=np.uint8).reshape(num_all_blocks, -1)
        self._tell_all(AllocatePool(num_blocks, self._is_joined))
        self._collect()
        return facts, num_blocks

    def _map_pool(self, num_bytes: int) -> mmap.mmap:
        """Raises ConfigError."""
        if self._allocate is not None:
            pool = self._allocate(num_bytes)
            if os.fstat(self._pool_fd).st_size >= num_bytes:
                return pool
            pool.close()  # memory of its own, which the ranks cannot map
        try:
            os.ftruncate(self._pool_fd, num_bytes)
            return mmap.mmap(self._pool_fd, num_bytes)
        except (OSError, ValueError, OverflowError) as exc:
            raise ConfigError(
                f"cannot allocate {num_bytes} bytes of shared memory for the ranks' KV pools ({exc})",
                param="kv_cache_memory",
            ) from exc

    def _layout(self, part: KVLayout, num_model_heads: int) -> KVLayout:
        """The layout of the whole worker: all stages' layers and all ranks' KV heads, including repeated ones."""
        rank = self._ranks[0]
        region = part.regions[0].region
        num_kv_heads = region.num_heads * rank.tp_size
        return paged_kv(
            num_layers=region.num_layers * rank.pp_size,
            num_kv_heads=num_kv_heads,
            block_size=part.block_size,
            head_dim=region.entry_values,
            dtype=region.dtype,
            tp_size=rank.tp_size,
            pp_size=rank.pp_size,
            head_replicas=max(1, num_kv_heads // num_model_heads),
        )

    # -- talking to the ranks -----------------------------------------------------------------------------------------

    def _tell_all(self, command: Command) -> None:
        for rank in self._ranks:
            self._tell(rank.index, command)

    def _tell(self, index: int, command: Command) -> None:
        try:
            self._processes.ranks[index].commands.send(command)
        except ChannelClosedError:
            self._fail({})

    def _collect(self) -> dict[int, Answer]:
        """An answer of each rank. Raises what one of them has failed with, or EngineDeadError."""
        answers: dict[int, Answer] = {}
        self._detector.begin()
        while len(answers) < len(self._ranks):
            events = self._poller.poll(self._look_ms)
            if not events and self._is_warm and self._detector.check():
                silent = [rank.index for rank in self._ranks if rank.index not in answers]
                self._fail({}, [i for i in self._detector.culprits() if i in silent] or silent)
            for fd, _ in events:
                index = self._by_fd[fd]
                try:
                    answer = self._processes.ranks[index].commands.receive()
                except ChannelClosedError:
                    self._fail({})
                if isinstance(answer, RankFailed):
                    self._fail({index: answer})
                answers[index] = answer
        self._last_contact_s = time.monotonic()
        return answers

    def _kill(self, rank: ParallelRank) -> Callable[[], None]:
        return lambda: self._processes.kill_one(rank.index, KILL_WAIT_S)

    # -- failure ------------------------------------------------------------------------------------------------------

    def _fail(self, failed: dict[int, RankFailed], hung: Sequence[int] = ()) -> NoReturn:
        """End all ranks and raise the reason, now and on each later call."""
        if hung and self._group.ep and all(self._detector.is_waiting(rank.index) for rank in self._ranks):
            error: KvrelayError = PeerLostError(
                f"this engine has waited {self._timeout_s:g} s (--rank-timeout-s) for another rank of its group"
            )
        elif hung:
            names = ", ".join(f"{self._ranks[i]}, pid {self._processes.ranks[i].pid}," for i in hung)
            error = EngineDeadError(
                f"{names} has finished no layer for {self._timeout_s:g} s (--rank-timeout-s): it hangs"
            )
        else:
            self._listen(failed)
            error = first_cause(self._ranks, self._processes.ranks, failed)
        self._failure = error
        self._processes.kill()
        raise error

    def _listen(self, failed: dict[int, RankFailed]) -> None:
        """Collect the last messages of other ranks for a moment, into ``failed``."""
        deadline_s = time.monotonic() + BLAME_WAIT_S
        open_fds = {fd for fd, i in self._by_fd.items() if i not in failed}
        while open_fds and (left_s := deadline_s - time.monotonic()) > 0:
            for fd, _ in self._poller.poll(left_s * 1000):
                index = self._by_fd[fd]
                try:
                    answer = self._processes.ranks[index].commands.receive()
                except ChannelClosedError:
                    self._poller.unregister(fd)
                    open_fds.discard(fd)
                    continue
                if isinstance(answer, RankFailed):
                    failed[index] = answer
                    open_fds.discard(fd)
        # A process's socket closes before the process has ended.
        while time.monotonic() < deadline_s and not any(rank.ending for rank in self._processes.ranks):
            time.sleep(0.01)


def require_agreement(ranks: Sequence[ParallelRank], loaded: Sequence[WeightsLoaded]) -> None:
    """Raise CheckpointError if the ranks do not hold parts of one model: files may change while they load."""
    for rank, facts in zip(ranks, loaded, strict=True):
        if replace_struct(facts, max_blocks=loaded[0].max_blocks) != loaded[0]:
            raise CheckpointError(f"{rank} has loaded another model than {ranks[0]}: {facts}, not {loaded[0]}")


def threads_per_rank(requested: int, num_ranks: int) -> int:
    """The ranks share the worker's threads, of which there are at most as many as cores. Each rank gets at least
    one."""
    cores = len(usable_cores())
    return max(1, min(requested or cores, cores) // num_ranks)
