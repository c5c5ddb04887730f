"""Remote or local, by cost: both ways are estimated in seconds each time a step is scheduled, until one is taken.

    cost(way) = first token + LATE * its lateness + HARM * delay of running answers + LATE * lateness of their tokens

A waiting request is not bound to a way: the decode worker sends a prefill away only while its window is open, a few
prefills ahead of the prefill workers. So the queue stays short, little must be taken back from it, and a request holds
blocks only from then on.

While the cheaper way is closed, the request waits for it, unless the line of waiting requests is so long that the other
way would serve the line's end sooner. With two unequal servers the slower one is used from some length of the line on
(Lin and Kumar, IEEE Trans. Automatic Control 1984). Otherwise a way with a long latency would stay idle under any load.

Pure: numbers in, a decision out. ``docs/cost-model.md`` has the formulas with their sources.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from kvrelay.config import DisaggConfig
from kvrelay.config.settings import DEFAULT_ITL_MS
from kvrelay.core.clock import Clock
from kvrelay.core.step_cost import MAX_COST_S, StepCost, StepWork, bounded_s, prefill_pairs
from kvrelay.placement.base import Decision, Objectives, PrefillLoad, PrefillPlace, Situation
from kvrelay.placement.cost_model import RemoteCost, RemoteCostModel, expected_lateness
from kvrelay.placement.threshold import DisaggPolicy
from kvrelay.placement.trials import Trials

LATE = 4.0
"""The cost, in seconds, of a second beyond an objective."""
HARM = 0.1
"""The cost, in seconds, of delaying a running answer by a second within its objective."""
MIN_WINDOW = 4
"""Prefills per prefill worker that may always be in flight: one computing, one waiting, two to arrive."""
MIN_OBJECTIVE_S, MAX_OBJECTIVE_S = 1e-6, 1e6
"""Others count as these: a client may ask for anything, and the costs must stay finite."""
MIN_WAIT_TOKEN_S = 1e-9
"""A fit may say that waiting takes no time."""
WINDOW_S = 0.25
"""More are sent while the wait before them is below this and the way's own latency."""


def decide(
    situation: Situation,
    remote: RemoteCost,
    prefill_load: PrefillLoad,
    mean_tokens: float,
    spread: float = 0.0,
    told_wait_s: float = 0.0,
) -> Decision:
    """Place one prefill. ``mean_tokens``: of a prefill that another decode worker has queued. ``told_wait_s``: what a
    prefill waits by what a frontend knows, which has sent pairs to the prefill workers and hears their loads."""
    if prefill_load.num_workers <= 0:
        return stay_here(situation.is_here_open, situation.load_s)
    others = max(0, prefill_load.queue_size - situation.num_remote_prefills) * mean_tokens
    known = (situation.num_remote_tokens + others) / prefill_load.num_workers
    told = told_wait_s / max(remote.wait_token_s, MIN_WAIT_TOKEN_S)
    ahead = max(known, told)
    local_s, local_price = local_cost(situation)
    remote_s, remote_price = _remote(situation, remote, ahead, spread)
    is_window_open = (
        situation.num_remote_prefills < MIN_WINDOW * prefill_load.num_workers
        or ahead * remote.wait_token_s < WINDOW_S + remote.overhead_s
    )
    if local_price <= remote_price:
        end_cost = local_cost(situation, situation.num_line)[1]
        is_local = situation.is_here_open or end_cost <= remote_price
    else:
        # A frontend counts what it has sent: the line here, too.
        ahead_of_end = max(known + situation.num_line / prefill_load.num_workers, told)
        end_cost = _remote(situation, remote, ahead_of_end, spread)[1]
        is_local = not is_window_open and local_price < end_cost
    place: PrefillPlace | None = None
    if is_local:
        place = PrefillPlace.LOCAL_CHEAPER if situation.is_here_open else None
    elif is_window_open:
        place = PrefillPlace.REMOTE
    return Decision(place, local_s, remote_s, local_price, remote_price, load_s=situation.load_s)


def stay_here(is_here_open: bool, load_s: float = 0.0) -> Decision:
    """The decision without a prefill worker: the prefill runs here, once the step's budget has room."""
    return Decision(PrefillPlace.LOCAL_NO_PREFILL_WORKER if is_here_open else None, load_s=load_s)


def _remote(situation: Situation, remote: RemoteCost, ahead: float, spread: float) -> tuple[float, float]:
    """Seconds to the first token, and the cost, of a prefill at a prefill worker with ``ahead`` tokens before it."""
    # What a tier here has, the prefill worker computes.
    return remote_cost(situation, remote.seconds(situation.num_tokens + situation.num_stored, ahead), spread)


def remote_cost(situation: Situation, seconds: float, spread: float = 0.0) -> tuple[float, float]:
    """``seconds`` to the first token of a prefill elsewhere, and its cost: it harms no answer that runs here."""
    return seconds, seconds + LATE * _late(situation, seconds, spread)


