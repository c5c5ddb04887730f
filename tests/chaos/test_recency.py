"""Which returning turns recency would serve in any case, and when a run says that value does not serve them."""

from __future__ import annotations

from array import array

import pytest
from tests.chaos.recency import CALM_S, MARGIN_BLOCKS, MIN_FOUND, MIN_KEPT, Return, lost_sessions, surely_kept
from tests.chaos.report import AskedPrompt, FaultRecord

NUM_BLOCKS = MARGIN_BLOCKS + 20


def asked(begin_s: float, end_s: float, num_tokens: int, *, seed: int = 0, worker: str = "d1") -> AskedPrompt:
    """With its first token in the middle."""
    tokens = tuple(seed + at for at in range(num_tokens))
    middle = array("d", [(begin_s + end_s) / 2])
    return AskedPrompt(begin_s, True, middle, end_s, worker=worker, token_ids=tokens[:-2], answer=tokens[-2:])


def returned(worker: str = "d1", num_cached: int = 144) -> Return:
    """Of a session with 10 blocks, the last of which is not full; its pause lasts from 2 to 3 s."""
    turn = asked(3.0, 4.0, 170, worker=worker)
    turn.num_cached = num_cached
    return Return(asked(1.0, 2.0, 150), turn, 150)


@pytest.mark.parametrize(
    ("others", "is_kept"),
    [
        ([], True),
        ([asked(2.2, 2.8, 160, seed=1000)], False),  # 9 blocks of the session, 10 of this one, a part of one each: 21
        ([asked(2.2, 2.8, 144, seed=1000)], True),
        ([asked(2.2, 2.8, 160)], True),  # it begins with the session's blocks
        ([asked(1.5, 2.1, 160, seed=1000)], False),
        ([asked(1.5, 1.9, 160, seed=1000)], True),
        ([asked(3.4, 5.0, 160, seed=1000)], False),
        ([asked(3.6, 5.0, 160, seed=1000)], True),  # the turn has its blocks by then
        ([asked(2.2, 2.8, 160, seed=1000, worker="d2")], True),
        ([asked(2.2, 2.8, 160, seed=1000, worker="")], False),  # no one knows where it was
    ],
)
def test_a_turn_is_served_unless_others_have_taken_the_rest_of_the_pool(
    others: list[AskedPrompt], is_kept: bool
) -> None:
    each = returned()
    assert surely_kept([each], [each.before, each.turn, *others], [], NUM_BLOCKS) == [each] * is_kept


@pytest.mark.parametrize(
    ("name", "at_s", "end_s", "is_kept"),
    [
        ("kill decode", 0.1, 0.9 - CALM_S, True),
        ("kill decode", 0.1, 0.9, False),
        ("widen prefill", 3.5, 9.0, False),
        ("cancel", 3.5, 9.0, False),
        ("kill decode", 4.0, 9.0, True),
        ("kill prefill", 0.1, 9.0, True),
        ("kill_frontend", 0.1, 9.0, True),
    ],
)
def test_what_a_fault_may_have_disturbed_does_not_count(name: str, at_s: float, end_s: float, is_kept: bool) -> None:
    each = returned()
    fault = FaultRecord(name, at_s, end_s)
    assert surely_kept([each], [each.before, each.turn], [fault], NUM_BLOCKS) == [each] * is_kept


def test_a_turn_at_another_worker_does_not_count() -> None:
    each = returned("d2")
    assert not surely_kept([each], [each.before, each.turn], [], NUM_BLOCKS)


def test_a_few_may_be_lost_to_wrong_guesses_and_few_turns_say_nothing() -> None:
    whole, lost = returned(num_cached=160), returned(num_cached=0)
    assert (whole.num_kept, whole.num_found) == (144, 144)
    num_lost = int((1.0 - MIN_FOUND) * MIN_KEPT)
    assert not lost_sessions([*[whole] * (MIN_KEPT - num_lost), *[lost] * num_lost])
    assert len(lost_sessions([*[whole] * (MIN_KEPT - num_lost - 1), *[lost] * (num_lost + 1)])) == 1
    assert not lost_sessions([lost] * (MIN_KEPT - 1))
