"""What a fleet can carry: expected lateness of a shape (so many prefill, decode and both workers) under a load. Pure.

Prefill and decode are two queues that share the workers which take requests ("mixed": decode and both):

    requests ──share──────> prefill workers   M/G/n, one prompt after the other at full speed
         └────1 - share───> mixed workers     M/G/m, chunks that leave the running answers within their objective
    answers ──────────────> mixed workers     processor sharing: each step serves all running answers

``share`` is the one that makes the least lateness, because the decode workers place each prefill by cost (conditional
disaggregation). Waiting is Allen and Cunneen's approximation of M/G/n (1978) with Sakasegawa's (1977) delay
probability; its tail is exponential. Beyond SATURATED utilisation a queue has no mean, so the excess grows as a fluid
over the horizon. What waits now drains as a fluid, unless it has been seen to stand (``standing``). Lateness is in
seconds of requests per second, and finite and monotone in the load.
"""

from __future__ import annotations

import math
from collections import Counter
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import msgspec

from kvrelay.config import WorkerRole
from kvrelay.core.step_cost import MAX_COST_S, StepCost, StepPace, StepWork
from kvrelay.planner.base import FleetView, Objectives

SATURATED = 0.95
LEAST_USE = 0.01
"""Of workers behind which something waits."""
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
TAIL = 2.33
"""Standard deviations to the 99th percentile: the objective between tokens is for that of an answer's gaps."""
ROUNDS = 4
"""Of the fixed point; each shortens the error by the utilisation."""
SLOWEST = 0.01
"""The share of an answer's gaps that may be late."""
MIN_STEP_S = 1e-6
"""A fit may say that a step without running answers costs nothing."""
NUM_STEPS = 256
"""Numbers of running answers for which steps are tabulated."""
LONG = 1.65
"""Standard deviations to a long prompt, the 95th percentile."""


class Shape(msgspec.Struct, frozen=True):
    """How many workers of each role."""

    prefill: int = 0
    decode: int = 0
    both: int = 0

    @property
    def mixed(self) -> int:
        """Workers that take requests."""
        return self.decode + self.both

    @property
    def total(self) -> int:
        return self.prefill + self.mixed

    @property
    def is_allowed(self) -> bool:
        """At least one of each role, or one that does both."""
        return min(self.prefill, self.decode, self.both) >= 0 and (self.both > 0 or min(self.prefill, self.decode) > 0)

    def plus(self, role: WorkerRole, count: int = 1) -> Shape:
        """With ``count`` workers more, or fewer, in ``role``."""
        return msgspec.structs.replace(self, **{role.value: getattr(self, role.value) + count})

    def __str__(self) -> str:
        parts = ((self.prefill, "P"), (self.decode, "D"), (self.both, "B"))
        return "".join(f"{count}{name}" for count, name in parts if count) or "none"


def shape_of(fleet: FleetView) -> Shape:
    """Of the workers that are ready."""
    return Shape(**Counter(worker.role.value for worker in fleet.workers if worker.is_ready))


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Requests per second; per request the mean tokens to prefill and to answer, and the prompt with its cached part.
    ``variation``: coefficient of variation of the tokens to prefill. ``waiting_tokens`` wait for a prefill now,
    ``waiting_answers`` requests for a place beside the running ones. ``pulled``: the share of those tokens that wait
    elsewhere than at workers that only decode.

    Of a backlog that stands: with ``standing_tokens`` of 0.2 prefills keep the workers busier by a fifth than their
    costs say, with ``standing_answers`` answers. At least ``least_share`` of the prefills go to prefill workers."""

    requests_per_s: float
    uncached_tokens: float
    prompt_tokens: float
    answer_tokens: float
    variation: float = 0.5
    waiting_tokens: float = 0.0
    waiting_answers: float = 0.0
    pulled: float = 0.0
    standing_tokens: float = 0.0
    standing_answers: float = 0.0
    least_share: float = 0.0

    @property
    def kind(self) -> Load:
        """What steps depend on."""
        return Load(
            requests_per_s=0.0,
            uncached_tokens=self.uncached_tokens,
            prompt_tokens=self.prompt_tokens,
            answer_tokens=self.answer_tokens,
            variation=self.variation,
        )

    @property
    def mean_and_long(self) -> tuple[float, float]:
        """Tokens of a mean and of a long prompt."""
        return self.uncached_tokens, self.uncached_tokens * (1.0 + LONG * self.variation)


class Worker(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker can do. ``spread``: standard deviation of the logarithm of its steps' times."""

    cost: StepCost
    kv_tokens: int = 0
    num_slots: int = 256
    chunk: int = 2048
    spread: float = 0.1


