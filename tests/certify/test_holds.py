"""The verdict over what became of requests when something was killed."""

from __future__ import annotations

import pytest

from kvrelay.certify.findings import Verdict
from kvrelay.certify.holds import Harm, judge_harm
from kvrelay.certify.served import Reference
from kvrelay.certify.servers import Answer, blocks_in_use

ANSWERS = tuple(Answer((str(number), "b", "c")) for number in range(3))
REFERENCE = Reference(((1,), (2,), (3,)), ANSWERS, ANSWERS)
WRONG = Answer(("x", "b", "c"))


@pytest.mark.parametrize(
    ("harm", "outcomes", "num_late", "verdict"),
    [
        (Harm.KILL_PREFILL, dict(enumerate(ANSWERS)), 0, Verdict.PASS),
        (Harm.KILL_PREFILL, {0: ANSWERS[0], 1: WRONG, 2: ANSWERS[2]}, 0, Verdict.FAIL),
        (Harm.KILL_PREFILL, {0: ANSWERS[0], 1: "broke off"}, 0, Verdict.WARN),
        (Harm.KILL_DECODE, {0: ANSWERS[0], 1: "broke off"}, 0, Verdict.PASS),
        (Harm.KILL_DECODE, {0: WRONG, 1: "broke off"}, 0, Verdict.FAIL),
        (Harm.STOP_PREFILL, {0: ANSWERS[0]}, 2, Verdict.FAIL),
    ],
    ids=["whole", "wrong", "broken off", "the decode worker died", "wrong all the same", "late"],
)
def test_only_a_decode_workers_death_may_break_answers_off(
    harm: Harm, outcomes: dict[int, Answer | str], num_late: int, verdict: Verdict
) -> None:
    row = judge_harm(harm, "title", "cell", REFERENCE, outcomes, num_late, 1.0, 1.0)
    assert row.verdict is verdict, row.reason


def test_blocks_that_leaked_count_wherever_they_are() -> None:
    whole = {"integrity": {"blocks_in_use": 0}, "kv_holding": {"num_blocks_in_use": 0}}
    assert blocks_in_use([whole, whole]) == 0
    assert blocks_in_use([whole, whole | {"integrity": {"blocks_in_use": 3}}]) == 3
    assert blocks_in_use([whole, whole | {"kv_holding": {"num_blocks_in_use": 2}}]) == 2
    # A worker that was not asked for its integrity is no proof.
    assert blocks_in_use([whole, {"kv_holding": None}]) == 1
