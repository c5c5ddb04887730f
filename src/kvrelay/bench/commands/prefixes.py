"""``kvrelay bench prefixes``: the prefix repetition of conversation files and traces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from kvrelay.bench.commands.options import FILE

_FORMATS = ("auto", "sharegpt", "lmsys", "dolly", "messages", "text", "mooncake")


@click.command("prefixes")
@click.argument("files", nargs=-1, required=True, type=FILE)
@click.option("--format", "fmt", type=click.Choice(_FORMATS), default="auto", show_default=True)
@click.option("--min-count", type=int, default=10, show_default=True, help="Fewest uses of a shared prefix.")
@click.option(
    "--min-length", type=int, help="Prefixes are longer than this.  [default: 120 chars, 30 tokens, 0 blocks]"
)
@click.option("--unit", type=click.Choice(["chars", "tokens"]), default="chars", show_default=True)
@click.option("--tokenizer", type=FILE, help="tokenizer.json or its directory, for --unit tokens; default: none.")
@click.option("--first-turn-only", is_flag=True, help="Up to the first thing that a user says.")
@click.option("--top", type=int, default=10, show_default=True, help="How many of the most used to show.")
@click.option("--block-size", type=int, help="Units in a cache block.  [default: 128 chars, 32 tokens]")
@click.option("--cache-blocks", default="", metavar="N,N,...", help="Sizes of LRU caches to replay through.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
@click.option("--plot", type=FILE, help="Draw lengths, uses and hit ratios; default: none.")
def prefixes_command(files: tuple[Path, ...], as_json: bool, plot: Path | None, **given: Any) -> None:
    """How much of a set of conversations begins with prefixes that many of them share.

    Reads ShareGPT JSON, LMSYS-chat-1M parquet, dolly-15k JSONL, OpenAI messages JSONL, plain text lines and Mooncake
    traces (by hash ids, 512 tokens each).

    \b
    Example: kvrelay bench prefixes conversations.jsonl --min-count 10 --cache-blocks 1000,10000
    """
    from kvrelay.bench.formats import FileFormat
    from kvrelay.bench.given import numbers
    from kvrelay.bench.prefixes.measure import PrefixOptions, Unit, measure_prefixes
    from kvrelay.bench.prefixes.render import plot_prefixes, prefixes_text
    from kvrelay.bench.progress import progress_bar
    from kvrelay.bench.report.files import print_result
    from kvrelay.errors import InvalidInputError

    sizes = numbers(given.pop("cache_blocks"), "--cache-blocks")
    if any(size != int(size) for size in sizes):
        raise InvalidInputError("--cache-blocks: a cache has a whole number of blocks")
    options = PrefixOptions(
        unit=Unit(given.pop("unit")),
        fmt=FileFormat(given.pop("fmt")),
        cache_blocks=tuple(int(size) for size in sizes),
        **given,
    )
    with progress_bar() as bar:
        measurement = measure_prefixes(files, options, bar)
    print_result(measurement.report, prefixes_text(measurement.report), as_json)
    if plot is not None:
        plot_prefixes(measurement, plot)
