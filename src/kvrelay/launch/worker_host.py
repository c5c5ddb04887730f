"""Slots for workers on one machine, which a planner fills: of ``kvrelay serve``, and of ``kvrelay agent`` elsewhere.

    planner ── order: a role ──> discovery ──> host: has it a free slot? ──> a worker, started as configured here
            <── report: slots, process ids ──<

The host's own command line fixes model, flags and slots; an order names nothing but a role. A worker is stopped by
draining it, which needs no host. What a host reports is believed only as far as it does no harm: it can lose its own
slots, or get orders that it does not carry out. Without control plane or planner nothing changes here.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Annotated

import msgspec

from kvrelay.config import ControlConfig, WorkerConfig, WorkerRole
from kvrelay.control.base import ControlPlane, Keys, Lease, WatchEvent, WatchKind
from kvrelay.control.following import follow
from kvrelay.core.control_codec import decode_worker
from kvrelay.core.decoding import UNREADABLE
from kvrelay.core.tasks import TaskSet, end_tasks, happen
from kvrelay.errors import ConfigError, ControlUnavailableError, KvrelayError, ProtocolError
from kvrelay.http import reserve_port
from kvrelay.launch.children import (
    CRASH_LOOP_LIMIT,
    Child,
    ChildErrors,
    Fate,
    control_environment,
    start_child,
    stop_children,
    supervise,
    worker_command,
    write_error,
)
from kvrelay.launch.process import on_terminate
from kvrelay.launch.request_plane import connected, give_back

_log = logging.getLogger(__name__)

MAX_SLOTS = 4096
REPORT_INTERVAL_S = 0.5
LOOK_INTERVAL_S = 5.0
READY_LIMIT_S = 300.0
"""As long as ``serve`` waits for its first workers."""
RECONNECT_S = 2.0
CHECK_INTERVAL_S = 0.2
NUM_PORTS_TRIED = 1000
_ROLES = {role.value for role in WorkerRole}


class HostReport(msgspec.Struct, frozen=True):
    """A host's entry in discovery. ``pids``: its workers, those that start included. ``needs_worker``: it ends if no
    worker of the cluster is left."""

    host_id: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    host: Annotated[str, msgspec.Meta(max_length=256)]
    model: Annotated[str, msgspec.Meta(max_length=1024)]
    slots: Annotated[int, msgspec.Meta(ge=0, le=MAX_SLOTS)]
    pids: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_SLOTS)] = ()
    needs_worker: bool = False

    @property
    def num_free(self) -> int:
        return max(self.slots - len(self.pids), 0)


_decode = msgspec.json.Decoder(HostReport).decode


def read_hosts(entries: dict[str, bytes]) -> list[HostReport]:
    """The reports of all hosts, by id; unreadable ones are left out."""
    found = []
    for _, value in sorted(entries.items()):
        try:
            found.append(_decode(value))
        except UNREADABLE as exc:
            _log.debug("ignored a host of workers: %s", exc)
    return found


def pids_of(entries: dict[str, bytes]) -> set[int]:
    """The processes of this host's workers in discovery."""
    found = set()
    for key, value in entries.items():
        with suppress(ProtocolError):
            info = decode_worker(key.rpartition("/")[2], value)
            if info.host == socket.gethostname():
                found.add(info.pid)
    return found


def beside(others: Sequence[WorkerConfig], base: WorkerConfig, num_slots: int) -> WorkerConfig:
    """``base`` for one more worker of a host of ``num_slots``: the next ports that are free, and with vLLM cores that
    no other worker has."""
    metrics, transfer, vllm = base.metrics, base.transfer, base.vllm
    of_metrics = {o.metrics.metrics_port + rank for o in others for rank in range(o.group.dp)}
    of_kv = {o.transfer.kv_port + number for o in others for number in range(o.group.dp * o.num_kv_ports)}
    metrics_port = next_free_port(metrics.metrics_host, metrics.metrics_port, base.group.dp, of_metrics | of_kv)
    num_kv_ports = base.group.dp * base.num_kv_ports
    kv_port = next_free_port(base.host, transfer.kv_port, num_kv_ports, of_metrics | of_kv | {metrics_port})
    if base.engine_kind == "vllm":
        from kvrelay.engines.vllm.cores import shares

        taken = Counter(other.vllm.engine_cores for other in others)
        cores = min(shares(vllm.engine_cores, num_slots), key=lambda share: taken[share])
        vllm = replace(vllm, engine_cores=cores)
    return replace(
        base,
        metrics=replace(metrics, metrics_port=metrics_port),
        transfer=replace(transfer, kv_port=kv_port),
        vllm=vllm,
    )


