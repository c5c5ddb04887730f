"""Traces become arrivals, line by line; generated loads are functions of their spec and seed."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import numpy as np
import pytest

from kvrelay.bench.traces import TraceFormat, detect_trace
from kvrelay.cli.main import run
from kvrelay.core.hashing import compute_sequence_hashes
from kvrelay.errors import InvalidInputError
from kvrelay.frontend.access.access_log import AccessLog, Generated
from kvrelay.simulate import loads
from kvrelay.simulate.arrival import Arrival, RecordedArrival, check_arrivals
from kvrelay.simulate.loads import generated_arrivals, trace_arrivals

MOONCAKE = '{"timestamp": %s, "input_length": 600, "output_length": 5, "hash_ids": [0, 1], "new": 1}\n'
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
HEADER = (
    '{"type":"header","worker_id":"w","model":"m","config":{},"num_blocks":8,"block_size":4,"max_model_len":99,'
    '"vocab_size":9,"eos_token_ids":[],"seed":0}\n'
)
KINDS = ("poisson", "bursts", "diurnal", "shift", "agents")


ACCESS = (
    '{"time":"2026-11-27T10:00:%s.500000Z","id":"a","key":"","method":"POST","path":"/v1/completions","status":"200",'
    '"duration_s":%s,"prompt_tokens":%s,"output_tokens":%s,"ttft_s":0.1,"worker":"d0"}\n'
)


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


def test_the_access_log_is_a_load_by_the_arrival_of_its_answered_requests(tmp_path: Path) -> None:
    """Lines are written at the end: the second one had arrived first, at 9:59:59.5; one has no answer."""
    lines = ACCESS % ("02", 1.0, 30, 4) + ACCESS % ("03", 4.0, 50, 6) + ACCESS % ("04", 1.0, "null", "null")
    found = trace_arrivals(written(tmp_path / "access.jsonl", lines))
    assert [(one.time_s, one.prompt_tokens, one.answer_tokens) for one in found] == [(0.0, 50, 6), (2.0, 30, 4)]


def test_requests_without_an_answer_are_left_out_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One refused, one failed after its prompt was counted, and a line of /v1/models, which is no request."""
    refused = (ACCESS % ("04", 0.1, "null", "null")).replace('"200"', '"429"')
    lines = ACCESS % ("02", 1.0, 30, 4) + ACCESS % ("03", 1.0, 50, 0) + refused + ACCESS % ("05", 0.1, "null", "null")
    path = written(tmp_path / "access.jsonl", lines)
    assert [one.prompt_tokens for one in trace_arrivals(path)] == [30]
    assert "left out requests without an answer (refused, failed or 0 tokens): 2, the first is number 2" in caplog.text
    log = written(tmp_path / "log.csv", "time,prompt_tokens,output_tokens\n1,20,0\n2,30,5\n4,40,6\n")
    assert [(one.time_s, one.answer_tokens) for one in trace_arrivals(log)] == [(0.0, 5), (2.0, 6)]
    with pytest.raises(InvalidInputError, match="no request has an answer"):
        trace_arrivals(written(tmp_path / "none.csv", "time,prompt_tokens,output_tokens\n1,20,0\n"))


def test_the_access_log_that_a_frontend_writes_is_a_load(tmp_path: Path) -> None:
    log = AccessLog("json", str(tmp_path / "access.jsonl"))
    log.note("a", Generated(12, 3, 0.1, "d0"))
    log.write("a", "key", "POST", "/v1/completions", "200", 0.25)
    log.write("b", "key", "GET", "/v1/models", "200", 0.25)
    log.close()
    (found,) = trace_arrivals(tmp_path / "access.jsonl")
    assert (found.prompt_tokens, found.answer_tokens) == (12, 3)


