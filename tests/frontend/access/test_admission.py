"""Admission control of a frontend: the bound on sequences in flight, and the rates of API keys."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from kvrelay.config import KeyLimits
from kvrelay.core.clock import ManualClock
from kvrelay.errors import InvalidInputError, OverloadedError
from kvrelay.frontend.access.admission import Admission


def retry_after_s(admission: Admission, num_sequences: int) -> float:
    with pytest.raises(OverloadedError, match="4 requests are in flight") as caught, admission.admitted(num_sequences):
        pass
    return caught.value.retry_after_s


def test_a_refusal_says_when_there_is_room() -> None:
    """Four may run; one ends every five seconds, and another one comes."""
    clock = ManualClock()
    admission = Admission(4, clock)
    running: list[ExitStack] = []

    def begin() -> None:
        running.append(ExitStack())
        running[-1].enter_context(admission.admitted(1))

    for _ in range(4):
        begin()
    assert retry_after_s(admission, 1) == 1.0, "nothing has ended yet: nothing is known"
    for _ in range(6):
        clock.advance(5.0)
        running.pop(0).close()
        begin()
    assert retry_after_s(admission, 1) == pytest.approx(5.0, rel=0.2)
    assert retry_after_s(admission, 3) == pytest.approx(5.0 + 3 * 5.0, rel=0.2), "after those told before"
    for stack in running:
        stack.close()
    assert admission.num_in_flight == 0
    assert admission.rejections == {
        "in_flight": 3,
        "requests_per_minute": 0,
        "tokens_per_minute": 0,
        "requests_at_once": 0,
    }
    clock.advance(10.0)
    with admission.admitted(4):
        assert retry_after_s(admission, 1) == 1.0, "what was before the frontend was idle says nothing"


def test_a_request_above_the_bound_alone_is_invalid() -> None:
    admission = Admission(4, ManualClock())
    with pytest.raises(InvalidInputError, match="is 5, above 4"), admission.admitted(5):
        pass


def wait_s(admission: Admission, key: str, requests_per_minute: int) -> float | None:
    """None if the request may go on."""
    try:
        admission.count_request(key, requests_per_minute)
    except OverloadedError as exc:
        return exc.retry_after_s
    return None


def test_a_key_may_spend_its_minute_at_once_and_then_goes_on_at_the_average_rate() -> None:
    clock = ManualClock()
    admission = Admission(4, clock)
    assert [wait_s(admission, "a", 3) for _ in range(3)] == [None] * 3
    assert wait_s(admission, "a", 3) == pytest.approx(20.0)
    assert wait_s(admission, "b", 1) is None
    assert wait_s(admission, "b", 1) == pytest.approx(60.0)
    clock.advance(5.0)
    assert wait_s(admission, "a", 3) == pytest.approx(15.0)
    clock.advance(15.0)
    assert wait_s(admission, "a", 3) is None
    assert wait_s(admission, "a", 3) == pytest.approx(20.0)
    clock.advance(3600.0)
    assert [wait_s(admission, "a", 3) is None for _ in range(4)] == [True, True, True, False]
    assert all(wait_s(admission, "c", 0) is None for _ in range(1000))


def test_a_key_has_so_many_sequences_at_once() -> None:
    admission, limits = Admission(9, ManualClock()), KeyLimits(requests_at_once=4)
    with admission.admitted(3, "a", limits):
        with pytest.raises(OverloadedError, match="4 sequences at once"), admission.admitted(2, "a", limits):
            pass
        with admission.admitted(4, "b", limits), admission.admitted(1, "a", limits):
            pass
    with admission.admitted(4, "a", limits):
        pass
    with pytest.raises(InvalidInputError, match="above 4"), admission.admitted(5, "a", limits):
        pass
    assert admission.rejections["requests_at_once"] == 1


def test_no_key_keeps_another_one_out() -> None:
    admission = Admission(4, ManualClock())
    with admission.admitted(4, "a"):
        with pytest.raises(OverloadedError), admission.admitted(1, "a"):
            pass
        with admission.admitted(2, "b"):
            with pytest.raises(OverloadedError), admission.admitted(1, "b"):
                pass
            with admission.admitted(1, "c"):
                assert admission.num_in_flight == 7
        with pytest.raises(OverloadedError), admission.admitted(1):
            pass


def test_a_key_pays_for_its_tokens_afterwards() -> None:
    clock = ManualClock()
    admission, limits = Admission(9, clock), KeyLimits(tokens_per_minute=60)

    def refused_s() -> float:
        with pytest.raises(OverloadedError, match="60 tokens per minute") as caught, admission.admitted(1, "a", limits):
            pass
        return caught.value.retry_after_s

    with admission.admitted(1, "a", limits):
        admission.count_tokens("a", 60, 40)
        admission.count_tokens("a", 60, 50)
    assert refused_s() == pytest.approx(31.0), "30 tokens too many, and one for the next request"
    with admission.admitted(1, "b", limits):
        pass
    clock.advance(31.0)
    with admission.admitted(1, "a", limits):
        pass


def test_only_keys_that_remain_keep_what_they_have_used() -> None:
    admission = Admission(4, ManualClock())
    for key in ("alice", "bob"):
        assert wait_s(admission, key, 1) is None
    admission.keep_keys({"bob", "carol"})
    assert wait_s(admission, "bob", 1) == pytest.approx(60.0)
    assert wait_s(admission, "alice", 1) is None
