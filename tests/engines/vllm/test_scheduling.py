"""A scheduler that tells of its steps, and cuts prompts by objectives: the composition and the time of each step, the
tokens that each request gets, and that nothing which fails here stops vLLM."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from tests.engines.vllm.fake_scheduler import FakeRequest, FakeScheduler

from kvrelay.core.step_cost import MIN_CHUNK_TOKENS, StepCost, StepPace, StepWork
from kvrelay.engines.hosted.step_log import RecorderState, StepLog
from kvrelay.engines.vllm import library, scheduling
from kvrelay.engines.vllm.scheduling import num_accepted_tokens, recording, share_of_prompt

ITL_S = 0.01001
"""A little above 10 ms: 70 % of it leave 6 ms for prompts, and a rounded sum is no other number of tokens."""
EXACT = StepCost(0.001, 0.001, 1e-5, 0.0, 1e-15, 1e-15)
"""A step with n prefill tokens takes 1 ms and 10 us for each."""


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr(scheduling, "time", SimpleNamespace(perf_counter=lambda: self.now_s))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def scheduler(base: Any = FakeScheduler, **given: Any) -> tuple[Any, StepLog]:
    log = StepLog.create()
    return recording(base, StepLog(log.path))(**given), log


def step(vllm: Any) -> dict[str, int]:
    """The tokens that each request got."""
    output = vllm.schedule(False)
    vllm.update_from_output(output, None)
    counts: dict[str, int] = output.num_scheduled_tokens
    return counts


def works(log: StepLog) -> list[StepWork]:
    return [work for work, _ in log.read_steps().taken]


def test_a_step_is_told_by_its_composition() -> None:
    vllm, log = scheduler(num_tokens=100)
    vllm.add(FakeRequest("long", 150), FakeRequest("hit", 60, num_computed_tokens=32))
    for _ in range(3):
        step(vllm)
    vllm.add(FakeRequest("loaded", 80, num_computed_tokens=79))
    step(vllm)
    assert works(log) == [
        StepWork(100, 100 * 100 // 2, 0, 0),
        # The rest of the long prompt, and the other one after 32 tokens that the cache had.
        StepWork(50 + 28, 50 * (100 + 25) + 28 * (32 + 14), 0, 0),
        StepWork(0, 0, 2, 151 + 61),
        # The last token of a prompt whose KV has come is a decode.
        StepWork(0, 0, 3, 152 + 62 + 80),
    ]


def test_answers_to_a_prompt_of_one_token_are_decodes() -> None:
    vllm, log = scheduler()
    vllm.add(FakeRequest("one", 1), FakeRequest("two", 2))
    step(vllm)
    vllm.add(FakeRequest("three", 3))
    step(vllm)
    assert works(log) == [StepWork(3, 2, 0, 0), StepWork(3, 4, 2, 2 + 3)]


def test_a_step_takes_from_its_scheduling_or_from_the_end_of_the_step_before(clock: Clock) -> None:
    """One after the other: what lies between two steps counts, a pause without requests does not."""
    vllm, log = scheduler()
    vllm.add(FakeRequest("a", 10))
    for pause_s in (0.5, 0.001, 0.002):
        clock.now_s += pause_s
        output = vllm.schedule()
        clock.now_s += 0.010
        vllm.update_from_output(output, None)
    vllm.finish("a")
    step(vllm)  # nothing is scheduled: vLLM tells its workers that the request has ended
    clock.now_s += 60.0
    vllm.add(FakeRequest("b", 10))
    output = vllm.schedule()
    clock.now_s += 0.020
    vllm.update_from_output(output, None)
    assert [seconds for _, seconds in log.read_steps().taken] == pytest.approx([0.010, 0.011, 0.012, 0.020])


def test_steps_that_overlap_take_from_end_to_end(clock: Clock) -> None:
    """As with asynchronous scheduling: the next step is scheduled while one runs."""
    vllm, log = scheduler()
    vllm.add(FakeRequest("a", 10))
    first = vllm.schedule()
    clock.now_s += 0.001
    vllm.requests["a"].num_output_placeholders = 1
    vllm.requests["a"].num_tokens += 1
    second = vllm.schedule()
    clock.now_s += 0.009
    vllm.update_from_output(first, None)
    third = vllm.schedule()
    clock.now_s += 0.010
    vllm.update_from_output(second, None)
    clock.now_s += 0.012
    vllm.update_from_output(third, None)
    assert [seconds for _, seconds in log.read_steps().taken] == pytest.approx([0.010, 0.010, 0.012])


def paced(itl_s: float, ttft_s: float = 0.0, **given: Any) -> tuple[Any, StepLog]:
    vllm, log = scheduler(**given)
    log.write_pace(StepPace.keeping(EXACT, 0.0, itl_s, ttft_s=ttft_s))
    return vllm, log


def test_prompts_beside_answers_keep_their_objective() -> None:
    vllm, log = paced(ITL_S, num_tokens=5000)
    vllm.add(FakeRequest("chat", 10))
    step(vllm)
    vllm.add(FakeRequest("long", 3000))
    assert step(vllm) == {"chat": 1, "long": 600}
    # One that arrives later runs after the long prompt in vLLM's list; its tokens still come first.
    vllm.add(FakeRequest("late", 20))
    assert step(vllm) == {"chat": 1, "long": 580, "late": 20}, "room for what it needs, and no more"
    assert step(vllm) == {"chat": 1, "late": 1, "long": 600}
    assert [request.name for request in vllm.running] == ["chat", "late", "long"]
    assert all(EXACT.step_seconds(work) <= 0.0071 for work in works(log))


def test_answers_come_first_also_if_a_whole_step_is_within_the_objective() -> None:
    """Else a prompt that runs before them in vLLM's list takes the tokens that they need."""
    vllm, _ = paced(60.0, num_tokens=1000)
    vllm.add(FakeRequest("long", 990), FakeRequest("chat", 10))
    step(vllm)
    vllm.requests["long"].num_tokens += 5000  # as after a preemption
    step(vllm)
    assert step(vllm) == {"chat": 1, "long": 999}


