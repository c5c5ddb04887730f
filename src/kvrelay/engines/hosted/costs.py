"""What a backend's steps cost: fitted to the steps that it tells, or estimated from what its answers show. Pure.

    told        composition and time of each step (``step_log``) ──> the fit; the pace goes back
    not told    the first token of a lone prefill, and gaps between the tokens of one answer ──> a coarser fit

A backend that tells its steps may stop to do so. Its costs then are stale: they are not published, and count for
nothing, until steps are told again.
"""

from __future__ import annotations

import logging
from typing import Protocol

import msgspec

from kvrelay.core.clock import Clock
from kvrelay.core.histogram import Histogram
from kvrelay.core.step_cost import CostSource, StepCost, StepPace, StepWork, prefill_pairs
from kvrelay.engine.pace import gaps_of, pace_of
from kvrelay.engine.request import PrefillMode, Request
from kvrelay.engines.hosted.step_log import RecorderState, Steps
from kvrelay.placement.cost_model import StepCostModel

_log = logging.getLogger(__name__)

LOOK_S = 0.05
"""Steps are taken in at most so often: no process wakes up for one."""
STALE_S, STALE_TOKENS = 5.0, 64
"""Without a step for so long, in which so many tokens came, the costs are stale."""


class StepTeller(Protocol):
    """A backend's steps (``StepLog``)."""

    def read_steps(self) -> Steps: ...

    def read_state(self) -> RecorderState | None: ...

    def write_pace(self, pace: StepPace) -> None: ...


class _Prefill(msgspec.Struct):
    """A prompt at the backend: its tokens to compute and those before them. ``is_alone``: no other was there."""

    num_tokens: int
    num_before: int
    began_s: float
    is_alone: bool


class AnswerTimes:
    """The requests that the backend computes, and what their answers show of its steps. Not thread-safe.

    An estimate: the way to the backend counts as computing, and prompts of others than this worker are not seen.
    """

    def __init__(self) -> None:
        self.num_prefill_tokens = 0
        """Of prompts whose first token has not come."""
        self.num_context = 0
        """Tokens of the answers that run, prompts included."""
        self._prefills: dict[str, _Prefill] = {}
        self._answers: dict[str, int] = {}
        self._watched = ("", 0.0)
        """The answer whose gaps are samples, and the time of its last tokens."""

    @property
    def num_decodes(self) -> int:
        return len(self._answers)

    def asked(self, request_id: str, num_tokens: int, num_before: int, now_s: float) -> None:
        """The backend computes ``num_tokens`` of a prompt after ``num_before`` others."""
        for prefill in self._prefills.values():
            prefill.is_alone = False
        self._prefills[request_id] = _Prefill(num_tokens, num_before, now_s, not self._prefills)
        self.num_prefill_tokens += num_tokens
        self._watched = ("", 0.0)

    def answered(
        self, request_id: str, num_tokens: int, num_context: int, now_s: float
    ) -> tuple[StepWork, float] | None:
        """``num_tokens`` have come for an answer, which now has ``num_context``. What that shows of one step."""
        prefill = self._end_prefill(request_id)
        num_decodes, context = len(self._answers), self.num_context
        self.num_context += num_context - self._answers.get(request_id, 0)
        self._answers[request_id] = num_context
        watched, since_s = self._watched
        if prefill is not None:
            self._watched = ("", 0.0)
            # All chunks together, as ``StepCost.prefill_seconds`` has them.
            pairs = prefill_pairs(prefill.num_tokens, prefill.num_before)
            work = StepWork(prefill.num_tokens, pairs, num_decodes, context)
            return (work, now_s - prefill.began_s) if prefill.is_alone else None
        if self._prefills or watched not in (request_id, ""):
            return None
        self._watched = (request_id, now_s)
        if not watched or num_tokens < 1:
            return None
        return StepWork(0, 0, num_decodes, context), (now_s - since_s) / num_tokens

    def ended(self, request_id: str) -> None:
        """Unknown ids are ignored."""
        self._end_prefill(request_id)
        self.num_context -= self._answers.pop(request_id, 0)
        # The next gap may be of another batch.
        self._watched = ("", 0.0)

    def _end_prefill(self, request_id: str) -> _Prefill | None:
        prefill = self._prefills.pop(request_id, None)
        if prefill is not None:
            self.num_prefill_tokens -= prefill.num_tokens
        return prefill