def local_cost(situation: Situation, num_line: int = 0) -> tuple[float, float]:
    """Seconds to the first token, and the cost, of a prefill here, with ``num_line`` more tokens before it."""
    num_before = situation.num_here + num_line
    cost, chunk = situation.cost, max(situation.chunk, 1)
    decodes, context = situation.num_decodes, situation.num_context
    computed_s = cost.prefill_seconds(
        situation.num_tokens,
        num_before=situation.num_cached + situation.num_stored,
        num_ahead=num_before,
        chunk=chunk,
        num_decodes=decodes,
        num_context=context,
    )
    seconds = bounded_s(situation.load_s + computed_s)
    delay_s = cost.added_seconds(situation.num_tokens, chunk=chunk)
    # An objective of the 99th percentile bears one late token in a hundred: a lone step may be late by chance.
    num_more = math.ceil(situation.num_tokens / chunk) - 1
    stall_s = _added_lateness(situation, chunk, 0.0) + num_more * _added_lateness(situation, chunk, situation.spread)
    # An idle worker is not free: chats that arrive meanwhile wait for its steps.
    harm_s = HARM * delay_s * max(decodes, 1) + LATE * stall_s * decodes
    total = seconds + LATE * _late(situation, seconds, situation.spread) + harm_s
    return seconds, min(total, MAX_COST_S * MAX_COST_S)


