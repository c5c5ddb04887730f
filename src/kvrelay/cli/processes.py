"""``kvrelay worker`` and ``kvrelay frontend``: the processes of a cluster. ``serve`` starts the same processes."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import click

from kvrelay.cli.grouped_help import GroupedCommand
from kvrelay.cli.options import (
    SettingsSource,
    engine_option,
    kv_transfer_option,
    model_argument,
    served_name_option,
    settings_options,
)
from kvrelay.config import (
    ControlConfig,
    DisaggConfig,
    EngineConfig,
    FrontendConfig,
    MetricsConfig,
    MockConfig,
    RouterConfig,
    RunnerConfig,
    TransferConfig,
    UpstreamConfig,
)

T = TypeVar("T")

WORKER_SETTINGS = (
    EngineConfig,
    RunnerConfig,
    TransferConfig,
    ControlConfig,
    DisaggConfig,
    MetricsConfig,
    MockConfig,
    UpstreamConfig,
)
FRONTEND_SETTINGS = (FrontendConfig, RouterConfig, ControlConfig)


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
    """Run one worker: an engine that joins a cluster.

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
    )
    run_async(run_worker(options))


@click.command(cls=GroupedCommand)
@settings_options(*FRONTEND_SETTINGS)
def frontend(config_file: Path | None, **flags: object) -> None:
    """Run one frontend: the OpenAI API of a cluster.

    Example: kvrelay frontend --control nats://10.0.0.1:4222 --port 8000
    """
    from kvrelay.launch.frontend_process import run_frontend_process

    source = SettingsSource(FRONTEND_SETTINGS, config_file, flags)
    run_async(
        run_frontend_process(source.build(FrontendConfig), source.build(RouterConfig), source.build(ControlConfig))
    )