class HostedCosts:
    """``backend``: its name. ``teller``: None if it tells no steps. ``sets_pace``: whether the objectives of the
    requests limit its steps. ``step_times`` gets the time of each step."""

    def __init__(
        self, backend: str, teller: StepTeller | None, clock: Clock, step_times: Histogram, *, sets_pace: bool = False
    ) -> None:
        self.model = StepCostModel()
        self.answers = AnswerTimes()
        self.num_steps = 0
        """That were told, or whose time was estimated."""
        self.num_missed = 0
        """Steps that were told too fast to be taken in."""
        self._backend = backend
        self._teller = teller
        self._clock = clock
        self._step_times = step_times
        self._sets_pace = sets_pace
        self._requests: dict[str, Request] = {}
        self._written = StepPace()
        self._due_s = self._heard_s = clock.now()
        self._num_tokens_since = 0
        self._is_stale = False
        self._noted = ""

    @property
    def source(self) -> CostSource:
        if self._teller is None:
            return CostSource.ESTIMATED
        return CostSource.STALE if self._is_stale else CostSource.MEASURED

    @property
    def cost(self) -> StepCost | None:
        """None: nothing that counts is known."""
        if self._is_stale or (self._teller is None and not self.num_steps):
            return None
        return self.model.cost

    def pace(self) -> StepPace:
        """As the backend has it."""
        requests, now_s = list(self._requests.values()) if self._sets_pace else [], self._clock.now()
        prompts = [
            request for request in requests if not (request.first_output_sent or request.mode is PrefillMode.REMOTE)
        ]
        return pace_of(self.cost or StepCost(), self.model.spread, gaps_of(requests, now_s), prompts, now_s)

    # -- the requests at the backend ----------------------------------------------------------------------------------

    def arrived(self, request: Request) -> None:
        """A request has come. Its objectives count until it has ``left``."""
        self._requests[request.request_id] = request
        self._write_pace()

    def left(self, request: Request) -> None:
        """From the next look on its objectives do not count. Unknown requests are ignored."""
        self._requests.pop(request.request_id, None)
        self.answers.ended(request.request_id)

    def asked(self, request_id: str, num_tokens: int, num_before: int) -> None:
        """``AnswerTimes.asked``."""
        self.answers.asked(request_id, num_tokens, num_before, self._clock.now())

    def answered(self, request_id: str, num_tokens: int, num_context: int) -> None:
        """``AnswerTimes.answered``."""
        self._num_tokens_since += num_tokens
        shown = self.answers.answered(request_id, num_tokens, num_context, self._clock.now())
        if self._teller is None and shown is not None:
            self._add(*shown)

    # -- the steps of the backend -------------------------------------------------------------------------------------

    def look(self) -> None:
        """Take in what was told, if that is due."""
        now_s = self._clock.now()
        if self._teller is None or now_s < self._due_s:
            return
        self._due_s = now_s + LOOK_S
        steps = self._teller.read_steps()
        self.num_missed += steps.num_missed
        for work, seconds in steps.taken:
            self._add(work, seconds)
        if steps.taken:
            self._heard_s, self._num_tokens_since = now_s, 0
        self._judge(self._teller.read_state(), now_s)
        self._write_pace()

    def _add(self, work: StepWork, seconds: float) -> None:
        self.num_steps += 1
        self.model.add(work, seconds)
        if self._teller is not None:
            self._step_times.observe(seconds)

    def _judge(self, state: RecorderState | None, now_s: float) -> None:
        """Whether steps are still told, and if not, say so once."""
        is_silent = self._num_tokens_since >= STALE_TOKENS and now_s - self._heard_s > STALE_S
        is_off = state is not None and not state.is_on
        reason = state.reason if state is not None else ""
        if is_off or is_silent:
            reason = reason or f"no step for {now_s - self._heard_s:.0f} s, in which tokens came"
            if not self._is_stale:
                _log.warning(
                    "the costs of %s's steps are stale, and thresholds decide instead: %s", self._backend, reason
                )
        else:
            if self._is_stale:
                _log.info("%s tells its steps again", self._backend)
            if reason and reason != self._noted:
                self._noted = reason
                _log.warning("%s: %s", self._backend, reason)
        self._is_stale = is_off or is_silent

    def _write_pace(self) -> None:
        if self._teller is None:
            return
        pace = self.pace()
        if pace != self._written:
            self._written = pace
            self._teller.write_pace(pace)
