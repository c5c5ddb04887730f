"""Separation against tensor parallelism on 8 and 16 slots, by simulation."""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.evaluate import forecast
from kvrelay.evaluate.calibration import Basis
from kvrelay.evaluate.findings import Section
from kvrelay.evaluate.plan import Wish
from kvrelay.evaluate.sections.sizes import best_sentence, outcomes_table, stress_factors
from kvrelay.evaluate.workbench import Workbench
from kvrelay.simulate.advise import Advice
from kvrelay.simulate.trial import Candidate, Outcome

NAME = "larger"
SLOTS = (8, 16)


def wishes(bench: Workbench, basis: Basis) -> list[Wish]:
    return [Wish(NAME, simulated_s=forecast.seconds_for(bench, 8 * len(SLOTS)))]


def candidates_for(slots: int, tps: Sequence[int], chunk: int) -> list[Candidate]:
    """With workers of each size: all aggregated, and half of them, a quarter and three quarters for prefills."""
    found = []
    for tp in tps:
        workers = slots // tp
        halves = dict.fromkeys(max(1, workers * quarters // 4) for quarters in (1, 2, 3))
        found += [Candidate(0, 0, workers, tp, chunk)]
        found += [Candidate(prefill, workers - prefill, 0, tp, chunk) for prefill in halves if prefill < workers]
    return found


def take(bench: Workbench, basis: Basis, advice: Advice) -> list[Section]:
    found = []
    for slots in SLOTS:
        factor = stress_factors(advice)[-1] * slots / bench.options.slots
        candidates = candidates_for(slots, sorted(basis.costs), advice.best.chunk)
        found.append((slots, forecast.outcomes(bench, basis, f"{slots} slots", candidates, [factor])))
    return [section_of(found, advice.rate)]


def section_of(found: Sequence[tuple[int, Sequence[tuple[Candidate, float, Outcome]]]], rate: float) -> Section:
    return Section(
        f"On {' and '.join(str(slots) for slots, _ in found)} slots",
        " ".join(f"{slots} slots: {best_sentence(own, rate, own[0][1])}" for slots, own in found),
        "Simulated at the highest rate that the best cluster of your slots holds, in proportion to the slots: your "
        "load, so many times as fast. Workers of two ranks only if they could be calibrated here.",
        tuple(outcomes_table(own, rate) for _, own in found),
    )
