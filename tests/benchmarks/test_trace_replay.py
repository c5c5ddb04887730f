"""Trace replay: the reader, the ratios, and that it tells policies apart."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from benchmarks.trace_replay import WorkerModel, infinite_hit_ratio, read_trace, replay_trace

from kvrelay.bench.formats import TraceRecord
from kvrelay.config import RouterConfig
from kvrelay.errors import InvalidInputError


def groups(seed: int = 0) -> list[TraceRecord]:
    """16 groups of 40 prompts with 4 shared blocks and one of their own, in random order."""
    rng = random.Random(seed)
    order = [group for group in range(16) for _ in range(40)]
    rng.shuffle(order)
    at, requests = 0.0, []
    for number, group in enumerate(order):
        at += rng.expovariate(160)
        requests.append(TraceRecord(at, 2148, 64, (*range(10 * group, 10 * group + 4), 10_000 + number)))
    return requests


def test_the_reader(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"timestamp": 27, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}\n\n'
        '{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1], "more": null}\n'
    )
    assert [request.timestamp_s for request in read_trace(path)] == [0, 0.027]
    assert read_trace(path, limit=1)[0].hash_ids == (1, 2)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        '{"timestamp": 0}',
        '{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": []}',
        "\xff\xfe",
    ],
)
def test_a_bad_trace_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(InvalidInputError) as caught:
        read_trace(path)
    assert str(path) in caught.value.message
    assert "\n" not in caught.value.message


def test_a_missing_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError):
        read_trace(tmp_path / "nothing")


def test_one_infinite_cache() -> None:
    requests = [TraceRecord(0, 1, 1, ids) for ids in ((1, 2), (1, 2, 3), (4, 2), (1, 2, 3, 5))]
    assert infinite_hit_ratio(requests) == pytest.approx((0 + 2 + 0 + 3) / 11)


def test_one_worker_with_room_is_the_infinite_cache() -> None:
    requests = groups()
    for policy in ("kv", "round-robin"):
        result = replay_trace(requests, RouterConfig(router=policy), num_workers=1)
        assert result.hit_ratio == pytest.approx(infinite_hit_ratio(requests))
        assert (result.token_imbalance, result.work_imbalance) == (1.0, 1.0)


def test_a_cache_without_room_finds_less() -> None:
    small = replay_trace(groups(), RouterConfig(router="kv"), num_workers=1, model=WorkerModel(cache_blocks=20))
    assert small.hit_ratio < 0.9 * infinite_hit_ratio(groups())


def test_kv_routing_finds_more_answers_sooner_and_stays_balanced() -> None:
    """Issue targets on a simulated cluster: hit ratio within 5 % of one infinite cache, TTFT twice as good, 1.3."""
    requests, model = groups(), WorkerModel(2000, prefill_tokens_per_s=50_000.0, inter_token_s=0.006)
    results = {
        policy: replay_trace(requests, RouterConfig(router=policy), num_workers=4, model=model)
        for policy in ("kv", "round-robin")
    }
    assert results["kv"].hit_ratio >= 0.95 * infinite_hit_ratio(requests)
    assert results["kv"].token_imbalance <= 1.3
    assert results["kv"].mean_ttft_s * 2 <= results["round-robin"].mean_ttft_s


def test_a_replay_gives_the_same_every_time() -> None:
    first, second = (replay_trace(groups(), RouterConfig(router="kv"), num_workers=4) for _ in range(2))
    assert first == second
    assert first.estimated_hit_ratio == pytest.approx(first.hit_ratio, abs=0.02)
