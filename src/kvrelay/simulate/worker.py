"""A simulated worker: a real engine, its placement and its hand-offs, stepped in virtual time.

    posted callbacks ──> [inbox] ──turn──> EngineCore.step ──step's time later──> deliver ──between steps──> turn

An idle worker has nothing in the heap and costs nothing. It differs from the real worker (``worker/worker.py``) only in
what carries things: virtual time and direct calls instead of threads, sockets and memory.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from copy import deepcopy
from typing import NamedTuple

import msgspec

from kvrelay.config import WorkerRole
from kvrelay.core.event_log import KvEventLog
from kvrelay.core.events import KvEventBatch, LoadMetrics
from kvrelay.core.handoff import HandoffId, HandoffOrder
from kvrelay.core.messages import TokenOutput
from kvrelay.core.sampling import SamplingParams
from kvrelay.core.shortest_first import ShortestFirst
from kvrelay.core.step_cost import StepCost
from kvrelay.core.workers import WorkerInfo
from kvrelay.engine.core import EngineCore
from kvrelay.engine.request import Request
from kvrelay.engine.stats import LoadSampler
from kvrelay.engine.step import StepOutput
from kvrelay.engine.thread import LOAD_INTERVAL_S
from kvrelay.errors import KvrelayError, OverloadedError, WorkerUnavailableError
from kvrelay.handoff import decode_events as de
from kvrelay.handoff.messages import ToDecode
from kvrelay.placement.base import PrefillLoad, PrefillPlace
from kvrelay.placement.cost import CostPlacement, PlacementState
from kvrelay.placement.cost_model import RemoteCostModel, StepCostModel
from kvrelay.placement.threshold import DisaggPolicy
from kvrelay.planner import WorkerView
from kvrelay.rpc.wire import Message
from kvrelay.simulate.decode_run import MAX_STEPS, DecodeRun, Outlet, QuietDelivery
from kvrelay.simulate.handoffs import DecodeHandoffs, PrefillHandoffs
from kvrelay.simulate.loop import Rank, StepClock
from kvrelay.simulate.machine import TOKEN, FittedStepTime, SimulatedExecutor, StepTime
from kvrelay.simulate.network import MODEL, Network
from kvrelay.simulate.result import WorkerResult
from kvrelay.worker.decode.placing import Placing
from kvrelay.worker.decode.queue import SIZE_INTERVAL_S

MIN_RUN = 3
"""Fewer steps are not worth a jump."""
BUSY_WAIT_S = 0.001
"""An engine that has work and computes nothing looks again after this time."""


class Generate(msgspec.Struct, frozen=True):
    """A request as a frontend sends it. ``pair``: the prefill worker and the hand-off (prefill-first)."""

    request_id: str
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    max_tokens: int
    priority: int
    order: HandoffOrder
    pair: tuple[str, HandoffId] | None = None
    remote_wait_s: float | None = None
    begins_within_s: float = 0.0
    sequence_hashes: tuple[int, ...] | None = None
    """Of the prompt's blocks, if they are known."""
    is_prefetch: bool = False

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(self.max_tokens, temperature=0.0, seed=0, ignore_eos=True, is_prefetch=self.is_prefetch)


class Delivery(msgspec.Struct, frozen=True):
    """What a step gives to the frontend and its router."""

    outputs: list[TokenOutput]
    events: KvEventBatch | None
    load: LoadMetrics | None


class Learnt(NamedTuple):
    """What workers know of their costs: the steps of a prefill worker and of others, and remote prefills."""

    prefill: StepCostModel
    decode: StepCostModel
    remote: RemoteCostModel


class FrontendPort(msgspec.Struct, frozen=True):
    """Where a worker's messages to the frontend go, after a hop."""

    deliver: Callable[[str, Delivery], None]
    decoded: Callable[[QuietDelivery], None]
    refused: Callable[[str, str, KvrelayError], None]


