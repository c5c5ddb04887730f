"""Goodput over the rate of long prompts, per policy of placing prefills: which share of the requests meets every
objective, and which objective the others miss.

Each case is started once a round and measured at all rates in turn, so that a round is short and every rate but the
first finds a warm server. At one rate of one round every case gets the same requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import click
from msgspec.structs import replace

from kvrelay.bench.cases import CaseTimes
from kvrelay.bench.client.connection import Target
from kvrelay.bench.commands.servers import interference_options
from kvrelay.bench.compare import FAILED, Reduce, finish, summarise, take_turns
from kvrelay.bench.given import numbers
from kvrelay.bench.interference import interference_cases, mixed_options
from kvrelay.bench.load.mix import ClassSpec
from kvrelay.bench.load.request import check_rate
from kvrelay.bench.progress import progress_bar
from kvrelay.bench.report.files import write_result
from kvrelay.bench.report.metrics import INTERRUPTED, Outcome, RunResult, Slo
from kvrelay.bench.report.table import Row, number, table
from kvrelay.bench.serving import run_serve
from kvrelay.errors import InvalidInputError

GOODPUT_KIND = "kvrelay-bench-goodput/1"


@click.command()
@interference_options
@click.option("--policies", default="cost,threshold,always,aggregated", help="Also threshold:TOKENS.")
@click.option("--rates", default="0.5,1,2,3,4.5,6", help="Rates of the second class, 1/s.")
def goodput(**given: Any) -> None:
    """The share of the requests that meets all objectives, by policy of --disagg-policy and rate of long prompts.

    Each server is started once a round. Writes goodput.json and goodput.md.

    Example: python -m benchmarks goodput --policies cost,threshold,threshold:1024,always --rates 0.5,2,6
    """
    cases = interference_cases(given, policies(given["policies"]))
    rates = numbers(given["rates"], "--rates")
    for rate in rates:
        check_rate(rate, "--rates")
    options = mixed_options(given)
    if options.slo is None:
        raise InvalidInputError("goodput needs objectives", param="slo")
    slo, folder = options.slo, given["output_dir"]
    objectives = ", ".join(f"{name} {limit_s * 1e3:g} ms" for name, limit_s in slo.limits_s.items())

    def report(points: Sequence[Row]) -> Row:
        about = {"kind": GOODPUT_KIND, "command": options.command, "load": given["mix"], "slo": objectives}
        return {**about, "summaries": summarise_points(points), "points": points}

    def write(points: Sequence[Row]) -> None:
        write_result(folder, "goodput", report(points), goodput_markdown(report(points)))

    with progress_bar() as bar:

        async def measure(target: Target, row: Row) -> Row:
            seed = options.seed + 10_000 * row["round"] + round(row["rate"] * 100)
            classes = at_rate(options.classes, row["rate"])
            turn = replace(options, target=target, backend=row["case"], classes=classes, seed=seed)
            run = await run_serve(turn, bar)
            return goodput_figures(run.result, slo) | ({"error": INTERRUPTED} if run.report.note == INTERRUPTED else {})

        points = take_turns(
            cases,
            given["rounds"],
            measure,
            points=[{"rate": rate} for rate in rates],
            say=lambda row: f"{row['share']:.0%} of {row['num_requests']}",
            done=write,
            log_dir=folder / "logs",
            times=CaseTimes(given["start_timeout"]),
            api_key=given["api_key"],
        )
    finish(report(points), goodput_markdown(report(points)), points, given["as_json"])


def policies(text: str) -> dict[str, str]:
    """Names to flags of ``cost``, ``threshold``, ``threshold:TOKENS``, ``always`` or ``aggregated`` (two workers that
    do both). Raises InvalidInputError."""
    found = {}
    for name in filter(None, (part.strip() for part in text.split(","))):
        kind, separator, tokens = name.partition(":")
        if name == "aggregated":
            found[name] = "--prefill 0 --decode 2"
            continue
        is_known = kind == "threshold" and tokens.isdigit() if separator else kind in ("cost", "threshold", "always")
        if not is_known:
            raise InvalidInputError(
                f"--policies: {name!r} is not cost, threshold, threshold:TOKENS, always or aggregated", param="policies"
            )
        length = f" --max-local-prefill-length {tokens}" if separator else ""
        found[name] = f"--prefill 1 --decode 1 --disagg-policy {kind}{length}"
    return found


def at_rate(classes: Sequence[ClassSpec], rate: float) -> tuple[ClassSpec, ...]:
    """The same load with the second class at ``rate`` requests per second."""
    chats, prompts = classes
    return (chats, replace(prompts, rate=rate, max_concurrency=None))


def goodput_figures(result: RunResult, slo: Slo) -> Row:
    """Judge the records of one run. Requests that the end of the run cut off do not count. ``missed``: how many
    requests missed which objective, by class and objective; one request may miss several."""
    ended = [record for record in result.records if record.outcome is not Outcome.CUT_OFF]
    num_met = sum(slo.met_by(record) for record in ended)
    num_failed = sum(record.outcome is Outcome.FAILED for record in ended)
    missed = Counter(f"{record.class_name} {name}" for record in ended for name in slo.missed_by(record))
    share = num_met / len(ended) if ended else 0.0
    return {
        "num_requests": len(ended),
        "num_met": num_met,
        "num_failed": num_failed,
        "share": share,
        "lowest_share": share,
        "highest_share": share,
        "met_per_s": num_met / (max(1, result.stop_ns - result.start_ns) / 1e9),
        "missed": missed,
        "error": None if len(ended) > num_failed else FAILED,
    }


def summarise_points(points: Sequence[Row]) -> list[Row]:
    """Each case at each rate over its rounds: medians, the lowest and the highest share; requests and misses add up."""
    add_up: Callable[[list[Counter[str]]], Counter[str]] = lambda counts: sum(counts, Counter[str]())  # noqa: E731
    how: dict[str, Reduce] = {
        "lowest_share": min,
        "highest_share": max,
        "missed": add_up,
        "num_requests": sum,
        "num_met": sum,
    }
    return summarise(points, how, labels=("rate", "case"))


def goodput_markdown(report: Row) -> str:
    """Three tables of rate and case: shares, requests per second, and misses."""
    of = {(row["rate"], row["case"]): row for row in report["summaries"]}
    rates, cases = (list(dict.fromkeys(names)) for names in zip(*of))

    def by_rate(cell: Callable[[Row], str], ratios: bool = False) -> str:
        columns = ["rate", *cases]
        rows = [[f"{rate:g}", *(cell(of.get((rate, case), {})) for case in cases)] for rate in rates]
        if ratios and len(cases) > 1:
            columns += [f"{cases[0]} / best other", f"{cases[0]} / worst"]
            shares = [[of.get((rate, case), {}).get("share") for case in cases] for rate in rates]
            rows = [row + _comparison(each) for row, each in zip(rows, shares)]
        return table(columns, rows, markdown=True)

    lines = [
        f"Load: `{report['load']}`, the second class at the rate of the row (1/s); objectives: {report['slo']}.",
        "Share of the requests that meet all objectives: median of the rounds (lowest to highest).",
        by_rate(_share_cell, ratios=True),
        "Requests per second that meet all objectives, median of the rounds:",
        by_rate(lambda row: number(row.get("met_per_s"))),
        "Missed objectives, all rounds together (a request may miss several):",
        by_rate(_missed_cell),
    ]
    errors = [
        f"- {row['case']} at {row['rate']:g}/s, round {row['round']}: {row['error']}"
        for row in report["points"]
        if row["error"]
    ]
    return "\n\n".join([*lines, "\n".join(errors)])


def _share_cell(row: Row) -> str:
    spread = f" ({number(row.get('lowest_share'), '.0%')} to {number(row.get('highest_share'), '.0%')})"
    return number(row.get("share"), ".0%") + (spread if row.get("rounds", 0) > 1 else "")


def _missed_cell(row: Row) -> str:
    misses = ", ".join(f"{what} {count}" for what, count in sorted((row.get("missed") or {}).items()))
    return f"{misses or 'none'} of {row.get('num_requests') or 0}"


def _comparison(shares: Sequence[float | None]) -> list[str]:
    """The first case's share over the best and over the worst of the others."""
    first, others = shares[0], [share for share in shares[1:] if share is not None]
    if first is None or not others:
        return ["-", "-"]
    return [f"{first / other:.2f}" if other else "-" for other in (max(others), min(others))]
