"""The recorder: what it keeps of each request, what it forgets, from several threads."""

from __future__ import annotations

import threading
import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from kvrelay.marks.phases import Phase
from kvrelay.marks.recorder import MAX_NUMBERS, Mark, Recorder, marks_of


def test_marks_come_back_in_order_and_once() -> None:
    recorder = Recorder()
    recorder.add("a", Phase.ROUTED, 3.0, 2.5)
    recorder.add("b", Phase.RECEIVED, 2.0, 0.0)
    recorder.add("a", Phase.RECEIVED, 1.0, 0.0, Phase.RUN_QUEUE, 1.0, 0.5)
    marks = [Mark(Phase.RECEIVED, 1.0, 0.0), Mark(Phase.RUN_QUEUE, 1.0, 0.5), Mark(Phase.ROUTED, 3.0, 2.5)]
    assert marks_of(recorder.read("a")) == marks
    assert marks_of(recorder.take("a")) == marks
    assert [*recorder.take("a"), *recorder.read("a"), *recorder.take("never")] == []
    recorder.add("a", Phase.SENT, 4.0, 0.0)
    assert marks_of(recorder.take("a")) == [Mark(Phase.SENT, 4.0, 0.0)]
    assert len(marks_of(recorder.take("b"))) == 1
    assert len(recorder) == 0


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=80))
def test_the_oldest_requests_make_room(calls: list[tuple[int, bool]]) -> None:
    recorder, known = Recorder(max_requests=4), {}
    for number, (request, is_taken) in enumerate(calls):
        key = str(request)
        if is_taken:
            assert [mark.at_s for mark in marks_of(recorder.take(key))] == known.pop(key, [])
        else:
            known.setdefault(key, []).append(number)
            recorder.add(key, Phase.SENT, number, 0.0)
            if len(known) > 4:
                del known[next(iter(known))]
    assert len(recorder) == len(known) <= 4


def test_requests_that_are_never_taken_cost_no_more_memory() -> None:
    recorder = Recorder(max_requests=64)

    def fill() -> None:
        for number in range(300):
            for _ in range(MAX_NUMBERS):
                recorder.add(f"{number % 100}", Phase.RECEIVED, 1.5, 1.5)

    fill()
    tracemalloc.start()
    try:
        fill()
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size < 64 * (MAX_NUMBERS + 10) * 40
    assert len(recorder) == 64


def test_threads_lose_no_mark() -> None:
    recorder = Recorder()

    def write(own: str) -> None:
        for number in range(60):
            recorder.add("shared" if number < 20 else own, Phase.SENT, number, 0.0)

    threads = [threading.Thread(target=write, args=(str(number),)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(marks_of(recorder.take("shared"))) == 160
    for number in range(8):
        assert [mark.at_s for mark in marks_of(recorder.take(str(number)))] == list(range(20, 60))


@given(st.lists(st.floats(allow_nan=False) | st.sampled_from(list(Phase)), max_size=30))
def test_numbers_of_others_are_no_error(numbers: list[float]) -> None:
    marks = marks_of(numbers)
    assert [mark.at_s for mark in marks] == sorted(mark.at_s for mark in marks)