def test_without_answers_the_objective_of_first_tokens_counts() -> None:
    vllm, _ = paced(ITL_S, 0.2, num_tokens=9000)
    vllm.add(FakeRequest("long", 8000))
    assert step(vllm) == {"long": 4900}, "a quarter of 200 ms"


def closed_loop(itl_s: float) -> float:
    """Tokens per second, by the costs of a vLLM on two cores: 128 clients with four prompts each, of 64 tokens like
    their answers. The first one comes alone: else one long step takes in all that wait."""
    cost = StepCost(0.005, 0.015, 7.5e-5, 0.0, 1e-4, 5e-7)
    vllm, log = scheduler(num_tokens=2048)
    log.write_pace(StepPace.keeping(cost, 0.25, itl_s, ttft_s=0.5))
    coming, num_idle, seconds = [FakeRequest(f"r{number}", 64) for number in range(512)], 127, 0.0
    vllm.add(coming.pop())
    while vllm.has_unfinished_requests():
        step(vllm)
        seconds += sum(cost.step_seconds(work) for work in works(log))
        for ended in [request for request in vllm.running if request.num_tokens == 64 + 64]:
            vllm.finish(ended.name)
            num_idle += 1
        while coming and num_idle:
            vllm.add(coming.pop())
            num_idle -= 1
    return 512 * 64 / seconds


def test_prompts_that_wait_get_on_though_a_step_with_any_is_late() -> None:
    """A step with a prompt takes 15 ms before its first token, beside an objective of 25 ms: of 128 clients all but a
    few once waited, because so few prompt tokens joined the step that as many answers ended."""
    assert closed_loop(0.025) > 0.8 * closed_loop(0.0)


def test_a_short_prompt_passes_a_long_one() -> None:
    vllm, _ = paced(ITL_S, num_tokens=5000)
    vllm.add(FakeRequest("chat", 10))
    step(vllm)
    vllm.add(FakeRequest("long", 3000))
    step(vllm)
    vllm.add(FakeRequest("urgent", 400, priority=-1), FakeRequest("short", 500))
    assert step(vllm) == {"chat": 1, "long": 200, "urgent": 200, "short": 200}
    assert step(vllm) == {"chat": 1, "urgent": 200, "short": 300, "long": 100}
    assert step(vllm) == {"chat": 1, "urgent": 1, "short": 1, "long": 600}