def next_free_port(host: str, first: int, count: int, taken: Collection[int]) -> int:
    """The first of ``count`` ports that no one has, counted up from ``first``; 0 for 0, and if there are none."""
    for port in range(first, min(first + NUM_PORTS_TRIED, 65536 - count + 1), count) if first else ():
        if all(each not in taken and is_free(host, each) for each in range(port, port + count)):
            return port
    return 0


def is_free(host: str, port: int) -> bool:
    """Whether a worker could listen there now."""
    try:
        reserve_port(host, port).close()
    except KvrelayError:
        return False
    return True


class WorkerHost:
    """Reports ``children`` and starts a worker by ``start(role)`` for each order, while a slot is free."""

    def __init__(
        self,
        control: ControlConfig,
        model: str,
        slots: int,
        children: Callable[[], Sequence[Child]],
        start: Callable[[WorkerRole], None],
        *,
        needs_worker: bool = False,
    ) -> None:
        self._control, self._model, self._slots = control, model, slots
        self._children, self._start, self._needs_worker = children, start, needs_worker
        self._keys = Keys(control.namespace)
        self.host_id = f"{socket.gethostname()}-{secrets.token_hex(5)}"
        self._seen: set[str] = set()
        self._since_s: dict[int, float] = {}
        """By process: since when an ordered worker has not been in discovery."""
        self._tasks = TaskSet()

    async def run_forever(self) -> None:
        """Connect, report, and carry out orders. Without the control plane nothing changes."""
        while True:
            try:
                async with connected(self._control) as plane:
                    lease = await plane.discovery.grant(self._control.lease_ttl_s)
                    try:
                        async with asyncio.TaskGroup() as group:
                            group.create_task(self._report_forever(plane, lease))
                            prefix = self._keys.orders(self.host_id)
                            group.create_task(
                                follow(plane.discovery, prefix, lambda event: self._ordered(plane, event))
                            )
                    finally:
                        await self._tasks.close()
                        await give_back(lease)
            except* KvrelayError as failed:
                _log.warning("no orders of a planner reach this host (%s); its workers stay", failed.exceptions[0])
            await asyncio.sleep(RECONNECT_S)

    async def _report_forever(self, plane: ControlPlane, lease: Lease) -> None:
        told: HostReport | None = None
        look_s = time.monotonic()
        while True:
            pids = tuple(sorted(child.pid for child in self._children() if child.exit_code is None))
            host = socket.gethostname()
            report = HostReport(self.host_id, host, self._model, self._slots, pids, self._needs_worker)
            if report != told:
                await plane.discovery.put(self._keys.host(self.host_id), msgspec.json.encode(report), lease)
                told = report
            if time.monotonic() >= look_s:
                look_s = time.monotonic() + LOOK_INTERVAL_S
                self.end_stuck(pids_of(await plane.discovery.list(self._keys.workers)), time.monotonic())
            await asyncio.sleep(REPORT_INTERVAL_S)

    def end_stuck(self, listed: Collection[int], now_s: float) -> None:
        """A worker that was ordered and has not registered in time gives its slot back. ``listed``: process ids of the
        workers of this host that are in discovery."""
        starting = {child.pid: child for child in self._children() if child.is_extra and child.pid not in listed}
        self._since_s = {pid: self._since_s.get(pid, now_s) for pid in starting}
        for pid, since_s in self._since_s.items():
            child = starting[pid]
            if now_s - since_s < READY_LIMIT_S or child.exit_code is not None:
                continue
            _log.warning("%s (pid %d) is not ready after %.0f s; it is ended", child.name, pid, now_s - since_s)
            child.crashes_s = [now_s] * CRASH_LOOP_LIMIT
            child.process.kill()

    def _ordered(self, plane: ControlPlane, event: WatchEvent) -> None:
        if event.kind is not WatchKind.PUT or event.key in self._seen:
            return
        self._seen.add(event.key)
        self._tasks.spawn(_delete(plane, event.key))
        role = event.value.decode(errors="replace")
        if role not in _ROLES:
            raise ProtocolError(f"an order names the role {role[:40]!r}")
        if len(self._children()) >= self._slots:
            _log.warning("an order for a %s worker was not carried out: all %d slots are taken", role, self._slots)
            return
        try:
            self._start(WorkerRole(role))
        except OSError as exc:  # the machine is short of something, and hears the next order
            _log.warning("an order for a %s worker was not carried out: %s", role, exc)


