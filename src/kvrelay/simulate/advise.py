"""What to run on N slots: split or not, how many of each, which chunks and policy. Searched by simulation.

    candidates ──successive halving at the trace's rate──> finalists ──> capacity of the best split and the best
                                                                        aggregated cluster ──> verdict

The score at the trace's rate is the share of requests within both objectives, then the tails. Capacity is the highest
rate at which 90 % of the requests meet both (goodput, Zhong et al., OSDI 2024). Pure: arrivals, costs in; Advice out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import msgspec

from kvrelay.config import DisaggConfig, EngineConfig
from kvrelay.errors import InvalidInputError
from kvrelay.placement.base import Objectives
from kvrelay.simulate.arrival import Arrival
from kvrelay.simulate.cluster import ClusterSpec
from kvrelay.simulate.costs import Costs
from kvrelay.simulate.halving import successive_halving
from kvrelay.simulate.result import SimulationResult
from kvrelay.simulate.simulation import simulate

CHUNKS = (512, 2048, 8192)
LOCAL_LENGTHS = (256, 2048)
"""Thresholds that are tried: the longest prefill that runs locally, in tokens."""
ATTAINMENT = 0.9
BUDGET_SHARES = (0.1, 0.3, 1.0)
MIN_BUDGET = 50
MAX_FACTOR = 64.0
NUM_BISECTIONS = 4
NOISE = 0.05
"""Bisection finds a capacity within some 4 %; smaller differences say nothing."""
NUM_SEEDS = 3
"""Capacities are found with so many seeds."""
NUM_COMPARED_LATENCIES = 200


class Candidate(msgspec.Struct, frozen=True):
    """A cluster to try. ``both`` workers are aggregated; else ``prefill`` and ``decode`` are above 0. A worker takes
    ``tp`` slots. ``max_local_prefill_length`` None: the policy is ``cost``, else ``threshold``."""

    prefill: int
    decode: int
    both: int
    tp: int = 1
    chunk: int = 2048
    max_local_prefill_length: int | None = None

    @property
    def is_split(self) -> bool:
        return self.both == 0

    def __str__(self) -> str:
        size = f"{self.prefill}P{self.decode}D" if self.is_split else f"{self.both} aggregated"
        policy = "cost" if self.max_local_prefill_length is None else f"threshold {self.max_local_prefill_length}"
        return f"{size}{f' tp {self.tp}' if self.tp > 1 else ''}, chunks {self.chunk}, {policy}"

    def command(self, objectives: Objectives, num_blocks: int = 0) -> str:
        """The command line that runs it on one machine."""
        parts = ["kvrelay serve MODEL", f"--prefill {self.prefill}", f"--decode {self.decode or self.both}"]
        if self.tp > 1:
            parts.append(f"--tp {self.tp}")
        parts.append(f"--max-num-batched-tokens {self.chunk}")
        if self.max_local_prefill_length is None:
            parts.append("--disagg-policy cost")
        else:
            parts.append(f"--disagg-policy threshold --max-local-prefill-length {self.max_local_prefill_length}")
        parts.append(f"--slo-ttft-ms {objectives.ttft_s * 1e3:g} --slo-itl-ms {objectives.itl_s * 1e3:g}")
        if num_blocks:
            parts.append(f"--num-blocks {num_blocks}")
        return " ".join(parts)


class Measured(msgspec.Struct, frozen=True):
    """A candidate on the load. ``goodput``: share within both objectives. ``ttft_ms`` and ``itl_ms``: p50, p90, p99;
    ``price``: per million answer tokens of requests within the objectives; None without a price, or without such."""

    candidate: Candidate
    goodput: float
    good_tokens_per_s: float
    ttft_ms: tuple[float, float, float]
    itl_ms: tuple[float, float, float]
    price: float | None
    ttft_sample_ms: tuple[float, ...]
    """Sorted; at most NUM_COMPARED_LATENCIES, for plots."""


class Capacity(msgspec.Struct, frozen=True):
    """``by_seed``: the highest rate, in requests/s, at which ATTAINMENT of the requests meet both objectives, with each
    seed. ``points``: what was tried with the first one, as (requests/s, goodput), by rate."""

    candidate: Candidate
    by_seed: tuple[float, ...]
    points: tuple[tuple[float, float], ...]

    @property
    def requests_per_s(self) -> float:
        """The mean over the seeds."""
        return sum(self.by_seed) / len(self.by_seed)


class Advice(msgspec.Struct, frozen=True):
    """``table``: the finalists, the best first. ``best`` is the winner by capacity. ``capacities``: of the best of each
    kind, the winner first."""

    best: Candidate
    verdict: str
    table: tuple[Measured, ...]
    capacities: tuple[Capacity, ...]
    objectives: Objectives
    num_blocks: int = 0

    @property
    def command(self) -> str:
        return self.best.command(self.objectives, self.num_blocks)


def candidates_for(num_slots: int, tps: Sequence[int]) -> list[Candidate]:
    """All clusters of at most ``num_slots`` slots that are tried. An aggregated one has no remote prefills, so no
    threshold."""
    found = []
    for tp, chunk in itertools.product(tps, CHUNKS):
        workers = num_slots // tp
        if workers >= 1:
            found.append(Candidate(0, 0, workers, tp, chunk))
        for prefill, local in itertools.product(range(1, workers), (None, *LOCAL_LENGTHS)):
            found.append(Candidate(prefill, workers - prefill, 0, tp, chunk, local))
    return found


def advise(
    arrivals: Sequence[Arrival],
    costs_by_tp: Mapping[int, Costs],
    num_slots: int,
    objectives: Objectives,
    *,
    slot_hour_price: float | None = None,
    num_blocks: int = 0,
    seed: int = 0,
    load_of_seed: Callable[[int], Sequence[Arrival]] | None = None,
    on_run: Callable[[Candidate], None] = lambda candidate: None,
) -> Advice:
    """Search; ``on_run`` is told of each simulation that begins. ``load_of_seed``: the load with another seed, to
    confirm the winner with; None: ``arrivals`` again, so that only the draws of the steps' times differ.

    Raises InvalidInputError for objectives that no cluster can meet, ConfigError for impossible settings.
    """
    check_objectives(arrivals, costs_by_tp, objectives)
    if slot_hour_price is not None and not 0.0 < slot_hour_price < math.inf:
        raise InvalidInputError(f"--gpu-hour-price must be above 0, got {slot_hour_price}", param="gpu_hour_price")
    found = candidates_for(num_slots, sorted(costs_by_tp))
    if not found:
        raise InvalidInputError(f"--slots {num_slots} are too few for tp {min(costs_by_tp)}; give more", param="slots")
    trials = [
        Trial(
            arrivals if number == seed or load_of_seed is None else load_of_seed(number),
            costs_by_tp,
            objectives,
            num_blocks,
            number,
            on_run,
        )
        for number in range(seed, seed + NUM_SEEDS)
    ]
    trial = trials[0]
    ranked = successive_halving(found, trial.score, trial.budgets, kind=lambda candidate: candidate.is_split)
    table = tuple(trial.measure(candidate, num_slots, slot_hour_price) for candidate, _ in ranked)
    if error := trial.why_nothing(table[0].candidate):
        raise InvalidInputError(f"{table[0].candidate} answers no request: {error}")
    if not table[0].goodput:
        raise InvalidInputError(
            f"no cluster of {num_slots} slots meets the objectives for any request: {table[0].candidate} has "
            f"a median TTFT of {table[0].ttft_ms[0]:.0f} ms and ITL of {table[0].itl_ms[0]:.1f} ms; "
            "give more slots or looser objectives"
        )
    firsts = [next((row.candidate for row in table if row.candidate.is_split is kind), None) for kind in (True, False)]
    capacities = ordered([capacity_of(one, trials) for one in firsts if one is not None])
    return Advice(capacities[0].candidate, verdict_of(capacities), table, tuple(capacities), objectives, num_blocks)


def check_objectives(arrivals: Sequence[Arrival], costs_by_tp: Mapping[int, Costs], objectives: Objectives) -> None:
    """Raise InvalidInputError if one is below the time of a single step, or of the shortest prompt's last token, on an
    idle worker. A smaller bound than the truth, so what is refused is impossible."""
    if not arrivals:
        raise InvalidInputError("the load has no request; give a longer trace or another --load")
    step_s = min(costs.step.step_s + costs.step.decode_s for costs in costs_by_tp.values())
    first_s = min(costs.step.prefill_s + costs.step.prefill_token_s for costs in costs_by_tp.values())
    for name, needed_s, given_s in (("itl", step_s, objectives.itl_s), ("ttft", first_s, objectives.ttft_s)):
        if given_s < needed_s:
            raise InvalidInputError(
                f"--slo-{name}-ms {given_s * 1e3:g} is impossible: one step takes {needed_s * 1e3:.2f} ms by the "
                "costs; give a looser objective or costs of faster hardware",
                param=f"slo_{name}_ms",
            )


def capacity_of(candidate: Candidate, trials: Sequence[Trial]) -> Capacity:
    """The whole search with the first trial; the others look around what it has found."""
    points: dict[float, float] = {}
    first = trials[0].capacity(candidate, points)
    rates = [trials[0].base_rate * first]
    rates += [trial.base_rate * trial.capacity(candidate, {}, around=first) for trial in trials[1:]]
    tried = tuple((trials[0].base_rate * factor, points[factor]) for factor in sorted(points))
    return Capacity(candidate, tuple(rates), tried)


def is_doubtful(first: Capacity, second: Capacity) -> str:
    """Why the difference of two capacities, the greater first, says nothing; empty: it does."""
    if first.requests_per_s < second.requests_per_s * (1 + NOISE):
        return "within the search's precision"
    # Seed by seed, because both had the same load: loads differ more than clusters.
    is_mixed = any(one <= other for one, other in zip(first.by_seed, second.by_seed))
    return f"within the spread of {len(first.by_seed)} seeds" if is_mixed else ""


def ordered(capacities: Sequence[Capacity]) -> list[Capacity]:
    """The winner first. Of two whose difference is doubtful it is the aggregated one, which is simpler."""
    found = sorted(capacities, key=lambda one: -one.requests_per_s)
    if len(found) == 2 and found[0].candidate.is_split and is_doubtful(*found):
        found.reverse()
    return found


def verdict_of(capacities: Sequence[Capacity]) -> str:
    """In one sentence; the first one has won."""
    first = capacities[0]
    if len(capacities) < 2:
        return f"{first.candidate}: nothing else fits into the slots"
    second = capacities[1]
    what, other = ("split", "aggregated") if first.candidate.is_split else ("do not split", "split")
    if not max(first.requests_per_s, second.requests_per_s):
        return (
            f"neither holds {ATTAINMENT * 100:.0f} % of the requests within the objectives, at any rate that was tried"
        )
    if not second.requests_per_s:
        return f"{what}: {other} holds the objectives at no rate that was tried"
    greater, less = sorted((first, second), key=lambda one: -one.requests_per_s)
    gain = greater.requests_per_s / less.requests_per_s - 1
    if why := is_doubtful(greater, less):
        return f"do not split: split and aggregated differ by {gain * 100:.1f} %, {why}, and aggregated is simpler"
    winner = "split" if first.candidate.is_split else "aggregated"
    return f"{what}: {winner} wins by {gain * 100:.0f} % of requests per second"


class Trial:
    """Simulations of one load under one pair of objectives."""

    def __init__(
        self,
        arrivals: Sequence[Arrival],
        costs_by_tp: Mapping[int, Costs],
        objectives: Objectives,
        num_blocks: int,
        seed: int,
        on_run: Callable[[Candidate], None],
    ) -> None:
        self._arrivals, self._costs, self._objectives = arrivals, costs_by_tp, objectives
        self._num_blocks, self._seed = num_blocks, seed
        self._on_run = on_run
        self._max_len = max(one.prompt_tokens + one.answer_tokens for one in arrivals) + 1
        self.budgets = sorted(
            {max(min(MIN_BUDGET, len(arrivals)), int(len(arrivals) * part)) for part in BUDGET_SHARES}
        )

    def run(self, candidate: Candidate, num_requests: int, factor: float = 1.0) -> SimulationResult:
        """The first ``num_requests``, ``factor`` times as fast. Pauses of sessions keep their length."""
        arrivals = [
            one if one.after is not None else msgspec.structs.replace(one, time_s=one.time_s / factor)
            for one in self._arrivals[:num_requests]
        ]
        self._on_run(candidate)
        local = candidate.max_local_prefill_length
        spec = ClusterSpec(
            prefill=candidate.prefill,
            decode=candidate.decode,
            both=candidate.both,
            engine=EngineConfig(max_num_batched_tokens=candidate.chunk, num_blocks=self._num_blocks),
            disagg=DisaggConfig(
                disagg_policy="cost" if local is None else "threshold",
                slo_ttft_ms=self._objectives.ttft_s * 1e3,
                slo_itl_ms=self._objectives.itl_s * 1e3,
                max_local_prefill_length=256 if local is None else local,
            ),
            max_model_len=self._max_len,
        )
        return simulate(spec, arrivals, self._costs[candidate.tp], seed=self._seed)

    def score(self, candidate: Candidate, num_requests: int) -> tuple[float, float]:
        """Goodput, then minus the P99s in units of their objectives."""
        result = self.run(candidate, num_requests)
        late = math.inf
        if found := result.latencies():
            late = found["ttft_s"]["p99"] / self._objectives.ttft_s + found["itl_s"]["p99"] / self._objectives.itl_s
        return result.goodput(self._objectives), -late

    def measure(self, candidate: Candidate, num_slots: int, slot_hour_price: float | None) -> Measured:
        """On the whole load. All slots are paid for, used or not."""
        result = self.run(candidate, len(self._arrivals))
        good = [one for one in result.done if one.meets(self._objectives)]
        good_tokens_per_s = sum(len(one.tokens_s) for one in good) / result.end_s if result.end_s else 0.0
        latencies = result.latencies()
        ttft, itl = (
            [1e3 * value for name, value in latencies.get(of, NOTHING).items() if name != "mean"] for of in BOTH
        )
        price = None
        if slot_hour_price is not None and good_tokens_per_s:
            price = slot_hour_price * num_slots / 3600 / good_tokens_per_s * 1e6
        times = sorted(1e3 * one.ttft_s for one in result.done)
        step = -(-len(times) // NUM_COMPARED_LATENCIES) or 1
        return Measured(
            candidate,
            result.goodput(self._objectives),
            good_tokens_per_s,
            (ttft[0], ttft[1], ttft[2]),
            (itl[0], itl[1], itl[2]),
            price,
            tuple(times[::step]),
        )

    def why_nothing(self, candidate: Candidate) -> str:
        """The first error, if no request of the load's shortest part gets an answer; else empty."""
        result = self.run(candidate, self.budgets[0])
        return "" if result.done else result.first_error

    def capacity(self, candidate: Candidate, points: dict[float, float], around: float = 0.0) -> float:
        """The highest speed of the load, 1 as given, that the cluster holds; ``points`` takes what was tried.

        By doubling or halving the speed, then by bisection; near ``around``, if that is given, in smaller steps to the
        same precision. Assumes that more load is never better.
        """

        def holds(factor: float) -> bool:
            points[factor] = self.run(candidate, len(self._arrivals), factor).goodput(self._objectives)
            return points[factor] >= ATTAINMENT

        return highest_that_holds(holds, around, 2**0.25, NUM_BISECTIONS - 2) if around else highest_that_holds(holds)

    @property
    def base_rate(self) -> float:
        """Requests per second of the load; calls of a session count with the session's first."""
        last_s = max(one.time_s for one in self._arrivals if one.after is None)
        return len(self._arrivals) / last_s if last_s > 0.0 else float(len(self._arrivals))


BOTH = ("ttft_s", "itl_s")
NOTHING = {"p50": 0.0, "p90": 0.0, "p99": 0.0}


def highest_that_holds(
    holds: Callable[[float], bool], start: float = 1.0, step: float = 2.0, num_bisections: int = NUM_BISECTIONS
) -> float:
    """The highest factor that holds, within ``step ** (1 / 2 ** num_bisections)``; 0 if none holds from 1 / MAX_FACTOR
    on. At most MAX_FACTOR."""
    low, high = 0.0, start
    while holds(high):
        low, high = high, high * step
        if high > MAX_FACTOR:
            return low
    while not low:
        factor = high / step
        if factor < 1 / MAX_FACTOR:
            return 0.0
        low, high = (factor, high) if holds(factor) else (0.0, factor)
    for _ in range(num_bisections):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
