"""``simulate``: a cluster, a load and costs in; each request's times out. The composition of all parts is here.

    arrivals ──> Frontend (real Router) ──> SimulatedWorker (real EngineCore, placement, hand-off ledgers)
                                                  └── Network: messages, links, MemoryQueue, discovery

One ``EventLoop`` moves them all. The same arguments give the same result, bit by bit.
"""

from __future__ import annotations

import gc
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from kvrelay.config import WorkerRole
from kvrelay.errors import ConfigError
from kvrelay.handoff import decode_events as de
from kvrelay.handoff import prefill_events as pe
from kvrelay.handoff.base import LeaseEnded, Registered
from kvrelay.simulate.arrival import Arrival, check_arrivals
from kvrelay.simulate.cluster import ROLE_PREFIX, Change, ClusterEvent, ClusterSpec, Controller
from kvrelay.simulate.costs import Costs
from kvrelay.simulate.frontend import Frontend
from kvrelay.simulate.loop import EventLoop
from kvrelay.simulate.machine import FittedStepTime, StepTime
from kvrelay.simulate.network import TERM, Network
from kvrelay.simulate.result import RequestResult, SimulationResult
from kvrelay.simulate.worker import Learnt, SimulatedWorker

GARBAGE_OBJECTS = 500_000
"""So many new objects are looked through at once."""
Watch = Callable[[float, Sequence[RequestResult]], bool]


def simulate(
    spec: ClusterSpec,
    arrivals: Sequence[Arrival],
    costs: Costs,
    *,
    seed: int = 0,
    until_s: float = math.inf,
    controller: Controller | None = None,
    controller_interval_s: float = 1.0,
    watch: Watch | None = None,
    watch_interval_s: float = 1.0,
    learnt: Learnt | None = None,
) -> SimulationResult:
    """Run ``arrivals`` until all have ended, or for ``until_s`` of virtual time. Raises ConfigError, InvalidInputError.

    ``controller`` is called every ``controller_interval_s`` with a view of all live workers, and changes them.
    ``watch`` is called every ``watch_interval_s`` with the time and the requests; the simulation ends if it says so.
    ``learnt``: what the first workers know of their costs; None: nothing, as after their start.
    """
    spec.check()
    check_arrivals(arrivals)
    simulation = Simulation(spec, arrivals, costs, seed, controller, controller_interval_s, learnt=learnt)
    if watch is not None:
        simulation.watch(watch, watch_interval_s)
    return simulation.run(until_s)


