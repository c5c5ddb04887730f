"""Hand-offs between engines whose peers are slow, repeat themselves, write late and die.

The ledgers of ``kvrelay/handoff`` decide, engines with a mock KV pool compute; the test plays drivers and network:
queue entries may be delivered twice, messages and block copies happen in random order, and a dead prefill worker's last
writes still land until it is fenced. Whatever happens, the answers are those of ``mock_generate``, which they are not
if one write ever lands in a block that belongs to somebody else.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.draws import seeds

from kvrelay.core.clock import ManualClock
from kvrelay.core.handoff import HandoffId, RemotePrefillRequest
from kvrelay.core.layout import BlockRun
from kvrelay.core.sampling import SamplingParams
from kvrelay.core.status import FinishReason
from kvrelay.engine import holding
from kvrelay.engine.core import EngineCore
from kvrelay.engine.request import PrefillMode, Request
from kvrelay.errors import OverloadedError
from kvrelay.executors.mock import MockExecutor, mock_generate
from kvrelay.handoff import decode_events as de
from kvrelay.handoff import prefill_events as pe
from kvrelay.handoff.base import LeaseEnded, LeaseLost, Registered, Tick, Value
from kvrelay.handoff.decode_ledger import DecodeLedger
from kvrelay.handoff.decode_state import DecodeRules
from kvrelay.handoff.messages import HandoffAbandon, HandoffDone, HandoffFetched, HandoffGrant, HandoffRefused
from kvrelay.handoff.prefill_ledger import PrefillLedger
from kvrelay.handoff.prefill_state import PrefillRules

MakeEngine = Callable[..., EngineCore]
VOCAB_SIZE, EOS = 500, (2,)
TTL_S = 3.0


def copy_blocks(
    source: EngineCore, source_ids: tuple[int, ...], target: EngineCore, target_ids: tuple[int, ...]
) -> None:
    assert isinstance(source.executor, MockExecutor)
    assert isinstance(target.executor, MockExecutor)
    assert len(source_ids) == len(target_ids)
    target.executor.pool[list(target_ids)] = source.executor.pool[list(source_ids)]


@dataclass
class Prefill:
    """A prefill worker."""

    name: str
    engine: EngineCore
    ledger: PrefillLedger
    copies: list[Callable[[], None]] = field(default_factory=list)
    """In the order in which they were submitted."""
    by_name: dict[str, HandoffId] = field(default_factory=dict)
    is_dead: bool = False


@dataclass
class World:
    """One decode worker, some prefill workers, and everything that is under way between them."""

    rng: random.Random
    clock: ManualClock
    decode: EngineCore
    ledger: DecodeLedger
    prefill: dict[str, Prefill]
    queue: list[HandoffId] = field(default_factory=list)
    starts: dict[HandoffId, RemotePrefillRequest] = field(default_factory=dict)
    messages: list[Callable[[], None]] = field(default_factory=list)
    answers: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    ended: dict[str, FinishReason] = field(default_factory=dict)
    num_remote: int = 0
    failing_reads: float = 0.0

    # -- the decode worker --------------------------------------------------------------------------------------------

    def step_decode(self) -> None:
        step = self.decode.step()
        for output in step.outputs:
            assert output.request_id not in self.ended
            self.answers[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                self.ended[output.request_id] = output.finish_reason
        for start in step.remote_prefills:
            self.starts[start.handoff_id] = start
            num_hit_blocks = start.num_cached_tokens // self.decode.pool.block_size
            self.tell_decode(
                de.Opened(start.handoff_id, start.request_id, start.block_ids, num_hit_blocks, len(start.token_ids))
            )
        for handoff_id in step.closed_handoffs:
            self.tell_decode(de.Closed(handoff_id))

    def tell_decode(self, event: de.DecodeEvent) -> None:
        for action in self.ledger.handle(event, self.clock.now()):
            self.carry_out(action)

    def carry_out(self, action: Value) -> None:
        decode = self.decode
        match action:
            case de.Push():
                self.queue.append(action.handoff_id)
            case de.AllocateLoan():
                block_ids = decode.lend_fresh(action.handoff_id, action.loan)
                self.later(lambda: self.tell_decode(de.LoanAllocated(action.handoff_id, action.loan, block_ids)))
            case de.SendGrant() | de.SendToPrefill():
                self.to_prefill(str(action.connection), action.message)
            case de.EndLoan():
                decode.end_loan(action.handoff_id, action.loan)
            case de.Resume():
                self.num_remote += decode.resume_handoff(action.handoff_id, action.loan, action.message.token_id, None)
            case de.ComputeHere():
                decode.compute_handoff_here(action.handoff_id)
            case de.Avoid():
                pass  # the driver only logs it
            case _:
                raise TypeError(action)

    def later(self, what: Callable[[], None]) -> None:
        self.messages.append(what)

    def to_prefill(self, name: str, message: Any) -> None:
        def deliver() -> None:
            worker = self.prefill.get(name)
            if worker is None:
                return
            match message:
                case HandoffGrant() | HandoffAbandon() | HandoffRefused() | HandoffFetched():
                    self.tell_prefill(worker, message)

        self.later(deliver)

    # -- prefill workers ----------------------------------------------------------------------------------------------

    def pull(self, worker: Prefill) -> None:
        if not self.queue:
            return
        handoff_id = self.queue.pop(self.rng.randrange(len(self.queue)))
        if self.rng.random() < 0.2:
            self.queue.append(handoff_id)
        start = self.starts[handoff_id]
        worker.by_name[str(handoff_id)] = handoff_id
        self.tell_prefill(worker, pe.Pulled(start, 1))

    def step_prefill(self, worker: Prefill) -> None:
        step = worker.engine.step()
        assert not step.outputs
        for load in step.kv_loads:
            wanted = pe.LoadRequested(worker.by_name[load.request_id], BlockRun(load.first_block, load.block_ids))
            self.tell_prefill(worker, wanted)
        for chunk in step.handoff_chunks:
            token = None if chunk.token_id is None else pe.FirstToken(chunk.token_id)
            blocks = BlockRun(chunk.first_block, chunk.block_ids)
            self.tell_prefill(worker, pe.ChunkComputed(worker.by_name[chunk.request_id], blocks, token))

    def tell_prefill(self, worker: Prefill, event: pe.PrefillEvent) -> None:
        if not worker.is_dead:
            for action in worker.ledger.handle(event, self.clock.now()):
                self.carry_out_prefill(worker, action)

    def carry_out_prefill(self, worker: Prefill, action: Value) -> None:
        engine = worker.engine
        match action:
            case pe.Compute():
                self.compute(worker, action.handoff_id)
            case pe.SendClaim():
                self.later(lambda: self.tell_decode(de.Claimed(action.message, worker.name)))
            case pe.ReadHits():
                self.read(worker, action)
            case pe.Write():
                worker.copies.append(lambda: self.write(worker, action))
            case pe.ReportLoaded():
                engine.kv_loaded(str(action.handoff_id), action.ok)
            case pe.StopComputing():
                engine.abort(str(action.handoff_id))
            case pe.FreeBlocks():
                engine.sending_finished(str(action.handoff_id))
            case pe.SendRelease():
                self.later(lambda: self.hear_release(worker, action))
            case pe.SendToDecode(message=HandoffDone() as message):
                self.later(lambda: self.tell_decode(de.Done(message, worker.name)))
            case pe.SendToDecode():
                self.later(lambda: self.tell_decode(action.message))
            case pe.Computed() | pe.Settle():
                pass
            case _:
                raise TypeError(action)

    def compute(self, worker: Prefill, handoff_id: HandoffId) -> None:
        start = self.starts[handoff_id]
        num_prompt = len(start.token_ids) - start.num_output_tokens
        worker.engine.add_request(
            Request(
                str(handoff_id),
                start.token_ids[:num_prompt],
                start.sampling,
                output_token_ids=start.token_ids[num_prompt:],
                mode=PrefillMode.HANDOFF,
                num_load_tokens=start.num_cached_tokens,
                priority=start.priority,
            )
        )

    def read(self, worker: Prefill, action: pe.ReadHits) -> None:
        ok = self.rng.random() >= self.failing_reads

        def read() -> None:
            if ok:
                copy_blocks(self.decode, action.there.block_ids, worker.engine, action.here.block_ids)
            self.tell_prefill(worker, pe.HitsRead(action.handoff_id, ok))

        worker.copies.append(read)

    def write(self, worker: Prefill, action: pe.Write) -> None:
        copy_blocks(worker.engine, action.here.block_ids, self.decode, action.there.block_ids)
        done: HandoffDone | None = action.done
        if done is not None and not worker.is_dead:
            self.later(lambda: self.tell_decode(de.Done(done)))
        self.tell_prefill(worker, pe.Written(action.handoff_id, True))

    def hear_release(self, worker: Prefill, action: pe.SendRelease) -> None:
        self.tell_decode(action.message)
        self.tell_prefill(worker, pe.ReleaseAcknowledged(action.message.handoff_id))

    def kill(self, name: str) -> None:
        """Dead, but what it had posted still lands for a while, before the decode worker fences it."""
        worker = self.prefill.pop(name)
        worker.is_dead = True
        if self.rng.random() < 0.5:
            self.tell_decode(de.ClaimantConnectionLost(name))
        self.tell_decode(LeaseEnded(name))
        for _ in range(self.rng.randrange(20)):
            self.step_decode()
            if worker.copies and self.rng.random() < 0.5:
                worker.copies.pop(0)()

    # -- time ---------------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        rng = self.rng
        if rng.random() < 0.9:
            self.step_decode()
        for worker in list(self.prefill.values()):
            if rng.random() < 0.3 and worker.ledger.num_active < 3:
                self.pull(worker)
            if rng.random() < 0.8:
                self.step_prefill(worker)
            if worker.copies and rng.random() < 0.6:
                worker.copies.pop(0)()
            if rng.random() < 0.005:
                self.tell_prefill(worker, LeaseLost())
            if rng.random() < 0.2:
                self.tell_prefill(worker, Tick())
        if self.messages and rng.random() < 0.8:
            self.messages.pop(rng.randrange(len(self.messages)))()
        self.clock.advance(0.1)
        if rng.random() < 0.2:
            self.tell_decode(Tick())

    @property
    def is_idle(self) -> bool:
        workers = self.prefill.values()
        return not (
            self.messages
            or self.queue
            or self.ledger.handoffs
            or any(worker.ledger.handoffs or worker.copies or worker.engine.has_unfinished() for worker in workers)
        )

    def check(self) -> None:
        for engine in (self.decode, *(worker.engine for worker in self.prefill.values())):
            engine.check_integrity()


def make_world(
    make_engine: MakeEngine, rng: random.Random, num_prefill: int, num_blocks: int = 72, **holding: int
) -> World:
    clock = ManualClock()
    decode = make_engine(worker_id="d", clock=clock, num_blocks=num_blocks, max_num_seqs=8, **holding)
    block_size = decode.pool.block_size
    ledger = DecodeLedger(DecodeRules(block_size, "same", max_attempts=3))
    prefill = {}
    for number in range(num_prefill):
        name = f"p{number}"
        engine = make_engine(
            worker_id=name, clock=clock, num_blocks=48, max_num_batched_tokens=16, exclusive_prefill=rng.random() < 0.7
        )
        prefill[name] = Prefill(name, engine, PrefillLedger(PrefillRules(block_size, "same", worker_id=name)))
        ledger.handle(Registered(name, TTL_S, 1), 0.0)
    return World(rng, clock, decode, ledger, prefill, failing_reads=0.2)


def settle(world: World) -> None:
    """Until nothing is under way any more."""
    for _ in range(5000):
        if world.is_idle:
            break
        world.tick()
    assert world.is_idle
    world.check()


@pytest.mark.parametrize("seed", seeds(4, 12))
def test_hand_offs_survive_disorder(make_engine: MakeEngine, seed: int) -> None:
    survive(make_world(make_engine, random.Random(seed), num_prefill=3))


@pytest.mark.parametrize("seed", seeds(4, 12))
def test_held_hand_offs_survive_disorder(make_engine: MakeEngine, seed: int) -> None:
    """The pool has room for two or three prompts, so most KV comes to the holding area."""
    world = make_world(make_engine, random.Random(seed), num_prefill=3, num_blocks=40, num_holding_blocks=40)
    survive(world)
    assert world.decode.holding.num_held > 0
    assert world.decode.holding.blocks.num_free == 40


@pytest.mark.parametrize("seed", seeds(3, 8))
def test_spilled_hand_offs_survive_disorder(
    make_engine: MakeEngine, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The area has room for two prompts; each copy takes several steps."""
    monkeypatch.setattr(holding, "PIECE_BYTES", 1)
    monkeypatch.setattr(holding, "COPY_S", -1.0)
    area = {"num_holding_blocks": 20, "num_spill_blocks": 60}
    world = make_world(make_engine, random.Random(seed), num_prefill=3, num_blocks=40, **area)
    survive(world)
    assert world.decode.holding.num_spilled > 0
    assert world.decode.holding.blocks.num_free == 20
    assert world.decode.holding.spilled.num_free == 60


