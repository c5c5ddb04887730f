"""One rank: a process that holds its share of the model and runs the driver's commands until either ends.

``__main__`` runs it. It waits for commands in ``recv``. Meanwhile one thread answers the driver's questions,
and one moves KV. After an error the process sends one message to the driver and ends.
"""

from __future__ import annotations

import logging
import signal
import socket
import threading
from contextlib import suppress
from pathlib import Path

import torch

from kvrelay.config import WorkerRole
from kvrelay.errors import ConfigError, KvrelayError, PeerLostError
from kvrelay.executors.torch.build import build_model_runner
from kvrelay.executors.torch.model_runner import ModelRunner
from kvrelay.executors.torch.parallel.channel import StepMemory
from kvrelay.executors.torch.parallel.following import FollowingRunner
from kvrelay.executors.torch.parallel.messages import (
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
    decode_step,
    drawn,
)
from kvrelay.executors.torch.parallel.micro_batches import merge, split
from kvrelay.executors.torch.parallel.processes import end_with_parent
from kvrelay.executors.torch.parallel.rank import ParallelRank
from kvrelay.executors.torch.parallel.shard import RankShard
from kvrelay.transfer.rank_map import InstanceSizes, place_rank
from kvrelay.transfer.ranks.channel import Channel, ChannelClosedError
from kvrelay.transfer.ranks.messages import ToRank
from kvrelay.transfer.ranks.mover import RankMover

_log = logging.getLogger(__name__)

_DONE = StepDone([])


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
