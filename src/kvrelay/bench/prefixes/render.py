"""The prefix report as tables and as a picture."""

from __future__ import annotations

from pathlib import Path

from kvrelay.bench.prefixes.measure import PrefixMeasurement, PrefixReport, Unit
from kvrelay.bench.report.plots import new_figure, save_figure
from kvrelay.bench.report.records import Distribution
from kvrelay.bench.report.table import table


def prefixes_text(report: PrefixReport) -> str:
    """Ratio, distributions, most used prefixes and cache hit ratios."""
    unit = "blocks of 512 tokens" if report.unit is Unit.BLOCKS else report.unit.value
    rule = f"at least {report.min_count} uses, longer than {report.min_length} {unit}, none inside another"
    rows = (
        ("conversations", f"{report.conversations}"),
        ("shared prefixes", f"{report.shared_prefixes} ({rule})"),
        ("repetition (prefixes / conversations)", f"{report.repetition:.4%}"),
        ("conversations that begin with one", f"{report.covered:.4%}"),
        (f"length in {unit}", _line(report.lengths)),
        ("uses", _line(report.uses)),
    )
    texts = [table(("prefix repetition", ", ".join(report.files)), rows, left=2)]
    if report.top:
        top = [(str(prefix.count), str(prefix.length), repr(prefix.text)) for prefix in report.top]
        texts.append(table(("uses", "length", "most used: begins with"), top, left=3))
    caches = [
        ("unlimited" if cache.num_blocks is None else f"LRU {cache.num_blocks}", f"{cache.hit_ratio:.3f}")
        for cache in report.caches
    ]
    columns = (f"cache, of {report.num_blocks} blocks of {report.block_size} {unit}", "hit ratio")
    return "\n\n".join([*texts, table(columns, caches)])


def plot_prefixes(measurement: PrefixMeasurement, path: Path) -> None:
    """Draw lengths, lengths against uses, and hit ratio against cache size."""
    report = measurement.report
    figure = new_figure(12, 4)
    lengths, scatter, caches = figure.subplots(1, 3)
    lengths.hist(measurement.lengths, bins=40)
    lengths.set(xlabel=f"length of shared prefix ({report.unit.value})", ylabel="prefixes")
    scatter.plot(measurement.lengths, measurement.uses, ".", markersize=4)
    scatter.set(xlabel=f"length ({report.unit.value})", ylabel="uses")
    if measurement.uses:
        scatter.set(xscale="log", yscale="log")
    sized = [cache for cache in report.caches if cache.num_blocks is not None]
    caches.plot([cache.num_blocks for cache in sized], [cache.hit_ratio for cache in sized], "o-", label="LRU")
    caches.axhline(report.caches[0].hit_ratio, linestyle="--", color="grey", label="unlimited")
    caches.set(xlabel="cache size (blocks)", ylabel="block hit ratio", ylim=(0, 1))
    caches.legend()
    save_figure(figure, path)


def _line(values: Distribution | None) -> str:
    if values is None:
        return "-"
    return (
        f"mean {values.mean:.1f}, median {values.median:.0f}, P90 {values.p90:.0f}, "
        f"P99 {values.p99:.0f}, max {values.max:.0f}"
    )
