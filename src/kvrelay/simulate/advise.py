"""What to run on N slots: split or not, how many of each, which chunks and policy. Searched by simulation.

    candidates ──successive halving at the trace's rate──> finalists ──> capacity of the best split and the best
                                                                        aggregated cluster ──> verdict

The score at the trace's rate is the share of requests within both objectives, then the tails. Capacity is the highest
rate at which 90 % of the requests meet both (goodput, Zhong et al., OSDI 2024). Simulations end early once they cannot
change the answer, and run in as many processes as the ``Runner`` has; the answer is the same with any number.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Generator, Mapping, Sequence

import msgspec

from kvrelay.config import EngineConfig
from kvrelay.core.step_cost import StepWork
from kvrelay.errors import InvalidInputError
from kvrelay.placement.base import Objectives
from kvrelay.simulate.arrival import Arrival
from kvrelay.simulate.costs import Costs
from kvrelay.simulate.halving import rounds, successive_halving
from kvrelay.simulate.memory import MemoryAdvice, advise_memory
from kvrelay.simulate.pool import Runner, runner
from kvrelay.simulate.trial import NO_MEMORY, Candidate, Outcome, Setting, Trial
from kvrelay.simulate.verdict import ATTAINMENT, Capacity, Load, Measured, ordered, verdict_of

CHUNKS = (512, 2048, 8192)
LOCAL_LENGTHS = (256, 2048)
"""Thresholds that are tried: the longest prefill that runs locally, in tokens."""
BUDGET_SHARES = (0.1, 0.3, 1.0)
MIN_BUDGET = 50
MAX_FACTOR = 64.0
RATES_PER_OCTAVE = 16
"""Capacities are found to one of so many rates between a rate and its double, so to 4.4 %."""
NUM_SEEDS = 3
"""Capacities are found with so many seeds."""
EXPECTED_RUNS = 5 + (NUM_SEEDS - 1) * 3
"""Simulations for one capacity, more or less: what progress is told before it is known."""
CAPACITY_SHARE = 0.45
"""Such a simulation ends early, after this share of the load, more or less."""

Search = Generator[float, bool, float]
"""Yields factors to try, is sent whether each holds, and returns the highest one that does."""
_Key = tuple[Candidate, int]
"""A candidate, and the number of a load."""
OnProgress = Callable[[float, Candidate], None]
"""``on_progress(share, candidate)``: the share of the work that is done, from 0 to 1, and what was simulated last."""


class Advice(msgspec.Struct, frozen=True):
    """``table``: the finalists on the whole load, the best first. ``best`` is the winner by capacity. ``capacities``:
    of the best of each kind, the winner first. ``rate``: of the load, in requests/s. ``num_blocks``: KV blocks of a
    worker, by its ranks; ``are_blocks_given``: by the caller, not by the costs. ``memory``: what more than the pools
    would gain; None: no prompt repeats another."""

    best: Candidate
    verdict: str
    table: tuple[Measured, ...]
    capacities: tuple[Capacity, ...]
    objectives: Objectives
    rate: float
    num_blocks: dict[int, int]
    are_blocks_given: bool = False
    memory: MemoryAdvice | None = None

    @property
    def command(self) -> str:
        num_blocks = self.num_blocks[self.best.tp] if self.are_blocks_given else 0
        memory = NO_MEMORY if self.memory is None else self.memory.best.memory
        return self.best.command(self.objectives, num_blocks, memory)


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
    num_processes: int = 1,
    on_progress: OnProgress = lambda share, candidate: None,
) -> Advice:
    """Search. ``load_of_seed``: the load with another seed, to confirm the winner with; None: ``arrivals`` again, so
    that only the draws of the steps' times differ.

    Raises InvalidInputError for objectives that no cluster can meet, ConfigError for impossible settings.
    """
    check_objectives(arrivals, costs_by_tp, objectives)
    if slot_hour_price is not None and not 0.0 < slot_hour_price < math.inf:
        raise InvalidInputError(f"--gpu-hour-price must be above 0, got {slot_hour_price}", param="gpu_hour_price")
    found = candidates_for(num_slots, sorted(costs_by_tp))
    if not found:
        raise InvalidInputError(f"--slots {num_slots} are too few for tp {min(costs_by_tp)}; give more", param="slots")
    loads = tuple(
        (number, arrivals if number == seed or load_of_seed is None else load_of_seed(number))
        for number in range(seed, seed + NUM_SEEDS)
    )
    setting = Setting(loads, costs_by_tp, objectives, num_blocks)
    with runner(setting, num_processes) as runs:
        search = _Search(setting, runs, found, on_progress)
        table = tuple(
            Measured(one, outcome, price_of(outcome, num_slots, slot_hour_price)) for one, outcome in search.finalists()
        )
        check_table(table, num_slots)
        firsts = [
            next((row.candidate for row in table if row.candidate.is_split is kind), None)
            for kind in (table[0].candidate.is_split, not table[0].candidate.is_split)
        ]
        goodputs = {row.candidate: row.outcome.goodput for row in table if row.candidate in firsts}
        capacities = ordered(search.capacities(goodputs), goodputs)
        best = capacities[0].candidate
        memory = advise_memory(runs, setting, best, next(row.outcome for row in table if row.candidate == best))
    rate = base_rate(arrivals)
    too_long = sum(first_token_s(costs_by_tp, one.prompt_tokens) > objectives.ttft_s for one in arrivals) / len(
        arrivals
    )
    return Advice(
        best,
        verdict_of(capacities, table, objectives, Load(rate, len(arrivals), too_long), num_slots),
        table,
        tuple(capacities),
        objectives,
        rate,
        {tp: costs.num_blocks(EngineConfig().block_size, num_blocks) for tp, costs in costs_by_tp.items()},
        bool(num_blocks),
        memory,
    )


def check_objectives(arrivals: Sequence[Arrival], costs_by_tp: Mapping[int, Costs], objectives: Objectives) -> None:
    """Raise InvalidInputError if one is below the time of a single step, or of the shortest prompt's last token, on an
    idle worker. A smaller bound than the truth, so what is refused is impossible."""
    if not arrivals:
        raise InvalidInputError("the load has no request; give a longer trace or another --load")
    token_s = min(costs.step.token_seconds(StepWork(num_decodes=1)) for costs in costs_by_tp.values())
    first_s = first_token_s(costs_by_tp, 1)
    for name, needed_s, given_s in (("itl", token_s, objectives.itl_s), ("ttft", first_s, objectives.ttft_s)):
        if given_s < needed_s:
            raise InvalidInputError(
                f"--slo-{name}-ms {given_s * 1e3:g} is impossible: one step takes {needed_s * 1e3:.2f} ms by the "
                "costs; give a looser objective or costs of faster hardware",
                param=f"slo_{name}_ms",
            )


def first_token_s(costs_by_tp: Mapping[int, Costs], num_tokens: int) -> float:
    """The least time from a prompt to its first token on an idle worker, if no prefix is cached."""
    return min(costs.step.prefill_s + num_tokens * costs.step.prefill_token_s for costs in costs_by_tp.values())


def check_table(table: Sequence[Measured], num_slots: int) -> None:
    """Raise InvalidInputError if the best cluster answers nothing, or nothing in time."""
    best = table[0]
    if best.outcome.error and not best.outcome.ttft_sample_ms:
        raise InvalidInputError(f"{best.candidate} answers no request: {best.outcome.error}")
    if not best.outcome.goodput:
        raise InvalidInputError(
            f"no cluster of {num_slots} slots meets the objectives for any request: {best.candidate} has "
            f"a median TTFT of {best.outcome.ttft_ms[0]:.0f} ms and ITL of {best.outcome.itl_ms[0]:.1f} ms; "
            "give more slots or looser objectives"
        )


def price_of(outcome: Outcome, num_slots: int, slot_hour_price: float | None) -> float | None:
    """All slots are paid for, used or not."""
    if slot_hour_price is None or not outcome.good_tokens_per_s:
        return None
    return slot_hour_price * num_slots / 3600 / outcome.good_tokens_per_s * 1e6


def base_rate(arrivals: Sequence[Arrival]) -> float:
    """Requests per second of a load; calls of a session count with the session's first."""
    last_s = max(one.time_s for one in arrivals if one.after is None)
    return len(arrivals) / last_s if last_s > 0.0 else float(len(arrivals))


