"""Prefixes that a given data set repeats, beside published values, what caches of several sizes would hit, and the data
set as a load."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec

from kvrelay.bench.formats import FileFormat, detect_format
from kvrelay.bench.load.request import LocalTokenizer
from kvrelay.bench.prefixes.measure import PrefixOptions, PrefixReport, measure_prefixes
from kvrelay.errors import InvalidInputError
from kvrelay.evaluate.calibration import CLIENTS, Basis
from kvrelay.evaluate.effects import GAP_P99, TOKENS, TTFT_P90, Row, effects, points_of
from kvrelay.evaluate.findings import Line, Plot, Section, Table
from kvrelay.evaluate.load import Point, conversations_load
from kvrelay.evaluate.plan import Wish
from kvrelay.evaluate.shown import comparison
from kvrelay.evaluate.workbench import REPLICAS, SPLIT, Workbench
from kvrelay.simulate.advise import Advice

NAME = "prefixes"
CACHE_BLOCKS = (1_000, 10_000, 100_000)
SECONDS = 10.0
CASES = (REPLICAS, SPLIT)
POINT = Point(f"{CLIENTS} clients", concurrency=CLIENTS)
PUBLISHED = {
    FileFormat.DOLLY: ("dolly-15k", "nearly none", "two prefixes, with 11 and 15 uses"),
    FileFormat.LMSYS: ("LMSYS-chat-1M", "about 5 % of the conversations", "30 to 40 uses, mean length about 300"),
    FileFormat.SHAREGPT: ("ShareGPT", "about 2 %", "mean length about 4,000"),
}
"""What others have measured of data sets in these formats: name, repetition, and the shared prefixes."""


def wishes(bench: Workbench, basis: Basis) -> list[Wish]:
    return [Wish(case_of(path), len(CASES), (POINT,), SECONDS) for path in bench.options.datasets]


def take(bench: Workbench, basis: Basis, advice: Advice) -> list[Section]:
    """None without a data set."""
    reports = [
        msgspec.convert(bench.journal.take(case_of(path), partial(_measured, bench, path)), PrefixReport)
        for path in bench.options.datasets
    ]
    found = [section_of(reports, [_format(path) for path in bench.options.datasets])] if reports else []
    return found + [_as_load(bench, basis, path) for path in bench.options.datasets]


def case_of(path: Path) -> str:
    """Another file under the same name is another case."""
    with path.open("rb") as file:
        return f"{NAME} / {path} {hashlib.file_digest(file, 'sha256').hexdigest()[:12]}"


def _format(path: Path) -> FileFormat | None:
    """None for one that only its content tells."""
    try:
        return detect_format(path)
    except InvalidInputError:
        return None


def _as_load(bench: Workbench, basis: Basis, path: Path) -> Section:
    """Both arrangements with the data set's own prompts and lengths."""
    try:
        load = conversations_load(path, LocalTokenizer(bench.options.model_path).encode, bench.load)
    except InvalidInputError as exc:
        return Section(f"{path.name} as a load", f"Not measured: {exc.message}", "")
    own = bench.calibrated(bench.options, load, basis.shortened, bench.pace)
    rows = own.rows(case_of(path), CASES, [POINT])
    about = (
        f"{len(load.arrivals)} conversations up to their last answer, {load.mean_prompt:.0f} prompt and "
        f"{load.mean_answer:.0f} answer tokens on average, {load.num_shortened} of them shortened to the context. "
        "Tokens are exchanged for others, one for one, so prompts share what they share in the file. Times in "
        "milliseconds."
    )
    return load_section(path.name, about, rows)


def load_section(name: str, about: str, rows: Sequence[Row]) -> Section:
    found = effects(rows, (TTFT_P90, GAP_P99, TOKENS), REPLICAS.name, [SPLIT.name], points_of(rows))
    return comparison(f"{name} as a load", about, rows, found)


def _measured(bench: Workbench, path: Path) -> PrefixReport:
    with bench.bar.part(f"{NAME}: {path.name}", SECONDS):
        return measure_prefixes((path,), PrefixOptions(cache_blocks=CACHE_BLOCKS), bench.bar).report


def section_of(reports: Sequence[PrefixReport], formats: Sequence[FileFormat | None] = ()) -> Section:
    """``formats``: of the data sets, for the published values beside them."""
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
        (
            Table(("data set", "conversations", "shared prefixes", "repetition", "covered", *sizes), tuple(rows)),
            *published_table(formats),
        ),
        (Plot("Hits over the cache's size", "blocks", "share of blocks", tuple(lines)),),
    )


def published_table(formats: Sequence[FileFormat | None]) -> tuple[Table, ...]:
    """Of the formats for which there are values."""
    rows = [PUBLISHED[one] for one in PUBLISHED if one in formats]
    return (Table(("published for", "repetition", "prefixes"), tuple(rows)),) if rows else ()
