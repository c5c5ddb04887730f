"""The repetition measure over files: read, pack, find, summarise; and its report as tables and as a picture.

It reports the ratio ``shared prefixes / conversations``, and the share of conversations that begin with one of these
prefixes, which is the share that a cache can hit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path

import msgspec
import numpy as np

from kvrelay.bench.formats import FileFormat, detect_format, read_conversations, read_mooncake
from kvrelay.bench.load.request import LocalTokenizer
from kvrelay.bench.prefixes.blocks import CacheHits, chained_blocks, hit_ratios
from kvrelay.bench.prefixes.radix import PackedSequences, SharedPrefixNode, shared_prefixes
from kvrelay.bench.progress import ProgressBar
from kvrelay.bench.report.metrics import Distribution, distribution
from kvrelay.bench.report.plots import new_figure, save_figure
from kvrelay.bench.report.table import table
from kvrelay.errors import InvalidInputError

_SHOWN_CHARS = 160


class Unit(StrEnum):
    """The unit of lengths. ``BLOCKS`` is for traces, whose hash ids stand for blocks of 512 tokens."""

    CHARS = "chars"
    TOKENS = "tokens"
    BLOCKS = "blocks"


_DEFAULTS = {Unit.CHARS: (120, 128), Unit.TOKENS: (30, 32), Unit.BLOCKS: (0, 1)}
_ITEM_BYTES = {Unit.CHARS: 0, Unit.TOKENS: 4, Unit.BLOCKS: 8}


class PrefixOptions(msgspec.Struct, frozen=True):
    """The options. ``min_length`` and ``block_size`` are in units; None takes the unit's default."""

    min_count: int = 10
    min_length: int | None = None
    unit: Unit = Unit.CHARS
    tokenizer: Path | None = None
    first_turn_only: bool = False
    top: int = 10
    block_size: int | None = None
    cache_blocks: tuple[int, ...] = ()
    fmt: FileFormat = FileFormat.AUTO


class TopPrefix(msgspec.Struct, frozen=True):
    """A shared prefix: uses, length in units, and its beginning as text (or as ids)."""

    count: int
    length: int
    text: str


class PrefixReport(msgspec.Struct, frozen=True):
    """The result. ``repetition`` is shared prefixes over conversations, ``covered`` conversations with one over all."""

    files: tuple[str, ...]
    conversations: int
    unit: Unit
    min_count: int
    min_length: int
    shared_prefixes: int
    repetition: float
    covered: float
    lengths: Distribution | None
    uses: Distribution | None
    top: tuple[TopPrefix, ...]
    block_size: int
    num_blocks: int
    caches: tuple[CacheHits, ...]


class PrefixMeasurement(msgspec.Struct, frozen=True):
    """The report, and the lengths and uses of the shared prefixes for a plot."""

    report: PrefixReport
    lengths: tuple[int, ...]
    uses: tuple[int, ...]


def measure_prefixes(files: tuple[Path, ...], options: PrefixOptions, bar: ProgressBar) -> PrefixMeasurement:
    """Measure all files as one set. Raises InvalidInputError for malformed files."""
    is_trace = _all_traces(files, options.fmt)
    unit = Unit.BLOCKS if is_trace else options.unit
    default_length, default_block = _DEFAULTS[unit]
    min_length = default_length if options.min_length is None else options.min_length
    block_size = default_block if options.block_size is None else options.block_size
    if min_length < 0 or block_size < 1 or options.top < 0:
        raise InvalidInputError("lengths, block sizes and counts must not be negative")
    requests: list[tuple[int, ...]] = []
    sequences = _trace_bytes(files, requests) if is_trace else _text_bytes(files, options, unit, block_size, requests)
    bar.stage("reading")
    content = list(bar.count(sequences))
    bar.stage("sorting, comparing neighbours", 1.0)
    packed = PackedSequences(content, _ITEM_BYTES[unit], bar.update)
    del content
    nodes = shared_prefixes(packed, options.min_count, min_length)
    bar.stage("replaying through caches")
    lengths, uses = tuple(node.length for node in nodes), tuple(node.count for node in nodes)
    report = PrefixReport(
        files=tuple(file.name for file in files),
        conversations=len(packed),
        unit=unit,
        min_count=options.min_count,
        min_length=min_length,
        shared_prefixes=len(nodes),
        repetition=len(nodes) / len(packed),
        covered=sum(uses) / len(packed),
        lengths=distribution(lengths),
        uses=distribution(uses),
        top=_top(nodes, options.top, unit),
        block_size=block_size,
        num_blocks=sum(map(len, requests)),
        caches=hit_ratios(requests, options.cache_blocks),
    )
    return PrefixMeasurement(report, lengths, uses)


def _all_traces(files: tuple[Path, ...], fmt: FileFormat) -> bool:
    kinds = {(detect_format(file) if fmt is FileFormat.AUTO else fmt) is FileFormat.MOONCAKE for file in files}
    if len(kinds) != 1:
        raise InvalidInputError("traces and conversations cannot be measured as one set")
    return kinds.pop()


def _trace_bytes(files: tuple[Path, ...], requests: list[tuple[int, ...]]) -> Iterator[bytes]:
    for file in files:
        for record in read_mooncake(file):
            requests.append(record.hash_ids)
            try:
                yield np.array(record.hash_ids, ">u8").tobytes()
            except OverflowError as exc:
                raise InvalidInputError(f"{file}: hash ids must be unsigned 64-bit numbers") from exc


def _text_bytes(
    files: tuple[Path, ...], options: PrefixOptions, unit: Unit, block_size: int, requests: list[tuple[int, ...]]
) -> Iterator[bytes]:
    encode = _encoder(options, unit)
    for file in files:
        for conversation in read_conversations(file, options.fmt):
            text = conversation.text(first_turn_only=options.first_turn_only)
            packed = encode(text)
            # Blocks have a fixed number of characters, so the text is cut in an encoding of fixed width.
            fixed = text.encode("utf-32-le", "surrogatepass") if unit is Unit.CHARS else packed
            requests.append(chained_blocks(fixed, 4 * block_size))
            yield packed


def _encoder(options: PrefixOptions, unit: Unit) -> Callable[[str], bytes]:
    if unit is Unit.CHARS:
        return lambda text: text.encode("utf-8", "surrogatepass")
    if options.tokenizer is None:
        raise InvalidInputError("--unit tokens needs --tokenizer", param="tokenizer")
    tokenizer = LocalTokenizer(options.tokenizer)
    return lambda text: np.array(tokenizer.encode(text), ">u4").tobytes()


def _top(nodes: list[SharedPrefixNode], top: int, unit: Unit) -> tuple[TopPrefix, ...]:
    chosen = sorted(nodes, key=lambda node: (-node.count, -node.length, node.content))[:top]
    return tuple(TopPrefix(node.count, node.length, _shown(node.content, unit)) for node in chosen)


def _shown(content: bytes, unit: Unit) -> str:
    if unit is Unit.CHARS:
        return content.decode("utf-8", "replace")[:_SHOWN_CHARS]
    kind = ">u4" if unit is Unit.TOKENS else ">u8"
    return " ".join(map(str, np.frombuffer(content, kind)[:16].tolist()))


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
