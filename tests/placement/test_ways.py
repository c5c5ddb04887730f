"""Local, pair or queue: estimates by arithmetic, and what must hold for all numbers."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.core.step_cost import MAX_COST_S, StepCost
from kvrelay.placement.base import Objectives
from kvrelay.placement.cost import HARM, LATE
from kvrelay.placement.pair_cost import PairCosts
from kvrelay.placement.seconds import Candidates, CostColumns, LoadColumns, Loads
from kvrelay.placement.ways import BOUND, PAIR_S, QUEUE_S, Way, Ways, is_surely_local, ways_of

BLOCK = 10
TOKEN_S = 1e-4
COST = StepCost(step_s=0.001, prefill_s=0.0, prefill_token_s=TOKEN_S, pair_s=0.0, decode_s=0.0, context_s=0.0)
LOOSE = Objectives(10.0, 10.0)


def half(overlaps: list[float], cost: StepCost = COST, prompt: int = 1000, **load: list[float]) -> Candidates:
    size = len(overlaps)
    names = LoadColumns.__struct_fields__
    columns = LoadColumns(**{name: np.array(load.get(name, [0.0] * size)) for name in names})
    costs = CostColumns(*(np.full(size, value) for value in msgspec.structs.astuple(cost)))
    return Candidates(prompt, BLOCK, np.array(overlaps), columns, costs, num_output=8.0)


def ways(
    prefill: Candidates, decode: Candidates, move_s: float = 0.01, objectives: Objectives = LOOSE, **open: Any
) -> Ways:
    """Of the first pair, beside the first decode worker alone. ``move_s``: of what that one lacks."""
    shape = len(prefill), len(decode)
    costs = PairCosts(np.zeros(shape[0]), np.zeros(shape[1]), np.full(shape, move_s), "s")
    num_here = float(decode.load.prefill_tokens[0])
    found = ways_of(prefill, decode, costs, (0, 0), 0, num_here, objectives, **open)
    assert found is not None
    return found


RUNNING = {"num_requests": [8.0], "context_tokens": [8000.0]}
BEGUN_S = 0.0005
"""Half of a step that decodes for them: what is left of the one that runs, in the mean."""


@pytest.mark.parametrize(
    ("prefill", "decode", "seconds", "best"),
    [
        # 1,000 tokens take 0.1 s anywhere; an idle decode worker saves the way.
        (half([0]), half([0]), (0.1, PAIR_S + 0.1 + 0.01, QUEUE_S + 0.1 + 0.01), Way.LOCAL),
        # Eight answers would be 0.1 s later each: 0.1 * HARM * 8.
        (half([0]), half([0], **RUNNING), (0.1 + BEGUN_S, PAIR_S + 0.11, BEGUN_S + QUEUE_S + 0.11), Way.PAIR),
        # 500 tokens wait at the only prefill worker: the queue is not bound to it.
        (
            half([0], prefill_tokens=[500.0]),
            half([0], **RUNNING),
            (0.1 + BEGUN_S, PAIR_S + BOUND * 0.05 + 0.11, BEGUN_S + QUEUE_S + 0.05 + 0.11),
            Way.QUEUE,
        ),
        # They wait at the chosen one of two, which holds half of the prompt; the other one is idle. Who pulls an entry
        # of the queue is chance: in the mean 200 tokens wait, and 75 blocks are missing.
        (
            half([50, 0], prefill_tokens=[400.0, 0.0]),
            half([0], **RUNNING),
            (0.1 + BEGUN_S, PAIR_S + BOUND * 0.04 + 0.05 + 0.01, BEGUN_S + QUEUE_S + 0.02 + 0.075 + 0.01),
            Way.PAIR,
        ),
        # The decode worker holds 90 of 100 blocks: the queue's puller reads them (10 times what is written).
        (half([0]), half([90], **RUNNING), (0.01 + BEGUN_S, PAIR_S + 0.11, BEGUN_S + QUEUE_S + 0.11), Way.LOCAL),
        # 2,000 tokens wait there.
        (
            half([0]),
            half([0], prefill_tokens=[2000.0]),
            (0.3, PAIR_S + 0.11, QUEUE_S + 0.11),
            Way.PAIR,
        ),
    ],
    ids=["idle", "answers run", "P is busy", "P holds half", "D holds it", "D is busy"],
)  # fmt: skip
def test_the_seconds_of_each_way(
    prefill: Candidates, decode: Candidates, seconds: tuple[float, float, float], best: Way
) -> None:
    found = ways(prefill, decode)
    assert found.local is not None
    assert found.pair is not None
    assert found.queue is not None
    assert (found.local[0], found.pair[0], found.queue[0]) == pytest.approx(seconds)
    assert found.best is best


def test_costs_are_those_of_remote_or_local() -> None:
    """Beyond the objective LATE per second; a local prefill also harms the answers that run."""
    found = ways(half([0]), half([0], **RUNNING), objectives=Objectives(0.05, 10.0))
    assert found.local is not None
    assert found.pair is not None
    assert found.queue is not None
    assert found.local.cost == pytest.approx(0.1 + BEGUN_S + LATE * (0.05 + BEGUN_S) + HARM * 0.1 * 8)
    assert found.pair.cost == pytest.approx(found.pair[0] + LATE * (found.pair[0] - 0.05))
    assert found.queue.cost == pytest.approx(found.queue[0] + LATE * (found.queue[0] - 0.05))


def test_a_second_token_that_waits_for_slow_transfers_speaks_against_a_pair() -> None:
    """0.4 s of transfer make the second token late; in the queue the first one, which has 10 s."""
    tight = Objectives(10.0, 0.05)
    busy = half([0], num_requests=[100.0], context_tokens=[8000.0])
    slow, quick = ways(half([0]), busy, 0.4, tight), ways(half([0]), busy, 0.001, tight)
    assert slow.pair is not None
    assert slow.queue is not None
    assert slow.pair[0] < slow.queue[0]
    assert (slow.best, quick.best) == (Way.QUEUE, Way.PAIR)
    long = msgspec.structs.replace(busy, num_output=500.0)
    assert ways(half([0]), long, 0.4, tight).best is Way.PAIR, "one late token in a hundred is borne"


def test_closed_ways_are_not_taken() -> None:
    idle = half([0]), half([0])
    assert ways(*idle, is_local_open=False).best is Way.PAIR
    assert ways(*idle, is_local_open=False, is_queue_open=False).queue is None
    behind = half([0], prefill_tokens=[10**6]), half([0], **RUNNING)
    assert ways(*behind).best is Way.LOCAL
    assert ways(*behind, is_local_open=False).best is Way.QUEUE
    assert ways(*behind, is_local_open=False, is_queue_open=False).best is Way.PAIR


def test_a_decode_worker_is_told_what_a_prefill_waits_in_the_mean() -> None:
    """For whomever it waits; a pair's own 1,000 tokens count where they go."""
    load = {"prefill_tokens": [400.0], "others_prefill_tokens": [100.0]}
    assert ways(half([0], **load), half([0])).wait_s == pytest.approx(400 * TOKEN_S)
    paired = ways(half([0], **load), half([0], **RUNNING), is_local_open=False, is_queue_open=False)
    assert paired.wait_s == pytest.approx(1400 * TOKEN_S)
    beside = ways(half([0, 0], prefill_tokens=[0.0, 200.0]), half([0], **RUNNING))
    assert (beside.best, beside.wait_s) == (Way.PAIR, pytest.approx((1000 + 200) / 2 * TOKEN_S))


