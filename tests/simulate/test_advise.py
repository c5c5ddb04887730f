"""Halving on toy objectives; the search, its words and its page on small loads."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.browser import opened, running_browser

from kvrelay.cli.main import run
from kvrelay.core.step_cost import StepCost
from kvrelay.errors import ConfigError, InvalidInputError
from kvrelay.placement.base import Objectives
from kvrelay.simulate import pool
from kvrelay.simulate.advice_shown import page_of, text_of, write_page
from kvrelay.simulate.advise import MAX_FACTOR, Advice, advise, candidates_for, search_highest
from kvrelay.simulate.advise_command import read_costs_by_tp
from kvrelay.simulate.arrival import Arrival
from kvrelay.simulate.costs import Costs, encode_costs
from kvrelay.simulate.halving import rounds, successive_halving
from kvrelay.simulate.pool import runner
from kvrelay.simulate.trial import Candidate, Outcome, Setting, Trial, run_trial
from kvrelay.simulate.verdict import Capacity, Load, Measured, ordered, verdict_of

LOOSE = Objectives(5.0, 1.0)
SPLIT, TOGETHER = Candidate(1, 1, 0), Candidate(0, 0, 2)


def test_halving_finds_the_best_and_spends_little() -> None:
    spent: Counter[int] = Counter()

    def score(candidates: Sequence[int], budget: int, num_kept: int) -> list[tuple[float]]:
        spent[budget] += len(candidates)
        # What cannot be kept may be scored as carelessly as you like.
        true = [-abs(one - 17) + (one % 3) / budget for one in candidates]
        limit = sorted(true, reverse=True)[num_kept - 1]
        return [(value if value >= limit else -99.0,) for value in true]

    ranked = successive_halving(range(27), score, (1, 10, 100))
    assert ranked[0][0] == 17
    assert spent == {1: 27, 10: 6, 100: 2}
    assert [value for _, value in ranked] == sorted((value for _, value in ranked), reverse=True)
    assert rounds(27, (1, 10, 100), 1) == 27 + 60 + 200


def test_halving_keeps_the_best_of_each_kind() -> None:
    ranked = successive_halving(
        range(20),
        lambda candidates, *_: [(one,) for one in candidates],
        (1, 2, 3),
        kind=lambda candidate: candidate < 3,
    )
    assert {candidate for candidate, _ in ranked} >= {19, 2}


def test_halving_without_candidates_or_budgets_is_refused() -> None:
    for candidates, budgets in (((), (1,)), ((1,), ())):
        with pytest.raises(ValueError, match="needs a candidate and a budget"):
            successive_halving(candidates, lambda one, *_: [(float(at),) for at in one], budgets)


def highest_that_holds(holds: Callable[[float], bool], *around: Any) -> float:
    search = search_highest(*around)
    factor = next(search)
    while True:
        try:
            factor = search.send(holds(factor))
        except StopIteration as end:
            return float(end.value)


@pytest.mark.parametrize("limit", [0.03, 0.7, 1.0, 3.3, 40.0])
def test_bisection_ends_just_below_the_limit(limit: float) -> None:
    found = highest_that_holds(lambda factor: factor <= limit)
    assert 0.95 * limit < found <= limit
    for start in (limit / 3, limit * 1.1):
        assert 0.95 * limit < highest_that_holds(lambda factor: factor <= limit, start, 1) <= limit


def test_a_search_that_begins_at_the_answer_takes_two_runs() -> None:
    """The other seeds' capacities are near the first one's."""
    tried: list[float] = []

    def holds(factor: float) -> bool:
        tried.append(factor)
        return factor <= 3.0

    assert highest_that_holds(holds, 3.0, 1) == 3.0
    assert tried == [3.0, pytest.approx(3.0 * 2 ** (1 / 16))]


def test_where_no_rate_holds_two_runs_say_so() -> None:
    tried: list[float] = []

    def holds(factor: float) -> bool:
        tried.append(factor)
        return False

    assert highest_that_holds(holds) == 0.0
    assert tried == [1.0, 1 / MAX_FACTOR]


def test_bisection_has_ends() -> None:
    assert highest_that_holds(lambda factor: True) == MAX_FACTOR
    assert highest_that_holds(lambda factor: False) == 0.0
    assert MAX_FACTOR / 1.05 < highest_that_holds(lambda factor: True, 3.0, 1) <= MAX_FACTOR
    assert highest_that_holds(lambda factor: False, 3.0, 1) == 0.0


def test_candidates_fill_the_slots() -> None:
    found = candidates_for(4, (1, 2))
    assert len(set(found)) == len(found)
    assert all(one.tp * (one.prefill + one.decode + one.both) == 4 for one in found)
    assert {(one.prefill, one.decode) for one in found if one.is_split and one.tp == 1} == {(1, 3), (2, 2), (3, 1)}
    assert candidates_for(1, (2,)) == []


def outcome(goodput: float = 0.97, ttft_met: float = 0.97, itl_met: float = 1.0, tokens: float = 310.0) -> Outcome:
    sample = tuple(float(n) for n in range(1, 51))
    times = ((120.0, 300.0, 450.0), (4.0, 9.0, 20.0))
    return Outcome(True, goodput, goodput, goodput, ttft_met, itl_met, tokens, *times, 1.0, sample)


def said_of(capacities: Sequence[Capacity], rate: float = 1.0, too_long: float = 0.0, **of_split: float) -> str:
    rows = [Measured(SPLIT, outcome(**of_split), 1.5), Measured(TOGETHER, outcome(goodput=0.55, tokens=186), 1.5)]
    return verdict_of(capacities, rows, Objectives(0.5, 0.025), Load(rate, 1000, too_long), 4)


def ordered_by(*capacities: Capacity, split: float = 0.6, together: float = 0.55) -> list[Capacity]:
    return ordered(capacities, {SPLIT: split, TOGETHER: together})


@pytest.mark.parametrize(
    ("split", "together", "said"),
    [
        (11.2, 10.0, "split: split wins by 12 %"),
        (10.0, 11.2, "do not split: aggregated wins by 12 %"),
        (10.2, 10.0, "do not split: split and aggregated differ by 2.0 %, within the search's precision"),
        (10.0, 10.2, "do not split: split and aggregated differ by 2.0 %, within the search's precision"),
        (10.0, 0.0, "split: aggregated holds the objectives at no rate"),
        (0.0, 0.0, "neither holds 90 %"),
    ],
)
def test_the_verdict_in_words(split: float, together: float, said: str) -> None:
    found = ordered_by(Capacity(SPLIT, (split,) * 3, ()), Capacity(TOGETHER, (together,) * 3, ()))
    assert said_of(found).startswith(said)


def test_a_gain_within_the_spread_of_the_seeds_is_none() -> None:
    found = ordered_by(Capacity(SPLIT, (9.0, 12.0, 15.0), ()), Capacity(TOGETHER, (9.5, 10.0, 10.5), ()))
    assert found[0].candidate is TOGETHER
    said = (
        "do not split: split and aggregated differ by 20.0 %, within the spread of 3 seeds, and aggregated is simpler."
    )
    assert said_of(found).startswith(said)
    # The loads of the seeds differ by more than the clusters, but one of these always holds more.
    apart = ordered_by(Capacity(SPLIT, (6.0, 12.0, 18.0), ()), Capacity(TOGETHER, (5.0, 10.0, 15.0), ()))
    assert said_of(apart).startswith("split: split wins by 20 % of requests per second.")


def test_where_both_hold_the_objectives_there_is_no_difference() -> None:
    found = ordered_by(Capacity(SPLIT, (12.0,) * 3, ()), Capacity(TOGETHER, (8.0,) * 3, ()))
    assert "At your rate (6 requests/s) there is no difference: both hold the objectives." in said_of(found, 6.0)
    assert "At your rate (9 requests/s) only 1P1D holds the objectives." in said_of(found, 9.0)


def test_what_fails_and_what_would_hold_it() -> None:
    """4 slots hold 3 requests/s, so 10 need 4 * 10 / 3 = 13.3."""
    found = ordered_by(Capacity(TOGETHER, (2.0,) * 3, ()), Capacity(SPLIT, (3.0,) * 3, ()))
    said = said_of(found, 10.0, goodput=0.6, ttft_met=0.62, itl_met=0.9)
    assert said == (
        "split: split wins by 50 % of requests per second. At your rate (10 requests/s) 1P1D does not hold the "
        "objectives: first tokens fail, 62 % of the requests keep 500 ms (P90 300 ms), and 90 % should. It would hold "
        "3 requests/s; for your rate give about 14 slots (in proportion), or looser objectives."
    )
    assert "gaps between tokens fail, 61 % of the requests keep 25 ms (P99 20 ms)" in said_of(found, 10.0, itl_met=0.61)


def test_where_no_rate_holds_the_better_one_is_named_and_its_command_given() -> None:
    """The capacities are in the order of the table, the best first."""
    found = ordered_by(Capacity(SPLIT, (0.0,) * 3, ()), Capacity(TOGETHER, (0.0,) * 3, ()))
    assert found[0].candidate is SPLIT
    said = said_of(found, goodput=0.6, ttft_met=0.6, tokens=297)
    assert "1P1D is the better one: 60 % and 297 good tokens/s, against 55 % and 186 with 2 aggregated" in said
    assert "first tokens fail" in said
    assert "No lower rate helps" in said


def test_where_no_rate_holds_and_the_two_differ_little_the_simpler_one_is_advised() -> None:
    found = ordered_by(Capacity(SPLIT, (0.0,) * 3, ()), Capacity(TOGETHER, (0.0,) * 3, ()), split=0.56)
    assert found[0].candidate is TOGETHER
    said = said_of(found, goodput=0.56, too_long=0.4)
    assert "2 aggregated is the simpler of two that differ little: 55 %" in said
    assert "40 % of the prompts take longer than 500 ms by themselves, if no prefix is cached. No lower rate" in said


def test_a_capacity_that_the_search_did_not_reach_is_said_so() -> None:
    split, together = (Capacity(one, (64.0,) * 3, (), is_least=True) for one in (SPLIT, TOGETHER))
    said = said_of(ordered_by(split, together))
    assert said.startswith("do not split: both hold 64 requests/s, the highest rate that is tried, and aggregated is")
    less = Capacity(TOGETHER, (32.0,) * 3, ())
    assert said_of(ordered_by(split, less)).startswith("split: split wins by at least 100 % of requests per second.")


def test_a_load_that_is_too_short_for_its_capacity_is_said_so() -> None:
    """1,000 requests last 10 s at 100/s: an overload by 5 % makes the last one 0.5 s late, the objective."""
    for rate, is_short in ((99.0, False), (101.0, True)):
        said = said_of(ordered_by(Capacity(SPLIT, (rate,) * 3, ()), Capacity(TOGETHER, (50.0,) * 3, ())))
        assert ("too short for this comparison" in said) is is_short
    assert "at 101 requests/s it lasts 9.9 s" in said
    assert "give at least 1010 requests instead of 1000" in said


@pytest.mark.parametrize(("gap_s", "is_least"), [(100.0, True), (0.05, False)])
def test_the_highest_rate_that_is_tried_is_a_least_capacity(gap_s: float, is_least: bool) -> None:
    advice = advise(load(4, gap_s, 2000, 4), {1: Costs()}, 1, Objectives(0.3, 0.5))
    assert advice.capacities[0].is_least is is_least
    assert ("at least" in text_of(advice).splitlines()[-4]) is is_least


def test_the_share_of_prompts_that_are_too_long_by_themselves() -> None:
    """At 64 us a token 10,000 tokens take 0.64 s."""
    arrivals = [*load(3, 1.0, 10_000, 2), *load(1, 1.0, 100, 2)]
    arrivals.sort(key=lambda one: one.time_s)
    advice = advise(arrivals, {1: Costs(step=StepCost(prefill_token_s=6.4e-5))}, 1, Objectives(0.5, 0.5))
    assert "75 % of the prompts take longer than 500 ms by themselves" in advice.verdict


def load(num: int, gap_s: float, prompt: int, answer: int) -> list[Arrival]:
    return [Arrival(time_s=n * gap_s, prompt_tokens=prompt, answer_tokens=answer) for n in range(num)]


@pytest.mark.matrix
def test_long_prompts_beside_tight_gaps_are_split() -> None:
    """A chunk beside running answers takes 30 ms at least, above the objective; decoding alone takes 4."""
    costs = Costs(step=StepCost(prefill_s=0.030))
    advice = advise(load(30, 0.25, 2000, 60), {1: costs}, 2, Objectives(1.0, 0.012), slot_hour_price=3.6)
    assert advice.verdict.startswith("split: ")
    assert advice.best.is_split
    assert "--prefill 1 --decode 1" in advice.command
    best = next(row for row in advice.table if row.candidate == advice.best)
    assert best.price == pytest.approx(2 * 3.6 / 3600 / best.outcome.good_tokens_per_s * 1e6)


def test_a_slow_link_is_not_worth_a_split() -> None:
    """Transfers take ten times as long as the objective for the first token."""
    costs = Costs(link_bytes_per_s=1e7)
    advice = advise(load(4, 0.1, 1000, 8), {1: costs}, 2, Objectives(0.5, 0.2))
    assert advice.verdict.startswith("do not split: ")
    assert "--prefill 0 --decode 2" in advice.command


def test_the_winner_is_confirmed_with_the_loads_of_other_seeds() -> None:
    asked: list[int] = []

    def load_of_seed(seed: int) -> list[Arrival]:
        asked.append(seed)
        return load(6, 0.4, 300, 4)

    advice = advise(load(6, 0.2, 300, 4), {1: Costs()}, 1, LOOSE, seed=7, load_of_seed=load_of_seed)
    assert asked == [8, 9]
    first, *others = advice.capacities[0].by_seed
    assert others[0] == others[1] == pytest.approx(first, rel=0.5)


@pytest.mark.parametrize(
    ("objectives", "said"),
    [
        (Objectives(1.0, 0.001), "--slo-itl-ms 1 is impossible: one step takes 4.05 ms"),
        (Objectives(0.002, 1.0), "--slo-ttft-ms 2 is impossible"),
        (Objectives(0.05, 1.0), "meets the objectives for any request.*give more slots or looser"),
    ],
)
def test_impossible_objectives_are_refused(objectives: Objectives, said: str) -> None:
    with pytest.raises(InvalidInputError, match=said):
        advise(load(6, 1.0, 4000, 2), {1: Costs()}, 2, objectives)


def test_a_cluster_that_answers_nothing_says_why() -> None:
    with pytest.raises(InvalidInputError, match="answers no request: the prompt has 4000 tokens"):
        advise(load(3, 1.0, 4000, 2), {1: Costs()}, 1, LOOSE, num_blocks=1)
    with pytest.raises(InvalidInputError, match="--gpu-hour-price must be above 0, got nan"):
        advise(load(3, 1.0, 40, 2), {1: Costs()}, 1, LOOSE, slot_hour_price=float("nan"))


def test_costs_of_another_model_are_refused(tmp_path: Path) -> None:
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path in paths:
        path.write_bytes(encode_costs(Costs(model=path.stem)))
    assert list(read_costs_by_tp((str(paths[0]),), "a")) == [1]
    for given, model in (((str(paths[0]),), "c"), ((str(paths[0]), f"2={paths[1]}"), None)):
        with pytest.raises(ConfigError, match=r"other models.*kvrelay simulate calibrate"):
            read_costs_by_tp(given, model)
    with pytest.raises(ConfigError, match="one file for each TP"):
        read_costs_by_tp((str(paths[0]), f"1={paths[0]}"), None)


def example() -> Advice:
    rows = tuple(Measured(one, outcome(), 1.5) for one in (SPLIT, TOGETHER))
    capacities = (
        Capacity(SPLIT, (7.5, 8.0, 8.5), ((4.0, 1.0), (8.0, 0.9))),
        Capacity(TOGETHER, (4.0, 4.0, 4.0), ((4.0, 0.95), (8.0, 0.4))),
    )
    verdict = verdict_of(capacities, rows, LOOSE, Load(2.0, 1000), 2)
    return Advice(SPLIT, verdict, rows, capacities, LOOSE, 2.0, {1: 26674})


def overload() -> list[Arrival]:
    """More than one worker can do: the first tokens get later and later."""
    return load(120, 0.02, 1500, 20)


@pytest.mark.parametrize("share", [0.3, 0.9])
def test_a_trial_ends_early_with_the_answer_of_the_whole(share: float) -> None:
    setting = Setting(((0, overload()),), {1: Costs(spread=0.1)}, Objectives(0.5, 0.05))
    whole = run_trial(setting, Trial(TOGETHER, 120))
    early = run_trial(setting, Trial(TOGETHER, 120, give_up_below=share, enough=share))
    assert whole.is_whole
    assert not early.is_whole
    assert (whole.goodput >= share) == (early.least >= share) == (early.most >= share)
    assert early.least <= whole.goodput <= early.most


def test_a_search_in_processes_gives_the_same_advice_and_shows_true_progress() -> None:
    """The same seed, the same advice."""
    shares: list[float] = []
    given = (load(4, 0.05, 900, 6), {1: Costs(spread=0.1)}, 2, Objectives(0.12, 0.05))
    here = advise(*given, on_progress=lambda share, _: shares.append(share))
    there = advise(*given, num_processes=2)
    assert msgspec.json.encode(here) == msgspec.json.encode(there)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert shares[0] < 0.1
    assert multiprocessing.active_children() == []


def test_processes_end_with_an_error() -> None:
    setting = Setting(((0, load(3, 1.0, 400, 2)),), {1: Costs()}, LOOSE)

    def interrupted() -> None:
        with runner(setting, 2) as runs:
            runs.submit(Trial(TOGETHER, 3))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert multiprocessing.active_children() == []


def test_a_process_that_is_being_started_does_not_hear_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its imports would end with a traceback. It inherits the blocked signals until it has begun."""
    blocked: list[bool] = []

    def blocks() -> bool:
        return signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())

    class Executor(contextlib.AbstractContextManager[Any]):
        def __init__(self, *_: object) -> None: ...

        def submit(self, *_: object) -> object:
            blocked.append(blocks())
            return object()

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(pool, "ProcessPoolExecutor", Executor)
    with runner(Setting(((0, load(3, 1.0, 400, 2)),), {1: Costs()}, LOOSE), 2) as runs:
        runs.submit(Trial(TOGETHER, 3))
    assert blocked == [True]
    assert not blocks()


