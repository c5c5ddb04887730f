"""A difference is named only if it is larger than the rounds' own."""

from __future__ import annotations

from typing import Any

import pytest

from kvrelay.evaluate.effects import (
    TOKENS,
    TTFT_P90,
    Effect,
    effects,
    effects_sentence,
    effects_table,
    median,
    unmeasured,
)
from kvrelay.evaluate.shown import failures, lines_over, rows_table


def row(case: str, number: int, ttft_s: float | None, *, point: str = "2 requests/s", **more: Any) -> dict[str, Any]:
    figures = {"case": case, "point": point, "round": number, "error": "", "ttft_p90_s": ttft_s, "tokens_per_s": 100.0}
    return figures | more


APART = [row("a", 1, 0.100), row("a", 2, 0.110), row("b", 1, 0.200), row("b", 2, 0.220)]
CLOSE = [row("a", 1, 0.100), row("a", 2, 0.150), row("b", 1, 0.120), row("b", 2, 0.160)]


def only(rows: list[dict[str, Any]]) -> Effect:
    (found,) = effects(rows, (TTFT_P90,), "a", ("b",), ("2 requests/s",))
    return found


def test_an_effect_above_the_rounds_noise_is_named_with_both_medians() -> None:
    found = only(APART)
    assert (found.medians, found.size) == (pytest.approx((0.105, 0.21)), pytest.approx(0.105))
    assert found.noise == pytest.approx(0.02)
    assert effects_sentence([found]) == "At 2 requests/s: P90 of first tokens: b 210 ms, a 105 ms (+100%)."


def test_an_effect_within_the_rounds_noise_is_not_shown() -> None:
    found = only(CLOSE)
    assert not found.is_shown
    said = "No difference is shown: the rounds of a case differ by more than the cases."
    assert effects_sentence([found]) == said
    (cells,) = effects_table([found]).rows
    assert cells == (
        *("2 requests/s", "P90 of first tokens", "b", "140 ms", "a", "125 ms", "15.0 ms", "50.0 ms", "not shown"),
    )


@pytest.mark.parametrize(("size", "is_shown"), [(0.05, False), (0.0501, True)])
def test_the_limit_is_what_one_case_differs_by_between_rounds(size: float, is_shown: bool) -> None:
    found = Effect(TTFT_P90, "", ("a", "b"), ((0.5, 0.55), (0.525 + size, 0.525 + size)))
    assert found.is_shown is is_shown


def test_one_round_shows_nothing() -> None:
    found = only(APART[::2])
    assert not found.is_shown
    assert effects_sentence([found]) == "No difference is shown: one round tells nothing of noise."


def test_what_failed_is_not_measured_and_does_not_count() -> None:
    failed = [row("b", number, None, error="it did not start") for number in (1, 2)]
    rows = APART[:2] + failed
    assert effects(rows, (TTFT_P90,), "a", ("b",), ("2 requests/s",)) == []
    assert effects_sentence([]).startswith("Not shown")
    assert unmeasured(rows, ("a", "b")) == " b: not measured."
    assert unmeasured(APART, ("a", "b")) == ""
    assert failures(rows) == ("b, 2 of 4 turns have no figures: it did not start",)
    assert only([*APART, row("a", 3, 9.0, error="torn")]) == only(APART)


def test_a_sentence_says_where_and_what_and_that_the_rest_is_not_shown() -> None:
    found = effects(APART, (TTFT_P90, TOKENS), "a", ("b",), ("2 requests/s", "9 requests/s"))
    assert effects_sentence(found) == (
        "At 2 requests/s: P90 of first tokens: b 210 ms, a 105 ms (+100%). "
        "Other differences are not shown: the rounds of a case differ by more than the cases."
    )


def test_turns_beside_other_processes_are_named() -> None:
    rows = [row("a", 1, 0.1, foreign_cores=0.1), row("a", 2, 0.1, foreign_cores=1.25)]
    (note,) = failures(rows)
    assert note.startswith("1 of 2 turns were taken while other processes used more than 0.3 cores (up to 1.2)")


def test_cases_are_compared_by_calm_rounds_if_both_have_two() -> None:
    stolen = {"stolen_cores": 0.04}
    rough = [row("a", 3, 0.4, **stolen), row("b", 3, 0.5, **stolen)]
    assert only([*APART, *rough]).rounds == only(APART).rounds
    # One calm round of b is not enough, and calm rounds of a are not compared with rough ones of b.
    rows = [*APART[:3], APART[3] | stolen, *rough]
    assert only(rows).rounds == ((0.1, 0.11, 0.4), (0.2, 0.22, 0.5))
    (note,) = failures(rows)
    assert note.startswith("In 3 of 6 turns this machine's host kept more than 0.005 cores from it (steal, up to 0.04)")


def test_tables_and_lines_have_the_medians_of_the_rounds() -> None:
    rows = [{**one, "rate": 2.0, "ttft_p50_s": 0.05} for one in APART]
    rows += [{**one, "rate": 1.0, "point": "1 requests/s", "ttft_p50_s": 0.05} for one in CLOSE]
    shown = rows_table(rows, {"P90": "ttft_p90_s:ms.0f"})
    assert shown.rows == (
        ("2 requests/s", "a", "105"),
        ("2 requests/s", "b", "210"),
        ("1 requests/s", "a", "125"),
        ("1 requests/s", "b", "140"),
    )
    (first, second) = lines_over(rows, "rate", "ttft_p90_s", 1e3)
    assert (first.name, first.points) == ("a", ((1.0, pytest.approx(125.0)), (2.0, pytest.approx(105.0))))
    assert second.points[1] == (2.0, pytest.approx(210.0))
    assert median([], "ttft_p90_s") is None