@pytest.mark.parametrize(
    "text",
    [
        "time,prompt_tokens,completion_tokens\n1764237600,10,2\n1764237601.5,20,3\n",
        "Timestamp,Input Tokens,Output-Tokens,model\n1764237600000,10,2,m\n1764237601500,20,3,m\n",
        "arrival_time_ms,input_length,output_length\n0,10,2\n1500,20,3\n",
        "created_at,ISL,OSL\n2026-11-27T10:00:00Z,10,2\n2026-11-27T11:00:01.5+01:00,20,3\n",
        "start_time,num_prompt_tokens,num_generated_tokens\n2026-11-27 10:00:00,10,2.0\n2026-11-27 10:00:01.500,20,3\n",
        '{"ts": 1764237600000000, "prompt_len": 10, "output_len": 2}\n'
        '{"ts": 1764237601500000, "prompt_len": 20, "output_len": 3}\n',
        '{"timestamp": 27000, "input_length": 10, "output_length": 2}\n'
        '{"timestamp": 28500, "input_length": 20, "output_length": 3, "hash_ids": [1]}\n',
    ],
    ids=[
        "epoch seconds",
        "epoch milliseconds",
        "a name with a unit",
        "ISO with zones",
        "ISO without",
        "microseconds",
        "mooncake",
    ],
)
def test_columns_of_the_usual_names_and_times_of_any_kind(tmp_path: Path, text: str) -> None:
    found = trace_arrivals(written(tmp_path / "log", text))
    assert [(one.prompt_tokens, one.answer_tokens) for one in found] == [(10, 2), (20, 3)]
    assert found[1].time_s == pytest.approx(1.5, abs=1e-6)


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
        ((MOONCAKE % 0).replace("600", "1" + "0" * 400), "possible are 1 to 10,000,000"),
        (HEADER.replace('"m"', "5"), "line 1: Expected `str`"),
        (HEADER.replace("{}", "{}, 1"), "line 1: JSON is malformed"),
        (HEADER, "is empty: no request in it"),
        (AZURE.replace("Gen", "Other") + "2023-11-16 18:15:46,1,44\n", "or a log: --access-log json of a frontend"),
        (
            "time,prompt_tokens,output_tokens\n1,2,3\n2,,3\n",
            "bad:3: `prompt_tokens` is missing; the prompt tokens must",
        ),
        (
            "time,prompt_tokens,output_tokens\n1,2,3\n2,5,x\n",
            "bad:3: `output_tokens` is 'x'; the answer tokens must be",
        ),
        (
            "time,prompt_tokens,output_tokens\n1,2,3\nnoon,5,9\n",
            "bad:3: `time` is 'noon'; the time must be ISO 8601 or",
        ),
        (
            '{"ts": 1, "isl": 2, "osl": 3}\n{"ts": 1, "osl": 3}\n',
            "bad:2: `isl` is missing; the prompt tokens must be a whole number",
        ),
        (ACCESS % ("00", 0.5, "7", 8) + ACCESS % ("01", 0.5, '"x"', 8), ":2: Expected `int | null`, got `str`"),
    ],
)
def test_a_bad_trace_is_refused_in_one_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        trace_arrivals(written(tmp_path / "bad", text))
    assert said in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("line", [b'{"a": "\xff"}\n', b"\xff\xfe,1,2\n", b"[" * 200_000 + b"\n", b"1\r2,3\n"])
def test_bytes_that_are_no_text_are_no_trace(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "bad"
    path.write_bytes(line)
    with pytest.raises(InvalidInputError, match="no known trace"):
        trace_arrivals(path)


@pytest.mark.parametrize("text", [MOONCAKE % 0, AZURE + "2023-11-16 18:15:46,600,5\n", "time,isl,osl\n1,600,5\n"])
def test_the_mark_that_spreadsheets_write_at_the_beginning_is_no_text(tmp_path: Path, text: str) -> None:
    path = tmp_path / "exported"
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert [one.prompt_tokens for one in trace_arrivals(path)] == [600]


def test_a_compressed_trace_is_told_to_be_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl.gz"
    path.write_bytes(gzip.compress((MOONCAKE % 0).encode()))
    with pytest.raises(InvalidInputError, match=r"m\.jsonl\.gz is compressed; unpack it first \(gunzip\)"):
        trace_arrivals(path)


def test_what_cannot_be_read_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = os.open(path, os.O_RDWR)
    os.write(writer, (MOONCAKE % 0).encode())
    with pytest.raises(InvalidInputError, match=r"pipe is no file, and is read twice; write it to a file first"):
        trace_arrivals(path)
    os.close(writer)


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
        ("poisson:rate=1,rate=2", "rate stands twice; give it once"),
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
    assert run([*given, "--json", "--max-model-len", "200000"]) == 0
    assert json.loads(capsys.readouterr().out)["num_done"] == 3


@pytest.mark.parametrize(
    "arrival",
    [
        Arrival(time_s=0.0, prompt_tokens=100, answer_tokens=1),
        Arrival(time_s=0.0, prompt_tokens=128, answer_tokens=1, hash_ids=(1, 2), hash_tokens=64),
        Arrival(time_s=0.0, prompt_tokens=150, answer_tokens=1, hash_ids=(1, 2), hash_tokens=64),
        RecordedArrival(time_s=0.0, prompt_tokens=40, answer_tokens=1, token_ids=tuple(range(40))),
    ],
)
def test_the_kept_hashes_are_those_of_the_prompt(arrival: Arrival) -> None:
    for index in (3, 4, 3):
        assert arrival.hashes(index, 1000, 16) == compute_sequence_hashes(arrival.prompt(index, 1000), 16)
