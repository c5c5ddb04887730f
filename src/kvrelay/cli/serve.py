"""``kvrelay serve``: one command to a running system."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import click
from click.core import ParameterSource

from kvrelay.cli.help import GroupedCommand
from kvrelay.cli.options import (
    Command,
    SettingsSource,
    engine_option,
    kv_transfer_option,
    model_argument,
    served_name_option,
    settings_options,
)
from kvrelay.cli.processes import FRONTEND_SETTINGS, WORKER_SETTINGS, run_async
from kvrelay.config import FrontendConfig, RouterConfig, UpstreamConfig, WorkerConfig, WorkerRole
from kvrelay.core.cores import threads_each
from kvrelay.errors import ConfigError

MAX_RANKS = 64
MAX_BLOCK_SIZE = 1024


PER_KIND = {
    "tp": ("Tensor-parallel ranks", MAX_RANKS),
    "pp": ("Pipeline stages", MAX_RANKS),
    "dp": ("Data-parallel ranks", MAX_RANKS),
    "block_size": ("Tokens per KV block", MAX_BLOCK_SIZE),
}
"""What the two kinds of workers may have differently, and the most of it."""
KINDS = {"prefill": "a prefill worker", "decode": "a decode or aggregated worker"}


def kind_options(command: Command) -> Command:
    """An option for one kind of worker; without it --tp, --pp, --dp and --block-size hold for both kinds."""
    for (setting, (what, most)), (kind, whose) in reversed([*itertools.product(PER_KIND.items(), KINDS.items())]):
        flag = "--" + setting.replace("_", "-")
        text = f"{what} of {whose}.  [default: {flag}]"
        names = (f"{flag}-{kind}", f"{setting}_{kind}")
        command = click.option(*names, type=click.IntRange(1, most), default=None, help=text)(command)
    return command


SERVE_SETTINGS = (*FRONTEND_SETTINGS, *(cls for cls in WORKER_SETTINGS if cls not in FRONTEND_SETTINGS))


EVERYDAY = (
    *("num_prefill", "num_decode", "num_frontends", "tp_prefill", "tp_decode", "engine_kind", "served_model_name"),
    *("host", "port", "api_key", "api_keys_file", "tls_cert", "tls_key", "tool_call_parser", "reasoning_parser"),
    *("max_num_seqs", "max_model_len", "kv_cache_memory", "dtype", "device", "num_threads", "tp", "transport"),
    *("disagg_policy", "control", "config_file"),
)
"""What ``--help`` lists."""


@click.command(cls=GroupedCommand, everyday=EVERYDAY)
@model_argument
@click.option("--prefill", "num_prefill", default=1, type=click.IntRange(0, 64), help="Prefill workers; 0: aggregated.")
@click.option("--decode", "num_decode", default=1, type=click.IntRange(1, 64), help="Decode workers.")
@kind_options
@click.option("--frontends", "num_frontends", default=1, type=click.IntRange(1, 64), help="Frontend processes.")
@engine_option
@served_name_option
@click.option(
    "--planner",
    type=click.Choice(["off", "suggest", "act"]),
    default="suggest",
    help="suggest: kvrelay plan shows which roles should change; act: they do.",
)
@click.option(
    "--max-workers",
    default=0,
    type=click.IntRange(0, 4096),
    help="Workers that a planner in mode act may have here at once; 0: it starts and stops none.",
)
@click.option(
    "--min-workers",
    default=1,
    type=click.IntRange(0, 4096),
    help="Fewest workers that --planner act leaves; 0: all stop when idle, and the next request starts one.",
)
@click.option("--quiet-s", type=click.FloatRange(1.0), default=300.0, help="--min-workers 0: idle s until all stop.")
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
    num_prefill: int,
    num_decode: int,
    num_frontends: int,
    planner: str,
    max_workers: int,
    min_workers: int,
    quiet_s: float,
    nats_dir: Path | None,
    start_timeout: float,
    drain_timeout: float,
    config_file: Path | None,
    **flags: Any,
) -> None:
    """Serve MODEL (a checkpoint directory or hub id; default: the bundled one) on this machine.

    Example: kvrelay serve ./model --prefill 1 --decode 1 --port 8000

    \b
    kvrelay serve                                  the bundled model, 1 prefill and 1 decode worker
    kvrelay serve ./model --decode 2 --tp 2        two decode workers, two ranks each
    kvrelay serve ./model --prefill 0              aggregated: one worker does both
    kvrelay serve ./model --engine vllm            vLLM computes
    """
    from kvrelay.launch.serve import ServeConfig, run_serve

    if min_workers != 1 and not max_workers:
        raise click.UsageError("--min-workers says how many workers a planner leaves; give --max-workers, too")
    source = SettingsSource(SERVE_SETTINGS, config_file, flags)
    common, frontend = source.worker(), source.build(FrontendConfig)
    upstreams = _upstreams(common)
    if upstreams:
        num_prefill, num_decode = _split_servers(upstreams, num_prefill, num_decode)
    prefill = _Kind(num_prefill, WorkerRole.PREFILL, *(flags[f"{name}_prefill"] for name in PER_KIND))
    other = WorkerRole.DECODE if num_prefill else WorkerRole.BOTH
    decode = _Kind(num_decode, other, *(flags[f"{name}_decode"] for name in PER_KIND))
    run_async(
        run_serve(
            ServeConfig(
                workers=_workers(common, (prefill, decode), upstreams, max_workers),
                kinds=_kinds(common, (prefill, decode), upstreams),
                frontend=replace(frontend, shutdown_timeout_s=min(frontend.shutdown_timeout_s, drain_timeout)),
                router=source.build(RouterConfig),
                num_frontends=num_frontends,
                planner=planner,
                max_workers=max_workers,
                min_workers=min_workers,
                quiet_s=quiet_s,
                nats_dir=nats_dir,
                start_timeout_s=start_timeout,
                drain_timeout_s=drain_timeout,
            )
        )
    )


class _Kind(NamedTuple):
    """The workers of one kind: how many, and what differs from --tp, --pp, --dp and --block-size (None: nothing)."""

    num_workers: int
    role: WorkerRole
    tp: int | None
    pp: int | None
    dp: int | None
    block_size: int | None

    def of(self, common: WorkerConfig) -> WorkerConfig:
        """What all workers of the kind share."""
        runner, group, engine = common.runner, common.group, common.engine
        return replace(
            common,
            role=self.role,
            runner=replace(runner, tp=self.tp or runner.tp, pp=self.pp or runner.pp),
            group=replace(group, dp=self.dp or group.dp),
            engine=replace(engine, block_size=self.block_size or engine.block_size),
        )


def _workers(
    common: WorkerConfig, kinds: tuple[_Kind, ...], upstreams: list[UpstreamConfig], max_workers: int
) -> tuple[WorkerConfig, ...]:
    """Kind by kind. Ports count up by the engines, of which a group has one for each rank; processors are shared out,
    those of vLLM also to workers that a planner may start. Raises ConfigError."""
    workers = [kind.of(common) for kind in kinds for _ in range(kind.num_workers)]
    num_engines = sum(worker.group.dp for worker in workers)
    num_threads = common.runner.num_threads or threads_each(num_engines)
    cores = _cores(common, max(num_engines, max_workers))
    metrics_port, kv_port = common.metrics.metrics_port, common.transfer.kv_port
    if metrics_port:
        replace(common.metrics, metrics_port=metrics_port + num_engines - 1)
    made: list[WorkerConfig] = []
    for number, worker in enumerate(workers):
        first = sum(other.group.dp for other in made)
        first_kv = sum(other.group.dp * other.num_kv_ports for other in made)
        made.append(
            replace(
                worker,
                runner=replace(worker.runner, num_threads=num_threads),
                transfer=replace(worker.transfer, kv_port=kv_port and kv_port + first_kv),
                metrics=replace(worker.metrics, metrics_port=metrics_port and metrics_port + first),
                upstream=upstreams[number] if upstreams else worker.upstream,
                vllm=replace(worker.vllm, engine_cores=",".join(cores[first : first + worker.group.dp])),
            )
        )
    return tuple(made)


def _kinds(
    common: WorkerConfig, kinds: tuple[_Kind, _Kind], upstreams: list[UpstreamConfig]
) -> tuple[WorkerConfig, WorkerConfig]:
    """What workers of each kind share that a planner wants."""
    num_threads = common.runner.num_threads or threads_each(sum(kind.num_workers for kind in kinds))
    upstream = upstreams[0] if upstreams else common.upstream
    common = replace(common, runner=replace(common.runner, num_threads=num_threads), upstream=upstream)
    return kinds[0].of(common), kinds[1].of(common)


def _upstreams(common: WorkerConfig) -> list[UpstreamConfig]:
    """One for each worker: ``--upstream`` is a list here. Raises ConfigError."""
    engine_kind, settings = common.engine_kind, common.upstream
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


def _cores(common: WorkerConfig, num_engines: int) -> list[str]:
    """Those of each engine with vLLM, named as for ``engine_cores``. Raises ConfigError."""
    if common.engine_kind != "vllm":
        return []
    from kvrelay.engines.vllm.cores import shares

    return shares(common.vllm.engine_cores, num_engines)
