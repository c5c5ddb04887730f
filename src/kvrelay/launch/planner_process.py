"""One planner process: it looks at the fleet, plans, and lets an actuator carry that out.

    discovery ─ workers ───────────────────────────────────────────────┐
             └─ frontends ──> what has come, and workers' loads as heard ─┴─> plan ──> log, report, actuator (mode act)

Of several planners one decides, until its lease ends; the others stand by. What the planner cannot
reach it leaves as it is: without the control plane, or when this process ends, nothing changes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from pathlib import Path

import msgspec

from kvrelay.config import ControlConfig
from kvrelay.control.base import ControlPlane, Keys, Lease
from kvrelay.core.garbage import spare_what_stays
from kvrelay.core.process_usage import ProcessUsage
from kvrelay.core.tasks import happen
from kvrelay.errors import ConfigError, ControlUnavailableError, KvrelayError
from kvrelay.launch.actuators import ClusterActuator, HookActuator
from kvrelay.launch.fleet_observer import FleetObserver
from kvrelay.launch.process import on_terminate
from kvrelay.launch.request_plane import connected, give_back, new_caller_id
from kvrelay.launch.worker_calls import worker_calls
from kvrelay.launch.worker_host import Hosts
from kvrelay.planner import Actuator, Hold, Objectives, Plan, PlannerState, Room, not_begun, plan, released, words_of
from kvrelay.planner.capacity import shape_of
from kvrelay.planner.log import Decision, DecisionLog
from kvrelay.planner.report import COUNT, HELD, MAX_CHANGES, PAUSED, Change, Doubts, PlannerReport, read_reports

_log = logging.getLogger(__name__)

REPORT_INTERVAL_S = 20.0
"""A report that says the same is repeated so often."""


class PlannerConfig(msgspec.Struct, frozen=True):
    """``mode``: suggest or act. ``start_s``: how long a worker takes to start. ``log_file`` None: no log of
    decisions. ``hook``: a command that sees to the number of workers, of which there may be ``max_workers``."""

    mode: str
    objectives: Objectives
    interval_s: float = 2.0
    start_s: float = 30.0
    log_file: Path | None = None
    hook: str = ""
    max_workers: int = 0


class PlannerProcess:
    """Decides every ``interval_s`` while it is the leader. ``lease``: of its entry in discovery."""

    def __init__(
        self,
        config: PlannerConfig,
        control: ControlPlane,
        keys: Keys,
        lease: Lease,
        observer: FleetObserver,
        actuator: Actuator,
    ) -> None:
        self._config, self._control, self._keys, self._lease = config, control, keys, lease
        self._observer, self._actuator = observer, actuator
        self._log = DecisionLog(config.log_file)
        self._state = PlannerState()
        self._doubts = Doubts()
        self._held: frozenset[str] = frozenset()
        self._reported_s = -REPORT_INTERVAL_S
        self._usage = ProcessUsage()
        self._used_s, self._measured_s = self._usage.read().cpu_s, time.monotonic()
        self.report = PlannerReport(
            planner_id=new_caller_id(),
            host=socket.gethostname(),
            pid=os.getpid(),
            started_unix=time.time(),
            mode=config.mode,
        )

    async def register(self) -> None:
        """Enter discovery. Raises ControlUnavailableError."""
        key = self._keys.planner(self.report.planner_id)
        await self._control.discovery.put(key, msgspec.json.encode(self.report), self._lease)

    async def run(self, stop: asyncio.Event) -> None:
        """Until ``stop``."""
        while not stop.is_set():
            await self.tick()
            await happen(self._config.interval_s, stop)

    async def tick(self) -> None:
        """Look and decide once. A control plane that is away is reported, and nothing changes; nor does it after a
        defect, which must not end ``serve`` with this process."""
        before = self.report
        try:
            settings = await self._control.discovery.list(self._keys.config_value("planner."))
            leader = await self._leader()
            if leader == before.planner_id:
                await self._try_to_decide(settings)
            else:
                self._state = PlannerState()
                self._say(is_leader=False, can_start=False, actions=(), problem=f"planner {leader} decides")
            await self._publish(before)
        except ControlUnavailableError as exc:
            self._say(problem=f"the control plane is away ({exc}): nothing changes")
        if self.report.problem != before.problem and self.report.problem:
            _log.warning("%s", self.report.problem)
        if self.report.doubt and not before.doubt:
            _log.warning("the planner's estimates are wrong: %s", self.report.doubt)

    async def _leader(self) -> str:
        """The planner that decides. A silent one is gone from discovery with its lease."""
        reports = read_reports(await self._control.discovery.list(self._keys.planners))
        return reports[0].planner_id if reports else self.report.planner_id

    async def _try_to_decide(self, settings: dict[str, bytes]) -> None:
        """Raises ControlUnavailableError."""
        try:
            await self._decide(settings)
        except ControlUnavailableError:
            raise
        except Exception as exc:  # noqa: BLE001 - a defect must not end the cluster
            problem = f"a defect of the planner ({exc!r}): nothing changes"
            if problem != self.report.problem:
                _log.exception("the planner could not decide")
            self._say(is_leader=True, can_start=False, actions=(), problem=problem)

    async def _decide(self, settings: dict[str, bytes]) -> None:
        paused = settings.get(self._keys.config_value(PAUSED)) == b"true"
        held = await self._hold(settings)
        fleet, demand = await self._observer.look()
        room = Room() if COUNT in held else await self._actuator.room()
        fleet = msgspec.structs.replace(
            fleet,
            max_workers=max(room.max_workers - room.num_starting, 0),
            start_s=self._config.start_s,
            workers=tuple(
                msgspec.structs.replace(
                    worker,
                    is_held=worker.is_held or worker.worker_id in held,
                    may_stop=worker.worker_id in room.may_stop,
                )
                for worker in fleet.workers
            ),
        )
        state, objectives = self._state, self._config.objectives
        if room.needs_worker:
            objectives = msgspec.structs.replace(objectives, min_workers=max(objectives.min_workers, 1))
        actions, after = plan(fleet, demand, objectives, state)
        acts = self._config.mode == "act" and not paused and self._lease.alive_until_s > time.monotonic()
        problem, changes = await self._carry_out(actions) if acts else ("", ())
        is_begun = acts and not problem
        self._state = after if is_begun else not_begun(fleet, state, after)
        self._log.add(
            Decision(
                unix_s=time.time(),
                fleet=fleet,
                demand=demand,
                objectives=objectives,
                state=state,
                actions=actions,
                is_carried_out=is_begun,
            )
        )
        self._say(
            is_leader=True,
            is_paused=paused,
            shape=str(shape_of(fleet)),
            actions=actions,
            held=tuple(sorted(held & ({worker.worker_id for worker in fleet.workers} | {COUNT}))),
            problem=problem or self._log.error,
            can_start=acts and room.max_workers > 0,
            num_changes=self.report.num_changes + len(changes),
            changes=(*self.report.changes, *changes)[-MAX_CHANGES:],
            measured=fleet.measured,
            doubt=self._doubts.look(fleet.now_s, actions[0].numbers, fleet.measured, objectives),
        )

    async def _carry_out(self, actions: Plan) -> tuple[str, tuple[Change, ...]]:
        """What went wrong, and the changes."""
        done: tuple[Change, ...] = ()
        for action in actions:
            try:
                await self._actuator.apply(action)
            except KvrelayError as exc:
                return f"{type(action).__name__.lower()} failed: {exc}", done
            if not isinstance(action, Hold):
                # A reason begins with the kind of the change.
                done += (Change(time.time(), words_of(action), action.reason.partition(": ")[2] or action.reason),)
        return "", done

    async def _hold(self, settings: dict[str, bytes]) -> frozenset[str]:
        """What is held by hand. Roles that were changed by hand are noted in discovery, so that the next leader knows;
        an entry that someone removed releases its worker."""
        prefix = self._keys.config_value(HELD)
        noted = frozenset(key.removeprefix(prefix) for key in settings if key.startswith(prefix))
        self._state = released(self._state, self._held - noted)
        for name in set(self._state.held) - noted:
            await self._control.discovery.put(prefix + name, b"true")
        self._held = noted | set(self._state.held)
        return self._held

    def _say(self, **changes: object) -> None:
        self.report = msgspec.structs.replace(self.report, unix_s=time.time(), **changes)

    async def _publish(self, before: PlannerReport) -> None:
        """If it says something new, or now and then."""
        is_new = msgspec.structs.replace(self.report, unix_s=0.0) != msgspec.structs.replace(before, unix_s=0.0)
        now_s = time.monotonic()
        if is_new or now_s - self._reported_s >= REPORT_INTERVAL_S:
            usage = self._usage.read()
            # Less is used than before once a hook has ended.
            cores = max(usage.cpu_s - self._used_s, 0.0) / max(now_s - self._measured_s, self._config.interval_s)
            self._used_s, self._measured_s, self._reported_s = usage.cpu_s, now_s, now_s
            self._say(cpu_cores=cores, rss_bytes=usage.rss_bytes)
            await self.register()


async def run_planner(config: PlannerConfig, control: ControlConfig) -> None:
    """Run until SIGTERM. Raises ConfigError, ControlUnavailableError."""
    if not control.control:
        raise ConfigError("a planner needs --control, e.g. --control nats://127.0.0.1:4222", param="control")
    stop = asyncio.Event()
    on_terminate(stop.set)
    keys = Keys(control.namespace)
    async with connected(control) as plane, worker_calls(plane, control) as calls:
        lease = await plane.discovery.grant(control.lease_ttl_s)
        lease.on_revoked(stop.set)
        hosts = Hosts(plane, keys, lease)
        actuator: ClusterActuator = (
            HookActuator(calls, hosts, config.hook, config.max_workers)
            if config.hook
            else ClusterActuator(calls, hosts)
        )
        process = PlannerProcess(config, plane, keys, lease, FleetObserver(plane, keys, calls), actuator)
        try:
            await process.register()
            spare_what_stays()
            await process.run(stop)
        finally:
            await actuator.close()
            await give_back(lease)