def survive(world: World) -> None:
    rng = world.rng
    stems = [[rng.randrange(VOCAB_SIZE) for _ in range(40)] for _ in range(2)]
    prompts: dict[str, list[int]] = {}
    wanted: dict[str, int] = {}
    aborted: set[str] = set()
    num_requests = 60
    for tick in range(20000):
        if len(prompts) < num_requests and rng.random() < 0.2:
            name = f"r{len(prompts)}"
            stem = rng.choice(stems)
            prompt = stem[: rng.randrange(41)] + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 30))]
            count = rng.randrange(1, 12)
            mode = PrefillMode.REMOTE if rng.random() < 0.8 else PrefillMode.LOCAL
            try:
                world.decode.add_request(Request(name, prompt, SamplingParams(max_tokens=count), mode=mode))
            except OverloadedError:
                continue
            prompts[name], wanted[name] = prompt, count
        if rng.random() < 0.01 and prompts:
            name = rng.choice(list(prompts))
            if name not in world.ended:
                world.decode.abort(name)
                aborted.add(name)
        if rng.random() < 0.002 and len(world.prefill) > 1:
            world.kill(rng.choice(list(world.prefill)))
        world.tick()
        if tick % 100 == 0:
            world.check()
        if len(prompts) == num_requests and not world.decode.has_unfinished() and not world.decode.has_work():
            break
    assert set(world.ended) | aborted == set(prompts)
    for name in set(prompts) - aborted:
        assert world.ended[name] is FinishReason.LENGTH
        expected = mock_generate(prompts[name], wanted[name], vocab_size=VOCAB_SIZE, eos_token_ids=EOS)
        assert world.answers[name] == expected, name
    assert world.num_remote > 0
    settle(world)
    for engine in (world.decode, *(worker.engine for worker in world.prefill.values())):
        assert engine.pool.num_free == engine.pool.num_blocks
        assert engine.num_requests == 0
