"""The cluster under test: one ``kvrelay serve``, and workers that are started by hand.

It owns these processes and ends them. It never caches the list of workers, but always asks the cluster.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
from tests.chaos.counts import WorkerCounts, counts_of, sum_counts

from kvrelay.config import ControlConfig
from kvrelay.control import connect_control
from kvrelay.control.base import ControlPlane, Keys
from kvrelay.errors import FatalError, KvrelayError
from kvrelay.executors.torch.parallel.processes import MODULE as RANK_MODULE
from kvrelay.launch.admin import cluster_status
from kvrelay.launch.children import Child, kvrelay_command, start_child, stop_children
from kvrelay.launch.frontend_calls import routing_state
from kvrelay.launch.planner_admin import planner_reports, release
from kvrelay.launch.worker_calls import worker_calls

READY = re.compile(r"ready: (\S+) .* at (\S+)/v1 \(control (\S+)\)")
CHILD_ENDED = re.compile(r"kvrelay: (.+) \(pid (\d+)\) ended with exit code (-?\d+)")
FRONTEND_COMMAND = kvrelay_command("frontend")
WORKER_COMMAND = kvrelay_command("worker")
PLANNER_COMMAND = kvrelay_command("planner")
START_TIMEOUT_S = 300.0
POLL_INTERVAL_S = 0.1
LOOK_CONNECT_TIMEOUT_S = 1.0
ORDER_CONNECT_TIMEOUT_S = 10.0
LOG_TAIL_CHARS = 2000
STOP_TIMEOUT_S = 60.0
HEAL_MARGIN_S = 60.0
HEAL_STARTS = 6.0
"""A crashed worker starts again at a lower CPU priority, beside clients that leave no core idle. That takes four times
as long as the first start."""


@dataclass(frozen=True, slots=True)
class Member:
    """A worker that is in discovery and answers. ``is_extra``: started by hand, not by ``serve``."""

    worker_id: str
    role: str
    pid: int
    is_extra: bool
    lease_id: str
    blocks_in_use: int = 0


class ClusterUnderTest:
    """A running cluster with ``num_workers[role]`` workers of each role, and frontends that share a port. An async
    context manager. ``is_planned``: a planner changes roles, so only the number of all workers is known."""

    def __init__(
        self,
        serve_flags: Sequence[str],
        worker_flags: Sequence[str],
        num_workers: dict[str, int],
        num_frontends: int,
        log_path: Path | None = None,
        *,
        is_planned: bool = False,
        api_key: str | None = None,
    ) -> None:
        self.is_planned = is_planned
        self._api_key = api_key
        self._serve_flags = serve_flags
        self._worker_flags = worker_flags
        self.num_workers = num_workers
        self.num_frontends = num_frontends
        self.model = self.url = ""
        self.heal_timeout_s = 0.0
        """How long the cluster may take to recover: the start's duration, measured at the beginning, and a margin."""
        self.control = ControlConfig()
        self._log_path = log_path
        self._extras: list[Child] = []
        self._joined_pids: set[int] = set()
        """Processes that were seen working."""
        self._may_crash_pids: set[int] = set()
        self._counts: dict[str, WorkerCounts] = {}

    async def __aenter__(self) -> ClusterUnderTest:
        shape = [f"--{role}={count}" for role, count in self.num_workers.items()]
        shape.append(f"--frontends={self.num_frontends}")
        command = kvrelay_command("serve", *self._serve_flags, "--port", "0", *shape)
        self._log = tempfile.TemporaryFile() if self._log_path is None else self._log_path.open("w+b")  # noqa: SIM115
        self._serve = start_child("serve", command, output=self._log)
        try:
            await self._until_ready()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await self.stop()
        finally:
            self._log.close()

    async def _until_ready(self) -> None:
        start_s = time.monotonic()
        while (found := READY.search(self.log)) is None:
            if self._serve.exit_code is not None or time.monotonic() > start_s + START_TIMEOUT_S:
                raise FatalError(f"the cluster did not start: {self.log[-LOG_TAIL_CHARS:]}")
            await asyncio.sleep(POLL_INTERVAL_S)
        self.heal_timeout_s = HEAL_MARGIN_S + HEAL_STARTS * (time.monotonic() - start_s)
        self.model, self.url, control = found.groups()
        self.control = ControlConfig(control=control, connect_timeout_s=LOOK_CONNECT_TIMEOUT_S)
        self._joined_pids.update(self.frontend_pids())
        await self.members()

    @property
    def log(self) -> str:
        """The output of ``serve`` and its children so far."""
        size = os.fstat(self._log.fileno()).st_size
        # Do not seek and read: the children share this file's position.
        return os.pread(self._log.fileno(), size, 0).decode("utf-8", errors="replace")

    def unclean_exits(self) -> list[str]:
        """Children of ``serve`` that ended by themselves with an error. Those that were killed or may crash do not
        count, nor those that could not reach the control server while they started: ``serve`` starts them again."""
        return [
            f"{name} ended with exit code {code}"
            for name, pid, code in CHILD_ENDED.findall(self.log)
            if int(code) != -signal.SIGKILL and int(pid) in self._joined_pids - self._may_crash_pids
        ]

    @property
    def counts(self) -> WorkerCounts:
        """Of all workers together; a worker that has ended counts as last seen."""
        return sum_counts(self._counts.values())

    # -- workers ------------------------------------------------------------------------------------------------------

    async def members(self, *, check: bool = False) -> list[Member]:
        """The workers that answer, by id; with ``check`` their block pools are verified. Empty if the control server
        does not answer."""
        try:
            report = await cluster_status(self.control, check=check)
        except KvrelayError:
            return []
        extras = {child.pid for child in self._extras}
        members = []
        for status in report["workers"]:
            if "error" not in status:
                self._counts[status["worker_id"]] = counts_of(status)
                self._joined_pids.add(status["pid"])
                members.append(_member(status, extras))
        return members

    async def until_whole(self, roles: Sequence[str], num_away: int = 0) -> float | None:
        """Wait until each role has all its workers except ``num_away``. Returns the seconds that it took, or None if it
        took too long."""
        start_s = time.monotonic()
        while time.monotonic() - start_s < self.heal_timeout_s:
            members = await self.members()
            self.start_failed_again()
            if not self._missing(members, roles, num_away):
                return time.monotonic() - start_s
            await asyncio.sleep(POLL_INTERVAL_S)
        return None

    def _missing(self, members: Sequence[Member], roles: Sequence[str], num_away: int = 0) -> list[str]:
        """The roles that miss more than ``num_away`` workers; "any" for all together if a planner changes them."""
        if self.is_planned:
            return ["any"] if len(members) < sum(self.num_workers.values()) - num_away else []
        counts = {role: sum(member.role == role for member in members) for role in roles}
        return [role for role, count in counts.items() if count < self.num_workers[role] - num_away]

    async def until_idle(self, timeout_s: float) -> tuple[int, str]:
        """Wait until no block is in use anywhere. Returns the number still in use at the end, and any other problem."""
        deadline = time.monotonic() + timeout_s
        in_use, problem = 0, "no worker answered"
        while time.monotonic() < deadline:
            if members := await self.members(check=True):
                in_use = sum(member.blocks_in_use for member in members)
                missing = self._missing(members, list(self.num_workers))
                problem = f"workers are missing, or their block pools damaged: {', '.join(missing)}" if missing else ""
                if not in_use and not missing:
                    break
            await asyncio.sleep(POLL_INTERVAL_S * 3)
        return in_use, problem

    def start_worker(self, role: str) -> Child:
        """Start one more worker by hand, as on another machine."""
        command = kvrelay_command("worker", *self._worker_flags, "--role", role, "--control", self.control.control)
        child = start_child(f"{role} worker by hand", command, output=self._log)
        self._extras.append(child)
        return child

    def start_failed_again(self) -> None:
        """A worker that cannot reach the control server during its start ends with an error, and its supervisor
        retries."""
        for child in self._extras:
            if child.exit_code and child.pid not in self._joined_pids:
                child.process = start_child(child.name, child.command, output=self._log).process

    def rank_pids(self, member: Member) -> list[int]:
        """The worker's rank processes. Raises FatalError if it has none."""
        pids = []
        with suppress(psutil.NoSuchProcess):  # a zombie, too
            for child in psutil.Process(member.pid).children():
                if RANK_MODULE in child.cmdline():
                    pids.append(child.pid)
        if pids:
            return sorted(pids)
        raise FatalError(f"{member.worker_id} has no rank processes")

    def may_crash(self, member: Member) -> None:
        """An error at this worker's end will not count."""
        self._may_crash_pids.add(member.pid)

    async def until_exit(self, member: Member, timeout_s: float) -> int | None:
        """Wait for the process to end. Returns its exit code, 0 for a child of ``serve`` (see ``unclean_exits``).

        None if it still runs.
        """
        deadline = time.monotonic() + timeout_s
        child = next((child for child in self._extras if child.pid == member.pid), None)
        while time.monotonic() < deadline:
            if child is not None and child.exit_code is not None:
                self._extras.remove(child)
                return child.exit_code
            if child is None and not psutil.pid_exists(member.pid):
                return 0
            await asyncio.sleep(POLL_INTERVAL_S)
        return None

    # -- admin commands -----------------------------------------------------------------------------------------------

    async def tell(self, worker_id: str, command: str, argument: str = "") -> None:
        """Sends an admin command to one worker. Raises KvrelayError."""
        async with self._operator() as control, worker_calls(control, self.control) as calls:
            await calls.look()
            await calls.ask(worker_id, command, argument)

    async def revoke(self, lease_id: str) -> None:
        """End a worker's lease by the server's own commands. Raises KvrelayError."""
        async with self._operator() as control:
            await control.discovery.delete(Keys(self.control.namespace).lease(lease_id))

    @asynccontextmanager
    async def _operator(self) -> AsyncIterator[ControlPlane]:
        """A connection with longer timeouts than those that only list workers. Raises ControlUnavailableError."""
        control = await connect_control(replace(self.control, connect_timeout_s=ORDER_CONNECT_TIMEOUT_S))
        try:
            yield control
        finally:
            await control.close()

    # -- children of serve --------------------------------------------------------------------------------------------

    def nats_pid(self) -> int:
        """Raises FatalError if there is no NATS server."""
        for child in psutil.Process(self._serve.pid).children():
            if "nats-server" in child.name():
                return int(child.pid)
        raise FatalError("there is no NATS server")

    def frontend_pids(self) -> list[int]:
        """The running frontends, in order of their pids."""
        return self._pids_of(FRONTEND_COMMAND)

    def planner_pids(self) -> list[int]:
        """The running planner, if there is one."""
        return self._pids_of(PLANNER_COMMAND)

    def _pids_of(self, command: list[str]) -> list[int]:
        pids = []
        for child in psutil.Process(self._serve.pid).children():
            with suppress(psutil.NoSuchProcess):  # a zombie, too
                if child.cmdline()[: len(command)] == command:
                    pids.append(child.pid)
        return sorted(pids)

    async def until_planned(self) -> float | None:
        """Wait until the planner that runs decides. Returns the seconds that it took, or None."""
        start_s = time.monotonic()
        while time.monotonic() - start_s < self.heal_timeout_s:
            with suppress(KvrelayError):
                leaders = {report["pid"] for report in await planner_reports(self.control) if report["is_leader"]}
                if leaders and leaders == set(self.planner_pids()):
                    return time.monotonic() - start_s
            await asyncio.sleep(POLL_INTERVAL_S)
        return None

    async def release(self, worker_id: str) -> None:
        """Give a worker whose role was set by hand back to the planner. Raises KvrelayError."""
        await release(replace(self.control, connect_timeout_s=ORDER_CONNECT_TIMEOUT_S), worker_id)

    def worker_processes(self) -> list[psutil.Process]:
        """All processes of the workers that ``serve`` has started, ranks included."""
        found: list[psutil.Process] = []
        for child in psutil.Process(self._serve.pid).children():
            with suppress(psutil.NoSuchProcess):  # a zombie, too
                if child.cmdline()[: len(WORKER_COMMAND)] == WORKER_COMMAND:
                    found += [child, *child.children(recursive=True)]
        return found

    async def until_frontends_answer(self) -> float | None:
        """Wait until all frontends run and each has answered. Returns the seconds that it took, or None."""
        start_s = time.monotonic()
        answered: set[int] = set()
        while time.monotonic() - start_s < self.heal_timeout_s:
            # They share a port: a connection may reach any of them.
            with suppress(KvrelayError):
                answered.add((await routing_state(self.url, self._api_key))["pid"])
            pids = self.frontend_pids()
            self._joined_pids |= answered
            if len(pids) == self.num_frontends and answered.issuperset(pids):
                return time.monotonic() - start_s
            await asyncio.sleep(POLL_INTERVAL_S)
        return None

    async def stop(self) -> list[str]:
        """End everything in order. Returns what did not end cleanly. May be called twice."""
        children, self._extras = [*self._extras, self._serve], []
        for child in children:
            await stop_children([child], STOP_TIMEOUT_S)
        return [
            f"{child.name} ended with exit code {child.exit_code}"
            for child in children
            if child.exit_code and not self._was_starting(child)
        ]

    def _was_starting(self, child: Child) -> bool:
        """Whether SIGTERM arrived before the process handled signals: a replacement that was started too late in the
        run."""
        has_joined = child is self._serve or child.pid in self._joined_pids
        return child.exit_code == -signal.SIGTERM and not has_joined


def _member(status: dict[str, Any], extras: set[int]) -> Member:
    in_use = status.get("integrity", {}).get("blocks_in_use", 0)
    is_extra = status["pid"] in extras
    return Member(status["worker_id"], status["role"], status["pid"], is_extra, status["lease_id"], in_use)
