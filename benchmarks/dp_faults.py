"""How long a data-parallel group with spread experts takes to end when one of its processes is killed or stopped.

Each fault strikes a running group, once while it is idle and once while streams run. The time is from the signal until
no process of the group is left. ``serve`` then starts the group again, and the next fault waits for that.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import click
import psutil
from tests.chaos.answers import KnownPrompt
from tests.chaos.client import ChaosClient
from tests.chaos.cluster import ClusterUnderTest

from benchmarks.dp_group import group_cluster, group_option
from kvrelay.bench.report.files import print_result
from kvrelay.bench.report.machine import describe_machine
from kvrelay.bench.report.table import Row, results_table
from kvrelay.cli.options import json_option
from kvrelay.cli.processes import run_async
from kvrelay.errors import FatalError, KvrelayError
from kvrelay.launch.admin import cluster_status

NUM_OUTPUTS = 40
NUM_CLIENTS = 4
BUSY_S = 1.0
"""How long streams run before the fault."""
END_TIMEOUT_S = 60.0
INTERVAL_S = 16.0
"""``serve`` gives up a worker that crashes five times within a minute."""
REASON = re.compile(r"rank \d[^\n]*(?:was killed|hangs|has ended|has failed)[^\n]*")


Pick = Callable[[dict[int, psutil.Process]], psutil.Process]
FAULTS: tuple[tuple[str, signal.Signals, Pick], ...] = (
    ("worker of the last rank killed", signal.SIGKILL, lambda ranks: ranks[max(ranks)]),
    ("worker of the last rank stopped", signal.SIGSTOP, lambda ranks: ranks[max(ranks)]),
    ("worker of rank 0, the coordinator, stopped", signal.SIGSTOP, lambda ranks: ranks[0]),
    ("rank process of the last rank killed", signal.SIGKILL, lambda ranks: ranks[max(ranks)].children()[0]),
    ("rank process of the last rank stopped", signal.SIGSTOP, lambda ranks: ranks[max(ranks)].children()[0]),
)


_COLUMNS = {"fault": "fault", "group": "group", "ended after, s": "seconds:.2f", "reason": "reason"}


@click.command()
@group_option
@click.option("--rank-timeout-s", default=3.0, type=click.FloatRange(0.2), help="Of the group.")
@json_option
def dp_faults(ranks: int, rank_timeout_s: float, as_json: bool) -> None:
    """Processes of a group are killed and stopped, idle and under load: how soon it has ended.

    Example: python -m benchmarks dp-faults
    """
    report = run_async(run_fault_benchmark(ranks, rank_timeout_s))
    print_result(report, results_table(report["faults"], _COLUMNS, left=2), as_json)


async def run_fault_benchmark(num_ranks: int, rank_timeout_s: float) -> Row:
    """Raises FatalError if the group does not start, does not end, or does not come back."""
    from kvrelay.executors.torch.checkpoints import make_model

    with tempfile.TemporaryDirectory(prefix="kvrelay-bench-") as directory:
        model = Path(directory) / "mixtral"
        await asyncio.to_thread(make_model, model, "mixtral", "tiny", dtype="float32")
        cluster = group_cluster(model, num_ranks, rank_timeout_s)
        found = []
        async with cluster, ChaosClient(cluster.url, cluster.model) as client:
            for name, number, pick in FAULTS:
                for is_busy in (False, True):
                    begin_s = time.monotonic()
                    ranks = await _whole_group(cluster, num_ranks)
                    found.append(await _strike(cluster, client, name, number, pick(ranks), is_busy))
                    await asyncio.sleep(begin_s + INTERVAL_S - time.monotonic())
    about: Row = {"machine": describe_machine(), "num_ranks": num_ranks}
    return {**about, "rank_timeout_s": rank_timeout_s, "faults": found}


async def _strike(
    cluster: ClusterUnderTest,
    client: ChaosClient,
    name: str,
    number: signal.Signals,
    victim: psutil.Process,
    is_busy: bool,
) -> Row:
    """``seconds``: from the signal until no process of the group was left. ``reason``: the first that a rank gave."""
    group, known = cluster.worker_processes(), len(cluster.log)
    stop = asyncio.Event()
    prompt = KnownPrompt((16, 17, 18), NUM_OUTPUTS, stream=True)
    num_clients = NUM_CLIENTS if is_busy else 0
    asking = [asyncio.ensure_future(client.keep_asking(lambda _: prompt, 0, stop)) for _ in range(num_clients)]
    await asyncio.sleep(BUSY_S)
    begin_s = time.monotonic()
    os.kill(victim.pid, number)
    while any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in group):
        if time.monotonic() > begin_s + END_TIMEOUT_S:
            raise FatalError(f"{name}: the group has not ended within {END_TIMEOUT_S:g} s")
        await asyncio.sleep(0.02)
    seconds = time.monotonic() - begin_s
    stop.set()
    await asyncio.gather(*asking)
    reason = REASON.search(cluster.log[known:])
    state = "streams" if is_busy else "idle"
    return {"fault": name, "group": state, "seconds": seconds, "reason": reason.group() if reason else ""}


async def _whole_group(cluster: ClusterUnderTest, num_ranks: int) -> dict[int, psutil.Process]:
    """The worker process of each rank, once all are in discovery and answer. Raises FatalError."""
    deadline_s = time.monotonic() + cluster.heal_timeout_s + END_TIMEOUT_S
    while time.monotonic() < deadline_s:
        workers: list[Row] = []
        with suppress(KvrelayError):  # a busy machine's control server may be late
            workers = (await cluster_status(cluster.control))["workers"]
        alive = {each.pid: each for each in cluster.worker_processes()}
        ranks = {each["dp_rank"]: alive[each["pid"]] for each in workers if each.get("pid") in alive}
        if len(ranks) == num_ranks == len(workers):
            return ranks
        await asyncio.sleep(0.1)
    raise FatalError("the group has not come back")