class Simulation:
    """One run; ``simulate`` is the door. Tests look at ``workers``. ``step_times``: by worker id, instead of the fitted
    ones. ``may_jump`` False: each step by itself, with the same result."""

    def __init__(
        self,
        spec: ClusterSpec,
        arrivals: Sequence[Arrival],
        costs: Costs,
        seed: int = 0,
        controller: Controller | None = None,
        controller_interval_s: float = 1.0,
        step_times: Callable[[str], StepTime] | None = None,
        may_jump: bool = True,
        learnt: Learnt | None = None,
    ) -> None:
        self.loop = EventLoop()
        self.network = Network(spec, costs, self.loop, seed)
        self.network.may_jump = may_jump
        self.frontend = Frontend(self.network, arrivals, self.loop.stop)
        self.workers: dict[str, SimulatedWorker] = {}
        self._step_times = step_times or (lambda worker_id: FittedStepTime(costs, f"{seed} {worker_id}"))
        self._controller, self._interval_s = controller, controller_interval_s
        self._numbers = {role: itertools.count() for role in ROLE_PREFIX.values()}
        counts = zip(ROLE_PREFIX.values(), (spec.prefill, spec.decode, spec.both))
        for role, count in counts:
            for _ in range(count):
                self._register(self._new_id(role), role, learnt)
        for event in spec.events:
            self.loop.at(event.time_s, lambda event=event: self._change(event))  # type: ignore[misc]
        if controller is not None:
            self.loop.at(self._interval_s, self._control)

    def run(self, until_s: float = math.inf) -> SimulationResult:
        """Raises ConfigError if an event names a worker that does not exist."""
        self.frontend.start()
        with _rare_collections(), _quietly():
            self.loop.run(until_s)
        self.frontend.catch_up()
        places = dict(self.network.places)
        ends = [request.tokens_s[-1] for request in self.frontend.results if request.tokens_s]
        end_s = max(ends, default=0.0) if math.isinf(until_s) else min(max(ends, default=0.0), until_s)
        return SimulationResult(
            self.frontend.results, [worker.result() for worker in self.workers.values()], places, end_s
        )

    def watch(self, watch: Watch, interval_s: float) -> None:
        """End as soon as ``watch`` says so."""

        def look() -> None:
            self.frontend.catch_up()
            if watch(self.loop.clock.now(), self.frontend.results):
                self.loop.stop()
            elif not self.loop.is_over:
                self.loop.after(interval_s, look)

        self.loop.after(interval_s, look)

    # -- workers come and go ------------------------------------------------------------------------------------------

    def _new_id(self, role: WorkerRole) -> str:
        prefix = next(prefix for prefix, named in ROLE_PREFIX.items() if named is role)
        return f"{prefix}{next(self._numbers[role])}"

    def _register(self, worker_id: str, role: WorkerRole, learnt: Learnt | None = None) -> None:
        """A new worker is ready: all know it, and it knows all."""
        step_time, number = self._step_times(worker_id), len(self.workers)
        worker = SimulatedWorker(worker_id, role, self.network, self.frontend.port, step_time, number)
        if learnt is not None:
            worker.begin_with(learnt)
        ttl_s = self.network.spec.lease_ttl_s
        own = Registered(worker_id, ttl_s, TERM)
        for other in self.workers.values():
            if other.is_alive:
                other.decodes.handle(own)
                other.prefills.handle(own)
                worker.decodes.handle(Registered(other.worker_id, ttl_s, TERM))
                worker.prefills.handle(Registered(other.worker_id, ttl_s, TERM))
        self.workers[worker_id] = self.network.nodes[worker_id] = worker
        self._enter(worker, role)

    def _enter(self, worker: SimulatedWorker, role: WorkerRole) -> None:
        worker.enter(role)
        self._list(worker)
        worker.publish()

    def _list(self, worker: SimulatedWorker) -> None:
        self.frontend.catch_up()
        self.network.list(worker.worker_id, worker.role, pulls_prefills=worker.pulls_prefills)
        self.frontend.listed(worker.info)

    def _unlist(self, worker_id: str) -> None:
        self.frontend.catch_up()
        had_prefill = self.network.num_prefill_workers
        self.network.list(worker_id, None)
        self.frontend.unlisted(worker_id)
        if had_prefill and not self.network.num_prefill_workers:
            for worker in self._alive():
                worker.no_prefill_worker()

    def _alive(self) -> list[SimulatedWorker]:
        return [worker for worker in self.workers.values() if worker.is_alive]

    # -- changes ------------------------------------------------------------------------------------------------------

    def _change(self, event: ClusterEvent) -> None:
        if event.change is Change.START and event.role is not None:
            role = event.role
            worker_id = self._new_id(role)
            self.loop.after(self.network.costs.start_s, lambda: self._register(worker_id, role))
            return
        worker = self.workers.get(event.worker_id)
        if worker is None:
            known = ", ".join(self.workers)
            raise ConfigError(
                f"event at {event.time_s} s: no worker is called {event.worker_id!r}; there are {known}", param="event"
            )
        if not worker.is_alive:
            return
        if event.change is Change.KILL:
            self._kill(worker)
        elif worker.is_accepting and event.role is WorkerRole.BOTH is not worker.role:
            worker.widen()
            self._list(worker)
        elif worker.is_accepting and worker.role is WorkerRole.BOTH and event.role not in (None, WorkerRole.BOTH):
            self._narrow(worker, event.role)
        elif worker.is_accepting and (event.change is Change.DRAIN or event.role is not worker.role):
            self._unlist(worker.worker_id)
            role_or_none = event.role
            if event.change is Change.DRAIN or role_or_none is None:
                worker.drain(lambda: self._leave(worker))
            else:
                worker.drain(lambda: self._reenter(worker, role_or_none))

    def _narrow(self, worker: SimulatedWorker, role: WorkerRole) -> None:
        if role is WorkerRole.PREFILL:
            self.frontend.unlisted(worker.worker_id)
        worker.narrow(role, lambda: self._reenter(worker, role))

    def _reenter(self, worker: SimulatedWorker, role: WorkerRole) -> None:
        worker.epoch += 1
        self._enter(worker, role)

    def _leave(self, worker: SimulatedWorker) -> None:
        worker.is_alive = False
        for other in self._alive():
            other.on_decode(LeaseEnded(worker.worker_id))
            other.prefills.handle(LeaseEnded(worker.worker_id))

    def _kill(self, worker: SimulatedWorker) -> None:
        """Connections end after a heartbeat's time-out, the lease after its time to live."""
        worker.kill()
        self.loop.after(self.network.detection_s, lambda: self._disconnected(worker.worker_id))
        self.loop.after(self.network.spec.lease_ttl_s, lambda: self._lease_ended(worker))

    def _disconnected(self, worker_id: str) -> None:
        for other in self._alive():
            other.on_decode(de.ClaimantConnectionLost(worker_id))
            other.prefills.handle(pe.DecodeConnectionLost(worker_id))
        self.frontend.lost(worker_id)

    def _lease_ended(self, worker: SimulatedWorker) -> None:
        if worker.worker_id in self.network.listed:
            self._unlist(worker.worker_id)
        self._leave(worker)

    # -- the controller -----------------------------------------------------------------------------------------------

    def _control(self) -> None:
        assert self._controller is not None
        now_s = self.loop.clock.now()
        views = [worker.view(is_ready=worker.is_accepting) for worker in self._alive()]
        for action in self._controller(now_s, views):
            action.check()
            self.loop.at(action.time_s, lambda action=action: self._change(action))  # type: ignore[misc]
        self.loop.after(self._interval_s, self._control)


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Look for garbage rarely. A simulation makes an object for each block that it caches, and they live long: looking
    through them takes a fifth of the time."""
    before = gc.get_threshold()
    gc.set_threshold(GARBAGE_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


@contextmanager
def _quietly() -> Iterator[None]:
    """What the simulated cluster warns of is part of the result."""
    log = logging.getLogger("kvrelay")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)
