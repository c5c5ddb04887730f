"""PUT, PUT_ASYNC and GET under serving load, over the transports of this machine."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from kvrelay.evaluate.calibration import Basis
from kvrelay.evaluate.effects import GAP_P99, Effect, Figure, Row, effects, good, median, points_of
from kvrelay.evaluate.findings import Section, Table
from kvrelay.evaluate.plan import Wish
from kvrelay.evaluate.shown import comparison
from kvrelay.evaluate.workbench import SPLIT, ServerCase, Workbench
from kvrelay.simulate.advise import Advice

NAME = "transfers"
WAYS = (("p2p", "PUT"), ("p2p", "PUT_ASYNC"), ("p2p", "GET"), ("nixl", "PUT"), ("nixl", "GET"), ("shm", "PUT"))
NUM_SHORT = 3
SHARE = 0.5
TTFT_P50 = Figure("ttft_p50_s", "median first tokens", "ms", 1e3)
FIRST = Figure("first", "mean first tokens", "ms", 1e3)
"""The sum of a row's phases."""
DOCUMENTED = ("PUT_ASYNC", "GET", "PUT")
"""The order that is published for this way of handing over, the fastest first."""
OWN = ("claim", "grant", "hand_over", "transfer", "attach")
"""Phases of the hand-off itself: a way of sending can change no others but by the cores that it takes."""
NUM_REASONS = 3


def cases_of(bench: Workbench) -> list[ServerCase]:
    ways = WAYS[:NUM_SHORT] if bench.options.is_short else WAYS
    common = (*SPLIT.flags, "--disagg-policy", "always")
    return [ServerCase(f"{by} {how}", (*common, "--transport", by, "--send-type", how)) for by, how in ways]


def wishes(bench: Workbench, basis: Basis) -> list[Wish]:
    return [Wish(NAME, len(cases_of(bench)), (basis.at(SHARE),))]


def take(bench: Workbench, basis: Basis, advice: Advice) -> list[Section]:
    cases = cases_of(bench)
    rows = bench.rows(NAME, cases, [basis.at(SHARE, has_phases=True)])
    return [section_of(rows, [case.name for case in cases])]


def section_of(rows: Sequence[Row], cases: Sequence[str]) -> Section:
    """All ways beside the first one."""
    points = points_of(rows)
    found = effects(rows, (TTFT_P50, GAP_P99), cases[0], cases[1:], points)
    phased = [{**row, **spread(row["phases"])} for row in rows if row.get("phases")]
    return comparison(
        "PUT, PUT_ASYNC and GET under load",
        "1P1D with every prefill remote. PUT waits until the KV has landed, PUT_ASYNC does not; with GET the decode "
        "worker fetches it. Times in milliseconds. The last table has the phases of kvrelay waterfall until the first "
        "token, on average; of phases that overlap, the one that began first counts.",
        rows,
        found,
        cases=cases,
        more=order_sentence(phased, points),
        tables=phases_table(phased, cases, points),
    )


def spread(phases: dict[str, float]) -> dict[str, float]:
    """Phases as figures of a row, and their sum."""
    return {**{f"phase {name}": value for name, value in phases.items()}, FIRST.name: sum(phases.values())}


def _phase(rows: Sequence[Row], case: str, point: str, name: str) -> float:
    """Median of the rounds, in seconds; a phase that a round did not have took no time."""
    return median([{name: 0.0, **row} for row in good(rows, case, point)], name) or 0.0


def _names(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row if name.startswith("phase ")))


def phases_table(rows: Sequence[Row], cases: Sequence[str], points: Sequence[str]) -> tuple[Table, ...]:
    """A line for each phase and one for their sum; none without a waterfall."""
    shown = [case for case in cases if any(row["case"] == case for row in rows)]
    lines = [
        (
            "all" if name == FIRST.name else name.removeprefix("phase "),
            *(f"{_phase(rows, case, points[0], name) * 1e3:.2f}" for case in shown),
        )
        for name in (*_names(rows), FIRST.name)
    ]
    return (Table(("phase until the first token", *shown), tuple(lines)),) if shown else ()


def order_sentence(rows: Sequence[Row], points: Sequence[str]) -> str:
    """The order of the ways over p2p beside the published one, and which phases make the difference."""
    names = {way: f"p2p {way}" for way in DOCUMENTED}
    if not all(any(row["case"] == name for row in rows) for name in names.values()):
        return ""
    at = points[0]
    mean = {way: _phase(rows, name, at, FIRST.name) for way, name in names.items()}
    order = sorted(DOCUMENTED, key=lambda way: mean[way])
    said = f" Published is the order {' before '.join(DOCUMENTED)}; here it is " + ", ".join(
        f"{way} {FIRST.text(mean[way])}" for way in order
    )
    found = [
        one
        for first, second in itertools.pairwise(DOCUMENTED)
        for one in effects(rows, (FIRST,), names[first], [names[second]], [at])
    ]
    reasons = [_reason(rows, one) for one in found if one.is_shown]
    own = {
        way: sum(_phase(rows, names[way], at, one) for one in _names(rows) if one.removeprefix("phase ") in OWN)
        for way in DOCUMENTED
    }
    shares = ", ".join(f"{way} {own[way] / mean[way]:.0%}" for way in order)
    share = f"A way of sending decides about {', '.join(OWN)}: of a first token {shares}."
    if not reasons:
        return f"{said}: not shown to differ, since the rounds differ by more. {share}"
    return f"{said}. {' '.join(reasons)} {share}"


def _reason(rows: Sequence[Row], one: Effect) -> str:
    """The phases that differ most between two ways."""
    first, second = one.names
    changes = [
        (_phase(rows, second, one.point, name) - _phase(rows, first, one.point, name), name) for name in _names(rows)
    ]
    largest = sorted(changes, key=lambda change: -abs(change[0]))[:NUM_REASONS]
    parts = ", ".join(f"{name.removeprefix('phase ')} {change * 1e3:+.1f}" for change, name in largest)
    return f"{second} against {first}: {one.size * 1e3:+.1f} ms, of which {parts}."
