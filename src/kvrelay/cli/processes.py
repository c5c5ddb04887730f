"""``kvrelay worker`` and ``kvrelay frontend``: the processes of a cluster. ``serve`` starts the same processes."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kvrelay.cli.grouped_help import GroupedCommand
from kvrelay.cli.options import (
    SettingsSource,
    engine_option,
    kv_transfer_option,
    model_argument,
    served_name_option,
    settings_options,
    settings_to_flags,
)
from kvrelay.config import (
    ControlConfig,
    DisaggConfig,
    EngineConfig,
    FrontendConfig,
    GroupConfig,
    MetricsConfig,
    MockConfig,
    RouterConfig,
    RunnerConfig,
    TransferConfig,
    UpstreamConfig,
    VllmConfig,
)

if TYPE_CHECKING:
    from kvrelay.launch.worker_process import WorkerOptions

T = TypeVar("T")

WORKER_SETTINGS = (
    EngineConfig,
    RunnerConfig,
    GroupConfig,
    TransferConfig,
    ControlConfig,
    DisaggConfig,
    MetricsConfig,
    MockConfig,
    UpstreamConfig,
    VllmConfig,
)
FRONTEND_SETTINGS = (FrontendConfig, RouterConfig, ControlConfig, DisaggConfig)


def run_async(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run to the end on uvloop and return the result."""
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(coroutine)


@click.command(cls=GroupedCommand)
@model_argument
@click.option("--role", type=click.Choice(["prefill", "decode", "both"]), default="both", help="What it does at first.")
@engine_option
@served_name_option
@click.option("--worker-host", default="127.0.0.1", help="Address that frontends and peers connect to.")
@click.option("--worker-port", default=0, type=click.IntRange(0, 65535), help="Request-plane port; 0: ephemeral.")
@kv_transfer_option(is_serve=False)
@settings_options(*WORKER_SETTINGS)
def worker(
    model: str | None,
    role: str,
    engine_kind: str,
    served_model_name: str | None,
    worker_host: str,
    worker_port: int,
    config_file: Path | None,
    **flags: object,
) -> None:
    """Run one worker: an engine that joins a cluster. With --dp N a group of N workers.

    Example: kvrelay worker ./model --control nats://10.0.0.1:4222 --role prefill
    """
    from kvrelay.core.workers import WorkerRole
    from kvrelay.launch.models import resolve_model, served_name
    from kvrelay.launch.worker_process import WorkerOptions, run_worker

    source = SettingsSource(WORKER_SETTINGS, config_file, flags)
    path = resolve_model(model)
    options = WorkerOptions(
        model_path=path,
        model_name=served_name(path, served_model_name),
        role=WorkerRole(role),
        engine_kind=engine_kind,
        host=worker_host,
        port=worker_port,
        engine=source.build(EngineConfig),
        runner=source.build(RunnerConfig),
        transfer=source.build(TransferConfig),
        control=source.build(ControlConfig),
        disagg=source.build(DisaggConfig),
        mock=source.build(MockConfig),
        metrics=source.build(MetricsConfig),
        upstream=source.build(UpstreamConfig),
        vllm=source.build(VllmConfig),
        group=source.build(GroupConfig),
    )
    if options.group.dp > 1 and options.group.dp_rank < 0:
        _run_group(options)
    else:
        run_async(run_worker(options))


def _run_group(options: WorkerOptions) -> None:
    """All ranks of a data-parallel group, as child processes."""
    from kvrelay.config.loading import environment_with
    from kvrelay.launch.dp_group import GroupOptions, run_group
    from kvrelay.launch.serve import available_cores

    runner, group = options.runner, options.group
    threads = runner.num_threads or max(1, available_cores() // group.dp)
    arguments = [str(options.model_path), "--served-model-name", options.model_name, "--role", str(options.role)]
    arguments += ["--engine", options.engine_kind, "--worker-host", options.host]
    for settings in (
        options.engine,
        replace(runner, num_threads=threads),
        group,
        replace(options.transfer, kv_port=0),
        options.disagg,
        options.mock,
        options.upstream,
        options.vllm,
    ):
        arguments += settings_to_flags(settings)
    arguments += settings_to_flags(options.control, skip=("control", "discovery"))
    arguments += settings_to_flags(options.metrics, skip=("metrics_port",))
    group_options = GroupOptions(
        arguments,
        environment_with(control=options.control.control, discovery=options.control.discovery),
        num_ranks=group.dp,
        num_devices=runner.num_ranks,
        worker_port=options.port,
        metrics_port=options.metrics.metrics_port,
        kv_port=options.transfer.kv_port,
    )
    code = run_async(run_group(group_options))
    if code:
        sys.exit(code)


@click.command(cls=GroupedCommand)
@settings_options(*FRONTEND_SETTINGS)
def frontend(config_file: Path | None, **flags: object) -> None:
    """Run one frontend: the OpenAI API of a cluster.

    Example: kvrelay frontend --control nats://10.0.0.1:4222 --port 8000
    """
    from kvrelay.launch.frontend_process import run_frontend_process

    source = SettingsSource(FRONTEND_SETTINGS, config_file, flags)
    run_async(
        run_frontend_process(
            source.build(FrontendConfig),
            source.build(RouterConfig),
            source.build(ControlConfig),
            source.build(DisaggConfig),
        )
    )
