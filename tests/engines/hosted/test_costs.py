"""The costs of a backend's steps: fitted to those that it tells, estimated from answers if it tells none, and stale
when it stops to tell them."""

from __future__ import annotations

import logging

import msgspec
import pytest

from kvrelay.core.clock import ManualClock
from kvrelay.core.histogram import Histogram
from kvrelay.core.sampling import SamplingParams
from kvrelay.core.status import RequestStatus
from kvrelay.core.step_cost import LATE_FACTOR, CostSource, StepCost, StepPace, StepWork
from kvrelay.engine.request import PrefillMode, Request
from kvrelay.engines.hosted.costs import LOOK_S, STALE_S, STALE_TOKENS, HostedCosts
from kvrelay.engines.hosted.step_log import StepLog
from kvrelay.placement.base import Objectives
from kvrelay.placement.cost import PlacementState

TRUE = StepCost(0.004, 0.005, 2e-5, 1e-9, 1e-4, 1e-8)


def told(clock: ManualClock, **given: bool) -> tuple[HostedCosts, StepLog]:
    """With the backend's end of the log."""
    log = StepLog.create()
    return HostedCosts("vLLM", log, clock, Histogram(), **given), StepLog(log.path)


def write(log: StepLog, *works: StepWork) -> None:
    for work in works:
        log.write_step(TRUE.step_seconds(work), *msgspec.structs.astuple(work))


def some_steps() -> list[StepWork]:
    """Decodes and prefills whose sizes differ in all directions."""
    decodes = [StepWork(0, 0, number % 9 + 1, 50 * (number % 7 + 1)) for number in range(120)]
    return decodes + [StepWork(100 * (number % 5 + 1), 3000 * (number % 4), number % 3, 90) for number in range(120)]


def test_costs_are_fitted_to_the_steps_that_are_told() -> None:
    clock = ManualClock()
    costs, log = told(clock)
    write(log, *some_steps())
    costs.look()
    assert costs.num_steps == 240
    found = costs.cost
    assert found is not None
    for work in (StepWork(0, 0, 5, 200), StepWork(400, 6000, 2, 90)):
        assert found.step_seconds(work) == pytest.approx(TRUE.step_seconds(work), rel=0.02)
    assert costs.source is CostSource.MEASURED


def test_the_tokens_of_a_step_are_told_to_the_worker_and_back() -> None:
    costs, log = told(ManualClock())
    write(log, StepWork(0, 0, 4, 400, 6), StepWork(0, 0, 6, 600, 9))
    costs.look()
    assert costs.cost is not None
    assert (costs.cost.tokens_per_step, log.read_pace().cost.tokens_per_step) == (2.5, 2.5)


def test_steps_are_taken_in_now_and_then_only() -> None:
    clock = ManualClock()
    costs, log = told(clock)
    write(log, StepWork(0, 0, 1, 10))
    costs.look()
    write(log, StepWork(0, 0, 1, 11))
    costs.look()
    assert costs.num_steps == 1
    clock.advance(LOOK_S)
    costs.look()
    assert costs.num_steps == 2


def request(name: str, objectives: Objectives | None, arrived_s: float = 0.0) -> Request:
    placement = None if objectives is None else PlacementState(objectives=objectives)
    made = Request(name, [1, 2, 3], SamplingParams(max_tokens=8), placement=placement)
    made.times.append((RequestStatus.WAITING, arrived_s))
    return made


def test_the_shortest_objectives_are_the_pace_of_the_backend() -> None:
    clock = ManualClock()
    costs, log = told(clock, sets_pace=True)
    strict, lax = request("a", Objectives(0.5, 0.02)), request("b", Objectives(0.2, 0.1))

    def limits() -> tuple[float, float]:
        clock.advance(LOOK_S)
        costs.look()
        pace, spread = log.read_pace(), costs.model.spread
        return round(pace.limit_s / StepCost().step_limit_s(1.0, spread), 6), pace.ttft_s

    for each in (lax, strict, request("c", None)):
        costs.arrived(each)
    assert limits() == (0.02, 0.2)
    costs.left(strict)
    assert limits() == (0.1, 0.2)
    costs.left(lax)
    assert limits() == (0.0, 0.0)
    write(log, *some_steps())
    clock.advance(LOOK_S)
    costs.look()
    assert log.read_pace() == StepPace(costs.model.cost)


def test_answers_that_were_late_make_room_for_prompts_that_are_late() -> None:
    clock = ManualClock()
    costs, log = told(clock, sets_pace=True)
    answer, prompt = (request(name, Objectives(0.5, 0.02)) for name in ("answer", "prompt"))
    answer.first_output_sent = True

    def limit_s() -> float:
        clock.advance(LOOK_S)
        costs.look()
        return log.read_pace().limit_s

    costs.arrived(answer)
    costs.arrived(prompt)
    strict_s = limit_s()
    assert 0.0 < strict_s < 0.02
    clock.advance(0.5)
    assert limit_s() == pytest.approx(strict_s), "the answer can still be good"
    answer.is_late = True
    assert limit_s() == pytest.approx(LATE_FACTOR * strict_s)
    prompt.mode = PrefillMode.REMOTE
    assert limit_s() == pytest.approx(strict_s), "it is computed elsewhere"


