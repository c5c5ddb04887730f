"""An engine's interface to its data-parallel group: which kind of round begins, and whether the group still exists.

    join ──> load the model ──> ready ──> listen: the engine runs ──> leave ──> is_over ──> close

The engine's thread makes the calls from ``listen`` on; messages of the connection come through the engine's inbox.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from kvrelay.dp.member import GroupMember, Notice
from kvrelay.dp.messages import AllLeft, AllReady, Ended
from kvrelay.dp.protocol import Participant, Round, StepsUntil
from kvrelay.errors import EngineDeadError, KvrelayError, PeerLostError

BLAME_WAIT_S = 0.5
"""How long to wait, after a failed collective, for the message that another rank has ended, which is then the
reason."""

Post = Callable[[Callable[[], None]], None]
"""Runs a function on the engine's thread, and wakes it."""


@runtime_checkable
class StepsTogether(Protocol):
    """An executor whose forward passes contain collectives over the ranks of a group."""

    def execute_dummy(self) -> None:
        """A forward pass without a batch, because the other ranks need it. Raises EngineDeadError."""


class Group(Protocol):
    """The data-parallel group of an engine, of one rank or more."""

    @property
    def owes_step(self) -> bool:
        """Whether the engine must continue without requests."""

    @property
    def is_over(self) -> bool:
        """Whether the engine may end, after ``leave``."""

    def begin_round(self, *, has_batch: bool) -> Round:
        """Raises EngineDeadError if the group has ended."""

    def execute_dummy(self) -> None:
        """The dummy batch that ``begin_round`` has requested."""

    def listen(self, post: Post) -> None:
        """From now on messages go to the engine."""

    def explain(self, error: Exception) -> Exception:
        """A step has failed: tell the group. Returns the reason: ``error``, unless another rank has ended."""

    def leave(self) -> None:
        """The engine has nothing left to do."""

    def close(self) -> None: ...


class Alone:
    """An engine without a group."""

    owes_step = False
    is_over = True

    def begin_round(self, *, has_batch: bool) -> Round:
        return Round.REAL if has_batch else Round.NO_STEP

    def execute_dummy(self) -> None:
        """Never called: no round is a dummy."""

    def listen(self, post: Post) -> None: ...

    def explain(self, error: Exception) -> Exception:
        return error

    def leave(self) -> None: ...

    def close(self) -> None: ...


class StepGroup:
    """A rank of a group that is formed. Without an executor that steps together, the ranks share only the group's life:
    steps of dense models are independent.

    ``on_lost``: called on the connection's thread, once, if the group ends before ``listen``.
    """

    def __init__(self, member: GroupMember, on_lost: Callable[[EngineDeadError], None]) -> None:
        self._member = member
        self._on_lost = on_lost
        self._executor: StepsTogether | None = None
        self.participant = Participant()
        self.ended: EngineDeadError | None = None
        """Why the group has ended."""
        self.has_left = False
        """``leave`` was called."""
        self._have_all_left = False
        self._are_all_ready, self._has_ended = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._post: Post | None = None
        self._early: list[Notice] = []
        self.num_dummy_steps = 0
        member.listen(self._deliver)

    def __repr__(self) -> str:
        return f"StepGroup({self._member.group_id}, {self.participant!r})"

    @property
    def group_id(self) -> str:
        return self._member.group_id

    def ready(self, executor: StepsTogether | None) -> None:
        """This rank is loaded. Returns when all ranks are. Raises EngineDeadError if the group ends before."""
        self._executor = executor
        self._member.ready()
        self._are_all_ready.wait()
        if self.ended is not None:
            raise self.ended

    @property
    def owes_step(self) -> bool:
        return self.participant.owes_step or self.ended is not None

    @property
    def is_over(self) -> bool:
        return self._have_all_left and not self.participant.owes_step

    def begin_round(self, *, has_batch: bool) -> Round:
        if self.ended is not None:
            raise self.ended
        if self._executor is None:
            return Round.REAL if has_batch else Round.NO_STEP
        kind, start = self.participant.begin_round(has_batch=has_batch)
        if start is not None:
            self._member.start_step(start)
        return kind

    def execute_dummy(self) -> None:
        assert self._executor is not None
        self.num_dummy_steps += 1
        self._executor.execute_dummy()

    def listen(self, post: Post) -> None:
        with self._lock:
            self._post, early = post, self._early
            for notice in early:
                self._hand_to_engine(post, notice)

    def explain(self, error: Exception) -> Exception:
        reason = error.message if isinstance(error, KvrelayError) else repr(error)
        if not isinstance(error, PeerLostError):
            self._member.fail(reason)
            return error
        self._has_ended.wait(BLAME_WAIT_S)
        return error if self.ended is None else EngineDeadError(f"{self.ended.message} ({reason})")

    def leave(self) -> None:
        if not self.has_left:
            self.has_left = True
            self._member.leave()

    def close(self) -> None:
        """End a running engine and the other ranks, unless all have left."""
        with self._lock:
            self._post = self._post or (lambda change: change())
        self._member.close()
        if not self.is_over and self.ended is None:
            self._deliver(Ended("this rank's connection to its data-parallel group is closed"))

    def _deliver(self, notice: Notice) -> None:
        """On the connection's thread, or on the one that begins a step."""
        if isinstance(notice, Ended):
            # At once, because a running step fails for the same reason.
            self.ended = EngineDeadError(notice.reason)
            self._has_ended.set()
        if isinstance(notice, AllReady | Ended):
            self._are_all_ready.set()
        with self._lock:
            if self._post is not None:
                self._hand_to_engine(self._post, notice)
                return
            self._early.append(notice)
        if self.ended is not None:
            self._on_lost(self.ended)

    def _hand_to_engine(self, post: Post, notice: Notice) -> None:
        post(lambda: self._take(notice))

    def _take(self, notice: Notice) -> None:
        """On the engine's thread."""
        if isinstance(notice, StepsUntil):
            self.participant.notified(notice.step)
        elif isinstance(notice, AllLeft):
            self._have_all_left = True
