"""CompletionRate: completions per second, and when there will be room again."""

from __future__ import annotations

import pytest

from kvrelay.core.clock import ManualClock
from kvrelay.core.completion_rate import MAX_RETRY_AFTER_S, MIN_RETRY_AFTER_S, CompletionRate


def test_the_rate_follows_recent_completions() -> None:
    clock = ManualClock()
    rate = CompletionRate(clock)
    assert rate.per_s == 0
    for per_s in (1, 10):
        for _ in range(300):
            clock.advance(1.0)
            rate.add(per_s)
        assert rate.per_s == pytest.approx(per_s, rel=0.03)
    clock.advance(30.0)
    assert rate.per_s < 5
    rate.restart()
    assert rate.per_s == 0
    clock.advance(2.0)
    rate.add(10)
    assert rate.per_s == pytest.approx(5.0, rel=0.05)


def test_retry_after_is_bounded() -> None:
    clock = ManualClock()
    rate = CompletionRate(clock)
    assert rate.retry_after_s(100) == MIN_RETRY_AFTER_S, "nothing is known"
    clock.advance(10.0)
    rate.add(20)
    assert rate.retry_after_s(1) == MIN_RETRY_AFTER_S
    assert rate.retry_after_s(40) == pytest.approx(40 / rate.per_s)
    assert rate.retry_after_s(10_000) == MAX_RETRY_AFTER_S
