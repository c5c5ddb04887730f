"""``kvrelay worker`` and ``kvrelay frontend``: the processes of a cluster. ``serve`` starts the same processes."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from dataclasses import replace
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
from kvrelay.config import ControlConfig, DisaggConfig, FrontendConfig, RouterConfig, WorkerRole
from kvrelay.config.worker import WORKER_SECTIONS

T = TypeVar("T")

WORKER_SETTINGS = tuple(WORKER_SECTIONS.values())
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
    from kvrelay.launch.dp_group import run_group
    from kvrelay.launch.worker_process import run_worker

    config = replace(
        SettingsSource(WORKER_SETTINGS, config_file, flags).worker(model, served_model_name, engine_kind),
        role=WorkerRole(role),
        host=worker_host,
        port=worker_port,
    )
    if config.group.is_whole:
        sys.exit(run_async(run_group(config)))
    run_async(run_worker(config))


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
