"""A fleet of fluid: what a steady demand makes of it follows from the capacity model, without a request."""

from __future__ import annotations

import msgspec

from kvrelay.config import WorkerRole
from kvrelay.core.events import LoadMetrics, TokenCounts
from kvrelay.core.step_cost import StepCost
from kvrelay.planner import (
    Action,
    Demand,
    FleetView,
    Hold,
    Narrow,
    Objectives,
    PlannerState,
    Start,
    Stop,
    Widen,
    WorkerView,
    plan,
)
from kvrelay.planner.capacity import Load, Worker, assess, shape_of

COST = StepCost(0.02, 0.02, 2e-4, 1e-8, 1e-3, 2e-7)
OBJECTIVES = Objectives(ttft_s=2.0, itl_s=0.08)
PREFIX = {WorkerRole.PREFILL: "p", WorkerRole.DECODE: "d", WorkerRole.BOTH: "b"}
TICK_S = 2.0


IDLE = LoadMetrics("", 0, 256, 0, 16_384, 0, 0.0, 0.0, step_cost=COST, tokens=TokenCounts(num_steps=1 << 30))
"""16,384 blocks of 16 tokens."""


def workers(prefill: int = 0, decode: int = 0, both: int = 0, **load: object) -> tuple[WorkerView, ...]:
    """So many of each role, called p0, d0, b0 and so on, all with this ``load``."""
    counts = {WorkerRole.PREFILL: prefill, WorkerRole.DECODE: decode, WorkerRole.BOTH: both}
    return tuple(
        loaded(WorkerView(role=role, load=IDLE, block_size=16), worker_id=f"{PREFIX[role]}{number}", **load)
        for role, count in counts.items()
        for number in range(count)
    )


def loaded(worker: WorkerView, **load: object) -> WorkerView:
    """With these changes in its load."""
    return msgspec.structs.replace(worker, load=msgspec.structs.replace(worker.load, **load))


def steady(rate: float, prompt: int = 2000, answer: int = 200) -> Demand:
    """A tick of ``rate`` requests a second, of equal lengths. ``rate`` is a whole number of requests in the tick."""
    count = round(rate * TICK_S)
    return Demand(
        duration_s=TICK_S,
        num_requests=count,
        num_prompt_tokens=count * prompt,
        num_uncached_tokens=count * prompt,
        sum_squares=1.28 * count * prompt**2,
        num_ended=count,
        num_ended_tokens=count * answer,
        num_generated_tokens=count * answer,
    )


class ToyFleet:
    """Changes take effect after ``delay_s``; a start after ``start_s``."""

    def __init__(self, fleet: tuple[WorkerView, ...], *, max_workers: int = 0, delay_s: float = 2.0) -> None:
        self.fleet = {worker.worker_id: worker for worker in fleet}
        self.max_workers, self.delay_s, self.start_s = max_workers, delay_s, 10.0
        self.now_s, self.state = 0.0, PlannerState()
        self.actions: list[tuple[float, Action]] = []
        self.due: list[tuple[float, Action]] = []

    def view(self) -> FleetView:
        ordered = tuple(self.fleet[name] for name in sorted(self.fleet))
        return FleetView(
            now_s=self.now_s, workers=ordered, max_workers=self.max_workers, start_s=self.start_s, spread=0.03
        )

    def tick(self, demand: Demand, objectives: Objectives = OBJECTIVES) -> Action:
        """One second."""
        self.now_s += TICK_S
        for due_s, action in list(self.due):
            if due_s <= self.now_s:
                self.due.remove((due_s, action))
                self.apply(action)
        self._run(demand, objectives)
        (action,), self.state = plan(self.view(), demand, objectives, self.state)
        if not isinstance(action, Hold):
            self.actions.append((self.now_s, action))
            self.due.append((self.now_s + (self.start_s if isinstance(action, Start) else self.delay_s), action))
        return action

    def _run(self, demand: Demand, objectives: Objectives) -> None:
        """The answers that run, as the model has them."""
        shape = shape_of(self.view())
        if not demand.num_requests or not shape.mixed:
            self.fleet = {name: loaded(w, num_running=0) for name, w in self.fleet.items()}
            return
        load = Load(
            requests_per_s=demand.num_requests / demand.duration_s,
            uncached_tokens=demand.num_uncached_tokens / demand.num_requests,
            prompt_tokens=demand.num_prompt_tokens / demand.num_requests,
            answer_tokens=demand.num_ended_tokens / max(demand.num_ended, 1),
        )
        found = assess(shape, load, Worker(cost=COST, kv_tokens=262_144, spread=0.03), objectives)
        running = round(load.requests_per_s * load.answer_tokens * found.itl_s / shape.mixed)
        for name, worker in self.fleet.items():
            num_running = min(running, 256) if worker.role.takes_requests else 0
            self.fleet[name] = loaded(worker, num_running=num_running)

    def apply(self, action: Action) -> None:
        match action:
            case Widen(worker_id):
                self.fleet[worker_id] = msgspec.structs.replace(self.fleet[worker_id], role=WorkerRole.BOTH)
            case Narrow(worker_id, role):
                self.fleet[worker_id] = msgspec.structs.replace(self.fleet[worker_id], role=role)
            case Start(role):
                name = f"{PREFIX[role]}n{len(self.actions)}"
                self.fleet[name] = msgspec.structs.replace(loaded(workers(decode=1)[0], worker_id=name), role=role)
            case Stop(worker_id):
                del self.fleet[worker_id]
