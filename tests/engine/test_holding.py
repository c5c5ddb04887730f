"""The holding area of an engine: what is held, in which order it goes on, what is freed when, and how long copies
take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvrelay.core.clock import ManualClock
from kvrelay.core.handoff import RemotePrefillRequest
from kvrelay.core.sampling import SamplingParams
from kvrelay.core.status import FinishReason, RequestStatus
from kvrelay.engine import holding
from kvrelay.engine.admission.queue import MAX_CANDIDATES
from kvrelay.engine.core import EngineCore
from kvrelay.engine.holding import MAX_POOLS, num_holding_blocks
from kvrelay.engine.request import PrefillMode, Request
from kvrelay.engine.step import KeptBlocks, StepOutput
from kvrelay.executors.mock import MockExecutor, mock_generate
from kvrelay.placement.base import Decision, Objectives, PrefillPlace, Situation
from kvrelay.placement.cost import PlacementState

MakeEngine = Callable[..., EngineCore]
VOCAB_SIZE, EOS = 500, (2,)
NUM_BLOCKS, SIZE = 12, 4


def reference(prompt: list[int], count: int) -> list[int]:
    return mock_generate(prompt, count, vocab_size=VOCAB_SIZE, eos_token_ids=EOS)


def prompt(length: int, start: int = 0) -> list[int]:
    return [(7 * number + 31 * start) % VOCAB_SIZE for number in range(length)]


class TickingClock(ManualClock):
    """Each look takes a while."""

    def now(self) -> float:
        self.advance(0.0004)
        return super().now()


class Decode:
    """A decode worker's engine with a small pool, and what it has told."""

    def __init__(self, make_engine: MakeEngine, **options: object) -> None:
        settings = {"num_blocks": NUM_BLOCKS, "num_holding_blocks": 4 * NUM_BLOCKS, "block_size": SIZE, **options}
        self.engine = make_engine(**settings)
        self.prefill = make_engine(worker_id="p", num_blocks=64, block_size=SIZE)
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, FinishReason] = {}
        self.sent: dict[str, RemotePrefillRequest] = {}
        self.cached: dict[str, int | None] = {}

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.note(self.engine.step())
            self.engine.check_integrity()

    def note(self, step: StepOutput) -> None:
        for output in step.outputs:
            self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
            self.cached.setdefault(output.request_id, output.num_cached_tokens)
            if output.finish_reason is not None:
                self.ended[output.request_id] = output.finish_reason
        self.sent.update((prefill.request_id, prefill) for prefill in step.remote_prefills)

    def local(self, name: str, tokens: list[int], count: int) -> Request:
        return self.add(name, tokens, count, PrefillMode.LOCAL)

    def remote(self, name: str, tokens: list[int], count: int = 6) -> Request:
        return self.add(name, tokens, count, PrefillMode.REMOTE)

    def add(self, name: str, tokens: list[int], count: int, mode: PrefillMode) -> Request:
        request = Request(name, tokens, SamplingParams(max_tokens=count), mode=mode)
        self.engine.add_request(request)
        return request

    def fill(self) -> None:
        """An answer takes the whole pool."""
        self.local("filling", prompt(NUM_BLOCKS * SIZE - 4, 9), 4)
        self.step()
        assert self.engine.pool.num_free <= 1

    def arrive(self, name: str, loan: int = 1, block_ids: tuple[int, ...] | None = None) -> None:
        """The KV of this prefill comes, computed by another engine."""
        sent = self.sent[name]
        request = Request(name, list(sent.token_ids), sent.sampling, mode=PrefillMode.HANDOFF)
        self.prefill.add_request(request)
        while request.status is not RequestStatus.PREFILL_SENDING:
            self.prefill.step()
        token = reference(list(sent.token_ids), 1)[0]
        copy(self.prefill, request.block_ids, self.engine, list(block_ids or sent.block_ids))
        self.prefill.sending_finished(name)
        assert self.engine.resume_handoff(sent.handoff_id, loan, token, None)
        for each in range(1, loan + 1):
            self.engine.end_loan(sent.handoff_id, each)

    def hold(self, name: str, tokens: list[int], count: int = 6) -> Request:
        """With its KV."""
        request = self.remote(name, tokens, count)
        self.step()
        assert name in self.sent
        self.arrive(name)
        self.step()
        return request

    @property
    def num_taken(self) -> int:
        area = self.engine.holding.blocks
        return area.num_blocks - area.num_free


