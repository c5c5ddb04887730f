"""What a frontend keeps of its requests: all that failed, the slowest, a sample, the latest, and never more."""

from __future__ import annotations

from unittest import mock

import pytest

from kvrelay.core.status import Outcome
from kvrelay.marks import kept as kept_module
from kvrelay.marks.kept import NUM_FAILED, NUM_RECENT, NUM_SAMPLED, NUM_SLICES, NUM_SLOWEST, SLICE_S, Kept
from kvrelay.marks.run_queue import RunQueue
from kvrelay.marks.trace import Trace


class Clock:
    def __init__(self) -> None:
        self.now_s = 1e6

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock():
    clock = Clock()
    with mock.patch("time.monotonic", clock):
        yield clock


@pytest.fixture
def kept():
    found = Kept("f")
    yield found
    found.close()


def run(kept: Kept, clock: Clock, name: str, took_s: float = 0.001, error: str | None = None) -> Trace:
    kept.begin(name, "")
    trace = kept.running[name]
    clock.now_s += took_s
    kept.end(name, error)
    return trace


def names(kept: Kept) -> list[str]:
    return [trace.request_id for trace in kept.all()]


def test_running_and_ended_requests_are_found(kept: Kept, clock: Clock) -> None:
    kept.begin("running", "alice")
    running = kept.running["running"]
    ended = run(kept, clock, "ended")
    assert kept.find("running") is running
    assert kept.find("ended") is ended
    assert kept.find("other") is None
    assert names(kept) == ["running", "ended"] or names(kept) == ["ended", "running"]


def test_the_slowest_and_the_failed_outlive_the_latest(kept: Kept, clock: Clock) -> None:
    run(kept, clock, "sampled")
    run(kept, clock, "slow", 5.0)
    run(kept, clock, "failed", error="no worker")
    for number in range(NUM_RECENT + 50):
        run(kept, clock, f"r{number}")
    assert {"sampled", "slow", "failed", f"r{NUM_RECENT + 49}", "r50"} <= set(names(kept))
    assert "r40" not in names(kept)
    # The window slides: a quarter of an hour later the slow one is not among the slowest any more.
    clock.now_s += SLICE_S * NUM_SLICES
    for number in range(NUM_RECENT):
        run(kept, clock, f"s{number}")
    assert kept.find("slow") is None
    assert kept.find("failed") is not None
    assert kept.find("sampled") is not None


def test_a_flood_of_refusals_leaves_what_failed(kept: Kept, clock: Clock) -> None:
    run(kept, clock, "sampled")
    run(kept, clock, "failed", error="no worker")
    for number in range(NUM_FAILED + NUM_RECENT):
        kept.begin(f"r{number}", "")
        kept.end(f"r{number}", "full", Outcome.REFUSED)
    assert kept.find("failed") is not None
    assert {trace.status for trace in kept.all()} == {"finished", "failed", "refused"}


def test_a_million_requests_an_hour_are_bounded(kept: Kept, clock: Clock) -> None:
    most = NUM_RECENT + NUM_FAILED + NUM_SAMPLED + NUM_SLOWEST * NUM_SLICES
    for number in range(20_000):
        run(kept, clock, f"r{number}", took_s=0.0036, error="no" if number % 3 == 0 else None)
    assert len(kept.all()) <= most
    assert "r19999" in names(kept)


def test_a_clock_that_stands_still_or_is_set_back_is_no_error(kept: Kept) -> None:
    with mock.patch("time.time", return_value=-5.0):
        kept.begin("x", "")
    trace = kept.running["x"]
    kept.end("x", None)
    kept.end("x", None)
    assert trace.received_unix == -5.0
    assert trace.latency_ms >= 0


def test_every_hundredth_is_sampled(clock: Clock) -> None:
    with mock.patch.multiple(kept_module, NUM_RECENT=1, NUM_SLOWEST=1):
        kept = Kept("f")
        run(kept, clock, "slowest", 1.0)
        for number in range(1, 500):
            run(kept, clock, f"r{number}")
        assert {"r100", "r200", "r300", "r400"} <= set(names(kept))
        assert len(names(kept)) == 6
        kept.close()


def test_the_run_queue_never_falls_and_needs_no_kernel_statistics() -> None:
    queue = RunQueue()
    queue.watch()
    first = queue.waited_s(1.0)
    assert 0 <= first <= queue.waited_s(2.0)
    queue.close()
    queue.close()
    with mock.patch("os.open", side_effect=FileNotFoundError):
        none = RunQueue()
        none.watch()
    assert none.waited_s(1.0) == 0.0
