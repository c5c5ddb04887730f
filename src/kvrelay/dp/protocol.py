"""The protocol by which the ranks of a data-parallel group run the same steps. Pure: events in, messages out.

A forward pass of a model with experts spread over the ranks contains collectives over all of them. So if one rank has
work, all ranks must step, the others with a dummy batch. Steps are numbered from 1, and every rank runs every number.

    rank a, busy      new_step: 7 > coord_step 6 ──StartStep(7)──> coordinator: step = 7 + lookahead
    rank b, asleep    notified(31) <───────────StepsUntil(31)──────────┘ to every rank
                      runs 7, 8, ... 31 with dummy batches, or with requests that arrive meanwhile; then sleeps

The caller of ``StartStep`` does not wait for an answer: it computes, and waits in the first collective. No rank waits
there for ever: a rank that runs step n was told to run until n at least, or has sent StartStep(n). In both cases the
coordinator tells all ranks to run until n at least, and a rank never lowers this number. So messages may be late,
reordered or repeated.

Idle ranks run at most ``lookahead`` steps after the last request. With a small lookahead there are more messages, with
a large one more dummy steps.
"""

from __future__ import annotations

import enum

import msgspec

Step = int
"""The number of a step; 0: before the first."""

DEFAULT_LOOKAHEAD = 24


class StartStep(msgspec.Struct, frozen=True, tag=True):
    """Rank to coordinator: this rank begins this step, which no StepsUntil covered."""

    step: Step


class StepsUntil(msgspec.Struct, frozen=True, tag=True):
    """Coordinator to every rank: run all steps up to this one."""

    step: Step


class Round(enum.Enum):
    """The kinds of rounds of an engine's loop."""

    REAL = enum.auto()
    """A step with the engine's batch."""
    DUMMY = enum.auto()
    """A step without a batch, for the other ranks."""
    NO_STEP = enum.auto()
    """No forward pass: there is nothing to compute, or only finished requests are cleaned up."""


def raised(step: Step, told: Step, lookahead: int) -> Step | None:
    """Up to which step all ranks shall run once a rank begins ``step``. None: they were told already, by ``told``."""
    return None if step <= told else step + lookahead


class Coordinator:
    """Holds the step up to which the group runs. There is one per group."""

    def __init__(self, lookahead: int = DEFAULT_LOOKAHEAD) -> None:
        self._lookahead = lookahead
        self.step: Step = 0

    def __repr__(self) -> str:
        return f"Coordinator(until step {self.step}, lookahead {self._lookahead})"

    def start_step(self, step: Step) -> StepsUntil | None:
        """A rank begins ``step``. Returns the message for every rank; None if every rank was told already."""
        until = raised(step, self.step, self._lookahead)
        if until is None:
            return None
        self.step = until
        return StepsUntil(until)


class Participant:
    """One rank: its current or last step (``local_step``), and the last step that it was told (``coord_step``)."""

    def __init__(self) -> None:
        self.local_step: Step = 0
        self.coord_step: Step = 0

    def __repr__(self) -> str:
        return f"Participant(step {self.local_step}, told until {self.coord_step})"

    @property
    def owes_step(self) -> bool:
        """Whether this rank must step although it may have nothing to compute."""
        return self.local_step < self.coord_step

    def begin_round(self, *, has_batch: bool) -> tuple[Round, StartStep | None]:
        """A round of the engine's loop begins. Returns its kind, and the message for the coordinator."""
        if has_batch:
            return Round.REAL, self._new_step()
        if self.owes_step:
            return Round.DUMMY, self._new_step()
        return Round.NO_STEP, None

    def notified(self, step: Step) -> None:
        """``StepsUntil(step)`` has arrived, maybe late or again."""
        self.coord_step = max(self.coord_step, step)

    def _new_step(self) -> StartStep | None:
        self.local_step += 1
        return StartStep(self.local_step) if self.local_step > self.coord_step else None
