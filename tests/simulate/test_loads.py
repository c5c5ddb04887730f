"""Traces become arrivals, line by line; generated loads are functions of their spec and seed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from kvrelay.bench.traces import TraceFormat, detect_trace
from kvrelay.cli.main import run
from kvrelay.errors import InvalidInputError
from kvrelay.simulate import loads
from kvrelay.simulate.arrival import check_arrivals
from kvrelay.simulate.loads import generated_arrivals, trace_arrivals

MOONCAKE = '{"timestamp": %s, "input_length": 600, "output_length": 5, "hash_ids": [0, 1], "new": 1}\n'
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
HEADER = (
    '{"type":"header","worker_id":"w","model":"m","config":{},"num_blocks":8,"block_size":4,"max_model_len":99,'
    '"vocab_size":9,"eos_token_ids":[],"seed":0}\n'
)
KINDS = ("poisson", "bursts", "diurnal", "shift", "agents")


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_mooncake_keeps_blocks_and_begins_at_zero(tmp_path: Path) -> None:
    first, second = trace_arrivals(written(tmp_path / "m.jsonl", MOONCAKE % 27000 + MOONCAKE % 30000))
    assert (first.time_s, second.time_s) == (0.0, 3.0)
    assert (first.prompt_tokens, first.answer_tokens, first.hash_ids, first.hash_tokens) == (600, 5, (0, 1), 512)


def test_azure_rows(tmp_path: Path) -> None:
    rows = "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:48.1805900,9,1\n"
    found = trace_arrivals(written(tmp_path / "a.csv", AZURE + rows), time_scale=2.0)
    assert [(a.time_s, a.prompt_tokens, a.answer_tokens) for a in found] == [(0.0, 374, 44), (0.75, 9, 1)]


def test_bailian_sessions_follow_their_parents(tmp_path: Path) -> None:
    rows = [
        {"chat_id": chat, "parent_chat_id": parent, "timestamp": chat, "input_length": 20, "output_length": 3}
        | {"type": "text", "turn": 1, "hash_ids": [1, chat]}
        for chat, parent in ((1, -1), (2, -1), (3, 1), (4, 3), (5, 99))
    ]
    found = trace_arrivals(written(tmp_path / "b.jsonl", "\n".join(map(json.dumps, rows))))
    assert [a.session for a in found] == ["1", "2", "1", "1", "99"]
    assert {a.hash_tokens for a in found} == {16}


def test_burst_gpt_leaves_failures_out(tmp_path: Path) -> None:
    head = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    path = written(tmp_path / "b.csv", head + "5,ChatGPT,472,18,490,x\n45,ChatGPT,10,0,10,x\n118,GPT-4,417,276,693,x\n")
    assert detect_trace(path) is TraceFormat.BURST_GPT
    assert [(a.time_s, a.prompt_tokens) for a in trace_arrivals(path)] == [(0.0, 472), (113.0, 417)]


def test_a_long_trace_is_read_no_further_than_its_limit(tmp_path: Path) -> None:
    path = written(tmp_path / "m.jsonl", (MOONCAKE % 0) * 50 + "not json\n")
    assert len(trace_arrivals(path, limit=50)) == 50
    with pytest.raises(InvalidInputError, match=r"m\.jsonl:51"):
        trace_arrivals(path, limit=51)


def test_a_million_rows_need_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loads, "MAX_REQUESTS", 50)
    path = written(tmp_path / "m.jsonl", (MOONCAKE % 0) * 51)
    assert len(trace_arrivals(path, limit=51)) == 51
    with pytest.raises(InvalidInputError, match=r"more than 50 requests.*choose with --limit N"):
        trace_arrivals(path)


@pytest.mark.parametrize("scale", [0.0, 1e-300, float("nan"), float("inf")])
def test_a_time_scale_has_bounds(tmp_path: Path, scale: float) -> None:
    with pytest.raises(InvalidInputError, match=r"--time-scale must be 0\.001 to"):
        trace_arrivals(written(tmp_path / "m.jsonl", MOONCAKE % 0), time_scale=scale)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("hello\n", "no known trace"),
        (MOONCAKE % -5, "request 1 has the time -0.005 s; remove it"),
        (MOONCAKE % 5 + MOONCAKE % 4, "request 2 is 0.001 s before the one above; sort by time"),
        (MOONCAKE % 0 + MOONCAKE % 3700000, "cut the trace at gaps above an hour"),
        ('{"timestamp": 0, "input_length": 600}\n', "output_length"),
        ((MOONCAKE % 0).replace("600", "500"), "2 hash ids of 512 tokens for 500 tokens"),
        (AZURE + "2023-11-16 18:15:46,x,44\n", ":2: not a row"),
        (AZURE + "2023-11-16 18:15:46,-5,44\n", ":2: a request of -5 and 44 tokens is none; remove it"),
        (AZURE + "2023-11-16 18:15:46+00:00,5,44\n2023-11-16 18:15:47,5,44\n", ":3: not a row"),
        (AZURE + '2023-11-16 18:15:46,"' + "5" * 200_000 + '",44\n', ":2: field larger than"),
        ((MOONCAKE % 0).replace("600", "1" + "0" * 12), "possible are 1 to 10,000,000"),
        (HEADER.replace('"m"', "5"), "line 1: Expected `str`"),
        (HEADER.replace("{}", "{}, 1"), "line 1: JSON is malformed"),
        (HEADER, "is empty: no request in it"),
        (AZURE.replace("Gen", "gen") + "2023-11-16 18:15:46,1,44\n", "GeneratedTokens"),
    ],
)
def test_a_bad_trace_is_refused_in_one_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        trace_arrivals(written(tmp_path / "bad", text))
    assert said in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("kind", KINDS)
def test_a_generator_is_a_function_of_spec_and_seed(kind: str) -> None:
    found = generated_arrivals(kind, seed=3)
    check_arrivals(found)
    assert found == generated_arrivals(kind, seed=3) != generated_arrivals(kind, seed=4)


@pytest.mark.parametrize("cached", [0.8, 0.86])
def test_agents_share_what_is_asked(cached: float) -> None:
    found = generated_arrivals(f"agents:sessions=20,cached={cached}")
    seen: set[int] = set()
    hits = 0
    for arrival in found:
        assert arrival.hash_ids is not None
        hits += sum(hash_id in seen for hash_id in arrival.hash_ids)
        seen.update(arrival.hash_ids)
    assert hits / sum(len(a.hash_ids or ()) for a in found) == pytest.approx(cached, abs=0.005)


def test_bursts_scatter_more_and_rates_hold() -> None:
    gaps = {kind: np.diff([a.time_s for a in generated_arrivals(f"{kind}:num=4000,rate=5")]) for kind in KINDS[:3]}
    assert gaps["bursts"].std() > 2 * gaps["poisson"].std()
    for kind in KINDS[:3]:
        assert gaps[kind].mean() == pytest.approx(0.2, rel=0.2)


def test_the_mix_shifts_from_prompts_to_answers() -> None:
    found = generated_arrivals("shift:num=2000,rate=10,period=200")
    halves = [[a for a in found if (a.time_s % 200 < 100) is first] for first in (True, False)]
    prompts, answers = ([np.mean([getattr(a, name) for a in half]) for half in halves] for name in NAMES)
    assert prompts[0] > 2 * prompts[1]
    assert answers[1] > 2 * answers[0]


NAMES = ("prompt_tokens", "answer_tokens")


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("agent", "is none of"),
        ("poisson:rat=2", "did you mean rate"),
        ("poisson:rate=x", "must be a number"),
        ("poisson:rate=0", "rate must be above 0"),
        ("poisson:num=1.5", "num must be a whole number"),
        ("poisson:rate=nan", "rate must be above 0"),
        ("poisson:rate=1e-300", "rate must be above 0"),
        ("poisson:num=1e9", "num must be a whole number above 0 and at most 100,000"),
        ("agents:sessions=20000", "sessions times calls can be at most 100,000"),
        ("agents:cached=0.99", "8 calls can share 0.75 to 0.88"),
        ("agents:calls=1", "change calls or cached"),
    ],
)
def test_a_bad_spec_is_refused(spec: str, said: str) -> None:
    with pytest.raises(InvalidInputError, match=said):
        generated_arrivals(spec)


def test_a_longer_model_takes_longer_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    given = [
        "simulate",
        "--load",
        "poisson:num=3,prompt=40000,answer=2",
        "--prefill",
        "0",
        "--decode",
        "0",
        "--both",
        "1",
    ]
    assert run([*given, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_failed"] > 0
    assert run([*given, "--json", "--max-model-len", "400000"]) == 0
    assert json.loads(capsys.readouterr().out)["num_done"] == 3