class _Search:
    """The simulations of one search, over ``runs``. Progress is counted in simulated requests."""

    def __init__(
        self, setting: Setting, runs: Runner, candidates: Sequence[Candidate], on_progress: OnProgress
    ) -> None:
        self._setting, self._runs, self._candidates = setting, runs, candidates
        num = len(setting.arrivals)
        self._on_progress = on_progress
        self.budgets = sorted({max(min(MIN_BUDGET, num), int(num * part)) for part in BUDGET_SHARES})
        kinds = {candidate.is_split for candidate in candidates}
        self._num_halving = rounds(len(candidates), self.budgets, len(kinds))
        self._total = self._num_halving + len(kinds) * EXPECTED_RUNS * CAPACITY_SHARE * num
        self._done = 0.0

    def _advance(self, candidate: Candidate, num_requests: float, most: float) -> None:
        """``most``: what this part of the search may be at, of the total."""
        self._done = min(self._done + num_requests, most)
        self._on_progress(self._done / self._total, candidate)

    # -- the finalists ------------------------------------------------------------------------------------------------

    def finalists(self) -> list[tuple[Candidate, Outcome]]:
        """Those of the last round, on the whole load, the best first."""
        outcomes: dict[Candidate, Outcome] = {}

        def score(candidates: Sequence[Candidate], budget: int, num_kept: int) -> list[tuple[float, float]]:
            outcomes.update(self._round(candidates, budget, num_kept))
            return [outcomes[candidate].score for candidate in candidates]

        ranked = successive_halving(self._candidates, score, self.budgets, kind=lambda candidate: candidate.is_split)
        self._done = self._num_halving
        return [(candidate, outcomes[candidate]) for candidate, _ in ranked]

    def _round(self, candidates: Sequence[Candidate], budget: int, num_kept: int) -> dict[Candidate, Outcome]:
        """One that cannot be among the best ``num_kept``, nor the best of its kind, ends early."""
        found: dict[Candidate, Outcome] = {}
        left = iter(candidates)

        def submit() -> None:
            if (candidate := next(left, None)) is not None:
                bound = _bound(candidate, found, num_kept) if num_kept < len(candidates) else 0.0
                self._runs.submit(Trial(candidate, budget, give_up_below=bound))

        for _ in range(self._runs.capacity):
            submit()
        for trial, outcome in self._runs.results():
            found[trial.candidate] = outcome
            self._advance(trial.candidate, budget, self._num_halving)
            submit()
        return found

    # -- capacities ---------------------------------------------------------------------------------------------------

    def capacities(self, goodputs: Mapping[Candidate, float]) -> list[Capacity]:
        """The whole search with the first load, of which ``goodputs`` tells the share of each candidate at its own
        rate; with the others around what that has found."""
        points: dict[_Key, dict[float, float]] = {(one, 0): {1.0: share} for one, share in goodputs.items()}
        firsts = self._highest({key: search_highest() for key in points}, points)
        found = firsts | self._highest(
            {
                (candidate, load): search_highest(factor, 1)
                for (candidate, _), factor in firsts.items()
                for load in range(1, NUM_SEEDS)
                if factor
            },
            points,
        )
        rates = [base_rate(arrivals) for _, arrivals in self._setting.loads]
        self._done = self._total
        self._on_progress(1.0, next(iter(goodputs)))
        return [
            Capacity(
                candidate,
                tuple(rate * found.get((candidate, load), 0.0) for load, rate in enumerate(rates)),
                tuple((rates[0] * factor, share) for factor, share in sorted(points[candidate, 0].items())),
                is_least=firsts[candidate, 0] >= MAX_FACTOR,
            )
            for candidate in goodputs
        ]

    def _highest(self, searches: Mapping[_Key, Search], points: dict[_Key, dict[float, float]]) -> dict[_Key, float]:
        """What each search returns; all of them at once. ``points``: shares by factor that are known; takes what is
        tried."""
        found: dict[_Key, float] = {}

        def go_on(key: _Key, holds: bool | None) -> None:
            try:
                factor = searches[key].send(holds)  # type: ignore[arg-type]  # None begins a generator
                while (share := points.setdefault(key, {}).get(factor)) is not None:
                    factor = searches[key].send(share >= ATTAINMENT)
            except StopIteration as end:
                found[key] = end.value
                return
            candidate, load = key
            num = len(self._setting.loads[load][1])
            self._runs.submit(Trial(candidate, num, factor, load, give_up_below=ATTAINMENT, enough=ATTAINMENT))

        for key in searches:
            go_on(key, None)
        for trial, outcome in self._runs.results():
            key = (trial.candidate, trial.load)
            points[key][trial.factor] = outcome.goodput
            self._advance(trial.candidate, CAPACITY_SHARE * trial.num_requests, 0.99 * self._total)
            go_on(key, outcome.least >= ATTAINMENT if not outcome.is_whole else outcome.goodput >= ATTAINMENT)
        return found


