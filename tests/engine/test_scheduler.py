"""What a step contains, seen at the executor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import msgspec
import pytest
from tests.executors.sitting_out import sit_out

from kvrelay.core.sampling import SamplingParams
from kvrelay.core.status import FinishReason, RequestStatus
from kvrelay.engine.core import EngineCore
from kvrelay.engine.request import PrefillMode, Request
from kvrelay.engine.step import NOT_NUMBERS, ModelOutput, SchedulerOutput
from kvrelay.executors.mock import mock_generate

MakeEngine = Callable[..., EngineCore]
VOCAB_SIZE, EOS = 500, (2,)
SHORTAGES = [
    pytest.param(256, 8, PrefillMode.LOCAL, id="slots"),
    pytest.param(256, 8, PrefillMode.REMOTE, id="slots-remote"),
    pytest.param(32, 64, PrefillMode.LOCAL, id="blocks"),
]


class Recorder:
    """Keeps every SchedulerOutput that an engine's executor gets, with the request behind each row."""

    def __init__(self, engine: EngineCore) -> None:
        self.work: list[SchedulerOutput] = []
        self.rows: list[list[tuple[str, int]]] = []
        self._names: dict[int, str] = {}
        self._execute = engine.executor.execute
        engine.executor.execute = self.execute  # type: ignore[method-assign]

    def execute(self, work: SchedulerOutput) -> ModelOutput:
        for slot in work.released_slots:
            del self._names[slot]
        for sequence in work.new_seqs:
            assert sequence.slot not in self._names
            self._names[sequence.slot] = sequence.request_id
        self.work.append(work)
        pairs = zip(work.slots.tolist(), work.num_tokens.tolist(), strict=True)
        self.rows.append([(self._names[slot], count) for slot, count in pairs])
        return self._execute(work)


def request(name: str, length: int, max_tokens: int = 4, *, first: int = 10, **options: object) -> Request:
    return Request(name, list(range(first, first + length)), SamplingParams(max_tokens=max_tokens), **options)  # type: ignore[arg-type]


def drain(engine: EngineCore) -> dict[str, list[int]]:
    answers: defaultdict[str, list[int]] = defaultdict(list)
    while engine.has_work():
        for output in engine.step().outputs:
            answers[output.request_id] += output.token_ids
    return answers


def test_prompts_are_cut_to_the_budget_and_decodes_come_first(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_batched_tokens=16)
    recorder = Recorder(engine)
    engine.add_request(request("a", 6, first=10))
    engine.add_request(request("b", 30, first=100))
    drain(engine)
    assert recorder.rows == [
        [("a", 6), ("b", 10)],
        [("a", 1), ("b", 15)],
        [("a", 1), ("b", 5)],
        [("a", 1), ("b", 1)],
        [("b", 1)],
        [("b", 1)],
    ]
    assert [work.samples.tolist() for work in recorder.work[:3]] == [[True, False], [True, False], [True, True]]


def test_a_sequence_is_sent_once_and_then_only_its_new_blocks(make_engine: MakeEngine) -> None:
    engine = make_engine()
    recorder = Recorder(engine)
    engine.add_request(request("a", 6, max_tokens=8))
    drain(engine)
    first, *later = recorder.work
    (sequence,) = first.new_seqs
    assert (tuple(sequence.token_ids), sequence.num_prompt_tokens, sequence.num_computed_tokens) == (
        tuple(range(10, 16)),
        6,
        0,
    )
    assert len(sequence.block_ids) == 2
    assert not any(work.new_seqs for work in later)
    grown = [(work.step, *work.block_indices.tolist()) for work in later if len(work.block_ids)]
    assert grown == [(4, 2), (8, 3)], "the ninth and the thirteenth position open a block"
    assert [work.slots.dtype.name for work in later] == ["int32"] * len(later)


def test_steady_decodes_reuse_their_slots_array(make_engine: MakeEngine) -> None:
    engine = make_engine()
    recorder = Recorder(engine)
    engine.add_request(request("a", 5, max_tokens=6))
    drain(engine)
    assert all(work.slots is recorder.work[1].slots for work in recorder.work[2:])


