"""Prefixes that a given data set repeats, and what caches of several sizes would hit."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec

from kvrelay.bench.prefixes.measure import PrefixOptions, PrefixReport, measure_prefixes
from kvrelay.evaluate.calibration import Basis
from kvrelay.evaluate.findings import Line, Plot, Section, Table
from kvrelay.evaluate.workbench import Workbench
from kvrelay.simulate.advise import Advice

NAME = "prefixes"
CACHE_BLOCKS = (1_000, 10_000, 100_000)
SECONDS = 10.0


def seconds_for(bench: Workbench) -> float:
    return SECONDS * len(bench.options.datasets)


def take(bench: Workbench, basis: Basis, advice: Advice) -> list[Section]:
    """None without a data set."""
    reports = [
        msgspec.convert(bench.journal.take(f"{NAME} / {path}", partial(_measured, bench, path)), PrefixReport)
        for path in bench.options.datasets
    ]
    return [section_of(reports)] if reports else []


def _measured(bench: Workbench, path: Path) -> PrefixReport:
    with bench.bar.part(f"{NAME}: {path.name}", SECONDS):
        return measure_prefixes((path,), PrefixOptions(cache_blocks=CACHE_BLOCKS), bench.bar).report


def section_of(reports: Sequence[PrefixReport]) -> Section:
    said, rows, lines = [], [], []
    for one in reports:
        name = ", ".join(one.files)
        hits = {cache.num_blocks: cache.hit_ratio for cache in one.caches if cache.num_blocks}
        said.append(
            f"{name}: {one.covered:.0%} of {one.conversations} conversations begin with a prefix that at least "
            f"{one.min_count} of them share."
        )
        rows.append(
            (
                name,
                f"{one.conversations}",
                f"{one.shared_prefixes}",
                f"{one.repetition:.2%}",
                f"{one.covered:.1%}",
                *(f"{hits.get(size, 0.0):.1%}" for size in CACHE_BLOCKS),
            )
        )
        lines.append(Line(name, tuple((float(size), hits[size]) for size in CACHE_BLOCKS if size in hits)))
    sizes = [f"hits, {size:,} blocks" for size in CACHE_BLOCKS]
    return Section(
        "Prefixes of the data sets",
        " ".join(said),
        f"As kvrelay bench prefixes counts: shared prefixes over conversations, and blocks found in an LRU cache, in "
        f"blocks of {', '.join(dict.fromkeys(f'{one.block_size} {one.unit.value}' for one in reports))}.",
        (Table(("data set", "conversations", "shared prefixes", "repetition", "covered", *sizes), tuple(rows)),),
        (Plot("Hits over the cache's size", "blocks", "share of blocks", tuple(lines)),),
    )
