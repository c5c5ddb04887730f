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
import os
import secrets
import socket
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from kvrelay.config import ControlConfig, FrontendConfig, MetricsConfig
from kvrelay.config.loading import environment_with
from kvrelay.control import connect_control
from kvrelay.control.base import Keys
from kvrelay.control.credentials import require_credentials
from kvrelay.control.nats_process import NatsServerProcess
from kvrelay.core.clock import MonotonicClock
from kvrelay.errors import (
    AddressInUseError,
    CheckpointError,
    ControlUnavailableError,
    FatalError,
    KvrelayError,
    WorkerUnavailableError,
)
from kvrelay.launch.admin import list_workers
from kvrelay.launch.child_errors import ChildErrors
from kvrelay.launch.children import Child, kvrelay_command, restart, restart_delay_s, start_child, stop_children
from kvrelay.launch.http_call import http_call
from kvrelay.launch.nats_supervisor import NatsSupervisor
from kvrelay.launch.security import require_api_key, require_metrics_key
from kvrelay.launch.signals import leave_closed_terminals, on_terminate, terminal_outputs
from kvrelay.launch.takers import LOOK_INTERVAL_S, is_child, no_worker_takes_requests

_log = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.05
RESTART_FLAGS = ("--yield-while-starting",)
"""When a crashed worker restarts, other workers prefill its streams, and new requests wait for them."""
USAGE_EXIT_CODE = 2
TOKEN_BYTES = 16
CUT_TIMEOUT_S = 5.0
"""Seconds that a frontend needs after the drain timeout to notify the clients whose streams it cuts off."""


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """The options of ``serve``. The children's flags are complete except for those that only ``serve`` knows.

    ``worker_flags``: one entry per worker, prefill workers first. ``control_flags`` and ``frontend_flags`` contain no
    secrets: secrets go through the environment.
    """

    model_path: Path
    model_name: str
    num_prefill: int
    num_decode: int
    num_engines: int
    """Engines in discovery: each data-parallel rank of a worker is one."""
    num_frontends: int
    frontend: FrontendConfig
    control: ControlConfig
    metrics: MetricsConfig
    worker_flags: list[list[str]]
    frontend_flags: list[str]
    control_flags: list[str]
    nats_dir: Path | None
    start_timeout_s: float
    drain_timeout_s: float


