"""Pictures without a display. matplotlib is loaded on demand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
import numpy as np

from kvrelay.bench.errors import MissingPackageError
from kvrelay.bench.report.metrics import Outcome, RequestRecord, RunResult
from kvrelay.errors import InvalidInputError

_T = TypeVar("_T")


def new_figure(width: float, height: float) -> Any:
    """An empty figure of that many inches. Raises MissingPackageError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as exc:
        raise MissingPackageError("matplotlib", "plotting") from exc
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Any, path: Path) -> None:
    """Write the figure; the name's ending chooses the format. An ending that is no picture format is refused."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as exc:
        raise InvalidInputError(f"cannot write the plot {path}: {exc}", param="plot") from exc


def plot_beside(plot: Callable[[_T, Path], None], report: _T, path: Path) -> None:
    """Draw an optional picture; without matplotlib, print a note and continue."""
    try:
        plot(report, path)
    except MissingPackageError as exc:
        click.echo(f"no plot: {exc.message}", err=True)


_MAX_TIMELINE = 400
_COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown")


def plot_run(title: str, result: RunResult, path: Path) -> None:
    """Four panels: TTFT and ITL as cumulative shares, the requests as bars, tokens per second."""
    figure = new_figure(13, 8)
    figure.suptitle(title)
    (ttft, itl), (timeline, throughput) = figure.subplots(2, 2)
    names = sorted({record.class_name for record in result.records})
    for name, colour in zip(names, _COLOURS * len(names)):
        good = [r for r in result.records if r.class_name == name and r.outcome is Outcome.OK]
        _share(ttft, [value for r in good if (value := r.ttft_s) is not None], name, colour)
        _share(itl, np.concatenate([np.empty(0), *(r.itl_s() for r in good)]).tolist(), name, colour)
        _timeline(timeline, [r for r in result.records if r.class_name == name], result.start_ns, colour)
        _throughput(throughput, good, result, name, colour)
    ttft.set(xlabel="time to first token (ms)", ylabel="share of requests")
    itl.set(xlabel="inter-token latency (ms)", ylabel="share of tokens")
    timeline.set(xlabel="time (s)", ylabel="request", title="dot: first token")
    throughput.set(xlabel="time (s)", ylabel="output tokens/s", ylim=(0, None))
    for panel in (ttft, itl, throughput):
        if names:
            panel.legend()
    save_figure(figure, path)


def _share(panel: Any, values_s: Sequence[float], name: str, colour: str) -> None:
    ordered = np.sort(np.asarray(values_s, np.float64)) * 1e3
    if ordered.size:
        panel.plot(ordered, np.arange(1, ordered.size + 1) / ordered.size, label=name, color=colour)
        if ordered[-1] > 20 * max(ordered[0], 1e-3):
            panel.set_xscale("log")


def _timeline(panel: Any, records: Sequence[RequestRecord], start_ns: int, colour: str) -> None:
    shown = sorted(records, key=lambda record: record.sent_ns)[:_MAX_TIMELINE]
    base = len(panel.patches)
    rows = np.arange(base, base + len(shown))
    starts = [(record.sent_ns - start_ns) / 1e9 for record in shown]
    panel.barh(rows, [record.e2e_s for record in shown], left=starts, color=colour, alpha=0.5)
    firsts = [(row, begin + ttft) for row, begin, r in zip(rows, starts, shown) if (ttft := r.ttft_s) is not None]
    panel.plot([when for _, when in firsts], [row for row, _ in firsts], ".", color=colour, markersize=3)


def _throughput(panel: Any, records: Sequence[RequestRecord], result: RunResult, name: str, colour: str) -> None:
    stamps = np.array([stamp for record in records for stamp in record.stamps_ns], np.float64)
    tokens = np.array([count for record in records for count in record.tokens], np.float64)
    if not stamps.size:
        return
    seconds = (stamps - result.start_ns) / 1e9
    width = max(0.25, float(seconds.max()) / 60)
    edges = np.arange(0, float(seconds.max()) + width, width)
    rates, _ = np.histogram(seconds, edges, weights=tokens)
    panel.plot(edges[:-1] + width / 2, rates / width, label=name, color=colour)
