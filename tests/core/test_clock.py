"""Beats: times that idle processes of a host have in common."""

from __future__ import annotations

import pytest

from kvrelay.core.clock import next_beat_s


@pytest.mark.parametrize("interval_s", [0.2, 1.0, 4.0, 16.0])
@pytest.mark.parametrize("number", range(32))
def test_a_beat_is_a_multiple_of_the_interval_and_neither_now_nor_far(interval_s: float, number: int) -> None:
    now_s = 1_000.0 + number * interval_s / 16
    beat_s = next_beat_s(now_s, interval_s)
    assert beat_s == pytest.approx(round(beat_s / interval_s) * interval_s)
    assert interval_s / 8 - 1e-9 <= beat_s - now_s <= interval_s * 9 / 8 + 1e-9


def test_a_timer_that_is_early_waits_for_the_beat_after() -> None:
    assert next_beat_s(7.999, 4.0) == next_beat_s(8.0, 4.0) == 12.0


def test_beats_of_a_multiple_of_the_interval_are_beats_of_the_interval() -> None:
    assert next_beat_s(next_beat_s(5.0, 16.0) - 2.0, 4.0) == next_beat_s(5.0, 16.0)
