"""Who carries out what a planner decides: roles by commands to workers, numbers by hosts of workers or by a hook."""

from __future__ import annotations

import asyncio
import json
import logging
import shlex
from collections import Counter
from collections.abc import Sequence

from kvrelay.config import WorkerRole
from kvrelay.core.tasks import TaskSet
from kvrelay.errors import KvrelayError
from kvrelay.launch.worker_calls import WorkerCalls
from kvrelay.launch.worker_host import HostReport, Hosts
from kvrelay.planner import Action, Hold, Narrow, Room, Start, Stop, Widen

_log = logging.getLogger(__name__)

ROLE_TIMEOUT_S = 600.0
"""A change of role ends with the longest answer."""
DRAIN_TIMEOUT_S = 10.0
HOOK_TIMEOUT_S = 60.0


class ClusterActuator:
    """Changes roles of workers that still have the one that the planner saw; starts workers on ``hosts``, and stops
    those that run there. A role command is answered when the change has ended, so it runs on."""

    def __init__(self, calls: WorkerCalls, hosts: Hosts) -> None:
        self._calls, self._hosts = calls, hosts
        self._tasks = TaskSet()

    async def apply(self, action: Action) -> None:
        """Raises KvrelayError."""
        match action:
            case Widen(worker_id):
                self._tasks.spawn(self._change(worker_id, WorkerRole.BOTH))
            case Narrow(worker_id, role):
                self._tasks.spawn(self._change(worker_id, role))
            case Start(role):
                await self.start(role)
            case Stop(worker_id):
                await self.stop(worker_id)
            case Hold():
                pass

    async def start(self, role: WorkerRole) -> None:
        """Launch a worker. Raises KvrelayError."""
        await self._hosts.order(role)

    async def stop(self, worker_id: str) -> None:
        """Let a worker drain and end. Raises KvrelayError if no host has started it: whoever did counts on it."""
        info = self._calls.known.get(worker_id)
        own = _owned(await self._hosts.list())
        if info is None or (info.host, info.pid) not in own:
            raise KvrelayError(f"{worker_id} was not started by a host of workers")
        await self._calls.ask(worker_id, "drain", timeout_s=DRAIN_TIMEOUT_S)

    async def room(self) -> Room:
        """Slots of all hosts, and workers that run elsewhere."""
        hosts = await self._hosts.list()
        if not hosts:
            return Room()
        own = _owned(hosts)
        known = {info.worker_id: (info.host, info.pid) for info in self._calls.known.values()}
        may_stop = frozenset(worker_id for worker_id, process in known.items() if process in own)
        num_slots = sum(max(host.slots, len(host.pids)) for host in hosts)
        needs_worker = any(host.needs_worker for host in hosts)
        return Room(num_slots + len(known) - len(may_stop), len(own - set(known.values())), may_stop, needs_worker)

    async def close(self) -> None:
        """Changes that run are left to themselves."""
        await self._tasks.close()

    async def _change(self, worker_id: str, role: WorkerRole) -> None:
        info = self._calls.known.get(worker_id)
        wanted = role.value if info is None else f"{role} from {info.role}"
        try:
            await self._calls.ask(worker_id, "role", wanted, timeout_s=ROLE_TIMEOUT_S)
        except KvrelayError as exc:
            _log.warning("%s does not become %s: %s", worker_id, role, exc)


def _owned(hosts: Sequence[HostReport]) -> set[tuple[str, int]]:
    """The processes that hosts have started, as machine and process id. One that two hosts report is neither's: a host
    cannot have another's workers stopped."""
    reported = Counter((host.host, pid) for host in hosts for pid in set(host.pids))
    return {process for process, count in reported.items() if count == 1}


class HookActuator(ClusterActuator):
    """Numbers of workers are the business of a command, for Slurm or Kubernetes. It gets the wanted counts on its
    standard input: ``{"prefill": 2, "decode": 3, "both": 0, "stop": "worker-0a1b2c3d4e"}``; ``stop`` is the worker that
    shall go, or null. It is run again with the same counts until they are there."""

    def __init__(self, calls: WorkerCalls, hosts: Hosts, command: str, max_workers: int) -> None:
        super().__init__(calls, hosts)
        self._command, self._max_workers = shlex.split(command), max_workers

    async def start(self, role: WorkerRole) -> None:
        counts = self._counts()
        counts[role.value] += 1
        await self._run(counts, None)

    async def stop(self, worker_id: str) -> None:
        counts = self._counts()
        counts[self._calls.known[worker_id].role.value] -= 1
        await self._run(counts, worker_id)

    async def room(self) -> Room:
        needs_worker = any(host.needs_worker for host in await self._hosts.list())
        return Room(self._max_workers, 0, frozenset(self._calls.known), needs_worker)

    def _counts(self) -> Counter[str]:
        return Counter(info.role.value for info in self._calls.known.values())

    async def _run(self, counts: Counter[str], stop: str | None) -> None:
        wanted = {role.value: counts[role.value] for role in WorkerRole} | {"stop": stop}
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command, stdin=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
            )
        except OSError as exc:
            raise KvrelayError(f"the hook {self._command[0]} cannot be run: {exc}") from exc
        try:
            async with asyncio.timeout(HOOK_TIMEOUT_S):
                _, said = await process.communicate(json.dumps(wanted).encode())
        except TimeoutError as exc:
            process.kill()
            await process.wait()
            raise KvrelayError(f"the hook did not end in {HOOK_TIMEOUT_S:g} s") from exc
        if process.returncode:
            reason = " ".join(said.decode(errors="replace").split())[-200:]
            raise KvrelayError(f"the hook ended with exit code {process.returncode}: {reason}")
