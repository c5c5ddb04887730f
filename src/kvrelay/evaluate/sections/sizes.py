"""How many of each: every split of the slots, and the aggregated cluster, by simulation."""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.evaluate import forecast
from kvrelay.evaluate.calibration import Basis
from kvrelay.evaluate.findings import Section, Table
from kvrelay.evaluate.plan import Wish
from kvrelay.evaluate.workbench import Workbench
from kvrelay.simulate.advise import Advice
from kvrelay.simulate.trial import Candidate, Outcome
from kvrelay.simulate.verdict import NOISE

NAME = "sizes"
HEAD = ("workers", "requests/s", "within objectives", "good tokens/s", "TTFT P50", "P90", "P99", "gap P99")


def wishes(bench: Workbench, basis: Basis) -> list[Wish]:
    return [Wish(NAME, simulated_s=forecast.seconds_for(bench, 2 * bench.options.slots))]


def take(bench: Workbench, basis: Basis, advice: Advice) -> list[Section]:
    slots, chunk = bench.options.slots, advice.best.chunk
    splits = [Candidate(prefill, slots - prefill, 0, 1, chunk) for prefill in range(1, slots)]
    factors = stress_factors(advice)
    found = forecast.outcomes(bench, basis, NAME, [*splits, Candidate(0, 0, slots, 1, chunk)], factors)
    return [section_of(found, advice.rate, slots)]


def stress_factors(advice: Advice) -> list[float]:
    """The load's own rate, and the highest one that the best cluster holds."""
    highest = max(one.requests_per_s for one in advice.capacities)
    return list(dict.fromkeys([1.0, highest / advice.rate if highest else 1.0]))


def section_of(found: Sequence[tuple[Candidate, float, Outcome]], rate: float, slots: int) -> Section:
    return Section(
        "How many of each",
        " ".join(best_sentence(found, rate, factor) for factor in dict.fromkeys(factor for _, factor, _ in found)),
        f"Every split of {slots} slots with one rank each, simulated at your rate and at the highest one that the best "
        "cluster holds. Times in milliseconds.",
        (outcomes_table(found, rate),),
    )


def best_sentence(found: Sequence[tuple[Candidate, float, Outcome]], rate: float, factor: float) -> str:
    """Which keeps most requests within the objectives; no difference within the search's precision is one."""
    own = sorted(((one, outcome) for one, at, outcome in found if at == factor), key=lambda pair: -pair[1].goodput)
    best = own[0]
    even = [one.size for one, outcome in own if outcome.goodput * (1 + NOISE) >= best[1].goodput]
    at = f"At {rate * factor:.3g} requests/s"
    if len(even) == len(own) > 1:
        return f"{at} no difference is shown: all keep {spread_text(own[-1][1].goodput, best[1].goodput)}."
    if len(even) > 1:
        return f"{at} {', '.join(even)} keep most requests within the objectives, up to {best[1].goodput:.0%}."
    return f"{at} {even[0]} keeps most requests within the objectives, {best[1].goodput:.0%}."


def spread_text(low: float, high: float) -> str:
    """Shares; one if they are equal when shown."""
    return f"{high:.0%}" if f"{low:.0%}" == f"{high:.0%}" else f"{low:.0%} to {high:.0%}"


def outcomes_table(found: Sequence[tuple[Candidate, float, Outcome]], rate: float) -> Table:
    rows = [
        (
            f"{one.size}{f' TP {one.tp}' if one.tp > 1 else ''}, chunks {one.chunk}",
            f"{rate * factor:.3g}",
            f"{outcome.goodput:.0%}",
            f"{outcome.good_tokens_per_s:.0f}",
            *(f"{value:.0f}" for value in outcome.ttft_ms),
            f"{outcome.itl_ms[2]:.1f}",
        )
        for one, factor, outcome in sorted(found, key=lambda each: (each[1], -each[2].goodput))
    ]
    return Table(HEAD, tuple(rows))