async def _delete(plane: ControlPlane, order: str) -> None:
    try:
        await plane.discovery.delete(order)
    except ControlUnavailableError as exc:
        _log.warning("the order %s cannot be deleted (%s); it is not carried out again", order, exc)


class Agent:
    """``kvrelay agent``: a host of workers without a frontend."""

    def __init__(self, config: WorkerConfig, slots: int, drain_timeout_s: float) -> None:
        self._config, self._slots, self._drain_timeout_s = config, slots, drain_timeout_s
        self._children: list[Child] = []
        self._errors = ChildErrors(write_error)
        self._num_started = 0
        self._stop = asyncio.Event()

    async def run(self) -> None:
        """Until SIGTERM or SIGINT; then its workers drain and end."""
        on_terminate(self._stop.set)
        host = WorkerHost(
            self._config.control, self._config.model, self._slots, lambda: self._children, self.start_worker
        )
        orders = asyncio.create_task(host.run_forever())
        print(f"kvrelay agent {host.host_id} has {self._slots} slots for workers of {self._config.model}", flush=True)
        try:
            while not self._stop.is_set():
                self._children = [child for child in self._children if keep(child, time.monotonic())]
                await happen(CHECK_INTERVAL_S, self._stop)
        finally:
            await end_tasks([orders])
            await stop_children(self._children, self._drain_timeout_s)
            await asyncio.to_thread(self._errors.finish, 1.0)

    def start_worker(self, role: WorkerRole) -> None:
        """A planner wants one more worker."""
        self._num_started += 1
        others = [child.worker for child in self._children if child.worker is not None]
        worker = beside(others, replace(self._config, role=role), self._slots)
        command = worker_command(worker)
        environment = control_environment(self._config.control)
        name = f"worker {self._num_started}"
        child = start_child(name, command, environment=environment, errors=self._errors)
        child.worker, child.is_extra = worker, True
        self._children.append(child)


def keep(child: Child, now_s: float) -> bool:
    """Restart a child that has crashed, when that is due. False: it was told to leave, or crashes in a loop."""
    fate = supervise(child, now_s)
    if fate is not Fate.GOES_ON:
        code = f"exit code {child.exit_code}"
        _log.warning("%s (pid %d, %s) %s; its slot is free", child.name, child.pid, code, fate.value)
    return fate is Fate.GOES_ON


async def run_agent(config: WorkerConfig, slots: int, drain_timeout_s: float) -> None:
    """Raises ConfigError, ControlUnavailableError."""
    if not config.control.control:
        raise ConfigError("an agent needs --control, e.g. --control nats://127.0.0.1:4222", param="control")
    async with connected(config.control):
        """Fail now if the address is wrong."""
    await Agent(config, slots, drain_timeout_s).run()


# -- the planner's side -----------------------------------------------------------------------------------------------


class Hosts:
    """All hosts, as a planner sees them. Its orders go with its lease."""

    def __init__(self, plane: ControlPlane, keys: Keys, lease: Lease) -> None:
        self._plane, self._keys, self._lease = plane, keys, lease
        self._last_order: dict[str, int] = {}
        """By host: the number of its latest order."""

    async def list(self) -> list[HostReport]:
        """Raises ControlUnavailableError."""
        return read_hosts(await self._plane.discovery.list(self._keys.hosts))

    async def order(self, role: WorkerRole) -> None:
        """Let a host with a free slot start a worker. Raises KvrelayError if no slot is free.

        Hosts take turns, those with more free slots first: one that reports slots it lacks delays the others by a turn.
        """
        free = [host for host in await self.list() if host.num_free]
        if not free:
            raise ControlUnavailableError("no host has a free slot")
        host = max(free, key=lambda host: (-self._last_order.get(host.host_id, 0), host.num_free))
        self._last_order[host.host_id] = max(self._last_order.values(), default=0) + 1
        key = self._keys.orders(host.host_id) + secrets.token_hex(5)
        await self._plane.discovery.put(key, role.value.encode(), self._lease)