def test_one_long_prompt_ends_before_the_next() -> None:
    """In equal parts both would end with the second one. A quarter of each step is for the one behind."""
    vllm, _ = paced(ITL_S, num_tokens=5000)
    vllm.add(FakeRequest("chat", 10))
    step(vllm)
    vllm.add(FakeRequest("first", 1500), FakeRequest("second", 1500))
    # While one waits, those that run must leave room for it.
    assert step(vllm) == {"chat": 1, "first": 300, "second": 300}
    assert [step(vllm) for _ in range(3)] == [
        {"chat": 1, "first": 450, "second": 150},
        {"chat": 1, "first": 450, "second": 150},
        {"chat": 1, "first": 300, "second": 300},
    ]
    assert step(vllm) == {"chat": 1, "first": 1, "second": 600}


def test_a_step_has_the_prompts_that_fit_each_after_what_is_computed_of_it() -> None:
    """10 us a token, and 10 ns for each of those before it. 2 ms are for the end of one prompt: 100 tokens after 950
    take 1 + 1 ms. 4 ms are left for the one that has just begun: n tokens after 50 take 10.5 us and 5 ns * n each."""
    cost = StepCost(0.001, 0.001, 1e-5, 1e-8, 1e-15, 1e-15)
    pace = StepPace.keeping(cost, 0.0, ITL_S)
    given = pace.prefill_budget(5000, num_decodes=1, prompts=[(100, 950), (3000, 50)])
    count = given - 100
    assert 10.5e-6 * count + 5e-9 * count**2 == pytest.approx(0.004, rel=0.01)


def test_who_holds_kv_and_waits_has_room_too() -> None:
    """vLLM 0.32 has a line of its own for those. Of what waits for something else nothing is expected."""
    held, deferred = FakeRequest("held", 4000, num_computed_tokens=4000), FakeRequest("deferred", 500)
    other = SimpleNamespace(waiting=[FakeRequest("new", 70), deferred], kv_holding_waiting=[held])
    assert scheduling.waiting_tokens(other) == [1, 70, 500]
    other.deferred_waiting = {deferred}
    assert scheduling.waiting_tokens(other) == [1, 70]
    other.waiting = [FakeRequest(f"r{number}", 5) for number in range(1000)]
    assert sum(scheduling.waiting_tokens(other)) == 1 + 5 * (scheduling.MOST_WAITING - 1)


def test_when_the_prompts_are_done_vllm_has_its_own_limits_again() -> None:
    vllm, log = paced(ITL_S, num_tokens=5000)
    vllm.add(FakeRequest("chat", 10))
    step(vllm)
    vllm.add(FakeRequest("long", 601))
    step(vllm)
    assert (vllm.max_num_scheduled_tokens, vllm.scheduler_config.long_prefill_token_threshold) == (601, 600)
    step(vllm)
    step(vllm)
    assert (vllm.max_num_scheduled_tokens, vllm.scheduler_config.long_prefill_token_threshold) == (5000, 0)
    log.write_pace(StepPace(EXACT))
    vllm.add(FakeRequest("more", 3000))
    assert step(vllm) == {"chat": 1, "long": 1, "more": 3000}, "no objective, no limit"


@pytest.mark.parametrize(
    "pace",
    [
        StepPace.keeping(EXACT, 0.0, math.nan, ttft_s=math.nan),
        StepPace.keeping(EXACT, math.nan, math.inf, ttft_s=-1.0),
        StepPace.keeping(StepCost(math.nan), 0.0, 0.01),
        StepPace.keeping(StepCost(0.0, 0.0, 0.0, 0.0, 0.0, 0.0), 0.0, 0.01),
    ],
    ids=["nan", "infinite", "cost-nan", "cost-zero"],
)
def test_a_pace_that_says_nothing_limits_nothing(pace: StepPace) -> None:
    vllm, log = scheduler()
    log.write_pace(pace)
    vllm.add(FakeRequest("chat", 10), FakeRequest("long", 3000))
    assert step(vllm) == {"chat": 10, "long": 990}
    assert step(vllm) == {"chat": 1, "long": 999}
    state = log.read_state()
    assert state is not None
    assert state.is_on


