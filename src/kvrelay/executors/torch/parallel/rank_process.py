"""One rank: a process that holds its share of the model and runs the driver's commands until either ends.

``__main__`` runs it. It waits for commands in ``recv``. Meanwhile one thread answers the driver's questions,
and one moves KV. After an error the process sends one message to the driver and ends.
"""

from __future__ import annotations

import logging
import mmap
import signal
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvrelay.config import WorkerRole
from kvrelay.config.byte_sizes import parse_bytes
from kvrelay.core.layout import KVLayout
from kvrelay.dp.addresses import GroupAddress
from kvrelay.errors import ConfigError, KvrelayError, PeerLostError
from kvrelay.executors.torch.build import build_model_runner
from kvrelay.executors.torch.config import ModelFacts
from kvrelay.executors.torch.kv_pool import KvPool, auto_pool_bytes, decide_num_blocks
from kvrelay.executors.torch.model_runner import ModelRunner
from kvrelay.executors.torch.parallel.channel import StepMemory
from kvrelay.executors.torch.parallel.collectives import Groups, file_store, tcp_store
from kvrelay.executors.torch.parallel.experts import ExpertGroup, ExpertSeat
from kvrelay.executors.torch.parallel.following import FollowingRunner
from kvrelay.executors.torch.parallel.messages import (
    AllocatePool,
    Command,
    DummyStep,
    Prepare,
    Question,
    RankFailed,
    RankPing,
    RankReady,
    RunStep,
    Start,
    StepDone,
    Stop,
    WarmUp,
    WeightsLoaded,
    decode_step,
    drawn,
)
from kvrelay.executors.torch.parallel.micro_batches import merge, split
from kvrelay.executors.torch.parallel.processes import end_with_parent
from kvrelay.executors.torch.parallel.rank import ParallelRank
from kvrelay.executors.torch.parallel.rank_progress import RankProgress
from kvrelay.transfer.rank_map import InstanceSizes, place_rank
from kvrelay.transfer.ranks.channel import Channel, ChannelClosedError
from kvrelay.transfer.ranks.messages import ToRank
from kvrelay.transfer.ranks.mover import RankMover

_log = logging.getLogger(__name__)

DEFAULT_COLLECTIVE_TIMEOUT_S = 300.0
"""Long, because the driver notices a hang much earlier, unless the driver itself is stopped."""

_DONE = StepDone()


