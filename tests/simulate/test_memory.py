"""What host memory and disks are worth: which sizes are tried, when no more is, and what is said."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import pytest

from kvrelay.cli.main import run
from kvrelay.core.step_cost import StepCost
from kvrelay.placement.base import Objectives
from kvrelay.simulate.advice_shown import text_of
from kvrelay.simulate.advise import advise
from kvrelay.simulate.arrival import Arrival
from kvrelay.simulate.costs import Costs
from kvrelay.simulate.loads import generated_arrivals
from kvrelay.simulate.memory import advise_memory, num_repeated_tokens
from kvrelay.simulate.pool import RunsHere
from kvrelay.simulate.trial import NO_MEMORY, Candidate, Memory, Outcome, Setting, Trial, later_turns, run_trial

ALONE = Candidate(0, 0, 1)
OBJECTIVES = Objectives(0.5, 0.5)
COSTS = Costs(kv_tokens=1600, token_bytes=10)
POOL_BYTES = 16_000


def prompts(*ids: tuple[int, ...]) -> list[Arrival]:
    """One a second, of 16 tokens for each id."""
    return [
        Arrival(time_s=at, prompt_tokens=16 * len(own), answer_tokens=1, hash_ids=own, hash_tokens=16)
        for at, own in enumerate(ids)
    ]


def outcome(later_ttft_ms: float, goodput: float = 0.8, computed: float = 0.6) -> Outcome:
    times = (1.0, 1.0, 1.0)
    return Outcome(True, goodput, 1.0, 0.9, 1.0, 1.0, 10.0, times, times, 0.1, (), "", computed, later_ttft_ms)


class Answers:
    """A runner that answers each trial with the next of ``outcomes``."""

    capacity = 1

    def __init__(self, *outcomes: Outcome) -> None:
        self._outcomes = deque(outcomes)
        self._waiting: list[Trial] = []
        self.asked: list[Memory] = []

    def submit(self, trial: Trial) -> None:
        self._waiting.append(trial)

    def results(self) -> Iterator[tuple[Trial, Outcome]]:
        while self._waiting:
            trial = self._waiting.pop()
            self.asked.append(trial.memory)
            yield trial, self._outcomes.popleft()


def setting(num_repeated: int) -> Setting:
    """Prompts that repeat so many blocks of 160 bytes."""
    own = tuple(range(num_repeated))
    return Setting(((0, prompts(own, own)),), {1: COSTS}, OBJECTIVES)


def test_blocks_of_more_than_one_prompt_count_once() -> None:
    assert num_repeated_tokens(prompts((1, 2, 3), (1, 2, 4), (1, 2, 4, 5), (9,))) == 3 * 16
    assert num_repeated_tokens([Arrival(time_s=0.0, prompt_tokens=9, answer_tokens=1)] * 2) == 0
    assert later_turns(prompts((1, 2), (3,), (1, 4), (3, 1))) == {2, 3}


def test_a_load_that_repeats_nothing_is_not_asked() -> None:
    runs = Answers()
    given = Setting(((0, prompts((1,), (2,))),), {1: COSTS}, OBJECTIVES)
    assert advise_memory(runs, given, ALONE, outcome(100.0)) is None


def test_what_the_pool_holds_needs_no_memory() -> None:
    """100 blocks of 160 bytes are the pool."""
    runs = Answers()
    found = advise_memory(runs, setting(100), ALONE, outcome(100.0))
    assert found is not None
    assert found.best.memory == NO_MEMORY
    assert found.verdict == (
        "Host memory for KV is not worth it: what prompts repeat is 15.6KiB for each worker, and its pool has 15.6KiB."
    )
    assert runs.asked == []


def test_sizes_double_until_one_more_gains_little() -> None:
    runs = Answers(outcome(100.0), outcome(60.0, 0.9, 0.4), outcome(58.0, 0.91, 0.3), outcome(58.0))
    found = advise_memory(runs, setting(10_000), ALONE, outcome(100.0))
    assert found is not None
    assert [one.host_bytes for one in runs.asked if not one.disk_bytes] == [POOL_BYTES, 2 * POOL_BYTES, 4 * POOL_BYTES]
    assert found.best.memory == Memory(2 * POOL_BYTES)


def test_then_a_disk_for_all_is_tried() -> None:
    """Of 10,000 blocks of 160 bytes and a quarter more."""
    for of_disk, is_worth in ((outcome(57.0, 0.9), False), (outcome(50.0, 0.9), True)):
        runs = Answers(outcome(60.0, 0.9, 0.4), outcome(58.0, 0.91, 0.3), of_disk)
        found = advise_memory(runs, setting(10_000), ALONE, outcome(100.0))
        assert found is not None
        assert runs.asked[-1] == Memory(POOL_BYTES, 2_000_000)
        assert found.best.memory == (runs.asked[-1] if is_worth else Memory(POOL_BYTES))
        assert found.verdict.startswith(
            "Host memory of 15.6KiB for each worker is worth it: it changes the prompt tokens computed from 60% to "
            "40%, the mean first token of later turns from 100 to 60 ms, and goodput from 80.0% to 90.0%. 31.2KiB gain "
            "little more. A disk of 1.9MiB for each worker is "
        )
        assert ("is worth it: it changes the prompt tokens computed from 40%" in found.verdict) is is_worth


def test_memory_for_all_is_the_last_that_is_tried() -> None:
    """250 blocks and a quarter more are 50,000 bytes: 4 times the pool."""
    runs = Answers(*[outcome(99.0)] * 4)
    found = advise_memory(runs, setting(250), ALONE, outcome(100.0))
    assert found is not None
    assert [one.host_bytes for one in runs.asked] == [POOL_BYTES, 2 * POOL_BYTES, 4 * POOL_BYTES, 0]
    assert found.best.memory == NO_MEMORY
    assert found.verdict.startswith("Host memory for KV is not worth it: 62.5KiB for each worker changes")


# -- with the simulator -----------------------------------------------------------------------------------------------

AGENTS = "agents:sessions=12,calls=5,tools=2,prompt=640,answer=8,cached=0.7,rate=4"


@pytest.mark.parametrize(("bytes_per_s", "is_worth"), [pytest.param(1e9, True, marks=pytest.mark.matrix), (1e3, False)])
def test_slow_copies_are_not_worth_it(bytes_per_s: float, is_worth: bool) -> None:
    """The pool holds 2 of 12 sessions, and to compute their prompts is dear."""
    costs = Costs(step=StepCost(prefill_token_s=2e-4), kv_tokens=3200, token_bytes=10, host_bytes_per_s=bytes_per_s)
    costs_by_tp = {1: costs}
    given = Setting(((0, generated_arrivals(AGENTS)),), costs_by_tp, OBJECTIVES)
    without = run_trial(given, Trial(ALONE, len(given.arrivals)))
    found = advise_memory(RunsHere(given), given, ALONE, without)
    assert found is not None
    assert (found.best.memory.host_bytes > 0) is is_worth
    if is_worth:
        assert found.best.computed < found.tried[0].computed


def test_the_advice_has_figures_and_flags() -> None:
    """The pool holds 1 of 6 sessions."""
    costs = Costs(step=StepCost(prefill_token_s=2e-4), kv_tokens=1600, token_bytes=10, host_bytes_per_s=1e9)
    few = AGENTS.replace("sessions=12,calls=5", "sessions=6,calls=4")
    advice = advise(generated_arrivals(few), {1: costs}, 1, OBJECTIVES)
    assert advice.memory is not None
    shown = text_of(advice)
    assert f"with pools alone: {advice.memory.tried[0].computed:.1%} of the prompt tokens computed" in shown
    assert advice.memory.verdict in shown
    assert f"--host-kv-cache {advice.memory.best.memory.host_bytes}" in advice.command


def test_the_command_takes_the_flags_of_a_worker(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["simulate", "--load", AGENTS, "--num-blocks", "200", "--prefill", "0", "--host-kv-cache", "2GiB"]
    assert run(given) == 0
    assert "KV tiers:" in capsys.readouterr().out
    assert run([*given[:-1], "1KiB"]) != 0
    assert "host_kv_cache is below" in capsys.readouterr().err
