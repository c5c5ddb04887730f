"""Servers side by side: what every experiment on several servers does, written once.

    cases      addresses or commands (``cases``), of this system by ``serve_case``
    measure    what is done to one server, once for each point (a rate, a load); gives figures by name
    turns      each case once a round, so that a drift of the machine affects all of them alike
    summary    per case, the median of each figure over its rounds
    table      columns of figures

An experiment owns its cases, its measurement and its columns. Rows are dicts: labels ("case", "round", those of the
point), figures, and "error", which says why a turn failed. A case that fails is noted, and the others continue.
"""

from __future__ import annotations

import shlex
import statistics
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from kvrelay.bench.cases import Case, CaseTimes, check_names, running, turns_of
from kvrelay.bench.client.connection import Target
from kvrelay.bench.errors import BenchError
from kvrelay.bench.report.files import print_result
from kvrelay.bench.report.metrics import INTERRUPTED
from kvrelay.bench.report.table import Row
from kvrelay.cli.processes import run_async
from kvrelay.errors import InvalidInputError

Measure = Callable[[Target, Row], Awaitable[Row]]
"""From the server and the labels of a row to its figures. May set "error"; may raise BenchError."""
Reduce = Callable[[list[Any]], Any]

ONE_POINT: tuple[Row, ...] = ({},)
FAILED = "no request succeeded"


def serve_case(name: str, model: str | None, arguments: str, flags: str) -> Case:
    """``kvrelay serve`` as a case. ``flags``, which make the case what it is, win over ``arguments``."""
    words = [shlex.quote(sys.executable), "-m kvrelay serve", shlex.quote(model) if model else "", arguments]
    return Case(name, command=" ".join(filter(None, (*words, "--port {port}", flags))))


def take_turns(
    cases: Sequence[Case],
    rounds: int,
    measure: Measure,
    *,
    points: Sequence[Row] = ONE_POINT,
    say: Callable[[Row], str] = lambda _: "done",
    done: Callable[[list[Row]], None] = lambda _: None,
    log_dir: Path | None = None,
    times: CaseTimes | None = None,
    api_key: str | None = None,
) -> list[Row]:
    """One row per case, round and point; ``done`` gets the rows so far after each. A server is started once a round and
    measured at all points. Every other round goes backwards through the cases.

    Raises InvalidInputError for bad cases or rounds, BenchError when it was interrupted.
    """
    check_names(tuple(cases))
    if rounds < 1:
        raise InvalidInputError("there must be at least one round", param="rounds")
    rows: list[Row] = []

    def note(row: Row) -> None:
        rows.append(row)
        at = "".join(f", {name} {row[name]}" for point in points[:1] for name in point)
        click.echo(f"round {row['round']}, {row['case']}{at}: {row['error'] or say(row)}", err=True)
        done(rows)

    async def turn(case: Case, number: int, folder: Path) -> None:
        left = [{"case": case.name, "round": number, **point} for point in points]
        try:
            async with running(case, folder, times or CaseTimes(), api_key) as target:
                while left:
                    row = {"error": None, **left[0], **await measure(target, left[0])}
                    left.pop(0)
                    note(row)
                    if row["error"] == INTERRUPTED:
                        return
        except BenchError as exc:
            for labels in left:
                note({**labels, "error": exc.message})

    with ExitStack() as stack:
        folder = log_dir or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for number, case in turns_of(cases, rounds):
            run_async(turn(case, number, folder))
            if rows[-1]["error"] == INTERRUPTED:
                raise BenchError("interrupted; the results so far were kept")
    return rows


def summarise(
    rows: Sequence[Mapping[str, Any]], how: Mapping[str, Reduce] | None = None, labels: Sequence[str] = ("case",)
) -> list[Row]:
    """The rows with the same ``labels`` as one: of each numeric figure the median, or what ``how`` makes of its values;
    None if there are none. Rows that failed count as "failed_rounds" only."""
    how = {"num_failed": sum, **(how or {})}
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[label] for label in labels), []).append(row)
    skipped = {"round", "error", *labels}
    names = dict.fromkeys(
        name
        for row in rows
        for name, value in row.items()
        if name not in skipped and (name in how or isinstance(value, int | float))
    )
    found = []
    for group, own in groups.items():
        good = [row for row in own if not row["error"]]
        values = {name: [row[name] for row in good if row.get(name) is not None] for name in names}
        found.append(
            {
                **dict(zip(labels, group)),
                "rounds": len(good),
                "failed_rounds": len(own) - len(good),
                **{name: how.get(name, statistics.median)(each) if each else None for name, each in values.items()},
            }
        )
    return found


def finish(report: object, text: str, rows: Sequence[Row], as_json: bool) -> None:
    """Print the report. Raises BenchError if a turn has failed."""
    print_result(report, text, as_json)
    failed = [row["error"] for row in rows if row["error"]]
    if failed:
        raise BenchError(f"{len(failed)} of {len(rows)} turns failed: {failed[0]}")


# -- loads ------------------------------------------------------------------------------------------------------------
