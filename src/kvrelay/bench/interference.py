"""The effect of long prompts on running answers: the same mixed load on several arrangements of a server.

Within a round every case gets the same requests; every round has its own requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvrelay.bench.cases import Case, CaseTimes, parse_case
from kvrelay.bench.client.connection import Target
from kvrelay.bench.compare import FAILED, Reduce, finish, serve_case, summarise, take_turns
from kvrelay.bench.given import ANY_TARGET, run_options
from kvrelay.bench.load.datasets import Dataset
from kvrelay.bench.load.mix import ClassSpec, parse_mix
from kvrelay.bench.progress import progress_bar
from kvrelay.bench.report.files import write_result
from kvrelay.bench.report.metrics import INTERRUPTED, ServeReport, figure
from kvrelay.bench.report.plots import new_figure, plot_beside, save_figure
from kvrelay.bench.report.table import Row, results_table
from kvrelay.bench.serving import RunOptions, run_serve
from kvrelay.errors import InvalidInputError

INTERFERENCE_KIND = "kvrelay-bench-interference/1"
ARRANGEMENTS = {
    "aggregated x1": "--prefill 0 --decode 1",
    "aggregated x2": "--prefill 0 --decode 2 --router round-robin",
    "1P1D always remote": "--prefill 1 --decode 1 --disagg-policy always",
    "1P1D conditional": "--prefill 1 --decode 1",
    "1P1D prefill-first": "--prefill 1 --decode 1 --order prefill-first",
}
"""They show the effect of separation, and of its two orders."""
_FIGURES = {
    "longest_wait_s": ("chat", "gap_s.max"),
    "chat_itl_p50_s": ("chat", "itl_s.median"),
    "chat_itl_p99_s": ("chat", "itl_s.p99"),
    "chat_ttft_p50_s": ("chat", "ttft_s.median"),
    "chat_ttft_p99_s": ("chat", "ttft_s.p99"),
    "long_ttft_p50_s": ("long", "ttft_s.median"),
    "long_ttft_p99_s": ("long", "ttft_s.p99"),
    "chat_tokens_per_s": ("chat", "output_tokens_per_s"),
    "output_tokens_per_s": ("all", "output_tokens_per_s"),
    "goodput_share": ("all", "goodput.share"),
    "goodput_requests_per_s": ("all", "goodput.requests_per_s"),
    "failed_requests": ("all", "failed"),
}
"""Figures of a turn: this figure of these requests."""
HOW: dict[str, Reduce] = {"longest_wait_s": max, "failed_requests": sum}
_COLUMNS = {
    "case": "case",
    "chat ITL P50": "chat_itl_p50_s:ms",
    "chat ITL P99": "chat_itl_p99_s:ms",
    "longest chat wait": "longest_wait_s:ms",
    "chat TTFT P50": "chat_ttft_p50_s:ms",
    "chat TTFT P99": "chat_ttft_p99_s:ms",
    "long TTFT P50": "long_ttft_p50_s:ms",
    "long TTFT P99": "long_ttft_p99_s:ms",
    "chat tok/s": "chat_tokens_per_s:.0f",
    "all tok/s": "output_tokens_per_s:.0f",
    "goodput": "goodput_share:.0%",
    "failed": "failed_requests:.0f",
}


def measure_interference(given: dict[str, Any]) -> None:
    """``kvrelay bench interference``: run, write, print. Raises BenchError when a turn has failed."""
    cases = interference_cases(given, ARRANGEMENTS)
    options = mixed_options(given)
    chat, long = (spec.name for spec in options.classes)
    folder: Path = given["output_dir"]

    def report(runs: Sequence[Row]) -> Row:
        summaries = summarise(runs, HOW)
        load = {"kind": INTERFERENCE_KIND, "command": options.command, "load": given["mix"]}
        return {**load, "summaries": summaries, "runs": runs}

    def write(runs: Sequence[Row]) -> None:
        write_result(folder, "interference", report(runs), interference_markdown(report(runs)))

    with progress_bar() as bar:

        async def measure(target: Target, row: Row) -> Row:
            seed = options.seed + row["round"] - 1
            turn = msgspec.structs.replace(options, target=target, backend=row["case"], seed=seed)
            return figures_of((await run_serve(turn, bar)).report, chat, long)

        times, key, logs = CaseTimes(given["start_timeout"]), given["api_key"], folder / "logs"
        runs = take_turns(cases, given["rounds"], measure, log_dir=logs, times=times, api_key=key, done=write)
    plot_beside(plot_interference, report(runs)["summaries"], folder / "interference.png")
    finish(report(runs), interference_markdown(report(runs)), runs, given["as_json"])


def interference_cases(given: dict[str, Any], arrangements: dict[str, str]) -> list[Case]:
    """``arrangements`` (names to flags of ``kvrelay serve``) unless only given ones are wanted, and the given ones."""
    own = {} if given["only_given"] else arrangements
    found = [serve_case(name, given["model_dir"], given["serve_args"], flags) for name, flags in own.items()]
    return found + [parse_case(text) for text in (*given["cases"], *given["urls"])]


def mixed_options(given: dict[str, Any]) -> RunOptions:
    """The run's options; its load has two classes. Raises InvalidInputError."""
    classes: tuple[ClassSpec, ...] = parse_mix(given["mix"], Dataset(vocab_size=given["vocab_size"]))
    if len(classes) != 2:
        raise InvalidInputError("the mix needs two classes: the chats, then the long prompts", param="mix")
    return run_options(given, ANY_TARGET, classes, retokenize=False)