def test_a_pair_has_until_the_next_best_way_would_have_been_through() -> None:
    """It begins PAIR_S after the decision, and the others' first tokens come after 0.1 s at best; beside a wait of
    0.04 s P begins as much later."""
    paired = ways(half([0]), half([0], **RUNNING))
    assert paired.begins_within_s == pytest.approx(PAIR_S + 0.1 + BEGUN_S)
    waiting = ways(half([0], prefill_tokens=[400.0]), half([0], **RUNNING), is_queue_open=False)
    assert waiting.begins_within_s == pytest.approx(PAIR_S + BOUND * 0.04 + 0.1 + BEGUN_S)
    alone = ways(half([0]), half([0]), is_local_open=False, is_queue_open=False)
    assert alone.begins_within_s == 0.0, "there is no other way"


def test_what_is_loaded_is_not_computed() -> None:
    """P reads 900 tokens in 0.02 s."""
    reading = msgspec.structs.replace(half([0]), loads=Loads(np.array([900.0]), np.array([0.02])))
    found = ways(reading, half([0], **RUNNING))
    assert found.pair is not None
    assert found.pair[0] == pytest.approx(PAIR_S + 0.02 + 0.01 + 0.01)


@pytest.mark.parametrize("is_loaded", [False, True])
def test_what_a_worker_has_of_a_prompt_is_context_of_what_it_computes(is_loaded: bool) -> None:
    """100 tokens after 900 have 100 * 950 pairs, whether the pool of P or of D has these or a tier, which takes 0.02 s:
    else the worker that loads them would seem slower by its attention to them."""
    dear = msgspec.structs.replace(COST, pair_s=1e-6)
    having = half([0 if is_loaded else 90], dear)
    if is_loaded:
        having = msgspec.structs.replace(having, loads=Loads(np.array([900.0]), np.array([0.02])))
    found = ways(having, having)
    own_s = 0.01 + 0.095 + 0.02 * is_loaded
    assert found.local is not None
    assert found.pair is not None
    assert (found.local[0], found.pair[0]) == pytest.approx((own_s, PAIR_S + own_s + 0.01))
    if not is_loaded:
        assert found.queue is not None
        assert found.queue[0] == pytest.approx(QUEUE_S + own_s + 0.01)


