"""The load as servers and as the simulator get it."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kvrelay.bench.report.metrics import Outcome, RequestRecord
from kvrelay.errors import InvalidInputError
from kvrelay.evaluate.load import Point, Sent, conversations_load, fitted, replayed, sent_of
from kvrelay.simulate.arrival import Arrival, RecordedArrival

SHARED = [
    Arrival(time_s=0.0, prompt_tokens=24, answer_tokens=5, hash_ids=(1, 2), hash_tokens=16),
    Arrival(time_s=1.0, prompt_tokens=30, answer_tokens=6, hash_ids=(1, 3), hash_tokens=16),
]


def common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return next((at for at, pair in enumerate(zip(one, other)) if pair[0] != pair[1]), min(len(one), len(other)))


def test_prompts_share_what_the_load_shares_within_a_turn_and_nothing_else() -> None:
    load = fitted(SHARED, 1024, 4096)
    first, second, third, _ = (request.prompt for request in islice(load.requests(7), 4))
    other = next(load.requests(8)).prompt
    assert [len(first), len(second)] == [24, 30]
    assert common(first, second) == 16
    assert common(first, third) < 4
    assert common(first, other) < 4
    assert all(32 <= token < 512 for token in (*first, *second))
    assert tuple(request.prompt for request in islice(load.requests(7), 2)) == (first, second)


def test_recorded_prompts_keep_what_they_share_with_other_tokens() -> None:
    common_ids = tuple(range(3000, 3040))
    recorded = [
        RecordedArrival(time_s=0.0, prompt_tokens=41, answer_tokens=5, token_ids=(*common_ids, last)) for last in (7, 8)
    ]
    load = fitted([*recorded, msgspec.structs.replace(recorded[0], answer_tokens=60)], 4096, 100)
    first, second, short = (request.prompt for request in islice(load.requests(1), 3))
    assert common(first, second) == 40
    assert short == first
    shortened = fitted(recorded, 4096, 40)
    assert [len(request.prompt) for request in islice(shortened.requests(1), 2)] == [34, 34]


def test_a_load_is_shortened_to_the_context() -> None:
    load = fitted([*SHARED, Arrival(time_s=2.0, prompt_tokens=500, answer_tokens=90)], 1024, 100)
    assert [(one.prompt_tokens, one.answer_tokens) for one in load.arrivals] == [(24, 5), (30, 6), (49, 50)]
    assert load.num_shortened == 1
    assert all(one.prompt_tokens + one.answer_tokens < 100 for one in load.arrivals)


def test_times_of_a_rate_are_those_of_any_other_in_proportion() -> None:
    load = fitted(SHARED, 1024, 4096)
    offsets = [list(load.at(Point("", rate=rate), salt, 50, 3).offsets or ()) for rate, salt in ((1.0, 1), (4.0, 2))]
    assert offsets[0] == pytest.approx([4 * time_s for time_s in offsets[1]])
    assert len(offsets[0]) == load.at(Point("", rate=1.0), 1, 50).num_requests == 50
    assert offsets[0][-1] == pytest.approx(50.0)


def test_shorter_requests_share_as_large_a_part_and_keep_a_rest() -> None:
    short = fitted(SHARED, 1024, 4096).shortened(2)
    assert [(one.prompt_tokens, one.answer_tokens) for one in short.arrivals] == [(12, 5), (15, 6)]
    first, second = (request.prompt for request in islice(short.requests(7), 2))
    assert common(first, second) == 8
    assert [one.prompt_tokens for one in short.shortened(100).arrivals] == [8, 8]
    assert [one.answer_tokens for one in short.shortened(1, 3).arrivals] == [3, 3]


@pytest.mark.parametrize("burstiness", [1.0, 100.0])
def test_burstiness_100_is_nearly_even(burstiness: float) -> None:
    point = Point("", rate=2.0, burstiness=burstiness)
    gaps = np.diff(list(fitted(SHARED, 1024, 4096).at(point, 0, 4000).offsets or ()))
    # A gamma distribution of shape k has the deviation mean / sqrt(k).
    assert gaps.mean() == pytest.approx(0.5, rel=0.1)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.1)


def test_answered_requests_are_replayed_at_their_times_or_round_the_clients() -> None:
    records = [
        RequestRecord("load", outcome, at, at + 9, (at + 4, at + 9), (1, 1), prompt_tokens=at, output_tokens=2)
        for at, outcome in ((3_000, Outcome.OK), (1_000, Outcome.OK), (2_000, Outcome.CUT_OFF), (5_000, Outcome.OK))
    ]
    sent = sent_of(records)
    assert sent[1] == Sent(2e-6, 3000, 2, pytest.approx(4e-9), pytest.approx(9e-9))
    assert [(one.time_s, one.prompt_tokens, one.after) for one in replayed(sent)] == [
        (0.0, 1000, None),
        (2e-6, 3000, None),
        (4e-6, 5000, None),
    ]
    assert [(one.time_s, one.after) for one in replayed(sent, 2)] == [(0.0, None), (0.0, None), (0.0, 0)]


def test_conversations_are_a_load_up_to_their_last_answer(tmp_path: Path) -> None:
    def item(*values: str) -> dict[str, object]:
        return {"conversations": [{"from": ("human", "gpt")[at % 2], "value": one} for at, one in enumerate(values)]}

    path = tmp_path / "share.json"
    path.write_text(json.dumps([item("ab", "cde", "abf", "gh"), item("ab", "xyz"), item("no answer")]))
    load = conversations_load(path, lambda text: tuple(text.encode()), fitted(SHARED, 1024, 4096))
    # "ab", "cde" and "abf" with two line ends; then "ab".
    assert [(one.prompt_tokens, one.answer_tokens) for one in load.arrivals] == [(10, 2), (2, 3)]
    first, second = (request.prompt for request in islice(load.requests(7), 2))
    assert common(first, second) == 2
    assert first[:2] == first[7:9]
    path.write_text(json.dumps([item("no answer")]))
    with pytest.raises(InvalidInputError, match="no conversation ends with an answer"):
        conversations_load(path, lambda text: tuple(text.encode()), load)
