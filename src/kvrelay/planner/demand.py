"""What the demand is now: samples since it changed last, and the load that follows from them. Pure.

Two errors are possible. A mean over a short time takes noise for a change; a mean over a long time hides a change. So
the samples are cut where they stop being alike: at the instant at which the work before and after differs by more than
CHANGED standard deviations of a compound Poisson process. Steady demand is averaged over a minute, and a burst is seen
in its first seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import reduce
from statistics import linear_regression

import msgspec

from kvrelay.config import WorkerRole
from kvrelay.planner.base import Backlog, Demand, FleetView, Objectives, PlannerState, WorkerView
from kvrelay.planner.capacity import Load

CHANGED = 4.0
"""Standard deviations. Many splits are tried at each call, and steady demand must pass them all for hours."""
BUCKETS_PER_WINDOW = 2
MAX_WINDOWS = 12
"""Older samples are forgotten, however alike."""
SCATTER = 1.3
"""Mean of the squares over the square of the mean, of answers' lengths (lognormal, sigma 0.5)."""
MIN_ENDED = 8
"""Answers whose mean length counts."""
PRIOR_ANSWER_TOKENS = 200.0
FULL = 0.9
ALPHA, BETA = 0.3, 0.1
"""The gains of ``trend``: of the level, and of the slope for a change of the level."""
SLOPE_NOISE = 0.042
"""sqrt(2 b^2 / (a (4 - 2 a - b))) with a = ALPHA and b = ALPHA BETA: the steady state of an alpha-beta filter (Kalata
1984)."""
GROWS = 3.0
"""Standard deviations of that noise."""


