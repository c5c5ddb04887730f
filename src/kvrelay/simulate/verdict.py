"""What a search has found, in words: which cluster, by how much, and what to do if none holds the objectives."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from kvrelay.placement.base import Objectives
from kvrelay.simulate.trial import Candidate, Outcome

ATTAINMENT = 0.9
NOISE = 0.05
"""Bisection finds a capacity within some 4 %; smaller differences say nothing."""


class Measured(msgspec.Struct, frozen=True):
    """A candidate on the whole load. ``price``: per million answer tokens of requests within the objectives; None
    without a price, or without such tokens."""

    candidate: Candidate
    outcome: Outcome
    price: float | None


class Load(msgspec.Struct, frozen=True):
    """``rate``: in requests/s. ``too_long``: the share of the prompts of which each takes longer than the objective for
    the first token by itself, on the fastest worker, if no prefix is cached."""

    rate: float
    num_requests: int
    too_long: float = 0.0


class Capacity(msgspec.Struct, frozen=True):
    """``by_seed``: the highest rate, in requests/s, at which ATTAINMENT of the requests meet both objectives, with each
    seed; 0: none that was tried. ``points``: what was tried with the first one, as (requests/s, goodput), by rate; a
    simulation that ended early counts with the requests until then. ``is_least``: the highest rate that is tried
    holds, so the truth may be more."""

    candidate: Candidate
    by_seed: tuple[float, ...]
    points: tuple[tuple[float, float], ...]
    is_least: bool = False

    @property
    def requests_per_s(self) -> float:
        """The mean over the seeds."""
        return sum(self.by_seed) / len(self.by_seed)


def is_doubtful(first: Capacity, second: Capacity) -> str:
    """Why the difference of two capacities, the greater first, says nothing; empty: it does."""
    if first.requests_per_s < second.requests_per_s * (1 + NOISE):
        return "within the search's precision"
    # Seed by seed, because both had the same load: loads differ more than clusters.
    is_mixed = any(one <= other for one, other in zip(first.by_seed, second.by_seed))
    return f"within the spread of {len(first.by_seed)} seeds" if is_mixed else ""


def ordered(capacities: Sequence[Capacity], goodputs: Mapping[Candidate, float]) -> list[Capacity]:
    """The winner first. Of two whose difference is doubtful it is the aggregated one, which is simpler. If no rate
    holds, the better one at the load's own rate comes first, of which ``goodputs`` tells."""
    if not any(one.requests_per_s for one in capacities):
        found = sorted(capacities, key=lambda one: -goodputs[one.candidate])
        is_even = len(found) == 2 and _are_even(*[goodputs[one.candidate] for one in found])
    else:
        found = sorted(capacities, key=lambda one: -one.requests_per_s)
        is_even = len(found) == 2 and bool(is_doubtful(*found))
    if is_even and found[0].candidate.is_split:
        found.reverse()
    return found


def _are_even(one: float, other: float) -> bool:
    return max(one, other) < min(one, other) * (1 + NOISE)


def verdict_of(
    capacities: Sequence[Capacity], rows: Sequence[Measured], objectives: Objectives, load: Load, num_slots: int
) -> str:
    """Sentences; the first one of ``capacities`` has won. ``rows``: of the same candidates, on the load at its own
    rate."""
    by_candidate = {row.candidate: row for row in rows}
    best, rate = capacities[0], load.rate
    said = [f"{_comparison(capacities, by_candidate)}."]
    if best.requests_per_s:
        said += _too_short(best.requests_per_s, objectives, load)
    holding = [one for one in capacities if one.requests_per_s >= rate]
    if best not in holding:
        said += _what_would_hold(best, by_candidate[best.candidate].outcome, objectives, load, num_slots)
    elif len(holding) > 1:
        said.append(f"At your rate ({rate:.3g} requests/s) there is no difference: both hold the objectives.")
    elif len(capacities) > 1:
        said.append(f"At your rate ({rate:.3g} requests/s) only {best.candidate.size} holds the objectives.")
    return " ".join(said)


