"""Which of several failures of ranks is the first cause, and what the engine raises for it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from kvrelay.errors import CheckpointError, EngineDeadError, InvalidInputError, KvrelayError, PeerLostError
from kvrelay.executors.torch.parallel.causes import error_of, first_cause
from kvrelay.executors.torch.parallel.messages import RankFailed
from kvrelay.executors.torch.parallel.rank import ParallelRank

RANKS = [ParallelRank.numbered(index, 2, 1) for index in range(2)]
OWN, LOST = RankFailed("RuntimeError", "out of memory", False), RankFailed("PeerLostError", "a peer is gone", True)


@dataclass
class Process:
    pid: int
    ending: str | None = None


@pytest.mark.parametrize(
    ("endings", "failed", "text"),
    [
        ((None, "was killed"), {0: LOST}, "pid 11, was killed"),
        ((None, "was killed"), {0: OWN}, "pid 11, was killed"),
        ((None, None), {0: LOST, 1: OWN}, "pid 11, failed: out of memory"),
        ((None, None), {0: LOST}, "pid 10, failed: a peer is gone"),
        ((None, "has ended"), {1: OWN}, "pid 11, failed: out of memory"),
        ((None, None), {}, "a rank does not answer"),
    ],
    ids=[
        "killed",
        "killed, another failed",
        "own before a lost peer",
        "a lost peer",
        "ended after its reason",
        "silent",
    ],
)
def test_the_first_cause_is_named(endings: tuple[str | None, ...], failed: dict[int, RankFailed], text: str) -> None:
    processes = [Process(10 + index, ending) for index, ending in enumerate(endings)]
    error = first_cause(RANKS, processes, failed)  # type: ignore[arg-type]
    assert isinstance(error, EngineDeadError)
    assert text in str(error)


@pytest.mark.parametrize(
    ("failed", "kind"),
    [
        (RankFailed("InvalidInputError", "no", False), InvalidInputError),
        (RankFailed("CheckpointError", "no", False), CheckpointError),
        (RankFailed("KvrelayError", "no", False), EngineDeadError),
        (RankFailed("ZeroDivisionError", "no", False), EngineDeadError),
        (LOST, PeerLostError),
    ],
)
def test_only_a_rank_s_own_bad_input_keeps_its_type(failed: RankFailed, kind: type[KvrelayError]) -> None:
    assert type(error_of(failed, "told")) is kind