def _bound(candidate: Candidate, found: Mapping[Candidate, Outcome], num_kept: int) -> float:
    """A candidate whose share is below this one cannot be kept: so many others are better already, and one of them is
    of its kind."""
    shares = sorted((one.goodput for one in found.values() if one.is_whole), reverse=True)
    own = [one.goodput for other, one in found.items() if one.is_whole and other.is_split is candidate.is_split]
    return min(shares[num_kept - 1], max(own)) if len(shares) >= num_kept and own else 0.0


def search_highest(start: float = 1.0, step: int = RATES_PER_OCTAVE) -> Search:
    """The highest factor that holds, to one of RATES_PER_OCTAVE; at most MAX_FACTOR, 0 if none holds from
    1 / MAX_FACTOR on. Up or down from ``start``, first by ``step`` and each time by twice as many, up to an octave,
    then by bisection. From afar the lowest one comes second: often no rate holds. A factor may be yielded twice.
    Assumes that more load is never better."""
    top = math.floor(RATES_PER_OCTAVE * math.log2(MAX_FACTOR / start))
    bottom = -math.floor(RATES_PER_OCTAVE * math.log2(MAX_FACTOR * start))
    holding, failing, at = bottom - 1, top + 1, 0
    if step >= RATES_PER_OCTAVE and not (yield start) and not (yield start * 2 ** (bottom / RATES_PER_OCTAVE)):
        return 0.0
    while failing - holding > 1:
        if (yield start * 2 ** (at / RATES_PER_OCTAVE)):
            holding = at
        else:
            failing = at
        if holding < bottom:
            at = max(at - step, bottom)
        elif failing > top:
            at = min(at + step, top)
        else:
            at = (holding + failing) // 2
        step = min(2 * step, RATES_PER_OCTAVE)
    return start * 2 ** (holding / RATES_PER_OCTAVE) if holding >= bottom else 0.0