def test_without_the_flag_objectives_set_no_pace() -> None:
    costs, log = told(ManualClock())
    costs.arrived(request("a", Objectives(0.5, 0.02)))
    assert (log.read_pace().limit_s, log.read_pace().ttft_s) == (0.0, 0.0)


def test_costs_are_stale_while_tokens_come_without_steps(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    costs, log = told(clock)
    write(log, *some_steps())
    costs.look()

    def later(num_tokens: int) -> CostSource:
        clock.advance(STALE_S + 1)
        for number in range(num_tokens):
            costs.answered("a", 1, number)
        costs.look()
        return costs.source

    assert later(STALE_TOKENS - 1) is CostSource.MEASURED
    assert later(0) is CostSource.MEASURED, "nothing is expected of an idle backend"
    assert later(1) is CostSource.STALE
    assert costs.cost is None
    assert costs.source is later(STALE_TOKENS)
    write(log, StepWork(0, 0, 1, 10))
    assert later(1) is CostSource.MEASURED
    assert costs.cost is not None
    assert [record.levelname for record in caplog.records if "stale" in record.message] == ["WARNING"], (
        "it is said once"
    )


def test_a_recorder_that_has_failed_is_named(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    costs, log = told(clock)
    log.write_state(is_on=True, reason="prompts are not cut by objectives: enable_chunked_prefill is off")
    costs.look()
    clock.advance(1)
    costs.look()
    assert [record.message for record in caplog.records if "enable_chunked_prefill" in record.message] != []
    assert costs.source is CostSource.MEASURED
    caplog.clear()
    log.write_state(is_on=False, reason="vLLM's scheduler has no running")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            clock.advance(1)
            costs.look()
    assert costs.source is CostSource.STALE
    (warning,) = caplog.records
    assert "no running" in warning.message


# -- what answers show ------------------------------------------------------------------------------------------------


class Server:
    """Computes one prompt after the other and one token of each answer per step, as TRUE has it."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.costs = HostedCosts("the server", None, self.clock, Histogram())
        self.answers: dict[str, int] = {}

    def prefill(self, name: str, num_tokens: int, num_before: int = 0) -> None:
        self.costs.asked(name, num_tokens, num_before)
        self.clock.advance(TRUE.prefill_seconds(num_tokens, num_before=num_before, chunk=10**6))
        self.answers[name] = num_before + num_tokens + 1
        self.costs.answered(name, 1, self.answers[name])

    def decode(self) -> None:
        work = StepWork(0, 0, len(self.answers), sum(self.answers.values()))
        self.clock.advance(TRUE.step_seconds(work))
        for name in self.answers:
            self.answers[name] += 1
            self.costs.answered(name, 1, self.answers[name])

    def end(self, name: str) -> None:
        del self.answers[name]
        self.costs.answers.ended(name)


def test_costs_are_estimated_from_what_answers_show() -> None:
    server = Server()
    assert server.costs.cost is None, "nothing is known yet"
    for round_number in range(40):
        for number in range(round_number % 6 + 1):
            server.prefill(f"{round_number}/{number}", 100 * (number * round_number % 7 + 1), 64 * (number % 2))
        for _ in range(10):
            server.decode()
        for name in list(server.answers):
            server.end(name)
    found = server.costs.cost
    assert found is not None
    assert server.costs.source is CostSource.ESTIMATED
    assert found.step_seconds(StepWork(0, 0, 4, 1500)) == pytest.approx(
        TRUE.step_seconds(StepWork(0, 0, 4, 1500)), rel=0.1
    )
    assert found.prefill_seconds(400) == pytest.approx(TRUE.prefill_seconds(400), rel=0.15)
    answers = server.costs.answers
    assert (answers.num_decodes, answers.num_context, answers.num_prefill_tokens) == (0, 0, 0)


def test_a_gap_with_a_prefill_or_another_batch_in_it_is_no_sample() -> None:
    server = Server()
    server.prefill("a", 100)
    server.decode()  # from here on gaps count
    server.decode()
    num_samples = server.costs.num_steps
    server.costs.asked("b", 2000, 0)
    server.clock.advance(3.0)
    for name in ("a", "b"):
        server.costs.answered(name, 1, 102)
    assert server.costs.num_steps == num_samples + 1, "the prefill itself"
    server.clock.advance(5.0)
    server.costs.answered("a", 1, 103)
    server.costs.answers.ended("b")
    server.clock.advance(7.0)
    server.costs.answered("a", 1, 104)
    assert server.costs.num_steps == num_samples + 1


def test_two_prefills_at_once_are_no_samples_and_tokens_that_come_together_share_their_gap() -> None:
    clock = ManualClock()
    costs = HostedCosts("the server", None, clock, Histogram())
    for name in ("a", "b"):
        costs.asked(name, 100, 0)
    assert costs.answers.num_prefill_tokens == 200
    clock.advance(1.0)
    for name in ("a", "b"):
        costs.answered(name, 1, 101)
    assert costs.num_steps == 0
    shown = costs.answers.answered("a", 1, 102, 5.0)
    assert shown is None
    shown = costs.answers.answered("a", 4, 106, 5.2)
    assert shown is not None
    work, seconds = shown
    assert (work.num_decodes, seconds) == (2, pytest.approx(0.05))
