"""The loads of the orders, and how their rounds become rows."""

from __future__ import annotations

from benchmarks.orders import load_of, summarised


def test_conversations_repeat_their_turns_and_call_no_tool() -> None:
    load = load_of("conversations", 1)
    assert len(load) == 24 * 8
    assert sum(arrival.after is None for arrival in load) == 24
    assert all(arrival.tool == "" for arrival in load)
    for arrival in load:
        if arrival.after is not None:
            before = load[arrival.after].hash_ids or ()
            assert (arrival.hash_ids or ())[: len(before)] == before


def test_questions_share_sixteen_prefixes() -> None:
    load = load_of("prefixes", 1)
    assert len(load) == 200
    assert len({arrival.hash_ids for arrival in load}) == 16
    assert all(len(arrival.hash_ids or ()) * arrival.hash_tokens == 2048 for arrival in load)
    assert [arrival.time_s for arrival in load] == sorted(arrival.time_s for arrival in load)


def test_rows_have_the_median_of_the_rounds_and_their_ends() -> None:
    turns = [
        {"load": "prefixes", "order": order, "ttft_ms": mean, "ttft_p90_ms": 2 * mean, "num_computed": 10}
        for order, mean in (("auto", 3.0), ("decode-first", 9.0), ("auto", 1.0), ("auto", 2.0))
    ]
    first, second = summarised(turns)
    assert first == {
        "load": "prefixes",
        "order": "auto",
        "rounds": 3,
        "failed_rounds": 0,
        "ttft_ms": 2.0,
        "ttft_p90_ms": 4.0,
        "num_computed": 10,
        "ttft_low_ms": 1.0,
        "ttft_high_ms": 3.0,
    }
    assert (second["order"], second["ttft_ms"]) == ("decode-first", 9.0)