class RankShard:
    """Connects this rank to the others and gets its memory: turns a runner into one rank of several."""

    def __init__(self, start: Start, commands: Channel[Command], memory: StepMemory, pool_fd: int) -> None:
        self.rank = ParallelRank.numbered(start.index, start.runner.tp, start.runner.pp)
        self.progress = RankProgress(memory.progress[start.index])
        self.groups: Groups | None = None
        # All ranks that share experts run equally many passes a step, whatever their own batches are.
        self.max_micro_batches = 1 if start.group.ep else self.rank.pp_size
        self.block_factor, self.block_offset = 1, 0
        """Converts the worker's block ids to those of ``allocate``'s pool."""
        self._start = start
        self._commands = commands
        self._pool_fd = pool_fd
        self._own_pool: KvPool | None = None
        self._shown = np.zeros((0, self.rank.num_ranks, 0), dtype=np.uint8)
        """The joined pool's memory, which has nothing but blocks that the driver asks for if pools are not joined."""

    def join(self, device: torch.device) -> tuple[Groups, ExpertGroup | None]:
        """The rank's collectives, and those of experts that are spread over more ranks. Raises PeerLostError."""
        store = file_store(self._start.store, self.rank.num_ranks)
        timeout_s = self._start.engine.step_timeout_s or DEFAULT_COLLECTIVE_TIMEOUT_S
        self.groups = Groups(self.rank, store, device, timeout_s, self.progress)
        self.groups.connect()
        experts = self._join_experts(self.groups, store, timeout_s) if self._start.group.ep else None
        return self.groups, experts

    def _join_experts(self, groups: Groups, own_store: Any, timeout_s: float) -> ExpertGroup:
        group = self._start.group
        seat = ExpertSeat.of(self.rank, group)
        store, host = own_store, "127.0.0.1"
        if group.dp > 1:
            address = GroupAddress.parse(group.dp_address)
            if address.directory is not None:
                store = file_store(str(address.directory / "experts"), seat.size * self.rank.pp_size)
            else:
                is_host = seat.index == 0 and self.rank.is_first_stage
                store = tcp_store(address.host, address.port + 1, is_host=is_host, timeout_s=timeout_s)
                host = address.own_host()
        experts = ExpertGroup(seat, groups, store, timeout_s, host)
        experts.connect()
        return experts

    def allocate(self, facts: ModelFacts, layout: KVLayout, device: torch.device, dtype: torch.dtype) -> KvPool:
        """The rank's pool, with as many blocks as fit into the memory of every rank. Raises ConfigError."""
        self._commands.send(WeightsLoaded(layout, self._max_blocks(layout, device), device.type, facts))
        command = self._commands.receive()
        if not isinstance(command, AllocatePool):
            raise ChannelClosedError("stopped while loading")
        num_ranks = self.rank.num_ranks
        num_blocks = command.num_blocks * num_ranks
        joined = mmap.mmap(self._pool_fd, num_blocks * layout.block_bytes)
        if not command.is_joined:
            self._shown = np.frombuffer(joined, dtype=np.uint8).reshape(command.num_blocks, num_ranks, -1)
            self._own_pool = KvPool(layout, command.num_blocks, device, dtype)
            return self._own_pool
        self.block_factor, self.block_offset = num_ranks, self.rank.index
        return KvPool(layout, num_blocks, device, dtype, memory=joined)

    def show(self, block_ids: Sequence[int]) -> None:
        """Copy this rank's parts of blocks from its own pool to where the driver can read them."""
        assert self._own_pool is not None
        for block_id in block_ids:
            self._shown[block_id, self.rank.index] = self._own_pool.block(block_id)

    def _max_blocks(self, layout: KVLayout, device: torch.device) -> int:
        engine, num_ranks = self._start.engine, self.rank.num_ranks
        given = engine.kv_cache_memory
        share = given if given == "auto" else str(parse_bytes(given) // num_ranks)
        num_sharing = num_ranks if device.type == "cpu" else 1
        return decide_num_blocks(layout, engine.num_blocks, share, lambda: auto_pool_bytes(device) // num_sharing)


class Rank:
    """A rank from Start to Stop."""

    def __init__(self, start: Start, commands: Channel[Command], memory: StepMemory, pool_fd: int) -> None:
        self._commands = commands
        self._memory = memory
        self._shard = RankShard(start, commands, memory, pool_fd)
        _choose_device(start, self._shard.rank)
        self.runner: ModelRunner = build_model_runner(Path(start.model_dir), start.runner, start.engine, self._shard)

    def mover(self, channel: Channel[ToRank], pool_fd: int) -> RankMover:
        """What moves this rank's KV. On the CPU its memory is the worker's whole pool."""
        shard, runner = self._shard, self.runner
        own = InstanceSizes(1, shard.rank.tp_size, shard.rank.pp_size)
        part_bytes = runner.kv_layout.block_bytes
        return RankMover(
            channel,
            self._memory.fence,
            runner.kv_region,
            begin=shard.block_offset * part_bytes,
            stride=shard.block_factor * part_bytes,
            pool_fd=pool_fd,
            port_offset=place_rank(own, own, WorkerRole.PREFILL, 0, shard.rank.index).port_offset,
        )

    def serve(self) -> None:
        """Raises ChannelClosedError if the driver is gone, and whatever a step raises."""
        self._commands.send(RankReady())
        while True:
            command = self._commands.receive()
            match command:
                case RunStep():
                    self._commands.send(self._step(command))
                case DummyStep():
                    self._shard.progress.move()
                    self.runner.execute_dummy()
                    self._commands.send(_DONE)
                case WarmUp():
                    self._warm_up()
                    self._commands.send(RankReady())
                case RankPing():
                    self._commands.send(RankReady())
                case Stop():
                    return
                case _:
                    raise ChannelClosedError(f"{type(command).__name__} is out of order")

    def answer(self, side: Channel[Question]) -> None:
        """The driver's questions, on a separate thread."""
        with suppress(ChannelClosedError):
            while True:
                question = side.receive()
                try:
                    if isinstance(question, Prepare):
                        self.runner.prepare(question.sampling)
                    else:
                        self._shard.show(question.block_ids)
                except KvrelayError as exc:
                    side.send(_failed(exc))
                else:
                    side.send(RankReady())

    def _step(self, command: RunStep) -> StepDone:
        shard, runner = self._shard, self.runner
        shard.progress.move()
        work, message = decode_step(self._memory.read(command), shard.block_factor, shard.block_offset)
        if isinstance(runner, FollowingRunner):
            runner.append(*drawn(message))
        parts = split(work, shard.max_micro_batches)
        outputs = [runner.execute(part.work) for part in parts]
        shard.progress.move()
        if not shard.rank.samples:
            return _DONE
        output = outputs[0] if len(parts) == 1 else merge(parts, outputs)
        return StepDone(output.token_ids, output.logprobs, output.prompt_logprobs, output.failures)

    def _warm_up(self) -> None:
        # Warm up alone: ranks compile kernels in turns, so a compiling rank must not wait for one that awaits its turn.
        assert self._shard.groups is not None
        with self._shard.groups.muted():
            self.runner.warm_up()


def _choose_device(start: Start, rank: ParallelRank) -> None:
    """Each rank gets its own GPU. Raises ConfigError."""
    if start.runner.device == "cpu" or not torch.cuda.is_available():
        return
    if torch.cuda.device_count() < rank.num_ranks:
        raise ConfigError(
            f"{rank.num_ranks} ranks need as many GPUs; there are {torch.cuda.device_count()}", param="tp"
        )
    torch.cuda.set_device(rank.index)


def _failed(exc: BaseException) -> RankFailed:
    message = exc.message if isinstance(exc, KvrelayError) else repr(exc)
    return RankFailed(type(exc).__name__, message, isinstance(exc, PeerLostError))


def run(parent_pid: int, commands_fd: int, side_fd: int, moves_fd: int, step_fd: int, pool_fd: int) -> int:
    """Returns the exit code: 0 if the driver has sent Stop or is gone."""
    end_with_parent(parent_pid)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # Ctrl-C, a closed terminal and an orderly stop reach the whole process group, but the driver still needs its
        # ranks for running requests.
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    commands: Channel[Command] = Channel(socket.socket(fileno=commands_fd), Command)
    side: Channel[Question] = Channel(socket.socket(fileno=side_fd), Question)
    try:
        start = commands.receive()
        if not isinstance(start, Start):
            return 0
        rank = Rank(start, commands, StepMemory(step_fd, start.runner.tp * start.runner.pp), pool_fd)
        rank.mover(Channel(socket.socket(fileno=moves_fd), ToRank), pool_fd).start()
        threading.Thread(target=rank.answer, args=(side,), name="side", daemon=True).start()
        rank.serve()
    except ChannelClosedError:
        return 0
    except Exception as exc:  # noqa: BLE001 - the process's outermost loop
        if not isinstance(exc, KvrelayError):
            _log.exception("the rank failed")
        with suppress(ChannelClosedError):
            commands.send(_failed(exc))
        return 1
    return 0
