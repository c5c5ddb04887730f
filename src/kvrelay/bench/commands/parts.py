"""``kvrelay bench engine``, ``transfer`` and ``prefixes``: measured in this process, without a server."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click

from kvrelay.bench.commands.options import FILE
from kvrelay.cli.options import SettingsSource, all_of, json_option, model_argument, settings_options
from kvrelay.config import EngineConfig, RunnerConfig, TransferConfig

SETTINGS = (EngineConfig, RunnerConfig)
ADMISSION = ("max_num_waiting", "kv_watermark")
"""Not to be set: the whole batch is there at once, and nothing of it may be refused."""


batch_options = all_of(
    model_argument,
    click.option("--num-prompts", default=128, type=click.IntRange(1, 100_000), help="Prompts in the batch."),
    click.option("--input-len", default=128, type=click.IntRange(1), help="Tokens per prompt."),
    click.option("--output-len", default=64, type=click.IntRange(1), help="Tokens per answer."),
    click.option("--runs", default=3, type=click.IntRange(1, 1000), help="Timed passes; the median is reported."),
    click.option("--load-seed", default=0, type=int, help="Seed of the prompts."),
    json_option,
    settings_options(*SETTINGS, exclude=ADMISSION),
)
"""A model, its engine, and the batch that goes through it; ``benchmarks.engine_turns`` has them, too."""


def run_batch(measure: Any, title: str, given: dict[str, Any]) -> None:
    """Print what ``measure(path, runner, engine, load, num_runs)`` reports of the batch that the options describe."""
    from kvrelay.bench.engine import BatchLoad, engine_text
    from kvrelay.bench.report.files import print_result
    from kvrelay.launch.models import resolve_model

    load = BatchLoad(*(given.pop(name) for name in ("num_prompts", "input_len", "output_len", "load_seed")))
    model, num_runs, as_json = (given.pop(name) for name in ("model", "runs", "as_json"))
    source = SettingsSource(SETTINGS, given.pop("config_file"), given)
    runner = source.build(RunnerConfig)
    engine = source.build(EngineConfig, max_num_waiting=load.num_prompts, kv_watermark=0)
    path = resolve_model(model)
    report = measure(path, runner, engine, load, num_runs)
    settings = {"model": path.name, "runner": dataclasses.asdict(runner), "engine": dataclasses.asdict(engine)}
    print_result(report | settings, engine_text(f"{title}, {path.name}, {runner.dtype}", report), as_json)


@click.command("engine")
@batch_options
def bench_engine(**given: Any) -> None:
    """Run a batch of random prompts through the engine, in this process, without any server.

    \b
    Example: kvrelay bench engine ./model --num-prompts 128 --input-len 128 --output-len 64
    """
    from kvrelay.bench.engine import run_engine_benchmark

    run_batch(run_engine_benchmark, "engine", given)


@click.command("transfer")
@click.option("--total-mib", default=64, type=click.IntRange(8, 16384), help="MiB moved per round.")
@click.option("--rounds", default=7, type=click.IntRange(1, 1000), help="Rounds; the median is reported.")
@json_option
@settings_options(TransferConfig, exclude=("kv_checksums",))
def bench_transfer(total_mib: int, rounds: int, as_json: bool, config_file: Path | None, **flags: object) -> None:
    """Read and write a pool of another process on this machine, in pieces of several sizes, beside a plain memcpy.

    \b
    Example: kvrelay bench transfer --total-mib 256
    """
    from kvrelay.bench.report.files import print_result
    from kvrelay.bench.transfer import run_transfer_benchmark, transfer_text

    config = SettingsSource((TransferConfig,), config_file, flags).build(TransferConfig)
    result = run_transfer_benchmark(config, total_bytes=total_mib * 2**20, num_rounds=rounds)
    print_result(result, transfer_text(result), as_json)


_FORMATS = ("auto", "sharegpt", "lmsys", "dolly", "messages", "text", "mooncake")


@click.command("prefixes")
@click.argument("files", nargs=-1, required=True, type=FILE)
@click.option("--format", "fmt", type=click.Choice(_FORMATS), default="auto")
@click.option("--min-count", type=int, default=10, help="Fewest uses of a shared prefix.")
@click.option(
    "--min-length", type=int, help="Prefixes are longer than this.  [default: 120 chars, 30 tokens, 0 blocks]"
)
@click.option("--unit", type=click.Choice(["chars", "tokens"]), default="chars")
@click.option("--tokenizer", type=FILE, help="tokenizer.json or its directory, for --unit tokens; default: none.")
@click.option("--first-turn-only", is_flag=True, help="Up to the first thing that a user says.")
@click.option("--top", type=int, default=10, help="How many of the most used to show.")
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
    from kvrelay.bench.prefixes.measure import PrefixOptions, Unit, measure_prefixes, plot_prefixes, prefixes_text
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
