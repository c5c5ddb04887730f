"""Halving on toy objectives; the search, its words and its page on small loads."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec
import pytest
from tests.browser import opened, running_browser

from kvrelay.cli.main import run
from kvrelay.core.step_cost import StepCost
from kvrelay.errors import ConfigError, InvalidInputError
from kvrelay.placement.base import Objectives
from kvrelay.simulate.advice_shown import page_of, text_of, write_page
from kvrelay.simulate.advise import (
    MAX_FACTOR,
    Advice,
    Candidate,
    Capacity,
    Measured,
    advise,
    candidates_for,
    highest_that_holds,
    ordered,
    verdict_of,
)
from kvrelay.simulate.advise_command import read_costs_by_tp
from kvrelay.simulate.arrival import Arrival
from kvrelay.simulate.costs import Costs, encode_costs
from kvrelay.simulate.halving import successive_halving

LOOSE = Objectives(5.0, 1.0)
SPLIT, TOGETHER = Candidate(1, 1, 0), Candidate(0, 0, 2)


def test_halving_finds_the_best_and_spends_little() -> None:
    spent: Counter[int] = Counter()

    def score(candidate: int, budget: int) -> float:
        spent[budget] += 1
        return -abs(candidate - 17) + (candidate % 3) / budget

    ranked = successive_halving(range(27), score, (1, 10, 100))
    assert ranked[0][0] == 17
    assert spent == {1: 27, 10: 9, 100: 3}
    assert [value for _, value in ranked] == sorted((value for _, value in ranked), reverse=True)


def test_halving_keeps_the_best_of_each_kind() -> None:
    ranked = successive_halving(
        range(20), lambda candidate, _: candidate, (1, 2, 3), kind=lambda candidate: candidate < 3
    )
    assert {candidate for candidate, _ in ranked} >= {19, 2}


def test_halving_without_candidates_or_budgets_is_refused() -> None:
    for candidates, budgets in (((), (1,)), ((1,), ())):
        with pytest.raises(ValueError, match="needs a candidate and a budget"):
            successive_halving(candidates, lambda one, _: one, budgets)


@pytest.mark.parametrize("limit", [0.03, 0.7, 1.0, 3.3, 40.0])
def test_bisection_ends_just_below_the_limit(limit: float) -> None:
    found = highest_that_holds(lambda factor: factor <= limit)
    assert 0.95 * limit < found <= limit
    assert 0.95 * limit < highest_that_holds(lambda factor: factor <= limit, limit * 1.1, 2**0.25, 2) <= limit


def test_bisection_has_ends() -> None:
    assert highest_that_holds(lambda factor: True) == MAX_FACTOR
    assert highest_that_holds(lambda factor: False) == 0.0


def test_candidates_fill_the_slots() -> None:
    found = candidates_for(4, (1, 2))
    assert len(set(found)) == len(found)
    assert all(one.tp * (one.prefill + one.decode + one.both) == 4 for one in found)
    assert {(one.prefill, one.decode) for one in found if one.is_split and one.tp == 1} == {(1, 3), (2, 2), (3, 1)}
    assert candidates_for(1, (2,)) == []


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
    found = ordered([Capacity(SPLIT, (split,) * 3, ()), Capacity(TOGETHER, (together,) * 3, ())])
    assert verdict_of(found).startswith(said)


def test_a_gain_within_the_spread_of_the_seeds_is_none() -> None:
    found = ordered([Capacity(SPLIT, (9.0, 12.0, 15.0), ()), Capacity(TOGETHER, (9.5, 10.0, 10.5), ())])
    assert found[0].candidate is TOGETHER
    said = (
        "do not split: split and aggregated differ by 20.0 %, within the spread of 3 seeds, and aggregated is simpler"
    )
    assert verdict_of(found) == said
    # The loads of the seeds differ by more than the clusters, but one of these always holds more.
    apart = ordered([Capacity(SPLIT, (6.0, 12.0, 18.0), ()), Capacity(TOGETHER, (5.0, 10.0, 15.0), ())])
    assert verdict_of(apart) == "split: split wins by 20 % of requests per second"


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
    assert best.price == pytest.approx(2 * 3.6 / 3600 / best.good_tokens_per_s * 1e6)


def test_a_slow_link_is_not_worth_a_split() -> None:
    """Transfers take ten times as long as the objective for the first token."""
    costs = Costs(link_bytes_per_s=1e7)
    advice = advise(load(12, 0.1, 1000, 12), {1: costs}, 2, Objectives(0.5, 0.2))
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


def test_the_same_seed_gives_the_same_advice() -> None:
    arrivals, costs = load(6, 0.2, 300, 4), {1: Costs(spread=0.1)}
    first, second = (msgspec.json.encode(advise(arrivals, costs, 2, LOOSE, seed=5)) for _ in range(2))
    assert first == second


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
    sample = tuple(float(n) for n in range(1, 51))
    rows = tuple(
        Measured(one, 0.97, 310.0, (120.0, 300.0, 450.0), (4.0, 9.0, 20.0), 1.5, sample) for one in (SPLIT, TOGETHER)
    )
    capacities = (
        Capacity(SPLIT, (7.5, 8.0, 8.5), ((4.0, 1.0), (8.0, 0.9))),
        Capacity(TOGETHER, (4.0, 4.0, 4.0), ((4.0, 0.95), (8.0, 0.4))),
    )
    return Advice(SPLIT, verdict_of(capacities), rows, capacities, LOOSE)


def test_the_table_has_a_row_for_each_finalist() -> None:
    lines = text_of(example()).splitlines()
    assert "97.0%" in lines[1]
    assert "8 requests/s (7.5 to 8.5 over 3 seeds)" in lines[3]
    assert lines[-1].startswith("kvrelay serve MODEL --prefill 1 --decode 1")


def test_the_page_needs_nothing_from_elsewhere() -> None:
    page = page_of(example(), "a trace </script><b>")
    assert "</script><b>" not in page
    for mark in ("/*DATA*/", "/*UPLOT", "src=", "href=", "@import"):
        assert mark not in page


@pytest.mark.system
async def test_the_page_draws_its_charts(tmp_path: Path) -> None:
    path = tmp_path / "advice.html"
    write_page(path, example(), "a load </script><b>")
    complaints: list[str] = []
    async with running_browser() as browser, opened(browser, path.as_uri(), complaints) as page:
        await page.wait_for_function("document.querySelectorAll('.u-over').length === 2")
        assert await page.inner_text("#verdict") == example().verdict
        assert await page.inner_text("#load") == "a load </script><b>"
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
    given = ["advise", "--load", "poisson:num=5,prompt=100,answer=5", "--costs", str(costs), "--slots", "2"]
    slo = ["--slo-ttft-ms", "500", "--slo-itl-ms", "50"]
    assert run([*given, *slo, "--html", str(page)]) == 0
    assert "kvrelay serve MODEL" in capsys.readouterr().out
    assert "uPlot" in page.read_text()
    assert run([*given, *slo, "--model", "other"]) != 0
    assert "other models" in capsys.readouterr().err
    assert run([*given[2:], "advise"]) != 0
