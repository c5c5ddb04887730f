"""``kvrelay bench engine`` and ``transfer``: parts of the system, in this process."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click

from kvrelay.bench.commands.options import moved_option
from kvrelay.cli.options import SettingsSource, json_option, model_argument, settings_options
from kvrelay.config import EngineConfig, RunnerConfig, TransferConfig

SETTINGS = (EngineConfig, RunnerConfig)
ADMISSION = ("max_num_waiting", "kv_watermark")
"""Not to be set: the whole batch is there at once, and nothing of it may be refused."""


@click.command("engine")
@model_argument
@click.option("--num-prompts", default=128, type=click.IntRange(1, 100_000), help="Prompts in the batch.")
@click.option("--input-len", default=128, type=click.IntRange(1), help="Tokens per prompt.")
@click.option("--output-len", default=64, type=click.IntRange(1), help="Tokens per answer.")
@click.option("--runs", default=3, type=click.IntRange(1, 1000), help="Timed passes; the median is reported.")
@click.option("--load-seed", default=0, type=int, help="Seed of the prompts.")
@click.option("--structured", is_flag=True, help="Free and grammar-bound passes in turns; reports the cost.")
@click.option(
    "--beside-one-process", is_flag=True, help="With --tp or --pp: in turns with one process of as many threads."
)
@json_option
@settings_options(*SETTINGS, exclude=ADMISSION)
def bench_engine(
    model: str | None, structured: bool, beside_one_process: bool, as_json: bool, config_file: Path | None, **given: Any
) -> None:
    """Run a batch of random prompts through the engine, in this process, without any server.

    \b
    Example: kvrelay bench engine ./model --num-prompts 128 --input-len 128 --output-len 64
             kvrelay bench engine --tp 2 --num-threads 2 --beside-one-process
    """
    from kvrelay.bench.engine import (
        BatchLoad,
        engine_text,
        run_engine_benchmark,
        run_ranks_benchmark,
        run_structured_benchmark,
    )
    from kvrelay.bench.report.files import print_result
    from kvrelay.launch.models import resolve_model

    load = BatchLoad(*(given.pop(name) for name in ("num_prompts", "input_len", "output_len", "load_seed")))
    num_runs = given.pop("runs")
    source = SettingsSource(SETTINGS, config_file, given)
    runner = source.build(RunnerConfig)
    engine = source.build(EngineConfig, max_num_waiting=load.num_prompts, kv_watermark=0)
    path = resolve_model(model)
    run = run_ranks_benchmark if beside_one_process else run_engine_benchmark
    if structured:
        run = run_structured_benchmark
    report = run(path, runner, engine, load, num_runs)
    settings = {"model": path.name, "runner": dataclasses.asdict(runner), "engine": dataclasses.asdict(engine)}
    print_result(report | settings, engine_text(f"engine, {path.name}, {runner.dtype}", report), as_json)


@click.command("transfer")
@click.option("--total-mib", default=64, type=click.IntRange(8, 16384), help="MiB moved per round.")
@click.option("--rounds", default=7, type=click.IntRange(1, 1000), help="Rounds; the median is reported.")
@moved_option("--beside-compute", "hand-off", is_flag=True)
@moved_option("--stream-mib-s", "hand-off")
@moved_option("--peers", "p2p-peers", is_flag=True)
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