class Assessment(msgspec.Struct, frozen=True, kw_only=True):
    """A shape under a load. ``lateness``: see the module. ``share`` of the prefills on prefill workers. ``ttft_s``:
    of a long prompt, with the mean wait; ``itl_s``: the mean. ``decode_utilisation``: of the objective between tokens,
    or of slots and KV, whose part is ``places``. ``drain_s``: an answer's time."""

    lateness: float
    share: float
    prefill_utilisation: float
    decode_utilisation: float
    places: float
    ttft_s: float
    itl_s: float
    drain_s: float


def assess(shape: Shape, load: Load, worker: Worker, objectives: Objectives) -> Assessment:
    """The best that the shape can do with the load."""
    if not shape.mixed:  # no answer ever ends
        return Assessment(
            lateness=load.requests_per_s * objectives.horizon_s,
            share=1.0,
            prefill_utilisation=0.0,
            decode_utilisation=MAX_COST_S,
            places=MAX_COST_S,
            ttft_s=MAX_COST_S,
            itl_s=MAX_COST_S,
            drain_s=0.0,
        )
    least = load.least_share - SHARES[1] / 2.0  # the nearest of them
    shares = [share for share in SHARES if share >= least] if shape.prefill or load.least_share else [0.0]
    return min((_with_share(shape, load, worker, objectives, share) for share in shares), key=lambda it: it.lateness)


def _with_share(shape: Shape, load: Load, worker: Worker, objectives: Objectives, share: float) -> Assessment:
    rate, num_mixed, num_pulling = load.requests_per_s, shape.mixed, max(shape.prefill + shape.both, 1)
    own_rate, pulled_rate = rate * (1.0 - share) / num_mixed, rate * share / num_pulling
    decode = _mixed(num_mixed, load, worker, objectives, own_rate)
    both = _mixed(num_mixed, load, worker, objectives, own_rate + pulled_rate) if shape.both else decode
    alone = [worker.cost.prefill_seconds(_whole(tokens), chunk=worker.chunk) for tokens in load.mean_and_long]

    def mean(counts: tuple[int, int], first: float, second: float) -> float:
        return (counts[0] * first + counts[1] * second) / max(sum(counts), 1)

    mixed, pulling = (shape.decode, shape.both), (shape.prefill, shape.both)
    here_s, here_long_s = (
        mean(mixed, of_decode, of_both) for of_decode, of_both in zip(decode.prefill_s, both.prefill_s)
    )
    there_s, there_long_s = (mean(pulling, of_prefill, of_both) for of_prefill, of_both in zip(alone, both.prefill_s))
    here_load = mean(mixed, own_rate * decode.prefill_s[0], (own_rate + pulled_rate) * both.prefill_s[0])
    there_load = mean(pulling, pulled_rate * alone[0], (own_rate + pulled_rate) * both.prefill_s[0])
    waiting = load.waiting_tokens / max(load.uncached_tokens, 1.0)
    here = _queue(num_mixed, here_load, here_s, (1.0 - share) * waiting * here_s, load, objectives)
    there = _queue(num_pulling, there_load, there_s, share * waiting * there_s, load, objectives)
    late_start_s = mean(mixed, decode.late_start_s, both.late_start_s)
    slack_s = objectives.ttft_s - late_start_s
    late_s = (1.0 - share) * here.late_s(slack_s - here_long_s) + share * there.late_s(slack_s - there_long_s)
    # Missing either objective by 100 % costs the same.
    late_s += objectives.ttft_s * mean(mixed, decode.late_gap_s, both.late_gap_s) / objectives.itl_s
    queue, long_s = (there, there_long_s) if share >= 0.5 else (here, here_long_s)
    step_s, places = mean(mixed, decode.step_s, both.step_s), max(decode.places, both.places)
    return Assessment(
        lateness=rate * late_s,
        share=share,
        prefill_utilisation=queue.utilisation,
        decode_utilisation=max(step_s / objectives.itl_s, places),
        places=places,
        ttft_s=long_s + queue.mean_s + late_start_s,
        itl_s=step_s,
        drain_s=load.answer_tokens * step_s,
    )


