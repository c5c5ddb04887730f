"""The planner in the simulator: the same ``plan`` as live, fed with what frontends and workers would publish."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvrelay.config import WorkerRole
from kvrelay.planner import (
    Action,
    FleetView,
    Hold,
    Narrow,
    Objectives,
    PlannerState,
    Start,
    Stop,
    Traffic,
    Widen,
    WorkerView,
    generated_since,
    plan,
)
from kvrelay.simulate.arrival import Arrival
from kvrelay.simulate.cluster import Change, ClusterEvent, ClusterSpec
from kvrelay.simulate.costs import Costs
from kvrelay.simulate.network import MODEL
from kvrelay.simulate.result import SimulationResult
from kvrelay.simulate.simulation import Simulation


class PlannedCluster:
    """A simulation whose workers the planner changes. ``max_workers``: slots; 0: it only changes roles.
    ``actions``: what it has done, and when."""

    def __init__(
        self,
        spec: ClusterSpec,
        arrivals: Sequence[Arrival],
        costs: Costs,
        objectives: Objectives,
        *,
        max_workers: int = 0,
        interval_s: float = 1.0,
        seed: int = 0,
    ) -> None:
        self._simulation = Simulation(spec, arrivals, costs, seed, self._control, interval_s)
        self._spec, self._costs, self._objectives = spec, costs, objectives
        self._max_workers = max_workers
        self._state = PlannerState()
        self._before, self._before_s = Traffic(), 0.0
        self._seen: Sequence[WorkerView] = ()
        self.actions: list[tuple[float, Action]] = []

    def run(self) -> SimulationResult:
        """Until all requests have ended."""
        return self._simulation.run()

    def _control(self, now_s: float, workers: Sequence[WorkerView]) -> list[ClusterEvent]:
        traffic = msgspec.structs.replace(self._simulation.frontend.traffic)
        num_generated = generated_since(self._seen, workers)
        demand = traffic.since(self._before).demand(now_s - self._before_s, num_generated)
        self._before, self._before_s, self._seen = traffic, now_s, workers
        queue = self._simulation.network.queue
        fleet = FleetView(
            now_s=now_s,
            workers=tuple(sorted(workers, key=lambda worker: worker.worker_id)),
            max_workers=self._max_workers,
            # The queue tells its length, not its tokens.
            num_queued_prefill_tokens=round(
                queue.num_waiting(MODEL) * traffic.num_arrived_tokens / max(traffic.num_arrived, 1)
            ),
            start_s=self._costs.start_s,
            spread=self._costs.spread,
            chunk=self._spec.engine.max_num_batched_tokens,
        )
        actions, self._state = plan(fleet, demand, self._objectives, self._state)
        self.actions += [(now_s, action) for action in actions if not isinstance(action, Hold)]
        return [event for action in actions if (event := event_of(now_s, action)) is not None]


def event_of(now_s: float, action: Action) -> ClusterEvent | None:
    """What happens in the simulation; None: nothing."""
    match action:
        case Widen(worker_id):
            return ClusterEvent(now_s, Change.ROLE, worker_id, WorkerRole.BOTH)
        case Narrow(worker_id, role):
            return ClusterEvent(now_s, Change.ROLE, worker_id, role)
        case Start(role):
            return ClusterEvent(now_s, Change.START, role=role)
        case Stop(worker_id):
            return ClusterEvent(now_s, Change.DRAIN, worker_id)
    return None
