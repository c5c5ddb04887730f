"""``kvrelay bench engine``: offline throughput of the engine."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click

from kvrelay.cli.options import SettingsSource, json_option, model_argument, settings_options
from kvrelay.config import EngineConfig, RunnerConfig

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
@json_option
@settings_options(*SETTINGS, exclude=ADMISSION)
def bench_engine(
    model: str | None,
    num_prompts: int,
    input_len: int,
    output_len: int,
    runs: int,
    load_seed: int,
    as_json: bool,
    config_file: Path | None,
    **flags: object,
) -> None:
    """Run a batch of random prompts through the engine, in this process, without any server.

    Example: kvrelay bench engine ./model --num-prompts 128 --input-len 128 --output-len 64
    """
    from kvrelay.bench.parts.engine import EngineLoad, run_engine_benchmark
    from kvrelay.bench.report.files import print_result
    from kvrelay.bench.report.table import table
    from kvrelay.launch.models import resolve_model

    source = SettingsSource(SETTINGS, config_file, flags)
    runner = source.build(RunnerConfig)
    engine = source.build(EngineConfig, max_num_waiting=num_prompts, kv_watermark=0)
    path = resolve_model(model)
    report = run_engine_benchmark(path, runner, engine, EngineLoad(num_prompts, input_len, output_len, load_seed), runs)
    rows = [(name, f"{value:,.4g}" if value < 1000 else f"{value:,.0f}") for name, value in report.items()]
    settings = {"model": path.name, "runner": dataclasses.asdict(runner), "engine": dataclasses.asdict(engine)}
    print_result(report | settings, table((f"engine, {path.name}, {runner.dtype}", ""), rows), as_json)