def copy(source: EngineCore, source_ids: list[int], target: EngineCore, target_ids: list[int]) -> None:
    assert isinstance(source.executor, MockExecutor)
    assert isinstance(target.executor, MockExecutor)
    target.executor.pool[target_ids] = source.executor.pool[source_ids]


@pytest.mark.parametrize("length", [1, SIZE - 1, SIZE, SIZE + 1, 5 * SIZE, 6 * SIZE + 1])
def test_a_held_request_has_its_first_token_and_goes_on_when_there_is_room(
    make_engine: MakeEngine, length: int
) -> None:
    decode = Decode(make_engine)
    decode.fill()
    request = decode.hold("r", prompt(length))
    assert min(decode.sent["r"].block_ids) >= NUM_BLOCKS
    assert decode.sent["r"].num_cached_tokens == 0
    assert request.status is RequestStatus.KV_HELD
    assert decode.tokens["r"] == reference(prompt(length), 1)
    assert decode.cached["r"] == 0
    decode.step(20)
    assert decode.tokens["r"] == reference(prompt(length), 6)
    assert decode.ended == {"filling": FinishReason.LENGTH, "r": FinishReason.LENGTH}
    assert decode.num_taken == 0
    assert decode.engine.pool.num_free == NUM_BLOCKS
    assert decode.engine.scheduler.num_prefilled_tokens == NUM_BLOCKS * SIZE - 4, "only the filling prompt was computed"


