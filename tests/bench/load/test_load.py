"""Data sets, arrivals and mixes: lengths, sharing, repeatability, refusals."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest

from kvrelay.bench.formats import TraceRecord
from kvrelay.bench.load.datasets import (
    Dataset,
    DatasetKind,
    TokenRange,
    mooncake_requests,
    random_requests,
    readable_prefix_requests,
    shared_prefix_requests,
)
from kvrelay.bench.load.mix import ClassSpec, build_class, parse_mix
from kvrelay.bench.load.request import (
    EstimatedTokens,
    Length,
    LoadRequest,
    LocalTokenizer,
    parse_length,
    random_arrivals,
    trace_arrivals,
)
from kvrelay.errors import InvalidInputError


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def fixed(length: int) -> Length:
    return Length("fixed", length)


def ids(request: LoadRequest) -> tuple[int, ...]:
    assert isinstance(request.prompt, tuple)
    return request.prompt


@pytest.mark.parametrize(
    ("text", "low", "high", "mean"), [("7", 7, 7, 7), ("uniform~3~9", 3, 9, 6), ("normal~50~5", 20, 80, 50)]
)
def test_lengths(text: str, low: int, high: int, mean: float) -> None:
    length, source = parse_length(text), rng()
    drawn = [length.sample(source) for _ in range(2000)]
    assert low <= min(drawn) <= max(drawn) <= high
    assert np.mean(drawn) == pytest.approx(mean, abs=0.5)


@pytest.mark.parametrize("text", ["0", "-3", "x", "uniform~9~3", "normal~5", "uniform~0~3", "99999999999", "1.5", ""])
def test_wrong_lengths(text: str) -> None:
    with pytest.raises(InvalidInputError, match="--input-len"):
        parse_length(text, "--input-len")


def test_random_requests_repeat_with_their_seed() -> None:
    def take(seed: int) -> list[LoadRequest]:
        stream = random_requests(rng(seed), parse_length("uniform~1~30"), fixed(5), TokenRange(32, 100))
        return list(itertools.islice(stream, 20))

    assert take(1) == take(1) != take(2)
    assert all(32 <= token < 100 for request in take(1) for token in ids(request))
    assert all(request.prompt_len == len(request.prompt) and request.output_len == 5 for request in take(1))


def test_shared_prefix_groups() -> None:
    spec = Dataset(groups=3, per_group=5, system=fixed(20), prompt=fixed(6))
    requests = list(shared_prefix_requests(rng(), spec, fixed(4), TokenRange()))
    heads = [ids(request)[:20] for request in requests]
    assert len(requests) == 15
    assert sorted(heads.count(head) for head in set(heads)) == [5, 5, 5]
    assert len({ids(request) for request in requests}) == 15
    assert all(len(ids(request)) == 26 for request in requests)


def test_readable_prefixes_have_the_asked_length() -> None:
    spec = Dataset(groups=2, per_group=4, system=fixed(60), prompt=fixed(25))
    counter = EstimatedTokens()
    requests = list(readable_prefix_requests(rng(), spec, fixed(4), counter))
    systems = {request.messages[0].content for request in requests}
    assert (len(requests), len(systems)) == (8, 2)
    for request in requests:
        system, question = (counter.count(message.content) for message in request.messages)
        assert 56 <= system <= 60
        assert 21 <= question <= 25
    assert all(str(request.prompt).startswith("You are assistant") for request in requests)


def test_mooncake_prompts_share_what_their_hash_ids_share() -> None:
    records = [TraceRecord(0, 1200, 10, (1, 2, 3)), TraceRecord(1, 1536, 10, (1, 2, 4)), TraceRecord(2, 512, 10, (2,))]
    first, second, third = (ids(r) for r in mooncake_requests(records, 0, TokenRange()))
    assert (len(first), len(second), len(third)) == (1200, 1536, 512)
    assert first[:1024] == second[:1024]
    assert first[1024:] != second[1024:1200]
    assert third == first[512:1024]


def test_mooncake_scaled_down_keeps_the_blocks() -> None:
    (small,) = mooncake_requests([TraceRecord(0, 1200, 100, (1, 2, 3))], 0, TokenRange(), block_tokens=16)
    assert (small.prompt_len, small.output_len, len(small.prompt)) == (38, 4, 38)


def test_mooncake_with_wrong_ids_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="hash ids"):
        list(mooncake_requests([TraceRecord(0, 1200, 10, (1, 2))], 0, TokenRange()))
    with pytest.raises(InvalidInputError, match="1 to 512"):
        list(mooncake_requests([], 0, TokenRange(), block_tokens=0))


def test_poisson_has_its_rate_and_burstiness_its_spread() -> None:
    for burstiness in (0.25, 1.0, 4.0):
        offsets = list(itertools.islice(random_arrivals(rng(), 20.0, burstiness), 8000))
        gaps = np.diff(offsets)
        assert (gaps >= 0).all()
        assert gaps.mean() == pytest.approx(1 / 20, rel=0.06)
        assert gaps.std() * 20 == pytest.approx(1 / math.sqrt(burstiness), rel=0.08)
    assert list(itertools.islice(random_arrivals(rng(), math.inf), 3)) == [0, 0, 0]


@pytest.mark.parametrize("rate", [0, -1, math.nan])
def test_rates_that_are_none(rate: float) -> None:
    with pytest.raises(InvalidInputError, match="above zero"):
        next(random_arrivals(rng(), rate))
    with pytest.raises(InvalidInputError, match="above zero"):
        ClassSpec(rate=rate)


def test_trace_times_are_scaled() -> None:
    assert list(trace_arrivals([5.0, 6.0, 9.0], 2.0)) == [0, 0.5, 2.0]
    with pytest.raises(InvalidInputError):
        list(trace_arrivals([1.0], 0))


def test_mix() -> None:
    chat, long = parse_mix("chat=64/128:closed=8,long=uniform~900~1100/8:rate=3:n=5", Dataset())
    assert (chat.name, chat.max_concurrency, chat.rate, chat.endless) == ("chat", 8, None, True)
    assert (long.rate, long.num_requests, long.dataset.output) == (3, 5, fixed(8))
    load = build_class(chat, 0)
    assert load.offsets is None
    assert next(load.requests).output_len == 128
    timed = build_class(long, 0)
    assert timed.offsets is not None
    assert 900 <= (next(timed.requests).prompt_len or 0) <= 1100
    shared = parse_mix("a=10/2:closed=1:groups=2:per-group=3:system=30", Dataset())[0]
    assert len(list(build_class(shared, 0).requests)) == 6
    better = parse_mix("a=10/2:closed=1:priority=-1", Dataset())[0]
    assert next(build_class(better, 0).requests).priority == -1
    assert next(load.requests).priority == 0


@pytest.mark.parametrize(
    "text",
    ["", "chat", "chat=64", "chat=64/1", "chat=64/1:closed=x", "chat=64/1:wrong=1", "a=1/1:rate=0", "a=1/1:closed=0",
     "a=1/1:closed=1,a=1/1:closed=1", "1a=1/1:closed=1", "a=0/1:closed=1",
     "a=1/1:rate=1:rate=2", "a=1/1:closed=1:max=2", "a=1/1:closed=1:groups=2:groups=3"],
)  # fmt: skip
def test_wrong_mixes(text: str) -> None:
    with pytest.raises(InvalidInputError):
        parse_mix(text, Dataset())


def test_file_data_sets(tmp_path: Path) -> None:
    share = tmp_path / "s.json"
    turns = [{"from": "human", "value": "what is it"}, {"from": "gpt", "value": "a" * 40}]
    share.write_text(json.dumps([{"conversations": turns}, {"conversations": turns[1:]}]))
    (request,) = build_class(ClassSpec(dataset=Dataset(DatasetKind.SHAREGPT, share)), 0).requests
    share.write_bytes(b"\xef\xbb\xbf" + share.read_bytes())  # as Windows writes it
    assert list(build_class(ClassSpec(dataset=Dataset(DatasetKind.SHAREGPT, share)), 0).requests) == [request]
    assert (request.prompt, request.prompt_len, request.output_len) == ("what is it", 3, 10)
    lines = tmp_path / "r.jsonl"
    lines.write_text(
        '{"prompt": [1, 2], "output_len": 3}\n{"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}\n'
    )
    first, second = build_class(ClassSpec(dataset=Dataset(DatasetKind.JSONL, lines)), 0).requests
    assert (first.prompt, first.output_len, second.prompt, second.output_len) == ((1, 2), 3, "x", 4)
    lines.write_text('{"prompt": "x"}')
    with pytest.raises(InvalidInputError, match="record 1"):
        list(build_class(ClassSpec(dataset=Dataset(DatasetKind.JSONL, lines)), 0).requests)


def test_trace_data_set_brings_its_times(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.0,10,2\n2023-11-16 18:15:50.0,20,3\n")
    load = build_class(ClassSpec(dataset=Dataset(DatasetKind.TRACE, path), time_scale=4), 0)
    assert load.offsets is not None
    assert [len(request.prompt) for request in load.requests] == [10, 20]
    assert list(load.offsets) == [0, 1]
    with pytest.raises(InvalidInputError, match="needs a file"):
        ClassSpec(dataset=Dataset(DatasetKind.TRACE))


def test_tokenizers(tmp_path: Path) -> None:
    assert [EstimatedTokens().count(text) for text in ("", "a", "abcde")] == [0, 1, 2]
    with pytest.raises(InvalidInputError, match="no tokenizer"):
        LocalTokenizer(tmp_path / "none")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InvalidInputError, match="is not a tokenizer"):
        LocalTokenizer(tmp_path)