def figures_of(report: ServeReport, chat: str, long: str) -> Row:
    """The figures of a turn; ``chat`` and ``long`` name the two classes of requests."""
    loads = {load.name: load for load in report.classes} | {"all": report.total}
    error = report.note if report.note == INTERRUPTED else None if report.total.successful else FAILED
    names = {"chat": chat, "long": long, "all": "all"}
    found = {name: figure(loads.get(names[part]), path) for name, (part, path) in _FIGURES.items()}
    return {**found, "report": report, "error": error}


def interference_markdown(report: Row) -> str:
    """The table for a performance page."""
    lines = [f"Load: `{report['load']}`; times in ms, medians of the rounds, the longest wait is the worst of all.", ""]
    lines += [results_table(report["summaries"], _COLUMNS, markdown=True), ""]
    errors = [f"- {run['case']}, round {run['round']}: {run['error']}" for run in report["runs"] if run["error"]]
    return "\n".join([*lines, *errors])


def plot_interference(summaries: Sequence[Row], path: Path) -> None:
    """Bars per case: chat ITL (median and P99), first tokens, tokens per second."""
    picture = new_figure(15, 4.5)
    panels = itl, ttft, tokens = picture.subplots(1, 3)
    names = [summary["case"] for summary in summaries]
    _bars(itl, summaries, (("P50", "chat_itl_p50_s"), ("P99", "chat_itl_p99_s"), ("max", "longest_wait_s")))
    _bars(ttft, summaries, (("chat P50", "chat_ttft_p50_s"), ("long P50", "long_ttft_p50_s")))
    tokens.bar(range(len(names)), [summary.get("chat_tokens_per_s") or 0 for summary in summaries])
    for panel, label in zip(panels, ("chat ITL (ms)", "time to first token (ms)", "chat tokens/s")):
        panel.set_ylabel(label)
        panel.set_xticks(range(len(names)), names, rotation=20, ha="right")
    for panel in (itl, ttft):
        heights = [bar.get_height() for bar in panel.patches if bar.get_height() > 0]
        if heights:
            panel.set_yscale("log")
            panel.set_ylim(bottom=min(heights) / 2)
        panel.legend()
    save_figure(picture, path)


def _bars(panel: Any, summaries: Sequence[Row], series: Sequence[tuple[str, str]]) -> None:
    width = 0.8 / len(series)
    for at, (label, field) in enumerate(series):
        heights = [(summary.get(field) or 0) * 1e3 for summary in summaries]
        places = [place + (at - (len(series) - 1) / 2) * width for place in range(len(summaries))]
        panel.bar(places, heights, width, label=label)
