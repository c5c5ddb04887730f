"""What an engine sees of its data-parallel group: which kind of round begins, and whether the group still stands.

All methods are called by the engine's thread; what the group's connection hears comes through the engine's inbox.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from kvrelay.engine.step_sync.member import GroupMember, Notice
from kvrelay.engine.step_sync.messages import AllLeft, Ended
from kvrelay.engine.step_sync.protocol import Participant, Round, StepsUntil
from kvrelay.errors import EngineDeadError, KvrelayError

BLAME_WAIT_S = 1.0
BLAME_LOOK_S = 0.02
"""After a failed step: so long for the news that another rank has ended, which is then the reason."""


class Group(Protocol):
    """The data-parallel group of an engine, of one rank or more."""

    @property
    def owes_step(self) -> bool:
        """Whether the engine must go on without work of its own."""

    @property
    def is_over(self) -> bool:
        """Whether the engine may end, after ``leave``."""

    def begin_round(self, *, has_batch: bool) -> Round:
        """Raises EngineDeadError if the group has ended."""

    def step_empty(self) -> None:
        """Compute a step with a dummy batch."""

    def listen(self, post: Callable[[Callable[[], None]], None]) -> None:
        """``post`` runs a function on the engine's thread, and wakes it."""

    def explain(self, error: Exception) -> Exception:
        """The reason for a step's failure: ``error``, unless another rank has ended."""

    def leave(self) -> None:
        """The engine has nothing left to do."""

    def close(self) -> None: ...


class Alone:
    """An engine without a group, or a group of one."""

    owes_step = False
    is_over = True

    def begin_round(self, *, has_batch: bool) -> Round:
        return Round.REAL if has_batch else Round.NO_STEP

    def step_empty(self) -> None:
        """Never asked for: no round is a dummy."""

    def listen(self, post: Callable[[Callable[[], None]], None]) -> None: ...

    def explain(self, error: Exception) -> Exception:
        return error

    def leave(self) -> None: ...

    def close(self) -> None: ...


class StepGroup:
    """A rank of a group. ``step_empty`` computes a dummy batch. None: the ranks' steps are independent, as those of
    dense models are, and only the group's life is shared."""

    def __init__(self, member: GroupMember, step_empty: Callable[[], None] | None) -> None:
        self._member = member
        self._step_empty = step_empty
        self._participant = Participant()
        self._ended: EngineDeadError | None = None
        self._has_left = False
        self._have_all_left = False
        self.num_dummy_steps = 0

    def __repr__(self) -> str:
        return f"StepGroup({self._member.group_id}, {self._participant!r})"

    @property
    def owes_step(self) -> bool:
        return self._participant.owes_step or self._ended is not None

    @property
    def is_over(self) -> bool:
        return self._ended is not None or (self._have_all_left and not self._participant.owes_step)

    def begin_round(self, *, has_batch: bool) -> Round:
        if self._ended is not None:
            raise self._ended
        if self._step_empty is None:
            return Round.REAL if has_batch else Round.NO_STEP
        kind, start = self._participant.begin_round(has_batch=has_batch)
        if start is not None:
            self._member.start_step(start)
        return kind

    def step_empty(self) -> None:
        assert self._step_empty is not None
        self.num_dummy_steps += 1
        self._step_empty()

    def listen(self, post: Callable[[Callable[[], None]], None]) -> None:
        def deliver(notice: Notice) -> None:
            if isinstance(notice, Ended):
                # At once, for a step that is running and fails of the same reason.
                self._ended = EngineDeadError(notice.reason)
            post(lambda: self._take(notice))

        self._member.listen(deliver)

    def explain(self, error: Exception) -> Exception:
        deadline_s = time.monotonic() + BLAME_WAIT_S
        while self._ended is None and time.monotonic() < deadline_s:
            time.sleep(BLAME_LOOK_S)
        if self._ended is None or error is self._ended:
            return error
        detail = error.message if isinstance(error, KvrelayError) else repr(error)
        return EngineDeadError(f"{self._ended.message} ({detail})")

    def leave(self) -> None:
        if not self._has_left:
            self._has_left = True
            self._member.leave()

    def close(self) -> None:
        self._member.close()

    def _take(self, notice: Notice) -> None:
        match notice:
            case StepsUntil(step):
                self._participant.heard(step)
            case AllLeft():
                self._have_all_left = True
            case Ended():
                pass