class Traffic(msgspec.Struct, kw_only=True):
    """What frontends count, since their start. Prompts are counted when they arrive, with the sum of their squares, and
    again with their cached part when they are prefilled; answers when they end."""

    num_arrived: int = 0
    num_arrived_tokens: int = 0
    sum_squares: int = 0
    num_prefilled_tokens: int = 0
    num_cached_tokens: int = 0
    num_ended: int = 0
    num_ended_tokens: int = 0

    def arrived(self, num_prompt_tokens: int) -> None:
        self.num_arrived += 1
        self.num_arrived_tokens += num_prompt_tokens
        self.sum_squares += num_prompt_tokens * num_prompt_tokens

    def prefilled(self, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        self.num_prefilled_tokens += num_prompt_tokens
        self.num_cached_tokens += num_cached_tokens

    def ended(self, num_tokens: int) -> None:
        self.num_ended += 1
        self.num_ended_tokens += num_tokens

    def since(self, before: Traffic) -> Traffic:
        """What has been counted since ``before``. Counts that went back are those of a frontend that left: 0."""
        names = self.__struct_fields__
        return Traffic(**{name: max(getattr(self, name) - getattr(before, name), 0) for name in names})

    def plus(self, other: Traffic) -> Traffic:
        """Of both."""
        return Traffic(**{name: getattr(self, name) + getattr(other, name) for name in self.__struct_fields__})

    def demand(self, duration_s: float, num_generated_tokens: int = 0) -> Demand:
        """Of ``duration_s`` seconds. The cached share of arrived prompts is taken from those that were prefilled."""
        uncached = 1.0 - self.num_cached_tokens / max(self.num_prefilled_tokens, 1)
        return Demand(
            duration_s=duration_s,
            num_requests=self.num_arrived,
            num_prompt_tokens=self.num_arrived_tokens,
            num_uncached_tokens=round(self.num_arrived_tokens * uncached),
            sum_squares=self.sum_squares * uncached**2,
            num_ended=self.num_ended,
            num_ended_tokens=self.num_ended_tokens,
            num_generated_tokens=num_generated_tokens,
        )


def heard(state: PlannerState, demand: Demand, objectives: Objectives) -> PlannerState:
    """With one more sample; without those from before the last change."""
    if not 0.0 < demand.duration_s < math.inf:
        return state
    samples = list(state.samples)
    if samples and samples[-1].duration_s < objectives.window_s / BUCKETS_PER_WINDOW:
        demand = total((samples.pop(), demand))
    samples.append(demand)
    while sum(sample.duration_s for sample in samples[1:]) >= MAX_WINDOWS * objectives.window_s:
        samples.pop(0)
    samples = samples[last_change(samples) :]
    whole = total(samples)
    answer_tokens = whole.num_ended_tokens / whole.num_ended if whole.num_ended >= MIN_ENDED else state.answer_tokens
    return msgspec.structs.replace(state, samples=tuple(samples), answer_tokens=answer_tokens)


def total(samples: Iterable[Demand]) -> Demand:
    """All of them as one."""
    return reduce(_sum, samples, Demand(duration_s=0.0))


def _sum(one: Demand, other: Demand) -> Demand:
    return Demand(**{name: getattr(one, name) + getattr(other, name) for name in Demand.__struct_fields__})


def last_change(samples: Sequence[Demand]) -> int:
    """The first sample of those that belong together; 0: all do."""
    best, found = CHANGED, 0
    after = Demand(duration_s=0.0)
    whole = total(samples)
    for index in range(len(samples) - 1, 0, -1):
        after = _sum(after, samples[index])
        deviations = max(
            _deviations(after.duration_s, after_work, whole.duration_s, work, squares)
            for after_work, (work, squares) in zip(_work(after), zip(_work(whole), _squares(whole)))
        )
        if deviations > best:
            best, found = deviations, index
    return found


def _work(demand: Demand) -> tuple[float, float]:
    """Tokens to prefill and tokens of ended answers."""
    return float(demand.num_uncached_tokens), float(demand.num_ended_tokens)


def _squares(demand: Demand) -> tuple[float, float]:
    """Sums of the squares of both."""
    return demand.sum_squares, SCATTER * demand.num_ended_tokens**2 / max(demand.num_ended, 1)


def _deviations(after_s: float, after: float, whole_s: float, whole: float, squares: float) -> float:
    """By how many standard deviations the rates before and after differ, if all of it is one process."""
    before_s = whole_s - after_s
    variance = squares / whole_s * (1.0 / after_s + 1.0 / before_s) if before_s > 0.0 else 0.0
    if variance <= 0.0:
        return 0.0
    return abs(after / after_s - (whole - after) / before_s) / math.sqrt(variance)


def trend(samples: Sequence[Demand]) -> float:
    """By how much the request rate grows, in requests per second per second: the slope of a local linear trend (Holt
    1957, the steady state of a Kalman filter for it). 0 with few samples."""
    if len(samples) < 4:
        return 0.0
    level, slope = samples[0].num_requests / samples[0].duration_s, 0.0
    for sample in samples[1:]:
        expected = level + slope * sample.duration_s
        level_now = expected + ALPHA * (sample.num_requests / sample.duration_s - expected)
        slope += BETA * ((level_now - level) / sample.duration_s - slope)
        level = level_now
    return slope


def growth(samples: Sequence[Demand]) -> float:
    """The trend, if it grows by more than steady Poisson arrivals let it seem to: else 0."""
    slope, whole = trend(samples), total(samples)
    if slope <= 0.0:
        return 0.0
    # The filter's gains make SLOPE_NOISE standard deviations of a sample's rate, over its length, of that noise.
    sample_s = whole.duration_s / len(samples)
    noise = SLOPE_NOISE * math.sqrt(whole.num_requests / whole.duration_s / sample_s) / sample_s
    return slope if slope > GROWS * noise else 0.0


def generated_since(before: Iterable[WorkerView], workers: Iterable[WorkerView]) -> int:
    """Tokens of answers since that view. A worker without a count in it is counted from the next view on."""
    known = {worker.worker_id: worker.tokens.num_generated for worker in before}
    pairs = [(known.get(w.worker_id, 0), w.tokens.num_generated) for w in workers if w.role.takes_requests]
    return sum(max(now - then, 0) for then, now in pairs if then)


def waits(state: PlannerState, at_s: float, load: Load, window_s: float) -> PlannerState:
    """With what waits at ``at_s``."""
    recent = [each for each in state.backlog if at_s - each.at_s < 2.0 * window_s]
    latest = Backlog(at_s, load.waiting_tokens, load.waiting_answers)
    least_share = min(state.least_share, load.pulled) if load.waiting_tokens else state.least_share
    return msgspec.structs.replace(state, backlog=(*recent, latest), least_share=least_share)


def stands(backlog: Sequence[Backlog], objectives: Objectives) -> tuple[float, float]:
    """The shares of the waiting tokens and answers that stand: that have waited for a whole window, they or others in
    their place, and will not be gone within the horizon if it goes on like this."""
    if backlog[-1].at_s - backlog[0].at_s < objectives.window_s:
        return 0.0, 0.0
    times = [each.at_s for each in backlog]
    return (
        _standing_share(times, [each.tokens for each in backlog], objectives.horizon_s),
        _standing_share(times, [each.answers for each in backlog], objectives.horizon_s),
    )


def _standing_share(times: Sequence[float], amounts: Sequence[float], horizon_s: float) -> float:
    slope = linear_regression(times, amounts).slope
    left = min(amounts[-1] / -slope / horizon_s, 1.0) if slope < 0.0 else 1.0
    return left * min(amounts) / max(amounts[-1], 1.0)


def load_of(fleet: FleetView, state: PlannerState) -> Load:
    """The load of the whole fleet."""
    seen = total(state.samples)
    num_requests, seconds = max(seen.num_requests, 1), max(seen.duration_s, 1e-9)
    uncached = seen.num_uncached_tokens / num_requests
    ended = seen.num_ended_tokens / seen.num_ended if seen.num_ended else PRIOR_ANSWER_TOKENS
    answers = state.answer_tokens or ended
    num_running = sum(worker.load.num_running for worker in fleet.workers)
    # Long answers end late. Until then they count by what has been generated, once that is more than running answers of
    # the known length account for.
    if seen.num_generated_tokens > seen.num_ended_tokens + num_running * answers / 2:
        answers = max(answers, seen.num_generated_tokens / num_requests)
    ready = [worker for worker in fleet.workers if worker.is_ready]
    loads = [worker.load for worker in ready if worker.role.takes_requests]
    # Each worker is at a prompt in the best of times.
    waiting = sum(worker.load.num_prefill_tokens - uncached for worker in ready)
    kept = sum(worker.load.num_prefill_tokens - uncached for worker in ready if worker.role is WorkerRole.DECODE)
    waiting, kept = max(waiting + fleet.num_queued_prefill_tokens, 0.0), max(kept, 0.0)
    full = [load.num_waiting for load in loads if load.cache_usage > FULL or load.num_admitted >= load.num_slots > 0]
    return Load(
        requests_per_s=seen.num_requests / seconds,
        uncached_tokens=uncached,
        prompt_tokens=seen.num_prompt_tokens / num_requests,
        answer_tokens=answers,
        variation=math.sqrt(max(seen.sum_squares / num_requests / uncached**2 - 1.0, 0.0)) if uncached else 0.5,
        waiting_tokens=waiting,
        pulled=1.0 - min(kept / waiting, 1.0) if waiting else 0.0,
        waiting_answers=float(sum(full)),
    )
