"""What counts as a stall and as a hang, on a clock that is moved by hand."""

from __future__ import annotations

from kvrelay.core.clock import ManualClock
from kvrelay.engine.progress import REST_TICKS, Progress, StallDetector

TICK_S = 1.0


class Watched:
    """An engine's progress, observed at every tick."""

    def __init__(self, timeout_s: float) -> None:
        self.clock = ManualClock(100.0)
        self.progress = Progress(self.clock)
        self.detector = StallDetector(timeout_s, TICK_S)

    def watch(self, seconds: float, step_s: float = TICK_S) -> tuple[bool, bool]:
        """Let the time pass; stalled and hung at the end."""
        for _ in range(round(seconds / step_s)):
            self.clock.advance(step_s)
            self.detector.observe(self.progress.iteration, self.clock.now())
        return self.detector.is_stalled, self.detector.is_hung


def test_one_long_turn_is_a_stall_and_then_a_hang() -> None:
    watched = Watched(20.0)
    watched.progress.begin()
    assert watched.watch(9) == (False, False)
    assert watched.watch(1) == (True, False)
    assert watched.watch(9) == (True, False)
    assert watched.watch(1) == (True, True)
    assert watched.progress.age_s == 20.0


def test_steps_that_finish_are_progress_however_long_there_is_work() -> None:
    watched = Watched(20.0)
    for _ in range(10):
        watched.progress.begin()
        assert watched.watch(9) == (False, False)


def test_a_stall_that_ends_is_none_any_more() -> None:
    watched = Watched(20.0)
    watched.progress.begin()
    assert watched.watch(15) == (True, False)
    watched.progress.begin()
    assert watched.watch(1) == (False, False)
    assert watched.watch(18) == (True, False)


def test_an_engine_without_work_does_not_hang() -> None:
    watched = Watched(20.0)
    watched.progress.begin()
    watched.watch(15)
    watched.progress.rest()
    assert watched.watch(100) == (False, False)
    assert watched.progress.age_s == 0.0
    watched.progress.begin()
    assert watched.watch(9) == (False, False)


def test_a_process_that_was_stopped_has_not_hung() -> None:
    """Neither engine nor watchdog ran for an hour; both go on."""
    watched = Watched(20.0)
    watched.progress.begin()
    watched.watch(3)
    assert watched.watch(3600, step_s=3600) == (False, False)
    assert watched.watch(14) == (True, False)
    watched.progress.begin()
    assert watched.watch(1) == (False, False)


def test_a_turn_that_began_before_the_stop_counts_from_its_end() -> None:
    watched = Watched(20.0)
    watched.watch(3)
    watched.progress.begin()
    assert watched.watch(3600, step_s=3600) == (False, False)
    assert watched.watch(15) == (True, False)
    assert watched.watch(1) == (True, True)


def test_a_turn_that_began_during_a_rest_counts_from_its_beginning() -> None:
    watched = Watched(20.0)
    watched.watch(4, step_s=REST_TICKS * TICK_S)
    watched.clock.advance(1)
    watched.progress.begin()
    assert watched.watch(3, step_s=3) == (False, False)
    assert watched.watch(16) == (True, False)
    assert watched.watch(1) == (True, True)


def test_without_a_timeout_nothing_is_a_hang() -> None:
    watched = Watched(0.0)
    watched.progress.begin()
    assert watched.watch(29) == (False, False)
    assert watched.watch(100_000, step_s=2 * TICK_S) == (True, False)