def test_an_explanation_names_the_way_that_was_taken() -> None:
    paired, local = ways(half([0]), half([0], **RUNNING)), ways(half([0]), half([0]))
    assert paired.explained("remote") == "pair;local=0.1005s;pair=0.1160s;queue=0.1205s"
    assert local.explained("local_cheaper;local=0.1000s") == "local_cheaper;local=0.1000s;pair=0.1160s"
    tried = msgspec.structs.replace(paired, best=Way.LOCAL, is_trial=True)
    assert tried.explained("local_cheaper;local=0.1000s") == "local_cheaper;local=0.1000s;pair=0.1160s;trial"


times = st.sampled_from([0.0, 1e-9, 1e-5, 1e-3, 0.1, 10.0])
amounts = st.sampled_from([0.0, 1.0, 30.0, 900.0, 1e5, 1e12])
step_costs = st.builds(StepCost, times, times, times, times, times, times).filter(lambda cost: cost.is_sound)


@given(step_costs, step_costs, st.lists(amounts, min_size=9, max_size=9), st.integers(1, 10**6), times, times, times)
def test_some_way_is_best_whatever_the_numbers_and_the_quick_look_agrees(
    there: StepCost, here: StepCost, load: list[float], prompt: int, move_s: float, ttft_s: float, itl_s: float
) -> None:
    objectives = Objectives(max(ttft_s, 1e-6), max(itl_s, 1e-6))
    prefill = half([min(load[0], 9.0)], there, prompt, prefill_tokens=[load[1]])
    columns = {name: [value] for name, value in zip(("prefill_tokens", "num_requests", "context_tokens"), load[2:])}
    decode = half([min(load[8], 9.0)], here, prompt, **columns)
    found = ways(prefill, decode, move_s, objectives)
    for estimate in (found.local, found.pair, found.queue):
        assert estimate is not None
        assert 0.0 <= estimate.first_token_s <= MAX_COST_S
        assert math.isfinite(estimate.cost)
    assert found.wait_s <= MAX_COST_S
    if is_surely_local(decode, 0, load[2], objectives):
        assert found.best is Way.LOCAL


def test_the_quick_look_finds_short_prompts() -> None:
    """30 tokens take 3 ms; half as much is left of a step that runs, and two answers are harmed by 0.6: less than
    PAIR_S. 40 tokens and three answers are 7.2."""
    assert is_surely_local(half([97], num_requests=[2.0]), 0, 0.0, LOOSE)
    assert not is_surely_local(half([96], num_requests=[3.0]), 0, 0.0, LOOSE)
    assert not is_surely_local(half([97]), 0, 30.0, LOOSE), "30 tokens wait there"
    assert not is_surely_local(half([97]), 0, 0.0, Objectives(10.0, 0.004)), "answers would be late"


def test_a_chunk_is_cut_as_the_decode_workers_scheduler_cuts_it() -> None:
    """Beside answers a step may take 0.7 of 50 ms, so 1,000 tokens of 0.1 ms take three steps, of 1 ms each besides."""
    cost = msgspec.structs.replace(COST, prefill_s=0.001)
    found = ways(half([0], cost), half([0], cost, **RUNNING), objectives=Objectives(10.0, 0.05))
    assert found.local is not None
    assert found.local.first_token_s == pytest.approx(BEGUN_S + 0.1 + 3 * 0.001)


def test_the_tokens_of_the_step_after_a_transfer_come_together() -> None:
    """Four may take four objectives: 0.15 s less are late."""
    running, tight = {"num_requests": [100.0], "context_tokens": [8000.0]}, Objectives(10.0, 0.05)
    four = msgspec.structs.replace(COST, tokens_per_step=4.0)
    one, other = (ways(half([0]), half([0], cost, **running), 0.4, tight).pair for cost in (COST, four))
    assert one is not None
    assert other is not None
    assert one.cost - other.cost == pytest.approx(LATE * 0.15 * 10.0 / 0.05)
