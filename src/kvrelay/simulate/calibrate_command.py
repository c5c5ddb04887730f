"""``kvrelay simulate calibrate``: costs.json from a running cluster."""

from __future__ import annotations

import platform
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvrelay.cli.cluster import ClusterChoice, cluster_options
from kvrelay.cli.help import GroupedCommand
from kvrelay.cli.processes import run_async
from kvrelay.config import ControlConfig, WorkerRole

if TYPE_CHECKING:
    from kvrelay.bench.client.connection import Target
    from kvrelay.simulate.calibrate import Calibration, Phase


@click.command("calibrate", cls=GroupedCommand)
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), default="costs.json", help="File to write.")
@click.option("--url", help="Frontend; default: that of the cluster that you run on this machine.")
@click.option("--api-key", help="API key of the frontend; default: none.")
@click.option("--machine", default=platform.node, show_default="this host's name", help="Name of the machine.")
@click.option("--streams", type=click.IntRange(2, 1000), default=32, help="Requests for each length.")
@click.option("--short", type=click.IntRange(1), default=64, help="Tokens of the short prompts.")
@click.option("--long", "long_length", type=click.IntRange(2), default=1024, help="Tokens of the long prompts.")
@click.option("--seed", type=click.IntRange(0), default=0, help="Seed of the prompts.")
@cluster_options
def calibrate_command(
    output: Path,
    url: str | None,
    api_key: str | None,
    machine: str,
    streams: int,
    short: int,
    long_length: int,
    seed: int,
    where: ClusterChoice,
) -> None:
    """Fit costs from live workers and a small load, which needs an otherwise idle cluster.

    For a part of the load the run-time setting disagg.disagg_policy is `always`.

    Example: kvrelay simulate calibrate --output costs.json --machine "8 x H100"
    """
    from kvrelay.bench.client.connection import parse_target
    from kvrelay.bench.report.files import write_text
    from kvrelay.simulate.costs import encode_costs

    if long_length <= short:
        raise click.UsageError("--long must be above --short: the difference tells bandwidth and overhead apart")
    target = parse_target(url or where.found().url, api_key)
    found = run_async(calibrate(where.control(), target, machine, (short, long_length), streams, seed))
    write_text(output, encode_costs(found.costs).decode())
    click.echo(f"wrote {output}: {found.costs.model} on {machine}")
    if found.is_step_estimated:
        click.echo("step: an estimate by what answers show, since these engines tell no steps")
    if found.not_measured:
        click.echo(f"not measured, so the defaults are in it: {', '.join(found.not_measured)}")


async def calibrate(
    control: ControlConfig, target: Target, machine: str, lengths: tuple[int, int], num_streams: int, seed: int
) -> Calibration:
    """Send the small load to an idle cluster, and fit. ``lengths``: of prompts, in tokens. Raises BenchError,
    InvalidInputError."""
    from kvrelay.bench.client.connection import ConnectionPool
    from kvrelay.launch.admin import cluster_status
    from kvrelay.simulate.calibrate import Counters, counters_of, fit, read_status
    from kvrelay.simulate.probe import frontend_sender, keep_busy, probe

    workers = read_status(await cluster_status(control))

    async def count() -> Counters:
        return counters_of(read_status(await cluster_status(control)))

    async with ConnectionPool(target) as pool:
        send = frontend_sender(pool, workers[0].model)
        phases = await probe(send, count, lengths, num_streams, seed)
        remote = await probe_remote(control, lambda: probe(send, count, lengths, num_streams, seed + 2))
        alone = read_status(await cluster_status(control))
        await keep_busy(send, lengths, len(alone), num_streams, seed)
    return fit(alone, phases, machine, read_status(await cluster_status(control)), remote)


async def probe_remote(control: ControlConfig, measure: Callable[[], Awaitable[list[Phase]]]) -> list[Phase]:
    """What ``measure`` finds while all prefills are remote, which by cost few prompts of an idle cluster are; nothing
    without prefill workers and workers that take requests."""
    from kvrelay.control.base import Keys
    from kvrelay.launch.admin import DISAGG_PREFIX, cluster_status
    from kvrelay.launch.request_plane import connected
    from kvrelay.simulate.probe import all_remote

    async def policies() -> set[str]:
        workers = (await cluster_status(control))["workers"]
        answering = [worker for worker in workers if "error" not in worker]
        return {worker["disagg"]["disagg_policy"] for worker in answering if worker["role"] != WorkerRole.PREFILL}

    roles = {worker["role"] for worker in (await cluster_status(control))["workers"]}
    if not {WorkerRole.PREFILL, WorkerRole.DECODE} <= roles:
        return []
    async with connected(control) as plane:
        key = Keys(control.namespace).config_value(f"{DISAGG_PREFIX}disagg_policy")
        async with all_remote(plane.discovery, key, policies):
            return await measure()
