"""``kvrelay worker`` and ``kvrelay frontend``: the processes of a cluster. ``serve`` starts the same processes."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import click

from kvrelay.cli.help import GroupedCommand
from kvrelay.cli.options import (
    SettingsSource,
    engine_option,
    kv_transfer_option,
    model_argument,
    ready_line_option,
    served_name_option,
    settings_options,
)
from kvrelay.config import ControlConfig, DisaggConfig, FrontendConfig, MetricsConfig, RouterConfig, WorkerRole
from kvrelay.config.worker import WORKER_SECTIONS
from kvrelay.errors import ConfigError

T = TypeVar("T")

WORKER_SETTINGS = tuple(WORKER_SECTIONS.values())
FRONTEND_SETTINGS = (FrontendConfig, RouterConfig, ControlConfig, DisaggConfig, MetricsConfig)


def run_async(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run to the end on uvloop and return the result."""
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(coroutine)


EVERYDAY_WORKER = (
    *("role", "engine_kind", "served_model_name", "worker_host", "worker_port", "control", "namespace", "metrics_port"),
    *("max_num_seqs", "max_num_batched_tokens", "max_model_len", "kv_cache_memory", "block_size", "dtype", "device"),
    *("num_threads", "tp", "pp", "dp", "ep", "transport", "ucx_tls", "ucx_net_devices", "disagg_policy", "config_file"),
)
WORKER_PORT = ("metrics_port", "metrics_host")
"""A frontend has its own port."""
EVERYDAY_FRONTEND = (
    *("host", "port", "api_key", "api_keys_file", "requests_per_minute", "tls_cert", "tls_key", "max_body_bytes"),
    *("max_waiting_requests", "request_timeout_s", "allowed_origins", "access_log", "tool_call_parser"),
    *("reasoning_parser", "shutdown_timeout_s", "router", "order", "control", "discovery", "namespace", "config_file"),
)


@click.command(cls=GroupedCommand, everyday=EVERYDAY_WORKER)
@model_argument
@click.option("--role", type=click.Choice(["prefill", "decode", "both"]), default="both", help="Initial role.")
@engine_option
@served_name_option
@click.option("--worker-host", default="127.0.0.1", help="Address that frontends and peers connect to.")
@click.option("--worker-port", default=0, type=click.IntRange(0, 65535), help="Request-plane port; 0: ephemeral.")
@click.option(
    "--record-steps",
    default="",
    metavar="FILE",
    help="File for the engine's steps, prompts included, for kvrelay simulate --verify. Default: none.",
)
@ready_line_option
@kv_transfer_option(is_serve=False)
@settings_options(*WORKER_SETTINGS)
def worker(
    role: str,
    worker_host: str,
    worker_port: int,
    record_steps: str,
    announces: bool,
    config_file: Path | None,
    **flags: object,
) -> None:
    """Run one worker: an engine that joins a cluster. With --dp N a group of N workers.

    Example: kvrelay worker ./model --control nats://10.0.0.1:4222 --role prefill
    """
    from kvrelay.launch.dp_group import run_group
    from kvrelay.launch.worker_process import run_worker

    config = replace(
        SettingsSource(WORKER_SETTINGS, config_file, flags).worker(),
        role=WorkerRole(role),
        host=worker_host,
        port=worker_port,
        record_steps=record_steps,
    )
    if config.record_steps and config.group.dp > 1:
        raise ConfigError("--record-steps records one engine; leave out --dp", param="record_steps")
    if config.group.is_whole:
        sys.exit(run_async(run_group(config, announces=announces)))
    run_async(run_worker(config, announces=announces))


@click.command(cls=GroupedCommand, everyday=("slots", "drain_timeout", *EVERYDAY_WORKER))
@model_argument
@click.option("--slots", default=1, type=click.IntRange(1, 4096), help="Workers that may run here at once.")
@click.option(
    "--drain-timeout", default=30.0, type=click.FloatRange(0.0), help="Seconds that workers get to end, when this ends."
)
@engine_option
@served_name_option
@click.option("--worker-host", default="127.0.0.1", help="Address that frontends and peers connect to.")
@settings_options(*WORKER_SETTINGS)
def agent(slots: int, drain_timeout: float, worker_host: str, config_file: Path | None, **flags: object) -> None:
    """Offer slots for workers on this host: a planner in mode act fills them. Model, flags and slots are fixed here;
    the network names only roles.

    Example: kvrelay agent ./model --slots 4 --control nats://10.0.0.1:4222 --worker-host 10.0.0.7
    """
    from kvrelay.launch.worker_host import run_agent

    config = SettingsSource(WORKER_SETTINGS, config_file, flags).worker()
    if config.group.dp > 1:
        raise ConfigError("an agent starts single workers; leave out --dp", param="dp")
    run_async(run_agent(replace(config, host=worker_host), slots, drain_timeout))


@click.command(cls=GroupedCommand, everyday=EVERYDAY_FRONTEND)
@ready_line_option
@settings_options(*FRONTEND_SETTINGS, exclude=WORKER_PORT)
def frontend(announces: bool, config_file: Path | None, **flags: object) -> None:
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
            source.build(MetricsConfig),
            announces=announces,
        )
    )