def standing(shape: Shape, load: Load, worker: Worker, objectives: Objectives, tokens: float, answers: float) -> Load:
    """The load of a fleet behind which something stands: ``tokens`` and ``answers`` are the shares of what waits that
    do not become less, 0 to 1.

    A backlog that stands says that the fleet is as busy as it can be, whatever the rate says: clients that send when
    the last answer has ended (a closed loop) ask for what the fleet gives. Another fleet is then as much busier than
    its costs say, and drains the backlog by as much as it can do more. And prefills that are late at prefill workers
    are sent there whatever it costs: the other workers do not help.
    """
    mean_s, long_s = (worker.cost.prefill_seconds(_whole(some), chunk=worker.chunk) for some in load.mean_and_long)
    num_pulled = tokens * load.pulled * load.waiting_tokens / max(load.uncached_tokens, 1.0)
    if num_pulled * mean_s / max(shape.prefill + shape.both, 1) + long_s > objectives.ttft_s:
        load = msgspec.structs.replace(load, least_share=load.pulled)
    now = assess(shape, load, worker, objectives)

    def excess(utilisation: float) -> float:
        return max(SATURATED / max(utilisation, LEAST_USE) - 1.0, 0.0)

    return msgspec.structs.replace(
        load, standing_tokens=tokens * excess(now.prefill_utilisation), standing_answers=answers * excess(now.places)
    )


class _Mixed(msgspec.Struct, frozen=True):
    """A worker that answers, and prefills in chunks beside that. ``step_s``: mean time between two tokens;
    ``late_gap_s``: by how much the slowest gaps of an answer exceed the objective. ``places``: use of slots and KV;
    ``late_start_s``: how late answers begin for want of a place. ``prefill_s``: of a mean and of a long prompt."""

    step_s: float
    late_gap_s: float
    places: float
    late_start_s: float
    prefill_s: tuple[float, float]


class _Step(NamedTuple):
    """With so many running answers: the time between two tokens of each in steps without prefills, and in those with a
    chunk; and the steps of a mean and of a long prompt."""

    decode_s: float
    chunk_s: float
    prefill_s: float
    long_s: float

    def busy(self, prefills_per_s: float) -> float:
        """The share of the time in steps with a chunk."""
        return min(prefills_per_s * self.prefill_s, 1.0)

    def mean_s(self, prefills_per_s: float) -> float:
        """Between two tokens, over all steps."""
        busy = self.busy(prefills_per_s)
        return 1.0 / (busy / self.chunk_s + (1.0 - busy) / self.decode_s)


def _step(running: float, load: Load, worker: Worker, objectives: Objectives) -> _Step:
    """The engine cuts chunks by its pace."""
    cost = worker.cost
    context = _whole(running * (load.prompt_tokens + load.answer_tokens / 2))
    decode_s = decode_step_s(cost, _whole(running), context)
    pace = StepPace.keeping(cost, worker.spread, objectives.itl_s)
    chunk = pace.prefill_budget(worker.chunk, num_decodes=max(_whole(running), 1), num_context=context)
    mean_s, long_s = (
        cost.prefill_seconds(_whole(tokens), chunk=chunk, num_decodes=_whole(running), num_context=context)
        for tokens in load.mean_and_long
    )
    chunk_s = max(mean_s / max(math.ceil(load.uncached_tokens / chunk), 1), decode_s)
    return _Step(decode_s / cost.tokens_per_step, chunk_s / cost.tokens_per_step, mean_s, long_s)


@lru_cache(maxsize=4)
def _steps(most: float, load: Load, worker: Worker, objectives: Objectives) -> tuple[_Step, ...]:
    """Beside none to ``most`` running answers, in NUM_STEPS equal parts.

    Chunks of twice a decode step grow with the answers, and fewer chunks can make a prefill shorter. Here it takes as
    long as beside any fewer answers, or lateness would fall where the rate rises.
    """
    each = (_step(most * part / NUM_STEPS, load, worker, objectives) for part in range(NUM_STEPS + 1))
    return tuple(accumulate(each, lambda one, other: _Step(*map(max, one, other))))