def test_the_table_has_a_row_for_each_finalist() -> None:
    lines = text_of(example()).splitlines()
    assert "97.0%" in lines[2]
    assert "8 requests/s (7.5 to 8.5 over 3 seeds)" in lines[4]
    assert "KV of a worker: 26,674 blocks (kv_tokens of the costs); load: 2 requests/s" in lines
    assert lines[-1].startswith("kvrelay serve MODEL --prefill 1 --decode 1")


def test_the_page_needs_nothing_from_elsewhere() -> None:
    page = page_of(example(), "a trace </script><b>")
    assert "</script><b>" not in page
    for mark in ("{{", "src=", "href=", "@import"):
        assert mark not in page


@pytest.mark.system
async def test_the_page_draws_its_charts(tmp_path: Path) -> None:
    path = tmp_path / "advice.html"
    write_page(path, example(), "a load </script><b>")
    complaints: list[str] = []
    async with running_browser() as browser, opened(browser, path.as_uri(), complaints) as page:
        await page.wait_for_function("document.querySelectorAll('.u-over').length === 2")
        assert await page.inner_text("#verdict") == example().verdict
        assert (await page.inner_text("#load")).startswith("a load </script><b> KV of a worker: 26,674 blocks")
        assert len(await page.query_selector_all("#table tr")) == 3
        coloured = """() => [...document.querySelectorAll('canvas')].map(canvas => {
            const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
            let found = 0;
            for (let at = 0; at < pixels.length; at += 4)
                if (pixels[at + 3] && Math.abs(pixels[at] - pixels[at + 2]) > 60) found += 1;
            return found;
        })"""
        assert min(await page.evaluate(coloured)) > 100
        assert complaints == []


def test_the_command_writes_table_and_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    costs, page = tmp_path / "costs.json", tmp_path / "advice.html"
    costs.write_bytes(encode_costs(Costs(model="m")))
    given = ["advise", "--load", "poisson:num=3,prompt=100,answer=5", "--costs", str(costs), "--slots", "2"]
    slo = ["--slo-ttft-ms", "500", "--slo-itl-ms", "50", "--processes", "1"]
    assert run([*given, *slo, "--html", str(page)]) == 0
    assert "kvrelay serve MODEL" in capsys.readouterr().out
    assert "uPlot" in page.read_text()
    assert run([*given, *slo, "--model", "other"]) != 0
    assert "other models" in capsys.readouterr().err
    assert run([*given[2:], "advise"]) != 0
