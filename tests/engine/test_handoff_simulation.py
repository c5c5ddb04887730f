"""Hand-offs between engines whose peers are slow, repeat themselves, write late and die.

The test plays the workers and the network: queue entries may be delivered twice, messages and block copies happen in
random order, and a dead prefill worker's last writes still land until it is fenced. Whatever happens, the answers are
those of ``mock_generate``, which they are not if one write ever lands in a block that belongs to somebody else.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from kvrelay.core.clock import ManualClock
from kvrelay.core.handoff import HandoffAbandon, HandoffClaim, HandoffDone, HandoffGrant, HandoffReleased
from kvrelay.core.sampling import SamplingParams
from kvrelay.core.status import FinishReason
from kvrelay.engine.base import HandoffChunk, KvLoad, RemotePrefillStart
from kvrelay.engine.core import EngineCore
from kvrelay.engine.request import PrefillMode, Request
from kvrelay.errors import OverloadedError
from kvrelay.executors.mock import MockExecutor, mock_generate

MakeEngine = Callable[..., EngineCore]
VOCAB_SIZE, EOS = 500, (2,)


def copy_blocks(
    source: EngineCore, source_ids: tuple[int, ...], target: EngineCore, target_ids: tuple[int, ...]
) -> None:
    assert isinstance(source.executor, MockExecutor)
    assert isinstance(target.executor, MockExecutor)
    assert len(source_ids) == len(target_ids)
    target.executor.pool[list(target_ids)] = source.executor.pool[list(source_ids)]


@dataclass
class Outgoing:
    """A granted hand-off as its prefill worker sees it."""

    start: RemotePrefillStart
    grant: HandoffGrant
    name: str
    in_flight: int = 0
    last: HandoffChunk | None = None
    stopped: bool = False
    ended: bool = False


@dataclass
class World:
    """One decode worker, some prefill workers, and everything that is under way between them."""

    rng: random.Random
    clock: ManualClock
    decode: EngineCore
    prefill: dict[str, EngineCore]
    queue: list[RemotePrefillStart] = field(default_factory=list)
    outgoing: defaultdict[str, dict[str, Outgoing]] = field(default_factory=lambda: defaultdict(dict))
    copies: defaultdict[str, list[Callable[[], None]]] = field(default_factory=lambda: defaultdict(list))
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
            self.num_remote += output.remote_prefill
            if output.finish_reason is not None:
                self.ended[output.request_id] = output.finish_reason
        self.queue += step.remote_prefills
        for worker_id, abandon in self.decode.drain_abandons():
            self.messages.append(lambda worker_id=worker_id, abandon=abandon: self.on_abandon(worker_id, abandon))

    # -- prefill workers ----------------------------------------------------------------------------------------------

    def pull(self, worker_id: str) -> None:
        if not self.queue:
            return
        start = self.queue.pop(self.rng.randrange(len(self.queue)))
        if self.rng.random() < 0.2:
            self.queue.append(start)
        answer = self.decode.grant(HandoffClaim(start.handoff_id, worker_id, "same"))
        if not isinstance(answer, HandoffGrant):
            return
        name = f"{answer.handoff_id}/{answer.generation}"
        num_prompt = len(start.token_ids) - start.num_output_tokens
        self.outgoing[worker_id][name] = Outgoing(start, answer, name)
        self.prefill[worker_id].add_request(
            Request(
                name,
                start.token_ids[:num_prompt],
                start.sampling,
                output_token_ids=start.token_ids[num_prompt:],
                mode=PrefillMode.HANDOFF,
                num_load_tokens=answer.num_cached_tokens,
                priority=start.priority,
            )
        )

    def step_prefill(self, worker_id: str) -> None:
        step = self.prefill[worker_id].step()
        assert not step.outputs
        for load in step.kv_loads:
            self.load(worker_id, self.outgoing[worker_id].get(load.request_id), load)
        for chunk in step.handoff_chunks:
            out = self.outgoing[worker_id].get(chunk.request_id)
            if out is None or out.stopped:
                continue
            if chunk.last and out.in_flight:
                out.last = chunk
            else:
                self.send(worker_id, out, chunk)

    def load(self, worker_id: str, out: Outgoing | None, load: KvLoad) -> None:
        engine = self.prefill[worker_id]
        if out is None or out.stopped:
            engine.kv_loaded(load.request_id, False)
            return
        theirs = out.grant.block_ids[load.first_block : load.first_block + len(load.block_ids)]
        ok = self.rng.random() >= self.failing_reads
        out.in_flight += 1

        def read() -> None:
            if ok:
                copy_blocks(self.decode, theirs, engine, load.block_ids)
            out.in_flight -= 1
            engine.kv_loaded(out.name, ok)
            self.end_if_stopped(worker_id, out)

        self.copies[worker_id].append(read)

    def send(self, worker_id: str, out: Outgoing, chunk: HandoffChunk) -> None:
        engine = self.prefill[worker_id]
        theirs = out.grant.block_ids[chunk.first_block : chunk.first_block + len(chunk.block_ids)]
        assert chunk.first_block >= out.grant.num_cached_tokens // engine.pool.block_size
        out.in_flight += 1

        def write() -> None:
            copy_blocks(engine, chunk.block_ids, self.decode, theirs)
            out.in_flight -= 1
            if chunk.last:
                assert chunk.token_id is not None
                done = HandoffDone(out.grant.handoff_id, out.grant.generation, chunk.token_id, None, 0, 0.0)
                self.messages.append(lambda: self.on_done(done))
                self.end(worker_id, out)
            elif not self.end_if_stopped(worker_id, out) and not out.in_flight and out.last is not None:
                self.send(worker_id, out, out.last)

        self.copies[worker_id].append(write)

    def on_abandon(self, worker_id: str, abandon: HandoffAbandon) -> None:
        out = self.outgoing[worker_id].get(f"{abandon.handoff_id}/{abandon.generation}")
        if out is not None and not out.stopped:
            self.stop(worker_id, out)

    def stop(self, worker_id: str, out: Outgoing) -> None:
        out.stopped = True
        self.prefill[worker_id].abort(out.name)
        self.end_if_stopped(worker_id, out)

    def end_if_stopped(self, worker_id: str, out: Outgoing) -> bool:
        if not out.stopped or out.in_flight:
            return False
        if not out.ended:
            self.end(worker_id, out)
            released = HandoffReleased(out.grant.handoff_id, out.grant.generation, "stopped", worker_id)
            self.messages.append(lambda: self.decode.handoff_released(released))
        return True

    def end(self, worker_id: str, out: Outgoing) -> None:
        out.ended = True
        self.prefill[worker_id].sending_finished(out.name)
        self.outgoing[worker_id].pop(out.name, None)

    def on_done(self, done: HandoffDone) -> None:
        self.decode.remote_prefill_done(done)

    def kill(self, worker_id: str) -> None:
        """Dead, but what it had posted still lands for a while, before the decode worker fences it."""
        late = self.copies.pop(worker_id, [])
        del self.prefill[worker_id]
        if self.rng.random() < 0.5:
            for out in self.outgoing[worker_id].values():
                self.decode.claimant_lost(out.grant.handoff_id, out.grant.generation)
        for _ in range(self.rng.randrange(20)):
            self.step_decode()
            if late and self.rng.random() < 0.5:
                self.land(late.pop())
        self.outgoing.pop(worker_id, None)
        self.decode.peer_gone(worker_id)

    def land(self, write: Callable[[], None]) -> None:
        """Only the memory effect of a dead worker's copy: its engine is gone, its messages stay unsaid."""
        num_messages = len(self.messages)
        try:
            write()
        except KeyError:
            pass
        del self.messages[num_messages:]

    # -- time ---------------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        rng = self.rng
        if rng.random() < 0.9:
            self.step_decode()
        for worker_id in list(self.prefill):
            if rng.random() < 0.3 and len(self.outgoing[worker_id]) < 3:
                self.pull(worker_id)
            if rng.random() < 0.8:
                self.step_prefill(worker_id)
            copies = self.copies[worker_id]
            if copies and rng.random() < 0.6:
                copies.pop(rng.randrange(len(copies)))()
            if rng.random() < 0.01 and self.outgoing[worker_id]:
                out = rng.choice(list(self.outgoing[worker_id].values()))
                if not out.stopped:
                    self.stop(worker_id, out)
        if self.messages and rng.random() < 0.6:
            self.messages.pop(rng.randrange(len(self.messages)))()
        self.clock.advance(0.1)
        if rng.random() < 0.2:
            self.decode.expire_handoffs()

    def check(self) -> None:
        for engine in (self.decode, *self.prefill.values()):
            engine.check_integrity()


def make_world(make_engine: MakeEngine, rng: random.Random, num_prefill: int) -> World:
    clock = ManualClock()
    prefill = {
        f"p{i}": make_engine(
            worker_id=f"p{i}",
            clock=clock,
            num_blocks=48,
            max_num_batched_tokens=16,
            exclusive_prefill=rng.random() < 0.7,
        )
        for i in range(num_prefill)
    }
    decode = make_engine(worker_id="d", clock=clock, num_blocks=72, max_num_seqs=8, max_handoff_attempts=3)
    return World(rng, clock, decode, prefill, failing_reads=0.2)


@pytest.mark.parametrize("seed", range(12))
def test_hand_offs_survive_disorder(make_engine: MakeEngine, seed: int) -> None:
    rng = random.Random(seed)
    world = make_world(make_engine, rng, num_prefill=3)
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
    while any(world.copies.values()) or any(engine.has_unfinished() for engine in world.prefill.values()):
        world.tick()
    world.check()
    for engine in (world.decode, *world.prefill.values()):
        assert engine.pool.num_free == engine.pool.num_blocks
        assert engine.num_requests == 0