def test_urgent_requests_overtake(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_seqs=1)
    recorder = Recorder(engine)
    for name, priority in (("late", 1), ("later", 1), ("urgent", -1), ("normal", 0)):
        engine.add_request(request(name, 3, max_tokens=1, priority=priority))
    drain(engine)
    assert [rows[0][0] for rows in recorder.rows] == ["urgent", "normal", "late", "later"]


@pytest.mark.parametrize("mode", [PrefillMode.LOCAL, PrefillMode.HANDOFF])
def test_what_was_begun_elsewhere_goes_before_what_is_new(make_engine: MakeEngine, mode: PrefillMode) -> None:
    """On the worker that it moves to, and on the one that prefills it; but not before what is more urgent."""
    engine = make_engine(max_num_seqs=8, max_num_batched_tokens=16)
    recorder = Recorder(engine)
    engine.add_request(request("new", 16, 1, mode=mode))
    engine.add_request(request("urgent", 16, 1, first=40, priority=-1, mode=mode))
    engine.add_request(request("moved", 12, 5, first=70, output_token_ids=(5, 6, 7, 8), mode=mode))
    for _ in range(3):
        engine.step()
    assert [row[0][0] for row in recorder.rows] == ["urgent", "moved", "new"]


def test_the_least_urgent_is_preempted_and_comes_back(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=8)
    requests = [request(name, 8, max_tokens=12, first=first) for name, first in (("a", 10), ("b", 50), ("c", 90))]
    for item in requests:
        engine.add_request(item)
    answers = drain(engine)
    states = {item.request_id: [status for status, _ in item.times] for item in requests}
    assert RequestStatus.PREEMPTED not in states["a"]
    assert RequestStatus.PREEMPTED in states["c"]
    for item in requests:
        assert answers[item.request_id] == mock_generate(
            item.token_ids[:8], 12, vocab_size=VOCAB_SIZE, eos_token_ids=EOS
        )
    engine.check_integrity()


def test_a_preempted_sequence_comes_back_to_a_pool_with_room(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=16, max_num_seqs=4)
    recorder = Recorder(engine)
    for index in range(4):
        engine.add_request(request(f"r{index}", 8, max_tokens=24, first=10 + 40 * index))
    num_returns = num_preemptions = 0
    while engine.has_work():
        num_steps = len(recorder.work)
        if engine.pool.num_free == 0:
            engine.add_request(request(f"urgent{num_steps}", 3, priority=-1))
        engine.step()
        for work in recorder.work[num_steps:]:
            returned = [item for item in work.new_seqs if len(item.token_ids) > item.num_prompt_tokens]
            assert not work.new_seqs or engine.scheduler.num_preemptions == num_preemptions
            num_returns += len(returned)
            if returned and work.num_seqs > 1:
                assert engine.pool.num_free >= work.num_seqs
        num_preemptions = engine.scheduler.num_preemptions
    assert num_returns == num_preemptions > 0


def test_priority_decides_who_is_preempted(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=8)
    first = request("first", 8, max_tokens=12, first=10, priority=5)
    urgent = request("urgent", 8, max_tokens=12, first=50, priority=0)
    third = request("third", 8, max_tokens=12, first=90, priority=1)
    for item in (first, urgent, third):
        engine.add_request(item)
    drain(engine)
    assert RequestStatus.PREEMPTED in [status for status, _ in first.times]
    assert RequestStatus.PREEMPTED not in [status for status, _ in urgent.times]


