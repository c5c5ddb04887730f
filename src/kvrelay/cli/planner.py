"""``kvrelay planner``, the process that plans, and ``kvrelay plan``, which shows and steers it."""

from __future__ import annotations

import json
from pathlib import Path

import click

from kvrelay.cli.cluster import ClusterChoice, cluster_options
from kvrelay.cli.help import GroupedCommand
from kvrelay.cli.options import SettingsSource, json_option, settings_options
from kvrelay.cli.processes import run_async
from kvrelay.config import ControlConfig, DisaggConfig

_PATH = click.Path(dir_okay=False, path_type=Path)
_DEFAULTS = DisaggConfig()


@click.command(cls=GroupedCommand)
@click.option(
    "--mode",
    type=click.Choice(["suggest", "act"]),
    default="suggest",
    help="suggest: say what should change; act: change roles, and numbers where there are hosts of workers.",
)
@click.option("--slo-ttft-ms", type=click.FloatRange(1.0), default=_DEFAULTS.slo_ttft_ms, help="First token, ms.")
@click.option("--slo-itl-ms", type=click.FloatRange(1.0), default=_DEFAULTS.itl_ms, help="Between tokens, ms.")
@click.option(
    "--min-workers", type=click.IntRange(0, 4096), default=1, help="Fewest workers; 0: an idle cluster has none."
)
@click.option("--quiet-s", type=click.FloatRange(1.0), default=300.0, help="--min-workers 0: idle s until all stop.")
@click.option("--interval", type=click.FloatRange(0.1), default=2.0, help="Seconds between two decisions.")
@click.option("--log-file", type=_PATH, help="Log of decisions; default: planner-NAMESPACE.jsonl of your state.")
@click.option(
    "--hook",
    default="",
    metavar="COMMAND",
    help="Sees to the number of workers, e.g. for Slurm or Kubernetes: gets the wanted counts as JSON on its standard "
    "input. Default: hosts of workers do (serve --max-workers, kvrelay agent).",
)
@click.option(
    "--max-workers", type=click.IntRange(0, 4096), default=0, help="--hook: workers that may run at once; 0: no change."
)
@settings_options(ControlConfig)
def planner(
    hook: str,
    max_workers: int,
    mode: str,
    slo_ttft_ms: float,
    slo_itl_ms: float,
    min_workers: int,
    quiet_s: float,
    interval: float,
    log_file: Path | None,
    config_file: Path | None,
    **flags: object,
) -> None:
    """Run a planner of a cluster. kvrelay serve starts one; of several one decides.

    Example: kvrelay planner --control nats://127.0.0.1:4222 --mode act
    """
    from kvrelay.config.loading import state_directories
    from kvrelay.launch.planner_process import PlannerConfig, run_planner
    from kvrelay.planner import Objectives

    control = SettingsSource((ControlConfig,), config_file, flags).build(ControlConfig)
    objectives = Objectives(ttft_s=slo_ttft_ms / 1e3, itl_s=slo_itl_ms / 1e3, min_workers=min_workers, quiet_s=quiet_s)
    log = log_file or state_directories()[-1] / f"planner-{control.namespace}.jsonl"
    config = PlannerConfig(mode, objectives, interval, log_file=log, hook=hook, max_workers=max_workers)
    run_async(run_planner(config, control))


@click.group(name="plan", invoke_without_command=True)
@json_option
@cluster_options
@click.pass_context
def plan_group(ctx: click.Context, /, as_json: bool, where: ClusterChoice) -> None:
    """Show what the planner would do now, and why.

    Example: kvrelay plan
    """
    if ctx.invoked_subcommand is not None:
        return
    from kvrelay.launch.planner_admin import planner_reports, reports_text

    reports = run_async(planner_reports(where.control()))
    click.echo(json.dumps(reports) if as_json else reports_text(reports))


@plan_group.command(cls=GroupedCommand)
@cluster_options
def pause(where: ClusterChoice) -> None:
    """Let planners only suggest.

    Example: kvrelay plan pause
    """
    from kvrelay.launch import planner_admin

    click.echo(run_async(planner_admin.pause(where.control())))


@plan_group.command(cls=GroupedCommand)
@cluster_options
def resume(where: ClusterChoice) -> None:
    """Let planners in mode act change the cluster again.

    Example: kvrelay plan resume
    """
    from kvrelay.launch import planner_admin

    click.echo(run_async(planner_admin.resume(where.control())))


@plan_group.command(cls=GroupedCommand)
@click.argument("what")
@cluster_options
def hold(what: str, where: ClusterChoice) -> None:
    """Keep WHAT as it is: a worker, or "count": no worker is started or stopped.

    Example: kvrelay plan hold count
    """
    from kvrelay.launch import planner_admin

    click.echo(run_async(planner_admin.hold(where.control(), what)))


@plan_group.command(cls=GroupedCommand)
@click.argument("what")
@cluster_options
def release(what: str, where: ClusterChoice) -> None:
    """Give WHAT back to the planner: a worker whose role was set by hand, or "count".

    Example: kvrelay plan release worker-0a1b2c3d4e
    """
    from kvrelay.launch import planner_admin

    click.echo(run_async(planner_admin.release(where.control(), what)))


@plan_group.command(cls=GroupedCommand)
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def replay(file: Path) -> None:
    """Plan every decision of a log again; fail if one comes out differently.

    Example: kvrelay plan replay planner-default.jsonl
    """
    from kvrelay.launch.planner_admin import replay_log

    click.echo(replay_log(file))
