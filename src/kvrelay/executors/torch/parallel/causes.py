"""What the failures of rank processes mean: the first cause of several, as an error of the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvrelay import errors
from kvrelay.errors import EngineDeadError, KvrelayError, PeerLostError
from kvrelay.executors.torch.parallel.messages import RankFailed
from kvrelay.executors.torch.parallel.processes import RankProcess
from kvrelay.executors.torch.parallel.rank import ParallelRank


def first_cause(
    ranks: Sequence[ParallelRank], processes: Sequence[RankProcess], failed: Mapping[int, RankFailed]
) -> KvrelayError:
    """A rank that ended without a message, else one with a reason of its own, else one that lost a peer. ``failed``:
    the messages heard, by rank."""
    silent = [i for i, process in enumerate(processes) if process.ending is not None and i not in failed]
    if silent:
        process = processes[silent[0]]
        return EngineDeadError(f"{ranks[silent[0]]}, pid {process.pid}, {process.ending}")
    own = {i: answer for i, answer in failed.items() if not answer.is_peer_lost} or failed
    if not own:
        return EngineDeadError("a rank does not answer")
    index, answer = next(iter(own.items()))
    return error_of(answer, f"{ranks[index]}, pid {processes[index].pid}, failed: {answer.message}")


def error_of(failed: RankFailed, message: str) -> KvrelayError:
    """The rank's own error if it is an InvalidInputError, a CheckpointError or a PeerLostError, else an
    EngineDeadError."""
    if failed.is_peer_lost:
        return PeerLostError(message)
    kind = getattr(errors, failed.kind, None)
    if isinstance(kind, type) and issubclass(kind, errors.InvalidInputError | errors.CheckpointError):
        return kind(failed.message)
    return EngineDeadError(message)