def _mixed(num_workers: int, load: Load, worker: Worker, objectives: Objectives, prefills_per_s: float) -> _Mixed:
    """``num_workers`` share the answers; this one gets ``prefills_per_s``.

    B running answers get ``B / mean gap`` tokens per second, which must be what is asked for: B is the least fixed
    point, approached from below, which keeps it monotone in the load. Slots and KV bound it.
    """
    tokens_per_s = load.requests_per_s * load.answer_tokens / num_workers
    most = float(max(worker.num_slots, 1))
    if worker.kv_tokens:
        most = max(min(most, worker.kv_tokens / max(load.prompt_tokens + load.answer_tokens, 1.0)), 1.0)
    steps = _steps(most, load.kind, worker, objectives)

    def beside(running: float) -> _Step:
        return steps[int(running / most * NUM_STEPS)]

    running = 0.0
    for _ in range(ROUNDS):
        running = min(tokens_per_s * beside(running).mean_s(prefills_per_s), most)
    step = beside(running)
    # The number of answers scatters like a Poisson variable. A chunk matters if it falls on the slowest hundredth.
    crowded = beside(min(running + math.sqrt(running), most))
    with_chunk = 1.0 - math.exp(-step.busy(prefills_per_s) / SLOWEST)
    limit_s = objectives.itl_s / math.exp(TAIL * worker.spread)
    slowest_s = steps[-1].mean_s(prefills_per_s)
    places = tokens_per_s * slowest_s / most
    # Answers that wait for a place: the running ones must end first.
    waiting_s = load.waiting_answers * load.answer_tokens * slowest_s / (most * num_workers)
    return _Mixed(
        step_s=step.mean_s(prefills_per_s),
        late_gap_s=with_chunk * max(crowded.chunk_s - limit_s, 0.0)
        + (1.0 - with_chunk) * max(crowded.mean_s(prefills_per_s) - limit_s, 0.0),
        places=places,
        late_start_s=_fluid(waiting_s, places * (1.0 + load.standing_answers), objectives.horizon_s),
        prefill_s=(step.prefill_s, step.long_s),
    )


class _Queue(msgspec.Struct, frozen=True):
    """``delay``: the probability to wait; ``mean_s``: the mean wait; ``fluid_s``: its part that all share."""

    utilisation: float
    delay: float
    mean_s: float
    fluid_s: float

    def late_s(self, slack_s: float) -> float:
        """Mean time beyond ``slack_s`` of waiting, with an exponential tail."""
        slack_s -= self.fluid_s
        random_s = self.mean_s - self.fluid_s
        if slack_s <= 0.0 or random_s <= 0.0:
            return random_s - slack_s if slack_s <= 0.0 else 0.0
        return random_s * math.exp(-slack_s * self.delay / random_s)


def _queue(
    num_workers: int, utilisation: float, service_s: float, waiting_s: float, load: Load, objectives: Objectives
) -> _Queue:
    """M/G/n. ``waiting_s``: seconds of work that wait now."""
    fluid_s = _fluid(waiting_s / num_workers, utilisation * (1.0 + load.standing_tokens), objectives.horizon_s)
    busy = min(utilisation, SATURATED)
    delay = busy ** (math.sqrt(2.0 * (num_workers + 1)) - 1.0)
    scatter = (1.0 + load.variation**2) / 2.0
    random_s = delay / (num_workers * (1.0 - busy)) * service_s * scatter
    return _Queue(utilisation, max(delay, 1e-9), random_s + fluid_s, fluid_s)


def _fluid(waiting_s: float, utilisation: float, horizon_s: float) -> float:
    """Mean over the horizon of a wait that is ``waiting_s`` now and changes by ``utilisation - SATURATED`` a second."""
    slope = utilisation - SATURATED
    if slope >= 0.0:
        return waiting_s + slope * horizon_s / 2
    empty_s = min(waiting_s / -slope, horizon_s)
    return (waiting_s + slope * empty_s / 2) * empty_s / horizon_s


def decode_step_s(cost: StepCost, num_running: int, num_context: int) -> float:
    """A step without a prefill."""
    return max(cost.step_seconds(StepWork(num_decodes=num_running, num_context_tokens=num_context)), MIN_STEP_S)


def _whole(tokens: float) -> int:
    return max(int(tokens), 0)
