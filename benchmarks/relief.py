"""Relief after a shift: how soon a decode worker that is widened begins its first prefill, beside one that would first
drain. Real processes, mock engines, in turn.

    answers run on the decode workers, then prompts pile up in the prefill queue
         └─> decision ──widen──────────────────> the worker pulls its first prefill          "widened"
         └─> decision ──change to prefill──────> its answers have ended                      "drained"

A worker that drains before it opens its other door could pull its first prefill only when its answers have ended. So
the second figure is the least that drain-then-flip takes: registration and first pull come on top.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import click

from benchmarks.loads import fixed_load, print_rows, send
from kvrelay.bench.client.connection import Target, parse_target
from kvrelay.bench.report.table import Row
from kvrelay.certify.servers import Cluster, running_cluster
from kvrelay.cli.options import json_option, model_argument
from kvrelay.cli.processes import run_async
from kvrelay.config import WorkerRole
from kvrelay.control.base import Keys
from kvrelay.launch.actuators import ROLE_TIMEOUT_S, ClusterActuator
from kvrelay.launch.models import resolve_model
from kvrelay.launch.request_plane import connected
from kvrelay.launch.worker_calls import WorkerCalls, worker_calls
from kvrelay.launch.worker_host import Hosts
from kvrelay.planner import Numbers, Widen

FLAGS = (
    "--engine mock --prefill 1 --decode 2 --disagg-policy threshold --max-local-prefill-length 64 "
    "--max-prefill-queue-size 1000 --decode-base-s 0.01 --prefill-token-s 0.0005"
)
PROMPT_TOKENS = 700
"""0.35 s of a prefill worker."""
LOOK_S = 0.01
CALL_TIMEOUT_S = 10.0
WAIT_S = 60.0
TARGET_S, TARGET_SHARE = 1.0, 0.1
_COLUMNS = {"relief": "relief", "median s": "median_s:.3f", "max s": "max_s:.3f"}


@click.command()
@model_argument
@click.option("--rounds", default=5, type=click.IntRange(1, 1000), help="Turns of both.")
@click.option("--answer", default=800, type=click.IntRange(16), help="Tokens of an answer that runs at the decision.")
@json_option
def relief(model: str | None, rounds: int, answer: int, as_json: bool) -> None:
    """Seconds from a planner's decision to relief: widened beside drained.

    Example: python -m benchmarks relief --rounds 10
    """
    report = run_async(measure(model, rounds, answer))
    targets = "\n".join(
        f"target {'met' if value <= limit else 'missed'}: {name} {value:.3f} (at most {limit:g})"
        for name, (value, limit) in report["targets"].items()
    )
    print_rows(columns=_COLUMNS, as_json=as_json, after=targets, **report)


async def measure(model: str | None, num_rounds: int, answer_tokens: int) -> dict[str, Any]:
    """Both figures of each round, their medians, and the targets. Raises FatalError, BenchError."""
    found: dict[str, list[float]] = {"widened": [], "drained": []}
    seed = 0  # a new one each turn: prompts that are cached need no prefill worker
    async with AsyncExitStack() as stack:
        log = Path(stack.enter_context(TemporaryDirectory())) / "serve.log"
        running = await stack.enter_async_context(running_cluster([str(resolve_model(model)), *FLAGS.split()], log))
        cluster = await stack.enter_async_context(_opened(running))
        for number in range(num_rounds):
            for name in found if number % 2 else reversed(found):
                found[name].append(await cluster.turn(name, answer_tokens, seed))
                seed += 1
    rows: list[Row] = [
        {"relief": name, "median_s": median(values), "max_s": max(values)} for name, values in found.items()
    ]
    share = median(found["widened"]) / median(found["drained"])
    return {
        "rows": rows,
        "seconds": found,
        "targets": {
            "widened, the longest, s": (max(found["widened"]), TARGET_S),
            "widened over drained, medians": (share, TARGET_SHARE),
        },
    }


class _Cluster:
    """The running servers, with a planner's way to its workers."""

    def __init__(self, target: Target, calls: WorkerCalls, actuator: ClusterActuator) -> None:
        self._target, self._calls, self._actuator = target, calls, actuator

    async def turn(self, name: str, answer_tokens: int, seed: int) -> float:
        """Load the cluster, decide, and return the seconds until relief. Leaves an idle cluster as it was."""
        answers = fixed_load("answers", 16, answer_tokens, max_concurrency=8, num_requests=8)
        prompts = fixed_load("prompts", PROMPT_TOKENS, 2, max_concurrency=32, num_requests=32)
        async with asyncio.TaskGroup() as group:
            group.create_task(send(self._target, answers, seed=seed, warm_up=0))
            worker_id = await self._running()
            group.create_task(send(self._target, prompts, seed=seed, warm_up=0))
            await self._until_prefills_wait()
            seconds = await (self._widened(worker_id) if name == "widened" else self._drained(worker_id))
            await self._calls.ask(worker_id, "role", WorkerRole.DECODE.value, timeout_s=ROLE_TIMEOUT_S)
        return seconds

    async def _widened(self, worker_id: str) -> float:
        before = _num_pulled(await self._status(worker_id))
        start_s = time.monotonic()
        await self._actuator.apply(Widen(worker_id, "the benchmark decides", Numbers()))
        while _num_pulled(await self._status(worker_id)) == before:
            await asyncio.sleep(LOOK_S)
        return time.monotonic() - start_s

    async def _drained(self, worker_id: str) -> float:
        start_s = time.monotonic()
        await self._calls.ask(worker_id, "role", WorkerRole.PREFILL.value, timeout_s=ROLE_TIMEOUT_S)
        return time.monotonic() - start_s

    async def _running(self) -> str:
        """A decode worker, once both run answers."""
        decodes = [info.worker_id for info in self._calls.known.values() if info.role is WorkerRole.DECODE]
        async with asyncio.timeout(WAIT_S):
            while not all([(await self._status(name))["load"]["request_active_slots"] for name in decodes]):
                await asyncio.sleep(LOOK_S)
        return decodes[0]

    async def _until_prefills_wait(self) -> None:
        (prefill,) = [info.worker_id for info in self._calls.known.values() if info.role is WorkerRole.PREFILL]
        async with asyncio.timeout(WAIT_S):
            while not (await self._status(prefill))["handoffs_out"]:
                await asyncio.sleep(LOOK_S)

    async def _status(self, worker_id: str) -> dict[str, Any]:
        status: dict[str, Any] = await self._calls.ask(worker_id, "status", timeout_s=CALL_TIMEOUT_S)
        return status


@asynccontextmanager
async def _opened(running: Cluster) -> AsyncIterator[_Cluster]:
    """A planner's way to it. Raises ControlUnavailableError."""
    config = running.control
    keys = Keys(config.namespace)
    async with connected(config) as plane, worker_calls(plane, config) as calls:
        await calls.look()
        actuator = ClusterActuator(calls, Hosts(plane, keys, await plane.discovery.grant(config.lease_ttl_s)))
        try:
            yield _Cluster(parse_target(running.url), calls, actuator)
        finally:
            await actuator.close()


def _num_pulled(status: dict[str, Any]) -> int:
    """Prefills that were begun here for others."""
    num_ended: int = status["prefill"]["num_prefills"]
    return num_ended + int(status["handoffs_out"])