def test_an_objective_that_no_chunk_can_meet_does_not_stop_prompts() -> None:
    vllm, log = scheduler()
    log.write_pace(StepPace.keeping(StepCost(0.001, 5.0, 1.0, 0.0, 0.0, 0.0), 0.0, 1e-6))
    vllm.add(FakeRequest("chat", 10))
    step(vllm)
    vllm.add(FakeRequest("long", 200))
    counts = [step(vllm) for _ in range(200 // MIN_CHUNK_TOKENS)]
    assert counts == [{"chat": 1, "long": MIN_CHUNK_TOKENS}] * len(counts)


def wait_for_kv(vllm: Any) -> FakeRequest:
    """Beside an answer and a long prompt, this request waits for its KV."""
    vllm.add(FakeRequest("chat", 10))
    step(vllm)
    remote = FakeRequest("remote", 4000, num_computed_tokens=3999)
    vllm.add(FakeRequest("long", 3000), remote)
    vllm.deferred_waiting.add(remote)
    step(vllm)
    return remote


def test_those_that_wait_for_something_else_take_no_share() -> None:
    vllm, _ = paced(ITL_S, num_tokens=5000)
    remote = wait_for_kv(vllm)
    assert step(vllm) == {"chat": 1, "long": 600}
    vllm.loaded.add(remote)
    assert step(vllm) == {"chat": 1, "long": 600, "remote": 1}, "its KV has come: it does not wait for the prompt"


def test_with_drafts_room_is_left_for_those_of_each_that_may_begin() -> None:
    """vLLM 0.32 pads the first step after loaded KV with drafts, and schedules nothing behind it without room for them:
    four tokens for the answer that runs, and four for the one whose KV may come."""

    class Drafting(FakeScheduler):
        num_spec_tokens = 3

    vllm, log = scheduler(Drafting, num_tokens=5000)
    log.write_pace(StepPace.keeping(EXACT, 0.0, ITL_S))
    wait_for_kv(vllm)
    assert vllm.max_num_scheduled_tokens == 4 + 600 + 4


def test_where_vllm_cuts_no_prompts_steps_are_recorded_all_the_same() -> None:
    vllm, log = paced(ITL_S, num_tokens=5000, enable_chunked_prefill=False)
    vllm.add(FakeRequest("chat", 10))
    step(vllm)
    vllm.add(FakeRequest("long", 3000))
    assert step(vllm) == {"chat": 1, "long": 3000}
    assert len(works(log)) == 2
    state = log.read_state()
    assert state is not None
    assert state.is_on
    assert "enable_chunked_prefill" in state.reason


@pytest.mark.parametrize(
    ("attribute", "is_on", "word"),
    [("running", False, "running"), ("requests", False, "requests"), ("max_num_scheduled_tokens", True, "max_num")],
)
def test_a_scheduler_without_a_seam_goes_on_without_that_part(attribute: str, is_on: bool, word: str) -> None:
    class Other(FakeScheduler):
        def __init__(self) -> None:
            super().__init__()
            setattr(self, f"_{attribute}", getattr(self, attribute))
            delattr(self, attribute)

        def schedule(self, throttle_prefills: bool = False) -> Any:
            return SimpleNamespace(
                num_scheduled_tokens={},
                total_num_scheduled_tokens=0,
                scheduled_new_reqs=[],
                scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
            )

        def has_unfinished_requests(self) -> bool:
            return True

        def get_request_counts(self) -> tuple[int, int]:
            return 0, 0

    vllm, log = scheduler(Other)
    step(vllm)
    assert vllm.num_updates == 1
    state = log.read_state()
    assert state is not None
    assert state.is_on is is_on
    assert word in state.reason


@pytest.mark.parametrize("broken", ["priority", "num_tokens_with_spec"])
def test_a_recorder_that_fails_leaves_vllm_with_its_own_limits(broken: str) -> None:
    vllm, log = paced(ITL_S, num_tokens=5000)
    vllm.add(FakeRequest("chat", 10))
    step(vllm)
    vllm.add(FakeRequest("long", 3000))
    step(vllm)
    bad = FakeRequest("bad", 2000)
    vllm.add(bad)
    step(vllm)

    class Without(FakeRequest):
        def __getattribute__(self, name: str) -> Any:
            if name == broken:
                raise AttributeError(name)
            return super().__getattribute__(name)

    bad.__class__ = Without
    before = len(works(log))
    assert before == 3
    assert step(vllm)["long"] > 600
    step(vllm)
    assert works(log) == []
    state = log.read_state()
    assert state is not None
    assert not state.is_on
    assert broken in state.reason
    assert (vllm.max_num_scheduled_tokens, vllm.scheduler_config.long_prefill_token_threshold) == (5000, 0)


def test_the_class_is_made_of_the_one_that_vllm_would_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    log = StepLog.create()
    monkeypatch.setenv(scheduling.SCHEDULER, f"{FakeScheduler.__module__}.FakeScheduler")
    monkeypatch.setenv(scheduling.STEP_LOG, log.path)
    found = scheduling.class_by_name(scheduling.NAME)
    assert issubclass(found, FakeScheduler)
    assert found is not FakeScheduler
    found()
    assert log.read_state() == RecorderState(True)
    monkeypatch.setenv(scheduling.STEP_LOG, "/nowhere")
    assert scheduling.class_by_name(scheduling.NAME) is FakeScheduler


def test_the_worker_puts_its_scheduler_before_the_one_that_vllm_would_choose(caplog: pytest.LogCaptureFixture) -> None:
    log = StepLog.create()
    chosen: Any = SimpleNamespace(get_scheduler_cls=lambda: FakeScheduler, scheduler_cls=None)
    config = SimpleNamespace(scheduler_config=chosen)
    assert library.can_record(config)
    environment = library.record_steps(config, log)
    assert chosen.scheduler_cls == scheduling.NAME
    assert scheduling.class_by_name(environment[scheduling.SCHEDULER]) is FakeScheduler
    assert environment[scheduling.STEP_LOG] == log.path
    chosen.get_scheduler_cls = lambda: SimpleNamespace(schedule=None)
    assert not library.can_record(config)
    del chosen.get_scheduler_cls
    assert not library.can_record(config)
    first, second = (record.message for record in caplog.records)
    assert "update_from_output, get_request_counts" in first
    assert "get_scheduler_cls" in second


@pytest.mark.parametrize(
    ("budget", "prompts", "share"),
    [
        (600, [5000], 600),
        (600, [5000, 5000], 300),
        (600, [100, 5000], 500),
        (600, [10, 20, 30], 600),
        (600, [5000] * 10, 150),
        (600, [], 600),
        (3, [5000] * 10, 1),
    ],
)
def test_the_share_of_a_prompt(budget: int, prompts: list[int], share: int) -> None:
    assert share_of_prompt(budget, prompts) == share


def test_accepted_drafts_are_told_with_their_step() -> None:
    """Of three for each of two answers, two and none are accepted. A third answer has no drafts, a fourth is cancelled
    while the step runs."""

    class Drafting(FakeScheduler):
        num_spec_tokens = 3

    vllm, log = scheduler(Drafting)
    vllm.add(*(FakeRequest(name, 10) for name in "abcd"))
    step(vllm)
    for name in "abd":
        vllm.requests[name].num_drafts = 3
    output = vllm.schedule()
    vllm.finish("d")
    sampled = SimpleNamespace(req_id_to_index={"b": 0, "a": 1, "c": 2}, sampled_token_ids=[[7], [7, 8, 9], [7]])
    vllm.update_from_output(output, sampled)
    assert works(log) == [StepWork(40, 4 * 50, 0, 0), StepWork(0, 0, 4, 14 + 14 + 11 + 14, 2)]
    assert [vllm.requests[name].num_tokens for name in "abc"] == [14, 12, 12]
    nothing = SimpleNamespace(req_id_to_index={}, sampled_token_ids=[])
    assert num_accepted_tokens(output, nothing) == 0