class SimulatedWorker:
    """One worker, from its registration to its end."""

    def __init__(
        self,
        worker_id: str,
        role: WorkerRole,
        network: Network,
        frontend: FrontendPort,
        step_time: StepTime,
        number: int = 0,
    ) -> None:
        spec, seed = network.spec, f"{network.seed} {worker_id}"
        self.worker_id, self.role, self.epoch = worker_id, role, 0
        self.is_alive, self.is_accepting = True, False
        self._network, self._loop, self._frontend = network, network.loop, frontend
        self._clock = StepClock(network.loop.clock)
        self.executor = SimulatedExecutor(spec, network.costs, self._clock, step_time)
        self.core = EngineCore(self.executor, spec.engine, self._clock, worker_id=worker_id)
        self.executor.step_work = self.core.scheduler.step_work
        self._sampler = LoadSampler(self.core, LOAD_INTERVAL_S, self._clock)
        # No message is lost, so no router asks for a replay.
        self._log = KvEventLog(worker_id, 0, only_numbers=True)
        self._number, self._step_time = number, step_time
        self._between_s = network.costs.between_steps_s / network.costs.step.tokens_per_step
        self._outlet = Outlet(
            self._log.append, self._sample, lambda: self._sampler.due_s, frontend.decoded, network.costs.hop_s
        )
        policy = DisaggPolicy(spec.disagg)
        self._placement = CostPlacement(policy, self._prefill_load, self._count, self._clock)
        self._placing = Placing(policy, self._placement, self._prefill_load)
        secrets = random.Random(f"{seed} secrets")
        self.decodes = DecodeHandoffs(network, self, lambda: secrets.getrandbits(63), self._placement.prefill_took)
        self.prefills = PrefillHandoffs(network, self)
        self._arrivals: ShortestFirst[Generate] = ShortestFirst()
        self._numbers = itertools.count(1)
        self._inbox: list[Callable[[EngineCore], None]] = []
        self._is_busy = False
        self._on_drained: Callable[[], None] | None = None
        self._narrowing: WorkerRole | None = None
        self._queue_size, self._queue_read_s = 0, -SIZE_INTERVAL_S
        if spec.tiers.is_on:
            tiers = network.host_of(number).open_tiers(self._step_cost, self._clock, self.catch_up)
            self.core.attach(tiers)
            tiers.start(self._loaded, lambda: self.post(lambda _: None))

    def __repr__(self) -> str:
        return f"SimulatedWorker({self.worker_id}, {self.role}, {self.core!r})"

    @property
    def info(self) -> WorkerInfo:
        """Its entry in discovery."""
        spec = self._network.spec
        return WorkerInfo(
            worker_id=self.worker_id,
            epoch=self.epoch,
            role=self.role,
            model=MODEL,
            model_path="",
            address="",
            max_model_len=self.core.max_model_len,
            block_size=spec.engine.block_size,
            num_blocks=self.executor.num_blocks,
            vocab_size=spec.vocab_size,
            kv_compatibility=MODEL,
            host=self.worker_id,
        )

    @property
    def learnt(self) -> Learnt:
        steps = self.core.scheduler.token_budget.costs
        return Learnt(steps, steps, self._placement.model)

    def begin_with(self, learnt: Learnt) -> None:
        """It has served before. Before its first request."""
        steps = learnt.prefill if self.role is WorkerRole.PREFILL else learnt.decode
        self.core.scheduler.token_budget.costs = deepcopy(steps)
        self._placement.model = deepcopy(learnt.remote)

    # -- roles --------------------------------------------------------------------------------------------------------

    def enter(self, role: WorkerRole) -> None:
        """Begin to work in ``role``. The caller lists the worker in discovery."""
        self.role, self._narrowing = role, None
        self.is_accepting = True
        self.post(lambda core: core.set_exclusive_prefill(role is WorkerRole.PREFILL))
        if role.pulls_prefills:
            self.prefills.start()

    def widen(self) -> None:
        """Do both from now on, with all work in flight. Unlike a worker that began as ``both`` it pulls prefills."""
        is_pulling, self.epoch = self.pulls_prefills, self.epoch + 1
        self.enter(WorkerRole.BOTH)
        if not is_pulling:
            self.prefills.start()

    def narrow(self, role: WorkerRole, then: Callable[[], None]) -> None:
        """Begin no new work of the half that ``role`` lacks; ``then`` once what has begun of it has ended."""
        self._narrowing, self._on_drained = role, then
        if role is WorkerRole.PREFILL:
            self.is_accepting = False
        else:
            self.prefills.stop()
        self.check_drained()

    @property
    def pulls_prefills(self) -> bool:
        return self.prefills.is_pulling

    def drain(self, then: Callable[[], None]) -> None:
        """Begin no new work; ``then`` once all work in flight has ended."""
        self.is_accepting = False
        self.prefills.stop()
        self._on_drained = then
        self.check_drained()

    def check_drained(self) -> None:
        """Something has ended: perhaps it was the last."""
        is_over = self._on_drained is not None and self.is_alive and not self._has_work()
        if self._on_drained is not None and is_over:
            then, self._on_drained = self._on_drained, None
            self._loop.after(self._network.costs.drain_s, then)

    def _has_work(self) -> bool:
        """Of the half that ends, or any."""
        self.catch_up()
        if self._narrowing is WorkerRole.DECODE:
            return bool(self.prefills.jobs)
        own = bool(self._inbox or len(self._arrivals) or self.decodes.ledger.handoffs)
        if self._narrowing is WorkerRole.PREFILL:
            scheduler = self.core.scheduler
            return own or scheduler.num_admitted + scheduler.num_waiting > len(self.prefills.jobs)
        return own or self.core.has_unfinished() or bool(self.prefills.jobs)

    def kill(self) -> None:
        """The process is gone. Its queue entries come back after their ack deadline."""
        self._stop_run()
        self.is_alive = self.is_accepting = False
        self.prefills.stop()
        self.prefills.lose_entries()

    # -- the engine's loop --------------------------------------------------------------------------------------------

    def post(self, callback: Callable[[EngineCore], None]) -> None:
        """Run it between two steps."""
        self._inbox.append(callback)
        if not self._is_busy:
            self._is_busy = True
            self._loop.after(0.0, self._turn, Rank.TURN, self._number)
        elif (run := self._stop_run()) is not None and run.is_in_step:
            self._loop.at(run.next_s, lambda: self._end_last_step(run), Rank.STEP_END, self._number)
        elif run is not None:
            self._loop.at(run.next_s, self._turn, Rank.TURN, self._number)

    def _turn(self) -> None:
        if not self.is_alive:
            return
        while self._inbox:
            callbacks, self._inbox = self._inbox, []
            for callback in callbacks:
                callback(self.core)
        if not self.core.has_work():
            self._is_busy = False
            self.check_drained()
            return
        if self._network.may_jump and self._begin_run():
            return
        output = self.core.step(self._deliver)
        seconds, self._clock.ahead_s = self._clock.ahead_s, 0.0
        if seconds:
            self._loop.after(seconds, lambda: self._end_step(output), Rank.STEP_END, self._number)
        else:
            self._deliver(output)
            delay_s = BUSY_WAIT_S if self.core.has_work() else 0.0
            self._loop.after(delay_s, self._turn, Rank.TURN, self._number)

    def _end_step(self, output: StepOutput) -> None:
        if self.is_alive:
            self._deliver(output)
            self._loop.after(self._between_s, self._turn, Rank.TURN, self._number)

    # -- steps that only decode ---------------------------------------------------------------------------------------

    def _begin_run(self) -> bool:
        """Whether the next steps only decode: they are jumped over then, until something comes."""
        storage = self.core.storage
        has_events = self.core.pool.has_events or (storage is not None and storage.has_events)
        if not isinstance(self._step_time, FittedStepTime) or has_events:
            return False
        steps = self.core.scheduler.steady_decodes(TOKEN)
        if steps is None or steps.num_steps < MIN_RUN:
            return False
        count = min(steps.num_steps, MAX_STEPS)
        seconds = self._step_time.decode_seconds(len(steps.requests), steps.num_context, count)
        run = DecodeRun(self._number, self.core, steps, seconds, self._between_s, self._loop, self._outlet)
        self._network.runs[self._number] = run
        self._loop.at(run.end_s, lambda: self._end_run(run), Rank.TURN, self._number)
        return True

    def _end_run(self, run: DecodeRun) -> None:
        if self._network.runs.get(self._number) is run:
            self._stop_run()
            self._turn()

    def _stop_run(self) -> DecodeRun | None:
        """From now on the engine steps one by one; its state is that of now. Returns the run, if there was one."""
        run = self._network.runs.get(self._number)
        if run is not None and isinstance(self._step_time, FittedStepTime):
            run.catch_up(self._loop.position)
            run.leave()
            del self._network.runs[self._number]
            self._step_time.drop(run.num_begun)
            for seconds in run.seconds_begun():
                self.executor.busy_s += seconds
        return run

    def _end_last_step(self, run: DecodeRun) -> None:
        if self.is_alive:
            self._loop.at(run.end_step(), self._turn, Rank.TURN, self._number)

    def catch_up(self) -> None:
        """Show the state of now, also of steps that are jumped over."""
        if (run := self._network.runs.get(self._number)) is not None:
            run.catch_up(self._loop.position)

    def _deliver(self, step: StepOutput) -> None:
        """Carry out what the engine has put out: at a step's begin what need not wait for it, else at its end."""
        self.decodes.on_step(step)
        if step.kv_loads or step.handoff_chunks:
            self.prefills.on_step(step)
        events = self._log.append(step.kv_events) if step.kv_events else None
        load = self._sample()
        if step.outputs or events is not None or load is not None:
            self._tell(Delivery(step.outputs, events, load))

    def publish(self) -> None:
        """The first load sample, before any step: it has the costs that are expected of a worker."""
        self._tell(Delivery([], None, self._sample()))

    def _tell(self, delivery: Delivery) -> None:
        hop_s, deliver = self._network.costs.hop_s, self._frontend.deliver
        self._loop.after(hop_s, lambda: deliver(self.worker_id, delivery), Rank.DELIVERY, self._number)

    # -- KV beyond the pool -------------------------------------------------------------------------------------------

    def _step_cost(self) -> StepCost:
        return self.core.scheduler.token_budget.costs.cost

    def _loaded(self, request_id: str, is_whole: bool, num_blocks: int) -> None:
        self.post(lambda core: core.kv_loaded(request_id, is_whole, num_blocks))

    def _sample(self) -> LoadMetrics | None:
        """With what loads cost, as a worker's publisher adds it."""
        load, storage = self._sampler.sample(), self.core.storage
        if load is None or storage is None:
            return load
        return msgspec.structs.replace(load, load_costs=storage.stats().load_costs)

    # -- requests -----------------------------------------------------------------------------------------------------

    def generate(self, message: Generate) -> None:
        """A frontend's request: for a pair's prefill half, or for this worker to answer."""
        if not self.is_alive:
            return
        if not self.is_accepting:
            self._refuse(message.request_id, WorkerUnavailableError("the worker is draining"))
            return
        if message.pair is not None:
            self.decodes.handle(de.Expected(message.pair[1], message.pair[0], message.begins_within_s))
        size = len(message.prompt_token_ids) + len(message.output_token_ids)
        self._arrivals.add(next(self._numbers), size, message)
        self.post(self._admit_next)

    def session_paused(self, request_id: str, tool: str) -> None:
        """A frontend has seen that this request's answer ends in a call of ``tool``."""
        if self.is_alive:
            self.post(lambda core: core.session_paused(request_id, tool))

    def _admit_next(self, core: EngineCore) -> None:
        message = self._arrivals.take()
        if message is None:
            return
        try:
            self._enqueue(core, message)
        except KvrelayError as exc:
            self._not_paired(message)
            self._refuse(message.request_id, exc)

    def _enqueue(self, core: EngineCore, message: Generate) -> None:
        request = Request(
            message.request_id,
            message.prompt_token_ids,
            message.sampling,
            output_token_ids=message.output_token_ids,
            priority=message.priority,
            handoff_number=0 if message.pair is None else message.pair[1].number,
            placement=PlacementState(),
        )
        if message.sequence_hashes is not None and core.pool.enable_prefix_caching:
            # What the engine computes at arrival: the last token's block is not looked up.
            num_blocks = (len(request.token_ids) - 1) // core.pool.block_size
            request.sequence_hashes.extend(message.sequence_hashes[:num_blocks])
        if message.remote_wait_s is not None:
            self._placement.told(message.remote_wait_s)
        objectives, is_paired = self._placement.objectives(), message.pair is not None
        place = self._placing.add_request(core, request, message.order, objectives, is_paired=is_paired)
        if place is not None and not message.is_prefetch:
            self._count(place)
            if place is not PrefillPlace.REMOTE:
                self._not_paired(message)

    def _not_paired(self, message: Generate) -> None:
        """The prefill half of a pair is not needed."""
        if message.pair is not None:
            closed = de.Closed(message.pair[1])
            self._loop.after(0.0, lambda: self.decodes.handle(closed))

    def _refuse(self, request_id: str, error: KvrelayError) -> None:
        self._loop.after(self._network.costs.hop_s, lambda: self._frontend.refused(self.worker_id, request_id, error))

    def _prefill_load(self) -> PrefillLoad:
        """The queue's size is asked for at intervals, by the real worker, too."""
        now_s = self._loop.clock.now()
        if now_s - self._queue_read_s >= SIZE_INTERVAL_S:
            self._queue_size, self._queue_read_s = self._network.queue.num_waiting(MODEL), now_s
        return PrefillLoad(max(self._network.num_prefill_workers - self.pulls_prefills, 0), self._queue_size)

    def _count(self, place: PrefillPlace) -> None:
        self._network.places[place.value] += 1

    # -- peers --------------------------------------------------------------------------------------------------------

    def on_decode(self, event: de.DecodeEvent) -> None:
        """News of a prefill worker."""
        self.decodes.handle(event)
        self._perhaps_drained()

    def from_prefill(self, worker_id: str, message: ToDecode) -> None:
        """A prefill worker's message."""
        self.decodes.on_message(worker_id, message)
        self._perhaps_drained()

    def notified(self, payload: bytes) -> None:
        """What came behind a prefill worker's last write."""
        self.decodes.notified(payload)
        self._perhaps_drained()

    def _perhaps_drained(self) -> None:
        if self._on_drained is not None:
            self._loop.after(0.0, self.check_drained)

    def from_decode(self, worker_id: str, message: Message) -> None:
        """A decode worker's message."""
        self.prefills.on_message(worker_id, message)

    def no_prefill_worker(self) -> None:
        """The last prefill worker has left discovery."""
        self.post(lambda core: core.keep_prefills_here())
        self.decodes.handle(de.NoPrefillWorker())

    # -- what can be seen ---------------------------------------------------------------------------------------------

    def view(self, *, is_ready: bool) -> WorkerView:
        """For a controller."""
        self.catch_up()
        stats = self.core.stats()
        load = msgspec.structs.replace(stats.load, tokens=stats.tokens)
        return WorkerView(role=self.role, load=load, block_size=self._network.spec.engine.block_size, is_ready=is_ready)

    def result(self) -> WorkerResult:
        """What it has done until now. It does nothing more."""
        self._stop_run()
        scheduler, stats = self.core.scheduler, self.core.stats()
        return WorkerResult(
            self.worker_id,
            self.role.value,
            scheduler.num_steps,
            self.executor.busy_s,
            scheduler.num_prefilled_tokens,
            scheduler.num_generated_tokens,
            self._network.links.num_bytes.get(self.worker_id, 0),
            scheduler.num_preemptions,
            {} if stats.sessions is None else stats.sessions.tokens_by_place,
            stats.tiers,
        )


def is_final(error: KvrelayError) -> bool:
    """Whether another worker would refuse the request as well."""
    return not isinstance(error, OverloadedError | WorkerUnavailableError)