def test_a_key_without_share_is_served_beside_a_flood_at_a_better_priority(make_engine: MakeEngine) -> None:
    """Ten requests of one key with n = 32 at the best priority. The four tokens of another key wait for their turn."""
    engine = make_engine(num_blocks=256, max_num_seqs=8)
    num_flood = 320
    for number in range(num_flood):
        flood = request(f"flood-{number}", 12, max_tokens=8, first=10 + number // 32, priority=-(2**30), tenant="a")
        engine.add_request(flood)
    for _ in range(5):
        engine.step()
    admitted_before = num_flood - engine.scheduler.num_waiting
    modest = request("modest", 4, max_tokens=4, first=200, tenant="b")
    engine.add_request(modest)
    while modest.status is RequestStatus.WAITING:
        engine.step()
    assert num_flood - engine.scheduler.num_waiting - admitted_before <= 2, "the next free slots are shared"
    num_steps = 0
    while "modest" in engine.scheduler.requests:
        engine.step()
        num_steps += 1
    assert num_steps <= 5, "its chunk and its tokens do not wait either"


def _flooded(engine: EngineCore, num_requests: int) -> list[Request]:
    """One key's long requests at the best priority, begun."""
    flood = [
        request(f"flood-{number}", 12, max_tokens=40, first=10 + number, priority=-(2**30), tenant="a")
        for number in range(num_requests)
    ]
    for one in flood:
        engine.add_request(one)
    for _ in range(5):
        engine.step()
    return flood


@pytest.mark.parametrize(("num_blocks", "max_num_seqs", "mode"), SHORTAGES)
def test_a_key_within_its_share_does_not_wait_until_answers_of_a_flood_end(
    make_engine: MakeEngine, num_blocks: int, max_num_seqs: int, mode: PrefillMode
) -> None:
    engine = make_engine(num_blocks=num_blocks, max_num_seqs=max_num_seqs)
    flood = _flooded(engine, 40)
    ended_before = [one for one in flood if one.request_id not in engine.scheduler.requests]
    modest = [request(f"modest-{number}", 6, first=200 + 9 * number, tenant="b", mode=mode) for number in range(2)]
    for one in modest:
        engine.add_request(one)
    for _ in range(4):  # a step in which sequences that grow were preempted admits none
        engine.step()
    assert all(one.status is not RequestStatus.WAITING for one in modest)
    assert [one for one in flood if one.request_id not in engine.scheduler.requests] == ended_before
    assert 0 < sum(one.status is RequestStatus.PREEMPTED for one in flood) <= 4


def test_no_sequence_is_preempted_for_a_key_above_its_share_or_without_keys(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=256, max_num_seqs=8)
    flood = _flooded(engine, 12)
    others = [request(f"other-{number}", 6, first=200 + 9 * number, tenant="b") for number in range(9)]
    for one in others:
        engine.add_request(one)
    for _ in range(3):
        engine.step()
        assert sum(one.status is RequestStatus.RUNNING for one in others) <= 4, "half of the slots"
        assert sum(one.status is RequestStatus.RUNNING for one in flood) >= 4
    assert len(drain(engine)) == 21

    engine = make_engine(num_blocks=256, max_num_seqs=8)
    for number in range(20):
        engine.add_request(request(f"free-{number}", 8, max_tokens=20, first=10 + 10 * number, priority=-number))
    drain(engine)
    assert engine.scheduler.num_preemptions == 0


def test_a_key_above_its_share_with_what_is_computed_elsewhere_takes_nothing_of_others(make_engine: MakeEngine) -> None:
    """7 of 17 blocks wait for the KV of key a, whose next prompt needs 2. Key b has 9."""
    engine = make_engine(num_blocks=17)
    engine.add_request(request("remote", 28, tenant="a", mode=PrefillMode.REMOTE))
    engine.add_request(other := request("other", 33, first=100, tenant="b"))
    for _ in range(2):
        engine.step()
    assert engine.pool.num_free == 1
    engine.add_request(request("next", 8, first=300, tenant="a"))
    engine.step()
    assert other.status is RequestStatus.RUNNING


def test_a_key_keeps_its_blocks_beside_a_flood_at_a_better_priority(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=24, max_num_seqs=8)
    modest = request("modest", 8, max_tokens=30, first=200, tenant="b")
    engine.add_request(modest)
    flood = [
        request(f"flood-{number}", 8, max_tokens=30, first=10 * number, priority=-9, tenant="a") for number in range(9)
    ]
    for one in flood:
        engine.add_request(one)
    drain(engine)
    preempted = [one for one in (modest, *flood) if RequestStatus.PREEMPTED in [status for status, _ in one.times]]
    assert preempted
    assert modest not in preempted


def test_admission_leaves_a_reserve_unless_nothing_runs(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=10)
    engine.add_request(request("all", 40, max_tokens=0, first=10))
    engine.step()
    engine.step()
    assert engine.num_requests == 0, "alone it may have the whole pool"
    engine.add_request(request("a", 20, max_tokens=9, first=60))
    engine.add_request(request("b", 20, max_tokens=9, first=90))
    engine.step()
    assert engine.scheduler.num_waiting == 1, "five blocks are free, none would be left"
    assert set(drain(engine)) == {"a", "b"}


def test_a_blocked_queue_is_no_work(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=10)
    engine.add_request(request("away", 24, mode=PrefillMode.REMOTE, first=10))
    engine.add_request(request("waits", 20, first=60))
    (away,) = engine.step().remote_prefills
    assert engine.scheduler.num_waiting == 1
    assert not engine.has_work(), "nothing can happen until a block comes back"
    assert engine.has_unfinished()
    engine.abort("away")
    engine.end_loan(away.handoff_id, 1)
    assert engine.has_work()
    assert len(drain(engine)["waits"]) == 4


def test_no_place_is_no_work(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_seqs=2)
    for index in range(3):
        engine.add_request(request(f"away{index}", 8, mode=PrefillMode.REMOTE, first=10 * index))
    assert len(engine.step().remote_prefills) == 2
    assert engine.scheduler.num_waiting == 1
    assert not engine.has_work()
    engine.abort("away0")
    assert engine.has_work()
    (start,) = engine.step().remote_prefills
    assert start.request_id == "away2"


def test_equal_prompts_share_blocks_also_while_both_run(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_batched_tokens=16)
    prompt = list(range(10, 26))
    engine.add_request(Request("a", prompt, SamplingParams(max_tokens=10)))
    engine.step()
    second = Request("b", prompt, SamplingParams(max_tokens=10))
    engine.add_request(second)
    (output,) = [output for output in engine.step().outputs if output.request_id == "b"]
    assert output.num_cached_tokens == 12, "the last token is computed again, so its block is not shared"
    engine.check_integrity()
    assert engine.pool.num_in_use < 10
    drain(engine)


@pytest.mark.parametrize("order", [["chat", "away1", "away2"], ["away1", "chat", "away2"]])
def test_an_exclusive_prefill_runs_alone(make_engine: MakeEngine, order: list[str]) -> None:
    engine = make_engine(exclusive_prefill=True, max_num_batched_tokens=16)
    recorder = Recorder(engine)
    for position, name in enumerate(order):
        mode = PrefillMode.LOCAL if name == "chat" else PrefillMode.HANDOFF
        engine.add_request(request(name, 20, max_tokens=6, first=10 + 100 * position, mode=mode))
    drain(engine)
    for rows in recorder.rows:
        names = [name for name, _ in rows]
        assert len(names) == 1 or not any(name.startswith("away") for name in names)
    away = [name for rows in recorder.rows for name, _ in rows if name != "chat"]
    assert away == sorted(away), "one after the other"
    assert engine.num_requests == 2, "both wait for their writes"


def test_others_take_every_second_step_beside_an_exclusive_prefill(make_engine: MakeEngine) -> None:
    engine = make_engine(exclusive_prefill=True, max_num_batched_tokens=16)
    recorder = Recorder(engine)
    engine.add_request(request("chat", 8, max_tokens=9, first=10))
    engine.step()
    engine.add_request(request("away", 60, first=100, mode=PrefillMode.HANDOFF))
    drain(engine)
    names = [rows[0][0] for rows in recorder.rows]
    assert names == ["chat", *["away", "chat"] * 4, *["chat"] * 4]


def test_without_exclusive_prefill_hand_offs_share_steps(make_engine: MakeEngine) -> None:
    engine = make_engine()
    recorder = Recorder(engine)
    engine.add_request(request("chat", 8, first=10))
    engine.add_request(request("away", 8, first=100, mode=PrefillMode.HANDOFF))
    engine.step()
    assert [name for name, _ in recorder.rows[0]] == ["chat", "away"]


def test_more_sequences_than_budget_still_all_advance(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_seqs=40, max_num_batched_tokens=16, num_blocks=200)
    for index in range(30):
        engine.add_request(request(f"r{index}", 3, max_tokens=5, first=10 * index))
    answers = drain(engine)
    assert {len(answer) for answer in answers.values()} == {5}
    assert len(answers) == 30


def test_a_slot_given_on_within_a_step_keeps_its_own_blocks(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=6, max_num_seqs=2)
    engine.add_request(request("a", 8, max_tokens=10, first=10))
    engine.add_request(request("b", 8, max_tokens=10, first=60))
    engine.add_request(request("c", 3, max_tokens=10, first=110, priority=-1))
    answers = drain(engine)
    for name, first, length in (("a", 10, 8), ("b", 60, 8), ("c", 110, 3)):
        prompt = list(range(first, first + length))
        assert answers[name] == mock_generate(prompt, 10, vocab_size=VOCAB_SIZE, eos_token_ids=EOS)


@pytest.mark.parametrize("seed", range(5))
def test_rows_that_sit_out_steps_get_the_same_tokens_later(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """With chunks, prefix hits, and a pool so small that sequences are preempted."""
    sat_out = sit_out(monkeypatch, seed)
    engine = make_engine(max_num_batched_tokens=16, num_blocks=20)
    prompts = {f"r{n}": list(range(10, 10 + length)) for n, length in enumerate((1, 6, 8, 9, 21, 33, 40, 12))}
    for name, tokens in prompts.items():
        engine.add_request(request(name, len(tokens), max_tokens=14))
    answers = drain(engine)
    for name, tokens in prompts.items():
        assert answers[name] == mock_generate(tokens, 14, vocab_size=VOCAB_SIZE, eos_token_ids=EOS), name
    assert set(sat_out) == {"chunk", "decode"}
    assert engine.scheduler.num_generated_tokens == 14 * len(prompts)
    engine.check_integrity()


@pytest.mark.parametrize("reason", ["its grammar exploded", NOT_NUMBERS])
@pytest.mark.parametrize(("step", "row", "num_tokens"), [(0, 0, 0), (1, 0, 1), (1, 1, 0)], ids=str)
def test_a_sequence_that_cannot_continue_ends_with_the_reason_and_no_other_does(
    make_engine: MakeEngine, step: int, row: int, num_tokens: int, reason: str
) -> None:
    """In its prefill, whole (``a``) or begun (``b``), or in a decode. Of scores that are no numbers no KV is kept."""
    engine = make_engine(max_num_batched_tokens=16)
    execute, results = engine.executor.execute, []

    def failing(work: SchedulerOutput) -> ModelOutput:
        results.append(execute(work))
        failures = {row: reason} if len(results) == step + 1 else {}
        return msgspec.structs.replace(results[-1], failures=failures)

    engine.executor.execute = failing  # type: ignore[method-assign]
    engine.add_request(request("a", 8, first=10))
    engine.add_request(request("b", 20, first=100))
    outputs = [output for _ in range(8) if engine.has_work() for output in engine.step().outputs]
    failed, other = ("a", "b") if row == 0 else ("b", "a")
    of_failed = [output for output in outputs if output.request_id == failed]
    assert sum(len(output.token_ids) for output in of_failed) == num_tokens
    last = of_failed[-1]
    assert (last.finish_reason, last.error, last.is_final) == (FinishReason.ERROR, reason, True)
    assert last.status == (500 if reason == NOT_NUMBERS else 400)
    assert sum(len(output.token_ids) for output in outputs if output.request_id == other) == 4
    engine.check_integrity()
    assert engine.num_requests == 0
    before = engine.scheduler.admission.num_hit_tokens
    engine.add_request(request(failed, 8, first=10 if failed == "a" else 100))
    engine.step()
    assert (engine.scheduler.admission.num_hit_tokens == before) == (reason == NOT_NUMBERS or not step)


@pytest.mark.parametrize("reason", ["its grammar exploded", NOT_NUMBERS])
def test_no_last_chunk_of_a_hand_off_that_failed_is_sent(make_engine: MakeEngine, reason: str) -> None:
    """Its first chunk may be under way: its blocks stay until that has ended."""
    engine = make_engine(max_num_batched_tokens=16)
    engine.add_request(request("a", 20, mode=PrefillMode.HANDOFF))
    assert [chunk.last for chunk in engine.step().handoff_chunks] == [False]
    execute = engine.executor.execute
    engine.executor.execute = lambda work: msgspec.structs.replace(execute(work), failures={0: reason})  # type: ignore[method-assign]
    step = engine.step()
    assert not step.handoff_chunks
    assert [(output.token_ids, output.error) for output in step.outputs] == [((), reason)]
    assert not engine.has_work()
    engine.check_integrity()
    assert engine.pool.num_free < engine.pool.num_blocks
    engine.sending_finished("a")
    engine.step()
    engine.check_integrity()
    assert engine.pool.num_free == engine.pool.num_blocks
