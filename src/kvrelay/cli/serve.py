"""``kvrelay serve``: one command to a running system."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import click
from click.core import ParameterSource

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
from kvrelay.cli.processes import FRONTEND_SETTINGS, WORKER_SETTINGS, run_async
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
from kvrelay.errors import ConfigError

Command = TypeVar("Command", bound=Callable[..., Any])

MAX_RANKS = 64
MAX_BLOCK_SIZE = 1024


def kind_option(name: str, help_text: str, most: int = MAX_RANKS) -> Callable[[Command], Command]:
    """An option for one kind of worker; without it --tp, --pp and --block-size hold for both kinds."""
    flag = "--" + name.replace("_", "-")
    whole = f"{help_text}  [default: {flag.rpartition('-')[0]}]"
    return click.option(flag, name, type=click.IntRange(1, most), default=None, help=whole)


SERVE_SETTINGS = (*FRONTEND_SETTINGS, *(cls for cls in WORKER_SETTINGS if cls not in FRONTEND_SETTINGS))


@click.command(cls=GroupedCommand)
@model_argument
@click.option("--prefill", "num_prefill", default=1, type=click.IntRange(0, 64), help="Prefill workers; 0: aggregated.")
@click.option("--decode", "num_decode", default=1, type=click.IntRange(1, 64), help="Decode workers.")
@kind_option("tp_prefill", "Tensor-parallel ranks of a prefill worker")
@kind_option("pp_prefill", "Pipeline stages of a prefill worker")
@kind_option("tp_decode", "Tensor-parallel ranks of a decode or aggregated worker")
@kind_option("pp_decode", "Pipeline stages of a decode or aggregated worker")
@kind_option("dp_prefill", "Data-parallel ranks of a prefill worker")
@kind_option("dp_decode", "Data-parallel ranks of a decode or aggregated worker")
@kind_option("block_size_prefill", "Tokens per KV block of a prefill worker", MAX_BLOCK_SIZE)
@kind_option("block_size_decode", "Tokens per KV block of a decode or aggregated worker", MAX_BLOCK_SIZE)
@click.option("--frontends", "num_frontends", default=1, type=click.IntRange(1, 64), help="Frontend processes.")
@engine_option
@served_name_option
@click.option(
    "--nats-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Data directory of the NATS server; default: temporary.",
)
@click.option(
    "--start-timeout", default=300.0, type=click.FloatRange(1.0), help="Seconds until all processes must be ready."
)
@click.option(
    "--drain-timeout", default=30.0, type=click.FloatRange(0.0), help="Seconds to finish open requests on shutdown."
)
@kv_transfer_option(is_serve=True)
@settings_options(*SERVE_SETTINGS, exclude=("dp_rank", "dp_address"))
def serve(
    model: str | None,
    num_prefill: int,
    num_decode: int,
    tp_prefill: int | None,
    pp_prefill: int | None,
    tp_decode: int | None,
    pp_decode: int | None,
    dp_prefill: int | None,
    dp_decode: int | None,
    block_size_prefill: int | None,
    block_size_decode: int | None,
    num_frontends: int,
    engine_kind: str,
    served_model_name: str | None,
    nats_dir: Path | None,
    start_timeout: float,
    drain_timeout: float,
    config_file: Path | None,
    **flags: object,
) -> None:
    """Serve MODEL (a checkpoint directory or hub id; default: the bundled one) on this machine.

    Example: kvrelay serve ./model --prefill 1 --decode 1 --port 8000
    """
    from kvrelay.launch.models import resolve_model, served_name
    from kvrelay.launch.serve import ServeOptions, run_serve

    source = SettingsSource(SERVE_SETTINGS, config_file, flags)
    path = resolve_model(model)
    upstreams = _upstreams(engine_kind, source.build(UpstreamConfig))
    if upstreams:
        num_prefill, num_decode = _split_servers(upstreams, num_prefill, num_decode)
    prefill = _Kind(num_prefill, tp_prefill, pp_prefill, dp_prefill, block_size_prefill)
    decode = _Kind(num_decode, tp_decode, pp_decode, dp_decode, block_size_decode)
    num_engines = sum(kind.num_workers * (kind.dp or source.build(GroupConfig).dp) for kind in (prefill, decode))
    control, frontend = source.build(ControlConfig), source.build(FrontendConfig)
    run_async(
        run_serve(
            ServeOptions(
                model_path=path,
                model_name=served_name(path, served_model_name),
                num_prefill=num_prefill,
                num_decode=num_decode,
                num_engines=num_engines,
                num_frontends=num_frontends,
                frontend=frontend,
                control=control,
                metrics=source.build(MetricsConfig),
                worker_flags=_worker_flags(source, engine_kind, (prefill, decode), num_engines, upstreams),
                frontend_flags=_frontend_flags(source, frontend, drain_timeout),
                control_flags=settings_to_flags(control, skip=("control", "discovery")),
                nats_dir=nats_dir,
                start_timeout_s=start_timeout,
                drain_timeout_s=drain_timeout,
            )
        )
    )


class _Kind(NamedTuple):
    """The workers of one kind: how many, and what differs from --tp, --pp, --dp and --block-size (None: nothing)."""

    num_workers: int
    tp: int | None
    pp: int | None
    dp: int | None
    block_size: int | None

    def flags(self, runner: RunnerConfig, engine: EngineConfig) -> list[str]:
        """Those that all workers of the kind share."""
        own = replace(runner, tp=self.tp or runner.tp, pp=self.pp or runner.pp)
        return settings_to_flags(own) + settings_to_flags(
            replace(engine, block_size=self.block_size or engine.block_size)
        )


def _worker_flags(
    source: SettingsSource,
    engine_kind: str,
    kinds: tuple[_Kind, ...],
    num_engines: int,
    upstreams: list[UpstreamConfig],
) -> list[list[str]]:
    """The command line of each worker, kind by kind. ``num_engines`` counts every data-parallel rank. Raises
    ConfigError."""
    from kvrelay.launch.serve import available_cores

    runner = source.build(RunnerConfig)
    if runner.num_threads == 0:
        runner = source.build(RunnerConfig, num_threads=max(1, available_cores() // num_engines))
    engine, group, metrics = source.build(EngineConfig), source.build(GroupConfig), source.build(MetricsConfig)
    transfer = source.build(TransferConfig)
    of_all = ["--engine", engine_kind]
    of_all += settings_to_flags(replace(transfer, kv_port=0)) + settings_to_flags(source.build(DisaggConfig))
    if engine_kind == "mock":
        of_all += settings_to_flags(source.build(MockConfig))
    groups = [replace(group, dp=kind.dp or group.dp) for kind in kinds for _ in range(kind.num_workers)]
    of_kinds = [flags for kind in kinds for flags in [kind.flags(runner, engine)] * kind.num_workers]
    first_engines = [sum(each.dp for each in groups[:number]) for number in range(len(groups))]
    vllm = source.build(VllmConfig)
    vllms = _vllms(vllm, num_engines) if engine_kind == "vllm" else []
    return [
        of_all
        + of_kinds[number]
        + (settings_to_flags(upstreams[number]) if upstreams else [])
        + (settings_to_flags(vllms[number]) if vllms else [])
        + settings_to_flags(groups[number])
        + (["--kv-port", str(transfer.kv_port + first_engines[number])] if transfer.kv_port else [])
        + flags
        for number, flags in enumerate(_metrics_flags(metrics, first_engines, num_engines))
    ]


def _frontend_flags(source: SettingsSource, frontend: FrontendConfig, drain_timeout_s: float) -> list[str]:
    own = replace(frontend, shutdown_timeout_s=min(frontend.shutdown_timeout_s, drain_timeout_s))
    flags = settings_to_flags(own, skip=("port", "api_key"))
    return flags + settings_to_flags(source.build(RouterConfig)) + settings_to_flags(source.build(DisaggConfig))


def _upstreams(engine_kind: str, settings: UpstreamConfig) -> list[UpstreamConfig]:
    """One for each worker: ``--upstream`` is a list here. Raises ConfigError."""
    urls = [url.strip() for url in settings.upstream.split(",") if url.strip()]
    if engine_kind == "openai" and not urls:
        raise ConfigError("--engine openai needs --upstream URL[,URL...], the servers that compute", param="upstream")
    if engine_kind != "openai" and urls:
        raise ConfigError(f"--upstream is for --engine openai, not for {engine_kind}", param="upstream")
    return [replace(settings, upstream=url) for url in urls]


def _split_servers(upstreams: list[UpstreamConfig], num_prefill: int, num_decode: int) -> tuple[int, int]:
    """The numbers of workers in front of servers: the first servers prefill. Raises ConfigError for numbers that were
    asked for and do not fit."""
    num_upstreams = len(upstreams)
    given = click.get_current_context().get_parameter_source
    if upstreams[0].upstream_kv_transfer != "none":
        if num_prefill + num_decode != num_upstreams or not num_decode:
            raise ConfigError(
                f"--upstream names {num_upstreams} servers, --prefill {num_prefill} --decode {num_decode} need one for "
                "each worker",
                param="upstream",
            )
        return num_prefill, num_decode
    is_split = given("num_prefill") is not ParameterSource.DEFAULT and num_prefill
    if is_split or (given("num_decode") is not ParameterSource.DEFAULT and num_decode != num_upstreams):
        raise ConfigError(
            f"--engine openai has one aggregated worker for each server: leave out --prefill {num_prefill} --decode "
            f"{num_decode}",
            param="prefill",
        )
    return 0, num_upstreams


def _vllms(settings: VllmConfig, num_workers: int) -> list[VllmConfig]:
    """One for each worker, with cores of its own. Raises ConfigError."""
    from kvrelay.engines.vllm.cores import compute_cores, format_cores, share_of
    from kvrelay.launch.serve import allowed_cores

    cores = compute_cores(settings.engine_cores, allowed_cores(), 0)
    return [
        replace(settings, engine_cores=format_cores(share_of(cores, number, num_workers)))
        for number in range(num_workers)
    ]


def _metrics_flags(metrics: MetricsConfig, first_engines: list[int], num_engines: int) -> list[list[str]]:
    """Consecutive ports, one per engine; a group of data-parallel ranks gets its first. Raises ConfigError if there are
    not enough."""
    if not metrics.metrics_port:
        return [[] for _ in first_engines]
    replace(metrics, metrics_port=metrics.metrics_port + num_engines - 1)
    return [settings_to_flags(replace(metrics, metrics_port=metrics.metrics_port + first)) for first in first_engines]