def _added_lateness(situation: Situation, chunk: int, spread: float) -> float:
    """What a chunk in the middle of the prompt adds to the lateness of each running answer's tokens of that step.

    In seconds of lateness of a first token: one that is late by its whole objective is as bad as a token that is.
    """
    cost, objectives = situation.cost, situation.objectives
    tokens = min(situation.num_tokens, chunk)
    pairs = prefill_pairs(tokens, (situation.num_tokens - tokens) // 2)
    late_s, late_anyway_s = (
        expected_lateness(cost.step_seconds(work), spread, objectives.itl_s * cost.tokens_per_step)
        for work in (
            StepWork(tokens, pairs, situation.num_decodes, situation.num_context),
            StepWork(0, 0, situation.num_decodes, situation.num_context),
        )
    )
    return max(late_s - late_anyway_s, 0.0) * max(objectives.ttft_s / objectives.itl_s, 1.0)


def _late(situation: Situation, seconds: float, spread: float) -> float:
    return expected_lateness(seconds, spread, situation.objectives.ttft_s - situation.waited_s)


class CostPlacement:
    """Places the prefills of one decode worker, and learns what they cost. All methods run on the engine's thread.

    ``prefill_load`` returns the worker's knowledge of the prefill side; ``count`` is called with each decision that was
    carried out.
    """

    def __init__(
        self,
        policy: DisaggPolicy,
        prefill_load: Callable[[], PrefillLoad],
        count: Callable[[PrefillPlace], None],
        clock: Clock,
    ) -> None:
        self.model = RemoteCostModel()
        self.num_fallbacks = 0
        """Decisions by threshold, because the costs were not reliable."""
        self._policy = policy
        self._prefill_load = prefill_load
        self._count = count
        self._mean_tokens = 1000.0
        self._arriving = ("", 0.0)
        self._clock = clock
        self._told = (0.0, clock.now())
        """The wait that a frontend has told, and when."""
        self._local_trials, self._remote_trials = Trials(clock), Trials(clock)
        self._is_remote_in_doubt = False
        """A trial is under way: its time replaces what is known."""

    def objectives(self, ttft_ms: float = 0.0, itl_ms: float = 0.0) -> Objectives:
        """Those of a request, in milliseconds; 0: the configured one."""
        return objectives_of(self._policy.config, ttft_ms, itl_ms)

    @property
    def has_choice(self) -> bool:
        """Whether a prefill worker exists. Without one ``stay_here`` is the decision."""
        return self._prefill_load().num_workers > 0

    def told(self, wait_s: float) -> None:
        """A frontend says what a prefill waits. Times that cannot be are ignored."""
        if 0.0 <= wait_s <= MAX_COST_S:
            self._told = (wait_s, self._clock.now())

    @property
    def _told_wait_s(self) -> float:
        """What is left of it."""
        wait_s, told_s = self._told
        return max(wait_s - (self._clock.now() - told_s), 0.0)

    def decide(self, situation: Situation) -> Decision:
        """Where the prefill should go now."""
        remote, prefill_load = self.model.cost, self._prefill_load()
        if situation.cost.is_sound and remote.is_sound:
            told_s = self._told_wait_s
            decision = decide(situation, remote, prefill_load, self._mean_tokens, self.model.spread, told_s)
            return self._try_other(decision, situation, prefill_load)
        self.num_fallbacks += 1
        place: PrefillPlace | None = self._policy.decide(
            prompt_length=situation.num_tokens, num_cached_tokens=0, prefill_load=prefill_load
        )
        if place is not PrefillPlace.REMOTE and not situation.is_here_open:
            place = None
        return Decision(place)

    def _try_other(self, decision: Decision, situation: Situation, prefill_load: PrefillLoad) -> Decision:
        """Try the other way if its cost is doubtful, and if it would pay on a worker that prefills as fast as the other
        side does. Whatever is under way will be measured anyway."""
        cost, remote = situation.cost, self.model.cost
        if decision.place is PrefillPlace.LOCAL_CHEAPER:
            if situation.num_remote_prefills or not self._remote_trials.is_due:
                return decision
            token_s = cost.prefill_token_s + cost.pair_s * situation.num_tokens / 2
            remote = msgspec.structs.replace(
                remote,
                overhead_s=min(remote.overhead_s, RemoteCost().overhead_s),
                transfer_token_s=min(remote.transfer_token_s, RemoteCost().transfer_token_s),
                prefill_s=min(remote.prefill_s, cost.prefill_s),
                prefill_token_s=min(remote.prefill_token_s, token_s),
            )
        elif decision.place is PrefillPlace.REMOTE:
            if situation.num_here or not situation.is_here_open or not self._local_trials.is_due:
                return decision
            situation = msgspec.structs.replace(
                situation,
                cost=msgspec.structs.replace(
                    cost,
                    prefill_s=min(cost.prefill_s, remote.prefill_s),
                    prefill_token_s=min(cost.prefill_token_s, remote.prefill_token_s),
                    pair_s=0.0,
                ),
            )
        else:
            return decision
        doubtful = decide(situation, remote, prefill_load, self._mean_tokens, told_wait_s=self._told_wait_s)
        if doubtful.place in (None, decision.place):
            return decision
        return msgspec.structs.replace(decision, place=doubtful.place, is_trial=True)

    @property
    def num_trials(self) -> int:
        """Prefills that went a way against the costs."""
        return self._local_trials.num_trials + self._remote_trials.num_trials

    def soonest_s(self, num_tokens: int, num_before: int, cost: StepCost) -> float:
        """Seconds to the first token of ``num_tokens`` at best: all workers compute the ``num_before`` tokens before
        it, then the faster way is open at once. 0 if the costs are not reliable."""
        remote, prefill_load = self.model.cost, self._prefill_load()
        if not (cost.is_sound and remote.is_sound):
            return 0.0
        own_s = cost.prefill_seconds(num_tokens)
        before_s = cost.prefill_token_s * num_before
        if prefill_load.num_workers > 0:
            own_s = min(own_s, remote.seconds(num_tokens, 0.0))
            share = cost.prefill_token_s * prefill_load.num_workers
            before_s *= remote.wait_token_s / (remote.wait_token_s + share) if share else 1.0
        return min(before_s + own_s, MAX_COST_S)

    def placed(self, decision: Decision) -> None:
        """The engine has acted on ``decision``."""
        if decision.place is None:
            return
        is_remote = decision.place is PrefillPlace.REMOTE
        self._is_remote_in_doubt |= is_remote and decision.is_trial
        (self._remote_trials if is_remote else self._local_trials).taken(is_trial=decision.is_trial)
        self._count(decision.place)

    def prefill_took(self, request_id: str, prefill_s: float) -> None:
        """The prefill worker's report of a request whose KV has arrived; ``came_back`` follows at once, if at all."""
        self._arriving = (request_id, prefill_s)

    def came_back(self, request_id: str, num_tokens: int, num_ahead: int, seconds: float) -> None:
        """A remote prefill of ``num_tokens`` took ``seconds``; this worker had ``num_ahead`` tokens away before it."""
        self._mean_tokens += 0.1 * (num_tokens - self._mean_tokens)
        num_workers = max(self._prefill_load().num_workers, 1)
        if self._is_remote_in_doubt:
            self.model.begin_anew()
            self._is_remote_in_doubt = False
        arrived, prefill_s = self._arriving
        self.model.add(num_tokens, num_ahead / num_workers, seconds, prefill_s if arrived == request_id else 0.0)


def objectives_of(config: DisaggConfig, ttft_ms: float = 0.0, itl_ms: float = 0.0) -> Objectives:
    """The configured objectives with a request's own, where these are possible times."""
    own_ttft_ms, own_itl_ms = (value if 0.0 < value < math.inf else 0.0 for value in (ttft_ms, itl_ms))
    itl_ms = own_itl_ms or config.slo_itl_ms
    return Objectives(
        _objective_s(own_ttft_ms or config.slo_ttft_ms), _objective_s(itl_ms or DEFAULT_ITL_MS), not itl_ms
    )


def _objective_s(objective_ms: float) -> float:
    return min(max(objective_ms / 1e3, MIN_OBJECTIVE_S), MAX_OBJECTIVE_S)


class PlacementState(msgspec.Struct):
    """Where one request's prefill runs: who decides, by what, and the decision."""

    policy: CostPlacement | None = None
    """Decides when the engine admits the request; None: it is decided already."""
    objectives: Objectives | None = None
    refuses_late: bool = False
    """Whether the request is refused if its objective cannot be met any more."""
    explain: bool = False
    """Whether the first output reports the decision."""
    decision: Decision | None = None
    otherwise: CostPlacement | None = None
    """Decides once if the prefill worker of a pair does not compute it after all; None: it is computed here then."""
