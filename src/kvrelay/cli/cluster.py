"""Operators' commands for a running cluster. Status, drain, revoke-lease, role and config find the workers in
discovery; top asks a frontend, which it finds there too."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import click

from kvrelay.cli.help import GroupedCommand
from kvrelay.cli.options import Command, SettingsSource, json_option, settings_options
from kvrelay.cli.processes import run_async
from kvrelay.config import ControlConfig, WorkerRole

if TYPE_CHECKING:
    from kvrelay.launch.clusters import RunningCluster

_NEGATIVE = re.compile(r"-\.?[0-9]")


class ClusterChoice(NamedTuple):
    """Which cluster a command is for: that of ``--cluster``, that of the control plane's flags, file and environment,
    or the one that this user runs on this machine."""

    cluster: str | None
    config_file: Path | None
    flags: dict[str, object]

    @property
    def _given(self) -> ControlConfig:
        return SettingsSource((ControlConfig,), self.config_file, self.flags).build(ControlConfig)

    def control(self) -> ControlConfig:
        """Its control plane. Raises ConfigError."""
        given = self._given
        if given.control and self.cluster is None:
            return given
        found = self.found()
        return replace(given, control=found.control, discovery=found.discovery, namespace=found.namespace)

    def frontend_url(self, url: str | None) -> str:
        """The frontend to ask: the one given, else one of the cluster. Raises ConfigError, ControlUnavailableError."""
        if url:
            return url
        given = self._given
        if given.control and self.cluster is None:
            from kvrelay.launch.admin import find_frontend

            return run_async(find_frontend(given))
        return self.found().url

    def found(self) -> RunningCluster:
        """It runs on this machine. Raises ConfigError."""
        from kvrelay.launch.clusters import choose_cluster

        namespace = self.flags.get("namespace")
        return choose_cluster(self.cluster, str(namespace) if namespace is not None else None)


def cluster_options(command: Command) -> Command:
    """Options that say which cluster; the command gets them as ``where``, a ClusterChoice."""

    @functools.wraps(command)
    def with_choice(*args: Any, cluster: str | None, config_file: Path | None, **given: Any) -> Any:
        flags = {field.name: given.pop(field.name) for field in dataclasses.fields(ControlConfig)}
        return command(*args, where=ClusterChoice(cluster, config_file, flags), **given)

    about = "Port or process id of a kvrelay serve of yours on this machine. Default: the only one."
    return settings_options(ControlConfig)(click.option("--cluster", help=about)(cast(Command, with_choice)))


@click.command(cls=GroupedCommand)
@json_option
@click.option("--watch", is_flag=True, help="Repeat every second until interrupted.")
@click.option("--check", is_flag=True, help="Check the block pools; fail unless they are whole and idle.")
@click.option("--explain", "prompt", help="Show where a frontend would send this prompt, and why; default: none.")
@click.option(
    "--explain-tokens", type=click.IntRange(1), help="--explain for a generated prompt of N tokens; default: none."
)
@click.option("--url", help="--explain: the frontend; default: one of the cluster.")
@click.option("--model", help="Model for --explain; default: the first one.")
@click.option("--api-key", help="API key of the frontend for --explain; default: none.")
@cluster_options
def status(
    as_json: bool,
    watch: bool,
    check: bool,
    prompt: str | None,
    explain_tokens: int | None,
    url: str | None,
    model: str | None,
    api_key: str | None,
    where: ClusterChoice,
) -> None:
    """Show workers with role, model, load, KV use and hand-offs; with --explain, a routing decision.

    Example: kvrelay status
    """
    from kvrelay.launch.admin import cluster_status, require_idle, status_table
    from kvrelay.launch.frontend_calls import decision_table, explain_route, made_up_prompt, understood

    asked = made_up_prompt(explain_tokens) if explain_tokens is not None else prompt
    if asked is not None and (check or (prompt is not None and explain_tokens is not None)):
        raise click.UsageError("--explain, --explain-tokens and --check exclude each other")
    # The frontend answers --explain by itself.
    frontend = where.frontend_url(url) if asked is not None else ""
    control = where.control() if asked is None else ControlConfig()

    async def show() -> None:
        if asked is not None:
            answer = await explain_route(frontend, asked, model, api_key)
            if as_json:
                click.echo(json.dumps(answer))
            else:
                with understood(frontend):
                    decision_table(answer)
            return
        report = await cluster_status(control, check=check)
        if as_json:
            click.echo(json.dumps(report))
        else:
            status_table(report)
        if check:
            require_idle(report)

    while True:
        run_async(show())
        if not watch:
            return
        time.sleep(1.0)


@click.command(cls=GroupedCommand)
@json_option
@click.option("--once", is_flag=True, help="Show it once and end; default: every second until interrupted.")
@click.option("--url", help="Frontend to ask; default: one of the cluster.")
@click.option("--api-key", help="API key, or one of --metrics-keys-file; default: none.")
@cluster_options
def top(as_json: bool, once: bool, url: str | None, api_key: str | None, where: ClusterChoice) -> None:
    """Watch a cluster: workers, queues, KV, rates, the slowest requests. The same as the page at /ui.

    Example: kvrelay top
    """
    from kvrelay.launch.top import watch

    frontend = where.frontend_url(url)
    run_async(watch(frontend, api_key, as_json=as_json, once=once))


@click.command(cls=GroupedCommand)
@click.argument("worker_id")
@cluster_options
def drain(worker_id: str, where: ClusterChoice) -> None:
    """Let WORKER_ID finish its requests, leave the cluster and exit.

    Example: kvrelay drain worker-0a1b2c3d4e
    """
    from kvrelay.launch import admin

    click.echo(json.dumps(run_async(admin.drain(where.control(), worker_id))))


@click.command("revoke-lease", cls=GroupedCommand)
@click.argument("worker_id")
@cluster_options
def revoke_lease(worker_id: str, where: ClusterChoice) -> None:
    """Take WORKER_ID out of discovery by its lease, through the control plane alone. A worker that lives drains and
    exits, as with kvrelay drain; one that hangs or is not reachable gets no more requests.

    Example: kvrelay revoke-lease worker-0a1b2c3d4e
    """
    from kvrelay.launch import admin

    click.echo(run_async(admin.revoke_lease(where.control(), worker_id)))


@click.command(cls=GroupedCommand)
@click.argument("worker_id")
@click.argument("new_role", type=click.Choice(["prefill", "decode", "both"]))
@click.option("--force", is_flag=True, help="Also for the last worker that takes requests: nothing serves then.")
@cluster_options
def role(worker_id: str, new_role: str, force: bool, where: ClusterChoice) -> None:
    """Let WORKER_ID continue as NEW_ROLE, without reloading weights. It does the new work at once; what it has begun of
    the old ends in its own time.

    Example: kvrelay role worker-0a1b2c3d4e prefill
    """
    from kvrelay.launch.admin import change_role

    control = where.control()
    click.echo(json.dumps(run_async(change_role(control, worker_id, WorkerRole(new_role), force=force))))


@click.group()
def cache() -> None:
    """Forget the prompts whose KV is cached.

    Example: kvrelay cache clear
    """


@cache.command("clear", cls=GroupedCommand)
@click.argument("directory", required=False, type=click.Path(exists=True, file_okay=False, path_type=Path))
@cluster_options
def cache_clear(directory: Path | None, where: ClusterChoice) -> None:
    """Clear the prefix caches of a running cluster, with what its host memory and disks keep. With DIRECTORY, of
    --disk-kv-cache, remove the KV there instead, of all models; no worker need run.

    Example: kvrelay cache clear /var/cache/kv
    """
    if directory is not None:
        from kvrelay.tiers.disk_index import clear_directory

        click.echo(f"removed {clear_directory(directory)} blocks")
        return
    from kvrelay.launch.admin import clear_caches

    for worker_id in run_async(clear_caches(where.control())):
        click.echo(f"{worker_id}: cleared")


@click.group()
def config() -> None:
    """Read or change a setting of a running cluster.

    Example: kvrelay config set disagg.disagg_policy threshold
    """


@config.command("get", cls=GroupedCommand)
@click.argument("key", required=False)
@cluster_options
def config_get(key: str | None, where: ClusterChoice) -> None:
    """Show KEY, or all keys that are set.

    Example: kvrelay config get
    """
    from kvrelay.launch.admin import config_get as get
    from kvrelay.launch.admin import require_settable

    if key is not None:
        require_settable(key)
    run_async(get(where.control(), key))


class TakesNegativeNumbers(GroupedCommand):
    """A command whose arguments may be negative numbers, which click would parse as options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.ignore_unknown_options = any(_NEGATIVE.match(arg) for arg in args)
        return super().parse_args(ctx, args)


@config.command("set", cls=TakesNegativeNumbers)
@click.argument("key")
@click.argument("value")
@cluster_options
def config_set(key: str, value: str, where: ClusterChoice) -> None:
    """Set KEY to VALUE in every process at once.

    Example: kvrelay config set disagg.max_prefill_queue_size 4
    """
    from kvrelay.launch.admin import checked
    from kvrelay.launch.admin import config_set as put

    checked(key, value)  # before a cluster is looked for
    run_async(put(where.control(), key, value))


@config.command("unset", cls=GroupedCommand)
@click.argument("key")
@cluster_options
def config_unset(key: str, where: ClusterChoice) -> None:
    """Let every process return to its own value of KEY.

    Example: kvrelay config unset disagg.max_prefill_queue_size
    """
    from kvrelay.launch.admin import config_unset as unset
    from kvrelay.launch.admin import require_settable

    require_settable(key)
    run_async(unset(where.control(), key))