def _comparison(capacities: Sequence[Capacity], rows: dict[Candidate, Measured]) -> str:
    first = capacities[0]
    if len(capacities) < 2:
        return f"{first.candidate}: nothing else fits into the slots"
    second = capacities[1]
    what, other = ("split", "aggregated") if first.candidate.is_split else ("do not split", "split")
    if not max(first.requests_per_s, second.requests_per_s):
        one, two = rows[first.candidate].outcome, rows[second.candidate].outcome
        better = "the simpler of two that differ little" if _are_even(one.goodput, two.goodput) else "the better one"
        return (
            f"neither holds {ATTAINMENT * 100:.0f} % of the requests within the objectives, at any rate that was tried;"
            f" at your rate {first.candidate.size} is {better}: {one.goodput * 100:.0f} % and "
            f"{one.good_tokens_per_s:.0f} good tokens/s, against {two.goodput * 100:.0f} % and "
            f"{two.good_tokens_per_s:.0f} with {second.candidate.size}"
        )
    if not second.requests_per_s:
        return f"{what}: {other} holds the objectives at no rate that was tried"
    if first.is_least and second.is_least:
        return (
            f"do not split: both hold {first.requests_per_s:.3g} requests/s, the highest rate that is tried, and "
            "aggregated is simpler"
        )
    greater, less = sorted((first, second), key=lambda one: -one.requests_per_s)
    gain = greater.requests_per_s / less.requests_per_s - 1
    if why := is_doubtful(greater, less):
        return f"do not split: split and aggregated differ by {gain * 100:.1f} %, {why}, and aggregated is simpler"
    winner = "split" if first.candidate.is_split else "aggregated"
    at_least = "at least " if greater.is_least else ""
    return f"{what}: {winner} wins by {at_least}{gain * 100:.0f} % of requests per second"


def _too_short(capacity: float, objectives: Objectives, load: Load) -> list[str]:
    """An overload by NOISE makes the last first token late by this share of the load's duration. If that is less than
    the objective, the load is too short to tell a rate that can be sustained from a burst that can be waited out."""
    if load.num_requests >= (needed := capacity * objectives.ttft_s / NOISE):
        return []
    return [
        f"The load is too short for this comparison: at {capacity:.3g} requests/s it lasts "
        f"{load.num_requests / capacity:.2g} s, and so short a burst hides an overload. For a rate that can be "
        f"sustained give at least {math.ceil(needed)} requests instead of {load.num_requests}."
    ]


def _what_would_hold(best: Capacity, outcome: Outcome, objectives: Objectives, load: Load, num_slots: int) -> list[str]:
    """Which objective fails at the load's own rate, and which rate or how many slots would keep it."""
    name, met, at_ms, limit_ms = (
        ("first tokens", outcome.ttft_met, outcome.ttft_ms[1], objectives.ttft_s * 1e3)
        if outcome.ttft_met <= outcome.itl_met
        else ("gaps between tokens", outcome.itl_met, outcome.itl_ms[2], objectives.itl_s * 1e3)
    )
    percentile = "P90" if name == "first tokens" else "P99"
    said = [
        f"At your rate ({load.rate:.3g} requests/s) {best.candidate.size} does not hold the objectives: {name} fail, "
        f"{met * 100:.0f} % of the requests keep {limit_ms:g} ms ({percentile} {at_ms:.0f} ms), and "
        f"{ATTAINMENT * 100:.0f} % should."
    ]
    if best.requests_per_s:
        slots = math.ceil(num_slots * load.rate / best.requests_per_s)
        said.append(
            f"It would hold {best.requests_per_s:.3g} requests/s; for your rate give about {slots} slots (in "
            "proportion), or looser objectives."
        )
        return said
    if load.too_long:
        said.append(
            f"{load.too_long * 100:.0f} % of the prompts take longer than {objectives.ttft_s * 1e3:g} ms by "
            "themselves, if no prefix is cached."
        )
    said.append("No lower rate helps: give looser objectives, faster hardware or larger --tp.")
    return said
