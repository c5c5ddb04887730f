"""``kvrelay serve``: a whole cluster on one machine, as child processes under supervision.

It starts a NATS server on loopback unless it is given one, then the workers and frontends with the command lines of a
real cluster. It waits until all of them are ready, prints one line, and supervises them. A child that crashes is
restarted with growing pauses; if it crashes in a loop, ``serve`` ends with a non-zero exit code. A child that ends with
exit code 0 was told to leave and is not restarted; if no worker that takes requests is left, ``serve`` fails.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import socket
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from kvrelay.config import FrontendConfig, RouterConfig, WorkerConfig, WorkerRole
from kvrelay.config.addresses import WILDCARDS, host_port
from kvrelay.config.loading import settings_to_flags
from kvrelay.control.base import Keys
from kvrelay.control.credentials import require_credentials
from kvrelay.control.nats_process import NatsServerProcess
from kvrelay.core.clock import MonotonicClock
from kvrelay.core.tasks import end_tasks, happen
from kvrelay.core.workers import WorkerInfo
from kvrelay.errors import CheckpointError, ControlUnavailableError, FatalError, KvrelayError, WorkerUnavailableError
from kvrelay.http import reserve_port
from kvrelay.launch.children import (
    NO_READY_LINE,
    Child,
    ChildErrors,
    Fate,
    control_environment,
    kvrelay_command,
    settings_flags,
    start_child,
    stop_children,
    supervise,
    worker_command,
    write_error,
)
from kvrelay.launch.clusters import RunningCluster, announced, this_process
from kvrelay.launch.frontend_calls import http_call
from kvrelay.launch.nats_supervisor import NatsSupervisor
from kvrelay.launch.process import on_terminate
from kvrelay.launch.request_plane import connected, require_api_key, require_metrics_key
from kvrelay.launch.worker_calls import list_workers
from kvrelay.launch.worker_host import WorkerHost, beside

_log = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.05
LOOK_INTERVAL_S = 1.0
TOKENIZER_CHECK_AFTER_S = 8.0
"""If the cluster is not ready by then, ``serve`` looks whether the tokenizer is the reason."""
RESTART_FLAGS = ("--yield-while-starting",)
"""When a crashed worker restarts, other workers prefill its streams, and new requests wait for them."""
USAGE_EXIT_CODE = 2
TOKEN_BYTES = 16
CUT_TIMEOUT_S = 5.0
"""Seconds that a frontend needs after the drain timeout to notify the clients whose streams it cuts off."""


class ServeConfig(msgspec.Struct, frozen=True):
    """What ``serve`` is started with. ``workers``: prefill workers first, all with one model and control plane.
    ``kinds``: what prefill workers and others share, for workers that a planner wants.
    ``planner``: off, suggest or act. It may have ``max_workers`` workers here at once (0: it starts and stops none),
    and leaves at least ``min_workers``; with 0, all stop after ``quiet_s`` without a request."""

    workers: tuple[WorkerConfig, ...]
    kinds: tuple[WorkerConfig, WorkerConfig]
    frontend: FrontendConfig
    router: RouterConfig
    num_frontends: int = 1
    nats_dir: Path | None = None
    planner: str = "suggest"
    max_workers: int = 0
    min_workers: int = 1
    quiet_s: float = 300.0
    start_timeout_s: float = 300.0
    drain_timeout_s: float = 30.0

    @property
    def num_engines(self) -> int:
        """Engines in discovery: each data-parallel rank of a worker is one."""
        return sum(worker.group.dp for worker in self.workers)

    @property
    def num_slots(self) -> int:
        """Engines that may run here at once."""
        return max(self.max_workers, self.num_engines)

    @property
    def shape(self) -> str:
        """``1P2D``, or ``2 aggregated``."""
        num_prefill = sum(worker.role is WorkerRole.PREFILL for worker in self.workers)
        num_others = len(self.workers) - num_prefill
        return f"{num_prefill}P{num_others}D" if num_prefill else f"{num_others} aggregated"


class LocalCluster:
    """The children of one ``serve``, from start to stop."""

    def __init__(self, config: ServeConfig) -> None:
        self._config = config
        self._common = config.workers[0]
        self._nats: NatsServerProcess | None = None
        self._control = self._common.control
        self._workers: list[Child] = []
        self.frontends: list[Child] = []
        self._planner: Child | None = None
        self._orders: asyncio.Task[None] | None = None
        """Listens to a planner, if it may start workers here."""
        self._num_ordered = 0
        self._port = config.frontend.port
        self._stop = asyncio.Event()
        self._errors = ChildErrors(write_error)
        self._next_check_s: float | None = None
        """When to check that a worker still takes requests, after one has left; None: no check is due."""
        self._left_pids: set[int] = set()

    @property
    def url(self) -> str:
        host = self._config.frontend.host
        scheme = "https" if self._config.frontend.tls_cert else "http"
        return f"{scheme}://{host_port('127.0.0.1' if host in WILDCARDS else host, self._port)}"

    async def run(self) -> None:
        """Start, announce, supervise until SIGTERM or SIGINT, stop. Raises KvrelayError if the cluster cannot go on."""
        require_api_key(self._config.frontend, self._control)
        require_metrics_key(self._common.metrics, self._control)
        require_credentials(self._control)
        on_terminate(self._stop.set)
        with reserve_port(self._config.frontend.host, self._config.frontend.port) as reserved:
            self._port = int(reserved.getsockname()[1])
            try:
                await self.start()
                if await self.until_ready():
                    with announced(self._description()):
                        self.announce()
                        self._start_planner()
                        self._listen_for_orders()
                        await self._supervise()
            finally:
                await self.shut_down()

    # -- start --------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the control plane if there is none, the workers and the frontends."""
        if not self._control.control:
            self._nats = NatsServerProcess(store_dir=self._config.nats_dir, token=secrets.token_hex(TOKEN_BYTES))
            self._control = replace(self._control, control=self._nats.start())
        for number, worker in enumerate(self._config.workers):
            # A name without the role, which may change.
            self._start_worker(f"worker {number}", worker)
        frontend = replace(self._config.frontend, port=self._port)
        flags = settings_flags(frontend, self._config.router, self._common.disagg, self._common.control)
        flags += settings_to_flags(self._common.metrics, skip=("metrics_port", "metrics_host"))
        command = kvrelay_command("frontend", NO_READY_LINE, *flags)
        for number in range(self._config.num_frontends):
            self.frontends.append(self._start_child(f"frontend {number}", command, api_key=frontend.api_key))

    def _start_child(self, name: str, command: list[str], **secret: str) -> Child:
        return start_child(name, command, environment=control_environment(self._control, **secret), errors=self._errors)

    def _start_worker(self, name: str, worker: WorkerConfig) -> Child:
        child = self._start_child(name, [*worker_command(worker), NO_READY_LINE])
        child.restart_flags = RESTART_FLAGS
        self._workers.append(child)
        return child

    def _start_planner(self) -> None:
        """Once all is ready: no request waits for it."""
        if self._config.planner == "off":
            return
        disagg = self._common.disagg
        objectives = ("--slo-ttft-ms", str(disagg.slo_ttft_ms), "--slo-itl-ms", str(disagg.itl_ms))
        flags = settings_flags(self._common.control)
        fewest = ("--min-workers", str(self._config.min_workers), "--quiet-s", str(self._config.quiet_s))
        command = kvrelay_command("planner", "--mode", self._config.planner, *objectives, *fewest, *flags)
        self._planner = self._start_child("planner", command)

    def _listen_for_orders(self) -> None:
        """Of our own planner, or of one elsewhere."""
        if self._config.max_workers:
            slots = self._config.num_slots
            control, model = self._control, self._common.model
            needs_worker = self._config.min_workers > 0
            host = WorkerHost(
                control, model, slots, lambda: self._workers, self.start_ordered, needs_worker=needs_worker
            )
            self._orders = asyncio.create_task(host.run_forever())

    def start_ordered(self, role: WorkerRole) -> None:
        """A planner wants one more worker. The ports and cores of the first ones stay theirs."""
        self._num_ordered += 1
        extra = [child.worker for child in self._workers if child.worker is not None and child.is_extra]
        kind = replace(self._config.kinds[role.takes_requests], role=role, port=0)
        worker = beside((*self._config.workers, *extra), kind, self._config.num_slots)
        child = self._start_worker(f"extra worker {self._num_ordered}", worker)
        child.worker, child.is_extra = worker, True

    def _watch_planner(self, now_s: float) -> None:
        """Restart it like a worker; without it the cluster serves on, and nothing changes."""
        if self._planner is None or (fate := supervise(self._planner, now_s)) is Fate.GOES_ON:
            return
        if fate is Fate.CRASHES:
            why = f"the planner crashes in a loop (exit code {self._planner.exit_code})"
            print(f"kvrelay: {why}; it is left, and workers and roles stay as they are", file=sys.stderr)
        self._planner = None

    async def _check_tokenizer(self) -> None:
        """Raise FatalError if the tokenizer cannot be loaded: frontends retry for ever, since files may change."""
        from kvrelay.frontend.tokens.tokenizer import load_tokenizer

        try:
            await asyncio.to_thread(load_tokenizer, self._common.model_path)
        except CheckpointError as exc:
            raise FatalError(exc.message) from exc

    async def until_ready(self) -> bool:
        """Wait until all workers are in discovery, and each frontend serves with all of them. False: told to stop
        meanwhile."""
        began_s = time.monotonic()
        deadline, is_tokenizer_checked = began_s + self._config.start_timeout_s, False
        keys = Keys(self._control.namespace)
        ready: set[int] = set()
        async with connected(self._control) as control:
            while not self._stop.is_set():
                self._check_starting()
                # A frontend that serves has loaded it, and the check takes time from the children.
                if not is_tokenizer_checked and time.monotonic() - began_s >= TOKENIZER_CHECK_AFTER_S:
                    is_tokenizer_checked = True
                    await self._check_tokenizer()
                workers = await list_workers(control, keys)
                if len(workers) >= self._config.num_engines:
                    # They share a port: each call reaches any of them.
                    num_missing = len(self.frontends) - len(ready)
                    ready |= set(await asyncio.gather(*(self._healthy_pid() for _ in range(num_missing))))
                    ready &= {child.pid for child in self.frontends}
                    if len(ready) == len(self.frontends):
                        return True
                if time.monotonic() > deadline:
                    raise FatalError(
                        f"not ready after {self._config.start_timeout_s:g} s: "
                        f"{len(workers)} of {self._config.num_engines} workers are in discovery, "
                        f"{len(ready)} of {len(self.frontends)} frontends serve the model with all of them"
                    )
                await asyncio.sleep(POLL_INTERVAL_S)
        return False

    async def _healthy_pid(self) -> int:
        """The process of a frontend that serves with all workers; 0 if the one that was reached does not, or none was.

        On a busy machine a frontend may know one worker long before the others, which would get none of the first
        requests, or none of their prefills.
        """
        try:
            # The exchange holds no secret, and the certificate may name another host.
            status, body = await http_call(self.url, "GET", "/health", timeout_s=2.0, verify=False)
        except WorkerUnavailableError:
            return 0
        told = json.loads(body) if status == 200 else {}
        return int(told.get("pid", 0)) if told.get("workers", 0) >= self._config.num_engines else 0

    def _check_starting(self) -> None:
        """Raise FatalError if a child ended while starting; it has written the reason to stderr."""
        for child in self._workers + self.frontends:
            if child.exit_code is not None:
                error = FatalError(f"{child.name} ended with exit code {child.exit_code} while starting, see above")
                error.exit_code = USAGE_EXIT_CODE if child.exit_code == USAGE_EXIT_CODE else 1
                raise error

    def _description(self) -> RunningCluster:
        control = self._control
        return RunningCluster(
            *this_process(),
            port=self._port,
            url=self.url,
            model=self._common.model,
            shape=self._config.shape,
            control=control.control,
            discovery=control.discovery,
            namespace=control.namespace,
        )

    def announce(self) -> None:
        """Print where the cluster serves, and a first request."""
        config, model = self._config, self._common.model
        body = json.dumps({"model": model, "prompt": "Once there was a", "max_tokens": 32})
        out = sys.stderr if config.frontend.logs_to_stdout else sys.stdout
        where = f"{self.url}/v1 (control {self._control.control})"
        print(f"kvrelay is ready: {model} ({config.shape}) at {where}", file=out)
        has_keys = config.frontend.api_key or config.frontend.api_keys_file
        headers = "-H 'Content-Type: application/json'" + (" -H 'Authorization: Bearer KEY'" if has_keys else "")
        print(f"  curl {self.url}/v1/completions {headers} -d '{body}'", file=out, flush=True)

    # -- watch --------------------------------------------------------------------------------------------------------

    async def _supervise(self) -> None:
        supervisor = NatsSupervisor(self._nats, MonotonicClock()) if self._nats is not None else None
        while not self._stop.is_set():
            for child in self._workers + self.frontends:
                self.revive(child, time.monotonic())
            self._watch_planner(time.monotonic())
            if supervisor is not None:
                await supervisor.check()
            await self._check_serving_workers(time.monotonic())
            await happen(POLL_INTERVAL_S * 4, self._stop)

    def revive(self, child: Child, now_s: float) -> None:
        """Restart a worker or frontend that has crashed, when that is due. Raises FatalError if that does not help."""
        match supervise(child, now_s):
            case Fate.HAS_LEFT:
                self._let_go(child)
            case Fate.CRASHES if child.is_extra:
                print(f"kvrelay: {child.name} crashes in a loop; its slot is free", file=sys.stderr)
                self._workers = [other for other in self._workers if other is not child]
            case Fate.CRASHES:
                raise FatalError(f"{child.name} crashes in a loop (exit code {child.exit_code})")

    def _let_go(self, child: Child) -> None:
        """The child was told to leave, by SIGTERM, ``kvrelay drain`` or a revoked lease: do not restart it."""
        print(f"kvrelay: {child.name} (pid {child.pid}) was told to leave, and has left", file=sys.stderr)
        self._workers = [other for other in self._workers if other is not child]
        self.frontends = [other for other in self.frontends if other is not child]
        if not self.frontends:
            raise FatalError("the last frontend was told to leave: no client can reach the workers any more")
        if self._config.min_workers:
            self._next_check_s = 0.0
        self._left_pids.add(child.pid)

    async def _check_serving_workers(self, now_s: float) -> None:
        """After a worker has left: raise FatalError if no worker takes requests any more. Otherwise the cluster would
        look healthy and serve nothing."""
        if self._next_check_s is None or now_s < self._next_check_s:
            return
        self._next_check_s = now_s + LOOK_INTERVAL_S
        try:
            async with connected(replace(self._control, connect_timeout_s=LOOK_INTERVAL_S)) as control:
                workers = await list_workers(control, Keys(self._control.namespace))
        except ControlUnavailableError as exc:
            _log.debug("cannot ask discovery which workers take requests: %s", exc)
            return
        # A worker that left while the control plane was unreachable is listed until its lease expires.
        workers = [worker for worker in workers if not is_child(worker, self._left_pids)]
        if no_worker_takes_requests(workers, {child.pid for child in self._workers}):
            raise FatalError(
                "the last worker that takes requests was told to leave (kvrelay drain, SIGTERM or a revoked lease): "
                "nothing is left to serve"
            )
        if any(worker.role.takes_requests for worker in workers):
            self._next_check_s = None

    async def shut_down(self) -> None:
        """Stop the frontends, so that no new requests come; then drain the workers; then stop the control plane."""
        timeout_s = self._config.drain_timeout_s
        if self._orders is not None:
            await end_tasks([self._orders])
        if self._planner is not None:
            await stop_children([self._planner], timeout_s, self._say_waiting)
        await stop_children(self.frontends, timeout_s + CUT_TIMEOUT_S, self._say_waiting)
        await stop_children(self._workers, timeout_s, self._say_waiting)
        if self._nats is not None:
            await asyncio.to_thread(self._nats.stop)
        await asyncio.to_thread(self._errors.finish, 1.0)

    def _say_waiting(self, children: list[Child]) -> None:
        names = ", ".join(child.name for child in children)
        print(
            f"kvrelay: waiting up to {self._config.drain_timeout_s:g} s for {names} to end, open requests first; "
            "a second Ctrl-C or SIGTERM ends them at once",
            file=sys.stderr,
        )


async def run_serve(config: ServeConfig) -> None:
    """Run a cluster on this machine until it is told to stop."""
    try:
        await LocalCluster(config).run()
    except OSError as exc:
        raise KvrelayError(f"cannot start: {exc}") from exc


def is_child(worker: WorkerInfo, pids: Collection[int]) -> bool:
    """Whether that worker is one of these processes on this host, or was started by one as a rank of its group."""
    return worker.host == socket.gethostname() and (worker.pid in pids or worker.dp_parent_pid in pids)


def no_worker_takes_requests(workers: Sequence[WorkerInfo], child_pids: Collection[int]) -> bool:
    """Decide from the entries in discovery. A child without an entry may be starting or restarting. Its role is unknown
    until it registers, so until then the answer is no."""
    children = [worker for worker in workers if is_child(worker, child_pids)]
    listed = {worker.pid if worker.pid in child_pids else worker.dp_parent_pid for worker in children}
    return not any(worker.role.takes_requests for worker in workers) and listed.issuperset(child_pids)
