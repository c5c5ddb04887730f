"""A backend that says it is full: asked again soon, by one request at a time, and not for ever."""

from __future__ import annotations

from kvrelay.core.clock import ManualClock
from kvrelay.engines.hosted.load import FIRST_S, LONGEST_S, PROBE_S, Backoff


def test_pauses_grow_up_to_a_bound_whatever_is_asked_for() -> None:
    clock = ManualClock()
    backoff = Backoff(clock)
    assert not backoff.tries()
    pauses = []
    for number in range(2000):
        backoff.refused(600.0, is_probe=number > 0)
        pauses.append(backoff.wait_s)
        clock.advance(backoff.wait_s)
        assert backoff.tries()
    assert pauses[:4] == [FIRST_S, 2 * FIRST_S, 4 * FIRST_S, 8 * FIRST_S]
    assert set(pauses[5:]) == {LONGEST_S}


def test_a_short_wait_is_kept() -> None:
    backoff = Backoff(ManualClock())
    backoff.refused(0.25, is_probe=False)
    assert backoff.wait_s == 0.25


def test_a_burst_counts_once() -> None:
    clock = ManualClock()
    backoff = Backoff(clock)
    for _ in range(10):
        backoff.refused(600.0, is_probe=False)
    assert backoff.wait_s == FIRST_S
    assert not backoff.tries(), "a request from elsewhere, in the pause"


def test_one_request_tries_and_its_answer_ends_the_pause() -> None:
    clock = ManualClock()
    backoff = Backoff(clock)
    backoff.refused(600.0, is_probe=False)
    clock.advance(FIRST_S)
    assert backoff.wait_s == 0
    assert backoff.tries()
    assert backoff.wait_s == PROBE_S, "the next one waits for the first"
    backoff.answered(is_probe=False)
    assert backoff.wait_s == PROBE_S, "the answer of a request from before proves nothing"
    clock.advance(PROBE_S)
    assert backoff.tries(), "the first has got no answer yet"
    backoff.answered(is_probe=True)
    assert backoff.wait_s == 0
    assert not backoff.tries()