class Cluster:
    """The children of one ``serve``, from start to stop."""

    def __init__(self, options: ServeOptions) -> None:
        self._options = options
        self._nats: NatsServerProcess | None = None
        self._control = options.control
        self._workers: list[Child] = []
        self._frontends: list[Child] = []
        self._port = options.frontend.port
        self._stop = asyncio.Event()
        self._errors = ChildErrors(_write_error)
        self._look_for_takers_s: float | None = None
        """When to check that a worker still takes requests, after one has left; None: no check is due."""
        self._left_pids: set[int] = set()

    @property
    def url(self) -> str:
        host = self._options.frontend.host
        scheme = "https" if self._options.frontend.tls_cert else "http"
        return f"{scheme}://{'127.0.0.1' if host in ('0.0.0.0', '::') else host}:{self._port}"

    async def run(self) -> None:
        """Start, announce, supervise until SIGTERM or SIGINT, stop. Raises KvrelayError if the cluster cannot go on."""
        require_api_key(self._options.frontend, self._options.control)
        require_metrics_key(self._options.metrics, self._options.control)
        require_credentials(self._options.control)
        on_terminate(self._stop.set)
        self._port = _check_port(self._options.frontend)
        try:
            await self._start()
            await self._check_tokenizer()
            if await self._until_ready():
                self._announce()
                await self._supervise()
        finally:
            await self._shut_down()

    # -- start --------------------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        options = self._options
        if not self._control.control:
            self._nats = NatsServerProcess(store_dir=options.nats_dir, token=secrets.token_hex(TOKEN_BYTES))
            self._control = replace(self._control, control=self._nats.start())
        for number in range(options.num_prefill):
            self._workers.append(self._start_worker("prefill", number))
        for number in range(options.num_decode):
            self._workers.append(self._start_worker("decode" if options.num_prefill else "both", number))
        for number in range(options.num_frontends):
            self._frontends.append(self._start_frontend(number))

    def _start_worker(self, role: str, number: int) -> Child:
        options = self._options
        command = kvrelay_command(
            "worker",
            str(options.model_path),
            "--served-model-name",
            options.model_name,
            "--role",
            role,
            *options.worker_flags[len(self._workers)],
            *options.control_flags,
        )
        child = start_child(f"{role} worker {number}", command, environment=self._environment(), errors=self._errors)
        child.restart_flags = RESTART_FLAGS
        return child

    def _start_frontend(self, number: int) -> Child:
        options = self._options
        command = kvrelay_command(
            "frontend", *options.frontend_flags, "--port", str(self._port), *options.control_flags
        )
        environment = self._environment(api_key=options.frontend.api_key)
        return start_child(f"frontend {number}", command, environment=environment, errors=self._errors)

    def _environment(self, **secret: str) -> dict[str, str]:
        """Settings that may hold passwords; other users of this machine can read command lines."""
        return environment_with(control=self._control.control, discovery=self._control.discovery, **secret)

    async def _check_tokenizer(self) -> None:
        """Raise FatalError if the tokenizer cannot be loaded: frontends would retry for ever, since files may change.

        The workers start meanwhile, so the check costs no time.
        """
        from kvrelay.frontend.tokens.tokenizer import load_tokenizer

        try:
            await asyncio.to_thread(load_tokenizer, self._options.model_path)
        except CheckpointError as exc:
            raise FatalError(exc.message) from exc

    async def _until_ready(self) -> bool:
        """Wait until all workers are in discovery and all frontends serve the model. False: told to stop meanwhile."""
        from kvrelay.launch.admin import list_workers

        deadline = time.monotonic() + self._options.start_timeout_s
        control = await connect_control(self._control)
        keys = Keys(self._control.namespace)
        ready: set[int] = set()
        try:
            while not self._stop.is_set():
                self._check_starting()
                workers = await list_workers(control, keys)
                if len(workers) >= self._options.num_engines:
                    # They share a port: each call reaches any of them.
                    num_missing = len(self._frontends) - len(ready)
                    ready |= set(await asyncio.gather(*(self._healthy_pid() for _ in range(num_missing))))
                    ready &= {child.pid for child in self._frontends}
                    if len(ready) == len(self._frontends):
                        return True
                if time.monotonic() > deadline:
                    raise FatalError(
                        f"not ready after {self._options.start_timeout_s:g} s: "
                        f"{len(workers)} of {self._options.num_engines} workers are in discovery, "
                        f"{len(ready)} of {len(self._frontends)} frontends serve the model"
                    )
                await asyncio.sleep(POLL_INTERVAL_S)
        finally:
            await control.close()
        return False

    async def _healthy_pid(self) -> int:
        """The process of a frontend that serves the model; 0 if the one that was reached does not, or none was."""
        try:
            # The exchange holds no secret, and the certificate may name another host.
            status, body = await http_call(self.url, "GET", "/health", timeout_s=2.0, verify=False)
        except WorkerUnavailableError:
            return 0
        return int(json.loads(body).get("pid", 0)) if status == 200 else 0

    def _check_starting(self) -> None:
        """Raise FatalError if a child ended while starting; it has written the reason to stderr."""
        for child in self._workers + self._frontends:
            if child.exit_code is not None:
                error = FatalError(f"{child.name} ended with exit code {child.exit_code} while starting, see above")
                error.exit_code = USAGE_EXIT_CODE if child.exit_code == USAGE_EXIT_CODE else 1
                raise error

    def _announce(self) -> None:
        options = self._options
        body = json.dumps({"model": options.model_name, "prompt": "Once there was a", "max_tokens": 32})
        shape = (
            f"{options.num_prefill}P{options.num_decode}D"
            if options.num_prefill
            else f"{options.num_decode} aggregated"
        )
        is_access_log = options.frontend.access_log != "off" and not options.frontend.access_log_file
        out = sys.stderr if is_access_log else sys.stdout
        where = f"{self.url}/v1 (control {self._control.control})"
        print(f"kvrelay is ready: {options.model_name} ({shape}) at {where}", file=out)
        has_keys = options.frontend.api_key or options.frontend.api_keys_file
        headers = "-H 'Content-Type: application/json'" + (" -H 'Authorization: Bearer KEY'" if has_keys else "")
        print(f"  curl {self.url}/v1/completions {headers} -d '{body}'", file=out, flush=True)

    # -- watch --------------------------------------------------------------------------------------------------------

    async def _supervise(self) -> None:
        supervisor = NatsSupervisor(self._nats, MonotonicClock()) if self._nats is not None else None
        terminals = terminal_outputs()
        while not self._stop.is_set():
            # Without a hangup, as after ``disown``, what we print would fail later.
            leave_closed_terminals(terminals)
            for child in self._workers + self._frontends:
                if child.exit_code is not None:
                    self._revive(child, time.monotonic())
            if supervisor is not None:
                await supervisor.check()
            await self._check_takers(time.monotonic())
            try:
                async with asyncio.timeout(POLL_INTERVAL_S * 4):
                    await self._stop.wait()
            except TimeoutError:
                pass

    def _revive(self, child: Child, now_s: float) -> None:
        """Decide about a child that has ended, and restart it when that is due. Raises FatalError."""
        if child.restart_s is not None:
            if now_s >= child.restart_s:
                restart(child)
            return
        if child.exit_code == 0:
            self._let_go(child)
            return
        delay = restart_delay_s(child, now_s)
        if delay is None:
            raise FatalError(f"{child.name} crashes in a loop (exit code {child.exit_code})")
        print(
            f"kvrelay: {child.name} (pid {child.pid}) ended with exit code {child.exit_code}; restart in {delay:g} s",
            file=sys.stderr,
        )
        child.restart_s = now_s + delay

    def _let_go(self, child: Child) -> None:
        """The child was told to leave, by SIGTERM, ``kvrelay drain`` or a revoked lease: do not restart it."""
        print(f"kvrelay: {child.name} (pid {child.pid}) was told to leave, and has left", file=sys.stderr)
        self._workers = [other for other in self._workers if other is not child]
        self._frontends = [other for other in self._frontends if other is not child]
        if not self._frontends:
            raise FatalError("the last frontend was told to leave: no client can reach the workers any more")
        self._look_for_takers_s = 0.0
        self._left_pids.add(child.pid)

    async def _check_takers(self, now_s: float) -> None:
        """After a worker has left: raise FatalError if no worker takes requests any more. Otherwise the cluster would
        look healthy and serve nothing."""
        if self._look_for_takers_s is None or now_s < self._look_for_takers_s:
            return
        self._look_for_takers_s = now_s + LOOK_INTERVAL_S
        try:
            control = await connect_control(replace(self._control, connect_timeout_s=LOOK_INTERVAL_S))
            try:
                workers = await list_workers(control, Keys(self._control.namespace))
            finally:
                await control.close()
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
            self._look_for_takers_s = None

    async def _shut_down(self) -> None:
        """Stop the frontends, so that no new requests come; then drain the workers; then stop the control plane."""
        timeout_s = self._options.drain_timeout_s
        await stop_children(self._frontends, timeout_s + CUT_TIMEOUT_S, self._say_waiting)
        await stop_children(self._workers, timeout_s, self._say_waiting)
        if self._nats is not None:
            await asyncio.to_thread(self._nats.stop)
        await asyncio.to_thread(self._errors.finish, 1.0)

    def _say_waiting(self, children: list[Child]) -> None:
        names = ", ".join(child.name for child in children)
        print(
            f"kvrelay: waiting up to {self._options.drain_timeout_s:g} s for {names} to finish open requests; "
            "a second Ctrl-C or SIGTERM ends them at once",
            file=sys.stderr,
        )


def _write_error(line: bytes) -> None:
    sys.stderr.buffer.write(line)
    sys.stderr.buffer.flush()


def _check_port(config: FrontendConfig) -> int:
    """The port to serve on: the requested one if it is free, or any free one for 0. Raises AddressInUseError."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((config.host, config.port))
        except OSError as exc:
            raise AddressInUseError.at(config.host, config.port, exc) from exc
        return int(probe.getsockname()[1])


async def run_serve(options: ServeOptions) -> None:
    """Run a cluster on this machine until it is told to stop."""
    try:
        await Cluster(options).run()
    except OSError as exc:
        raise KvrelayError(f"cannot start: {exc}") from exc


def available_cores() -> int:
    """Number of cores that this process may use."""
    return len(allowed_cores())


def allowed_cores() -> list[int]:
    """The cores that this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
