"""What vLLM's engine process writes, the worker reads once and in order; what is missed is counted, and half a write
does not count."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.core.step_cost import StepCost, StepPace, StepWork
from kvrelay.engines.hosted.step_log import NUM_STEPS, STEP_BYTES, STEPS_AT, RecorderState, StepLog


def both() -> tuple[StepLog, StepLog]:
    """The worker's end, and vLLM's."""
    reader = StepLog.create()
    return reader, StepLog(reader.path)


def write(log: StepLog, first: int, count: int) -> None:
    for number in range(first, first + count):
        log.write_step(number / 1000, number, 2 * number, 3, 4)


@given(st.lists(st.integers(0, 3 * NUM_STEPS), min_size=1, max_size=4))
def test_every_step_is_read_once_or_counted_as_missed(bursts: list[int]) -> None:
    reader, writer = both()
    num_written, num_missed, last = 0, 0, 0
    for burst in bursts:
        write(writer, num_written + 1, burst)
        num_written += burst
        steps = reader.read_steps()
        num_missed += steps.num_missed
        numbers = [work.num_prefill_tokens for work, _ in steps.taken]
        first = last + steps.num_missed + 1
        assert numbers == list(range(first, num_written + 1))
        assert all(seconds == number / 1000 for number, (_, seconds) in zip(numbers, steps.taken))
        assert steps.num_missed == 0 or burst > NUM_STEPS
        last = num_written
    assert reader.read_steps() == ([], 0)


def test_a_step_is_what_was_written() -> None:
    reader, writer = both()
    writer.write_step(0.25, 100, 2**40, 7, 2**33, 9)
    writer.write_step(float("nan"), 1, 1, 1, 1)
    writer.write_step(0.5, 1, 0, 0, 0)
    assert reader.read_steps().taken == [(StepWork(100, 2**40, 7, 2**33, 9), 0.25), (StepWork(1), 0.5)]


def test_half_a_write_does_not_count(tmp_path: Path) -> None:
    reader, writer = both()
    write(writer, 1, 2)
    whole = Path(reader.path).read_bytes()
    at = STEPS_AT + 2 * STEP_BYTES + 12
    copy = tmp_path / "copy"
    copy.write_bytes(whole[:at] + b"\xff" + whole[at + 1 :])
    assert len(StepLog(str(copy)).read_steps().taken) == 1
    copy.write_bytes(whole)
    assert len(StepLog(str(copy)).read_steps().taken) == 2


def test_the_pace_goes_the_other_way() -> None:
    worker, vllm = both()
    assert vllm.read_pace() == StepPace()
    pace = StepPace(StepCost(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 2.5), 0.02, 0.03, 0.4)
    worker.write_pace(pace)
    assert vllm.read_pace() == pace
    assert vllm.read_pace() is vllm.read_pace(), "it is unpacked once"


def test_the_state_tells_why_nothing_is_recorded() -> None:
    worker, vllm = both()
    assert worker.read_state() is None
    vllm.write_state(is_on=True)
    assert worker.read_state() == RecorderState(True)
    vllm.write_state(is_on=False, reason="é" * 400)
    state = worker.read_state()
    assert state is not None
    assert not state.is_on
    assert state.reason.startswith("é" * 100)


def test_a_file_that_is_no_log_is_refused(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"abc")
    with pytest.raises(ValueError, match="mmap"):
        StepLog(str(tmp_path / "short"))
    with pytest.raises(FileNotFoundError):
        StepLog(str(tmp_path / "none"))