def test_a_prefix_that_the_pool_has_by_then_is_not_copied(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = Decode(make_engine, num_blocks=16)
    decode.local("filling", prompt(10 * SIZE), 20)  # grows to 15 blocks
    decode.step(18)
    request = decode.hold("r", [*prompt(10 * SIZE), 5, 6])
    copied: list[int] = []
    original = decode.engine.executor.copy_blocks

    def counting(source_ids: list[int], target_ids: list[int]) -> None:
        copied.extend(source_ids)
        original(source_ids, target_ids)

    monkeypatch.setattr(decode.engine.holding, "copy", counting)
    while request.status is not RequestStatus.RUNNING:
        decode.step()
    assert len(copied) == 1, "ten of eleven blocks were cached"
    decode.step(10)
    assert decode.tokens["r"] == reference([*prompt(10 * SIZE), 5, 6], 6)


class Learner:
    """A placement that sends each prefill away, and hears how long that takes."""

    has_choice = True

    def __init__(self) -> None:
        self.heard: list[tuple[str, int, int, float]] = []

    def decide(self, _: Situation) -> Decision:
        return Decision(PrefillPlace.REMOTE)

    def placed(self, decision: Decision) -> None:
        assert decision.place is PrefillPlace.REMOTE

    def came_back(self, *numbers: Any) -> None:
        self.heard.append(numbers)


def test_placement_learns_how_long_hand_offs_take_wherever_their_kv_comes_to(make_engine: MakeEngine) -> None:
    clock, learner = ManualClock(5.0), Learner()
    decode = Decode(make_engine, clock=clock, max_num_seqs=1)
    for name, seconds in (("direct", 1.0), ("held", 2.0)):
        request = Request(name, prompt(9), SamplingParams(max_tokens=1))
        request.placement = PlacementState(policy=learner, objectives=Objectives(1.0, 1.0))  # type: ignore[arg-type]
        decode.engine.add_request(request)
        decode.step()
        clock.advance(seconds)
        decode.arrive(name)
        decode.step()
        decode.local(f"after {name}", prompt(4), 8)
        decode.step()
    assert learner.heard == [("direct", 9, 0, 1.0), ("held", 9, 0, 2.0)]
    times = decode.engine.stats().times
    assert (times.handoff.count, times.handoff.total_s) == (2, 3.0)


def test_without_a_slot_it_is_held_though_the_pool_has_room(make_engine: MakeEngine) -> None:
    decode = Decode(make_engine, max_num_seqs=1)
    decode.local("running", prompt(4), 8)
    decode.step()
    decode.hold("r", prompt(9))
    assert decode.engine.scheduler.num_admitted == 1
    decode.step(20)
    assert decode.tokens["r"] == reference(prompt(9), 6)


def test_many_held_requests_keep_no_other_prefill_from_beginning(make_engine: MakeEngine) -> None:
    decode = Decode(make_engine)
    decode.local("filling", prompt(9 * SIZE, 9), 12)
    decode.step()
    names = [f"r{number}" for number in range(MAX_CANDIDATES + 2)]
    for number, name in enumerate(names):
        decode.remote(name, prompt(4 * SIZE, 100 + number))
    decode.step()
    for name in names:
        decode.arrive(name)
    decode.remote("late", prompt(4 * SIZE, 77))
    decode.step()
    assert decode.engine.scheduler.num_waiting == len(names) + 1
    assert "late" in decode.sent
    decode.arrive("late")
    decode.step(120)
    for number, name in enumerate(names):
        assert decode.tokens[name] == reference(prompt(4 * SIZE, 100 + number), 6)
    assert decode.tokens["late"] == reference(prompt(4 * SIZE, 77), 6)
    assert decode.num_taken == 0


def test_a_full_area_lets_smaller_prefills_pass_and_the_others_wait(make_engine: MakeEngine) -> None:
    decode = Decode(make_engine, num_holding_blocks=6)
    decode.fill()
    decode.remote("large", prompt(7 * SIZE))
    decode.remote("small", prompt(3 * SIZE))
    decode.remote("late", prompt(4 * SIZE))
    decode.step()
    assert list(decode.sent) == ["small"]
    assert decode.engine.scheduler.num_waiting == 3
    decode.step(8)
    assert list(decode.sent) == ["small", "late", "large"]
    assert max(decode.sent["large"].block_ids) < NUM_BLOCKS, "it gets blocks of the pool"


def test_it_keeps_its_place_among_those_that_wait(make_engine: MakeEngine) -> None:
    decode = Decode(make_engine)
    decode.fill()
    before = decode.local("before", prompt(6 * SIZE, 1), 6)
    held = decode.hold("held", prompt(6 * SIZE, 2))
    after = decode.local("after", prompt(6 * SIZE, 3), 6)
    began: list[str] = []
    for request in (before, held, after):
        request.listener = lambda each, status: (
            began.append(each.request_id) if status is RequestStatus.RUNNING else None
        )
    decode.step(60)
    assert began == ["before", "held", "after"]


def test_held_and_expected_requests_count_as_waiting(make_engine: MakeEngine) -> None:
    decode = Decode(make_engine)
    decode.fill()
    engine = decode.engine
    num_before = engine.scheduler.num_demanded_blocks
    decode.remote("r", prompt(5 * SIZE))
    decode.step()
    assert engine.holding.num_arriving == 1
    assert engine.metrics().num_waiting == 1
    assert engine.scheduler.num_demanded_blocks >= num_before + 5
    decode.arrive("r")
    decode.step()
    assert engine.metrics().num_waiting == 1
    stats = engine.stats().holding
    assert stats is not None
    assert (stats.num_blocks_in_use, stats.num_arriving, stats.num_held) == (5, 0, 1)


def test_what_came_last_is_spilled_when_the_area_is_full(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holding, "PIECE_BYTES", 1)
    decode = Decode(make_engine, num_holding_blocks=12, num_spill_blocks=24, clock=TickingClock())
    decode.local("filling", prompt(8 * SIZE, 9), 15)
    decode.step()
    requests = [decode.hold(f"r{number}", prompt(4 * SIZE, 100 + number)) for number in range(3)]
    decode.remote("late", prompt(5 * SIZE, 103))
    while "late" not in decode.sent:
        decode.step()
    spilled = [name for name, each in zip("abc", requests, strict=True) if min(each.held_block_ids) >= NUM_BLOCKS + 12]
    assert spilled == ["b", "c"], "the first one goes on soonest"
    decode.arrive("late")
    stats = decode.engine.stats().holding
    assert stats is not None
    assert (stats.num_spilled, stats.num_blocks_spilled) == (2, 8)
    decode.step(100)
    for name, number, length in (("r0", 100, 4), ("r1", 101, 4), ("r2", 102, 4), ("late", 103, 5)):
        assert decode.tokens[name] == reference(prompt(length * SIZE, number), 6)
    assert decode.num_taken == 0
    assert decode.engine.holding.spilled.num_free == 24


def test_a_request_that_ends_while_it_is_spilled_leaves_nothing(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holding, "PIECE_BYTES", 1)
    decode = Decode(make_engine, num_holding_blocks=8, num_spill_blocks=8, clock=TickingClock())
    decode.fill()
    decode.hold("r", prompt(8 * SIZE, 100))
    decode.remote("late", prompt(5 * SIZE, 103))
    decode.step()
    area = decode.engine.holding
    assert area.spilling
    decode.engine.abort("r")
    decode.engine.check_integrity()
    assert area.spilled.num_free == 8
    while "late" not in decode.sent:
        decode.step()
    decode.arrive("late")
    decode.step(20)
    assert decode.tokens["late"] == reference(prompt(5 * SIZE, 103), 6)
    assert (area.blocks.num_free, area.spilled.num_free) == (8, 8)


@pytest.mark.parametrize("phase", ["arriving", "held", "loading", "running"])
def test_an_aborted_request_leaves_nothing(
    make_engine: MakeEngine, phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holding, "PIECE_BYTES", 1)
    decode = Decode(make_engine, clock=TickingClock())
    decode.fill()
    request = decode.remote("r", prompt(8 * SIZE), 6)
    decode.step()
    sent = decode.sent["r"]
    if phase != "arriving":
        decode.arrive("r")
        decode.step()
    wanted = {"loading": RequestStatus.LOADING_KV, "running": RequestStatus.RUNNING}.get(phase, request.status)
    while request.status is not wanted:
        decode.step()
    decode.engine.abort("r")
    decode.engine.check_integrity()
    if phase == "arriving":
        assert decode.engine.holding.blocks.num_quarantined == 8, "a peer may still write"
        decode.step()
        decode.engine.end_loan(sent.handoff_id, 1)
    decode.step(12)
    assert decode.num_taken == 0
    assert decode.engine.pool.num_free == NUM_BLOCKS
    assert not decode.engine.has_unfinished()


def test_kv_that_does_not_come_is_computed_here(make_engine: MakeEngine) -> None:
    decode = Decode(make_engine)
    decode.fill()
    decode.remote("lost", prompt(5 * SIZE))
    decode.remote("wrong", prompt(5 * SIZE, 3))
    decode.step()
    engine = decode.engine
    engine.compute_handoff_here(decode.sent["lost"].handoff_id)
    assert not engine.resume_handoff(decode.sent["wrong"].handoff_id, 1, VOCAB_SIZE, None)
    engine.check_integrity()
    assert engine.holding.num_arriving == 0
    assert engine.holding.blocks.num_quarantined == 10
    for name in ("lost", "wrong"):
        engine.end_loan(decode.sent[name].handoff_id, 1)
    assert decode.num_taken == 0
    decode.step(30)
    assert decode.tokens["lost"] == reference(prompt(5 * SIZE), 6)
    assert decode.tokens["wrong"] == reference(prompt(5 * SIZE, 3), 6)


def test_a_later_claimant_gets_other_blocks_of_the_area(make_engine: MakeEngine) -> None:
    decode = Decode(make_engine)
    decode.fill()
    decode.remote("r", prompt(5 * SIZE))
    decode.step()
    sent = decode.sent["r"]
    fresh = decode.engine.lend_fresh(sent.handoff_id, 2)
    assert fresh is not None
    assert min(fresh) >= NUM_BLOCKS
    assert not set(fresh) & set(sent.block_ids)
    decode.engine.check_integrity()
    decode.arrive("r", loan=2, block_ids=fresh)
    decode.step(20)
    assert decode.tokens["r"] == reference(prompt(5 * SIZE), 6)
    assert decode.num_taken == 0


def test_an_answer_of_one_token_ends_while_it_is_held(make_engine: MakeEngine) -> None:
    decode = Decode(make_engine)
    decode.fill()
    decode.hold("r", prompt(5 * SIZE), count=1)
    assert decode.ended == {"r": FinishReason.LENGTH}
    assert decode.num_taken == 0


def test_a_held_request_that_is_preempted_later_is_prefilled_again(make_engine: MakeEngine) -> None:
    decode = Decode(make_engine)
    decode.fill()
    decode.hold("r", prompt(4 * SIZE), 24)
    decode.local("other", prompt(5 * SIZE, 4), 24)
    decode.step(120)
    assert decode.engine.scheduler.num_preemptions > 0
    assert decode.tokens["r"] == reference(prompt(4 * SIZE), 24)
    assert decode.tokens["other"] == reference(prompt(5 * SIZE, 4), 24)


def test_copies_hold_up_no_step_for_long(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holding, "PIECE_BYTES", 1)
    decode = Decode(make_engine, clock=TickingClock(), num_blocks=40)
    decode.local("running", prompt(4, 5), 60)
    decode.local("filling", prompt(36 * SIZE, 9), 3)
    decode.step(8)
    num_copied: list[int] = []
    engine = decode.engine
    copy_blocks = engine.executor.copy_blocks

    def counting(source_ids: list[int], target_ids: list[int]) -> None:
        num_copied[-1] += len(source_ids)
        copy_blocks(source_ids, target_ids)

    monkeypatch.setattr(engine.holding, "copy", counting)
    decode.local("filling again", prompt(36 * SIZE, 8), 3)
    decode.step(2)
    request = decode.hold("r", prompt(20 * SIZE))
    seen = set()
    while request.status is not RequestStatus.RUNNING:
        num_copied.append(0)
        num_before = len(decode.tokens["running"])
        decode.step()
        seen.add(request.status)
        assert len(decode.tokens["running"]) == num_before + 1
    assert RequestStatus.LOADING_KV in seen
    assert sum(num_copied) == 20
    assert max(num_copied) <= 4
    decode.step(8)
    assert decode.tokens["r"] == reference(prompt(20 * SIZE), 6)


# -- prefill side -----------------------------------------------------------------------------------------------------


def computed(engine: EngineCore, length: int) -> Request:
    request = Request("h", prompt(length), SamplingParams(max_tokens=4), mode=PrefillMode.HANDOFF)
    engine.add_request(request)
    while request.status is not RequestStatus.PREFILL_SENDING:
        engine.step()
    return request


def kept(engine: EngineCore) -> list[KeptBlocks]:
    found = engine.step().kept_blocks
    engine.check_integrity()
    return found


@pytest.mark.parametrize("num_holding_blocks", [0, 8])
def test_sending_takes_until_the_pool_has_its_blocks_again(make_engine: MakeEngine, num_holding_blocks: int) -> None:
    clock = ManualClock(5.0)
    engine = make_engine(num_blocks=NUM_BLOCKS, num_holding_blocks=num_holding_blocks, clock=clock)
    request = computed(engine, 5 * SIZE)
    clock.advance(1.0)
    engine.keep_blocks("h", tuple(request.block_ids))
    kept(engine)
    clock.advance(2.0)
    engine.sending_finished("h")
    times = engine.stats().times
    assert (times.sending.count, times.sending.total_s) == (1, 1.0 if num_holding_blocks else 3.0)


def test_computed_kv_is_kept_beside_the_pool_until_it_was_read(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=NUM_BLOCKS, num_holding_blocks=8)
    request = computed(engine, 5 * SIZE + 1)
    assert isinstance(engine.executor, MockExecutor)
    before = engine.executor.pool[request.block_ids].copy()
    engine.keep_blocks("h", tuple(request.block_ids[1:]))
    (answer,) = kept(engine)
    assert answer.block_ids is not None
    assert min(answer.block_ids) >= NUM_BLOCKS
    assert (engine.executor.pool[list(answer.block_ids)] == before[1:]).all()
    assert engine.pool.num_free == NUM_BLOCKS
    assert engine.pool.num_cached == 5, "its prefix is still found"
    assert engine.has_unfinished()
    engine.sending_finished("h")
    engine.check_integrity()
    assert engine.holding.blocks.num_free == 8
    assert not engine.has_unfinished()


def test_what_the_area_has_no_room_for_stays_in_the_pool(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=NUM_BLOCKS, num_holding_blocks=4)
    request = computed(engine, 5 * SIZE)
    engine.keep_blocks("h", tuple(request.block_ids))
    assert kept(engine) == [KeptBlocks("h", None)]
    assert engine.pool.num_free == NUM_BLOCKS - 5
    engine.keep_blocks("unknown", (1, 2))
    assert kept(engine) == [KeptBlocks("unknown", None)]
    engine.sending_finished("h")
    assert engine.pool.num_free == NUM_BLOCKS


def test_an_abort_while_it_is_kept_frees_nothing_before_the_end(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holding, "PIECE_BYTES", 1)
    engine = make_engine(num_blocks=NUM_BLOCKS, num_holding_blocks=8, clock=TickingClock())
    request = computed(engine, 6 * SIZE)
    engine.keep_blocks("h", tuple(request.block_ids))
    assert kept(engine) == []
    engine.abort("h")
    engine.check_integrity()
    assert engine.pool.num_free == NUM_BLOCKS - 6
    while not (answers := kept(engine)):
        assert engine.has_work()
    assert len(answers) == 1
    engine.sending_finished("h")
    engine.check_integrity()
    assert engine.pool.num_free == NUM_BLOCKS
    assert engine.holding.blocks.num_free == 8


def test_the_area_is_bounded_by_the_pool() -> None:
    assert num_holding_blocks(1000, 10, 50) == 100
    assert num_holding_blocks(10**9, 10, 50) == 50 * MAX_POOLS
    assert num_holding_blocks(9, 10, 50) == 0
