"""The answer: split or not, how many of each, from which rate on, at what price, and how sure that is."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

import msgspec

from kvrelay.evaluate.findings import Line, Plot, Section, Table
from kvrelay.evaluate.load import EvaluatedLoad
from kvrelay.evaluate.options import EvaluateOptions
from kvrelay.evaluate.sections.accuracy import Accuracy
from kvrelay.simulate.advise import Advice, price_of
from kvrelay.simulate.trial import Candidate
from kvrelay.simulate.verdict import ATTAINMENT, Capacity, Measured


def section_of(
    options: EvaluateOptions,
    load: EvaluatedLoad,
    advice: Advice,
    accuracy: Accuracy,
    order: str,
    measured: str,
    notes: Sequence[str] = (),
) -> Section:
    """``order``: a sentence about the order of prefill and decode; ``measured``: about the two arrangements here.
    ``notes``: of what the answer rests on."""
    headline, now = decision_of(advice)
    chosen = next(row for row in advice.table if row.candidate == now)
    turns, sure = turning_sentence(advice.capacities), sureness_sentence(margin_of(advice.capacities), accuracy)
    held = held_sentence(chosen, advice.rate)
    capacity = next(one for one in advice.capacities if one.candidate == now)
    costs = price_sentence(options, chosen, capacity, load.mean_answer)
    own = shlex.join(options.serve_words)
    chosen_here = [name.replace("_", "-").removesuffix("-spec") for name in options.unset]
    made = f"Not given, so chosen by what was measured: {', '.join('--' + name for name in chosen_here)}."
    shrunk = f"{load.num_shortened} requests of the load were shortened to the context of {load.context} tokens."
    rows = [
        ("prefill and decode", headline),
        ("run", f"{now.command(options.objectives)} {own}"),
        *([("run above that rate", f"{advice.command} {own}")] if now != advice.best else []),
        ("workers", f"{now.size}, {now.tp} rank{'s' * (now.tp > 1)} each"),
        ("chunks", f"up to {now.chunk} tokens a step"),
        ("order", order),
        ("rate at which the answer turns", turns),
        ("objectives that hold", held),
        ("measured on two slots", measured),
        ("price", costs),
        ("how sure", sure),
    ]
    return Section(
        f"{options.slots} slots: {headline}",
        advice.verdict[0].upper() + advice.verdict[1:],
        f"Simulated with the costs of this machine, for {options.slots} slots, {options.slo_ttft_ms:g} ms to the first "
        f"token and {options.slo_itl_ms:g} ms between tokens, and {len(load.arrivals)} requests at {advice.rate:.3g} "
        f"requests/s, with {load.mean_prompt:.0f} prompt and {load.mean_answer:.0f} answer tokens on average.",
        (Table(("question", "answer"), tuple(rows)),),
        (
            Plot(
                "Requests within the objectives over the rate",
                "requests per second",
                "percent",
                tuple(
                    Line(one.candidate.size, tuple((rate, 100 * share) for rate, share in one.points))
                    for one in advice.capacities
                ),
            ),
        ),
        notes=(*((made,) if options.unset else ()), *((shrunk,) if load.num_shortened else ()), *notes),
    )


def decision_of(advice: Advice) -> tuple[str, Candidate]:
    """In words, and the cluster to run at the load's own rate: a split that wins only above it can wait."""
    best = advice.best
    if not best.is_split:
        return f"do not split: {best.size}", best
    for other in advice.capacities:
        if not other.candidate.is_split and other.requests_per_s >= advice.rate:
            what = f"together at your rate ({advice.rate:.3g} requests/s), split as {best.size} above"
            return f"{what} {other.requests_per_s:.3g} requests/s", other.candidate
    return f"split as {best.size}", best


def turning_sentence(capacities: tuple[Capacity, ...]) -> str:
    """Below which rate it does not matter, and from which on only one cluster holds the objectives."""
    if len(capacities) < 2:
        return "nothing else fits into the slots"
    less, more = sorted(capacities, key=lambda one: one.requests_per_s)
    low, high = less.requests_per_s, more.requests_per_s
    if not high:
        return "neither holds the objectives, at any rate that was tried"
    at_least = "at least " if more.is_least else ""
    only = f"{more.candidate.size} alone holds them up to {at_least}{high:.3g}"
    if not low:
        return f"none: {only} requests/s, {less.candidate.size} at no rate that was tried"
    if low == high:
        return f"none: both hold the objectives up to {at_least}{high:.3g} requests/s"
    return f"{low:.3g} requests/s: below, both hold the objectives and aggregated is simpler; above, {only}"


def margin_of(capacities: tuple[Capacity, ...]) -> float | None:
    """By which share the greater capacity is above the other one; None if there is nothing to compare."""
    rates = sorted(one.requests_per_s for one in capacities)
    return rates[-1] / rates[0] - 1 if len(rates) > 1 and rates[0] else None


def sureness_sentence(margin: float | None, accuracy: Accuracy) -> str:
    """The margin of the answer beside the error of the simulator on this machine."""
    if not accuracy.throughput:
        return "not at all: the simulator was not checked here"
    error = accuracy.worst_throughput
    others = f"of first tokens up to {accuracy.worst_ttft:.0%}"
    if accuracy.goodput:
        others += f", of requests within the objectives up to {100 * accuracy.worst_goodput:.0f} points"
    off = f"up to {error:.0%} in throughput ({others})"
    same, total = accuracy.same_choice
    agrees = (
        f"; it agreed with the machine on the faster of two arrangements for {same} of {total} loads" if total else ""
    )
    if margin is None:
        return f"the simulator is off by {off} here{agrees}"
    beside = f"the margin of {margin:.0%} is {{}} the simulator's error of {off}"
    if margin <= error:
        return f"not sure: {beside.format('within')}, so measure both before you decide{agrees}"
    if 2 * same <= total and total:
        return f"not sure: {beside.format('above')}, but{agrees.removeprefix(';')}"
    return f"{beside.format('above')}{agrees}"


def held_sentence(best: Measured, rate: float) -> str:
    """Objectives that just hold at the load's own rate, by the simulation."""
    ttft, gap = best.outcome.ttft_ms, best.outcome.itl_ms
    return (
        f"at {rate:.3g} requests/s {ATTAINMENT:.0%} of the first tokens come within {ttft[1]:.0f} ms and 99 % within "
        f"{ttft[2]:.0f} ms; 99 % of the gaps are below {gap[2]:.1f} ms; {best.outcome.goodput:.0%} of the requests "
        "keep both objectives that were asked for"
    )


def price_sentence(options: EvaluateOptions, best: Measured, capacity: Capacity, mean_answer: float) -> str:
    """Per million answer tokens within the objectives, at the load's own rate and at the highest one that holds."""
    if options.price is None:
        return "not asked for (--price)"
    own = price_of(best.outcome, options.slots, options.price)
    now = "no answer in time" if own is None else f"{own:.3g} per million answer tokens at your rate"
    if not capacity.requests_per_s:
        return now
    full = msgspec.structs.replace(best.outcome, good_tokens_per_s=capacity.requests_per_s * ATTAINMENT * mean_answer)
    at_best = price_of(full, options.slots, options.price)
    return f"{now}, {at_best:.3g} at {capacity.requests_per_s:.3g} requests/s; all slots are paid for, used or not"
