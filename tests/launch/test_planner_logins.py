"""A planner (login: operator), a host of workers (worker) and a frontend with ``deploy/nats.conf`` on a real server."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
from tests.contracts.waiting import eventually, watching
from tests.control.configured_server import configured_server
from tests.control.test_nats_roles import CONFIG, refusals, role, url_of

from kvrelay.config import ControlConfig, WorkerRole
from kvrelay.control.base import ControlPlane, Keys
from kvrelay.core.tasks import end_tasks
from kvrelay.core.workers import CallerInfo
from kvrelay.frontend.cluster.figures import Figures
from kvrelay.frontend.cluster.frontends import Frontends
from kvrelay.frontend.cluster.metrics import FrontendMetrics
from kvrelay.launch.actuators import ClusterActuator
from kvrelay.launch.fleet_observer import FleetObserver
from kvrelay.launch.planner_process import PlannerConfig, PlannerProcess
from kvrelay.launch.worker_calls import worker_calls
from kvrelay.launch.worker_host import Hosts, WorkerHost
from kvrelay.planner import Hold, Objectives, Start
from kvrelay.planner.report import read_reports
from kvrelay.rpc import new_curve_keys

KEYS = Keys("default")


@asynccontextmanager
async def planner(plane: ControlPlane, url: str) -> AsyncIterator[PlannerProcess]:
    """As ``kvrelay planner --mode act`` builds it."""
    async with worker_calls(plane, ControlConfig(control=url)) as calls:
        lease = await plane.discovery.grant(10.0)
        observer = FleetObserver(plane, KEYS, calls)
        actuator = ClusterActuator(calls, Hosts(plane, KEYS, lease))
        config = PlannerConfig("act", Objectives())
        process = PlannerProcess(config, plane, KEYS, lease, observer, actuator)
        await process.register()
        try:
            yield process
        finally:
            await actuator.close()
            await lease.revoke()


async def test_planner_host_and_frontend_may_do_what_they_do(tmp_path: Path) -> None:
    started: list[WorkerRole] = []
    with configured_server(tmp_path, CONFIG.read_text()) as address:
        worker_login = ControlConfig(control=url_of(address, "worker"), connect_timeout_s=10.0)
        host = WorkerHost(worker_login, "m", 2, lambda: [], started.append)
        async with role(address, "worker"), role(address, "frontend") as front, role(address, "operator") as plane:
            hosting = asyncio.create_task(host.run_forever())
            own = await front.discovery.grant(10.0)
            entry = CallerInfo("f1", new_curve_keys().public.decode(), socket.gethostname(), os.getpid())
            await front.discovery.put(KEYS.frontend("f1"), msgspec.json.encode(entry), own)
            frontends = Frontends(front, KEYS, "f1", Figures(FrontendMetrics(), lambda: []))
            async with (
                frontends.serving(),
                watching(front.discovery, KEYS.planners) as told,
                planner(plane, url_of(address, "operator")) as process,
            ):
                while not started:
                    await process.tick()
                    assert "away" not in process.report.problem
                    await asyncio.sleep(0.05)
                assert started == [WorkerRole.BOTH]
                assert isinstance(process.report.actions[0], Start | Hold)
                await eventually(lambda: any(report.can_start for report in read_reports(told.state)))
                # Whoever hears no keeper of leases for a while offers to be it.
                assert refusals(plane) | refusals(front) <= {KEYS.lease_keeper}
            await end_tasks([hosting])
