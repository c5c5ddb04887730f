"""Events, chunks and the recorder, fed with made-up stamps."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.bench.client.connection import parse_target
from kvrelay.bench.client.stream import (
    MAX_EVENT_BYTES,
    BodyOptions,
    StreamEndpoint,
    StreamRecorder,
    decode_chunk,
    encode_body,
    events_in,
    parse_extra,
)
from kvrelay.bench.errors import BadResponseError
from kvrelay.bench.formats import ChatTurn
from kvrelay.bench.load.request import LoadRequest
from kvrelay.bench.report.metrics import Outcome, RequestRecord, TokenSource
from kvrelay.core.decoding import error_text
from kvrelay.core.event_stream import EventParser
from kvrelay.errors import InvalidInputError


@given(
    st.lists(
        st.tuples(st.sampled_from(["data: {}\n\n", "data:{}\r\n\r\n", ": note\n\ndata: {}\n\n"]), st.integers(1, 9))
    )
)
def test_events_come_out_whole_however_they_are_cut(parts: list[tuple[str, int]]) -> None:
    stream = "".join(template.format(f'{{"n": {number}}}') for template, number in parts).encode()
    for size in (1, 2, 3, 7, 1000):
        splitter = EventParser(MAX_EVENT_BYTES)
        found = [event for at in range(0, len(stream), size) for event in events_in(splitter, stream[at : at + size])]
        assert [json.loads(event)["n"] for event in found] == [number for _, number in parts]


def test_event_with_several_data_lines() -> None:
    assert events_in(EventParser(MAX_EVENT_BYTES), b"event: x\ndata: a\ndata: b\n\n") == [b"a\nb"]


def chunk(text: str = "", ids: list[int] | None = None, used: int | None = None, finish: str | None = None) -> bytes:
    value: dict[str, object] = {"choices": [{"text": text, "token_ids": ids, "finish_reason": finish}]}
    if used is not None:
        value["usage"] = {"prompt_tokens": 5, "completion_tokens": used}
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def total(used: int) -> bytes:
    return b'data: {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": %d}}\n\n' % used


def recorded(*reads: tuple[int, bytes]) -> RequestRecord:
    recorder = StreamRecorder("c", 9)
    recorder.sent(100)
    for stamp, body in reads:
        recorder.feed(stamp, body)
    return recorder.record(Outcome.OK, 999)


def test_token_ids_count() -> None:
    found = recorded((200, chunk("a", [1])), (300, chunk("", [2])), (400, chunk("bc", [3, 4])), (500, total(4)))
    assert (found.stamps_ns, found.tokens) == ((200, 300, 400), (1, 1, 2))
    assert (found.token_source, found.output_tokens, found.prompt_tokens) == (TokenSource.TOKEN_IDS, 4, 5)
    assert (found.text, found.sent_ns) == ("abc", 100)


def test_pieces_of_one_read_are_one_arrival() -> None:
    found = recorded((200, chunk("a", [1])), (300, chunk("b", [2]) + chunk("c", [3])))
    assert (found.stamps_ns, found.tokens) == ((200, 300), (1, 2))


def test_running_usage_counts() -> None:
    found = recorded((200, chunk("a", used=1)), (300, chunk("b", used=4)), (400, chunk("", used=4, finish="stop")))
    assert (found.tokens, found.token_source, found.output_tokens) == ((1, 3), TokenSource.USAGE, 4)


def test_without_counts_the_total_is_spread_by_length() -> None:
    found = recorded((200, chunk("aa")), (300, chunk("bbbbbb")), (400, chunk("", finish="stop")), (400, total(8)))
    assert found.token_source is TokenSource.ESTIMATED
    assert (found.tokens, found.output_tokens) == ((2, 6), 8)


def test_usage_with_the_last_piece_only_is_a_total() -> None:
    found = recorded((200, chunk("aa", used=5, finish="stop")))
    assert (found.tokens, found.token_source) == ((5,), TokenSource.ESTIMATED)
    found = recorded((200, chunk("aa")), (300, chunk("aa", used=6, finish="stop")))
    assert found.tokens == (3, 3)


def test_without_any_usage_pieces_are_counted() -> None:
    found = recorded((200, chunk("a")), (300, chunk("b")))
    assert (found.tokens, found.output_tokens, found.prompt_tokens) == ((1, 1), 2, 9)


def test_role_piece_is_no_token() -> None:
    role = (
        b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}], "usage": {"completion_tokens": 0}}\n\n'
    )
    word = b'data: {"choices": [{"delta": {"content": "hi"}}], "usage": {"completion_tokens": 1}}\n\n'
    found = recorded((200, role), (300, word))
    assert (found.stamps_ns, found.tokens, found.text) == ((300,), (1,), "hi")


@pytest.mark.parametrize(
    ("data", "message"),
    [(b"{", "no chunk"), (b"[]", "no chunk"), (b'{"error": {"message": "out\\n of memory"}}', "out of memory")],
)
def test_garbage_in_a_stream(data: bytes, message: str) -> None:
    with pytest.raises(BadResponseError, match=message):
        decode_chunk(data)


def test_bodies() -> None:
    request = LoadRequest((1, 2), 7)
    body = json.loads(encode_body(request, BodyOptions("m", extra=parse_extra('{"top_k": 3}'))))
    assert body["prompt"] == [1, 2]
    assert (body["model"], body["max_tokens"], body["ignore_eos"], body["return_token_ids"], body["top_k"]) == (
        "m", 7, True, True, 3,
    )  # fmt: skip
    plain = json.loads(encode_body(request, BodyOptions("m", plain=True)))
    assert set(plain) == {"model", "prompt", "max_tokens", "temperature", "stream", "stream_options"}
    assert plain["stream_options"] == {"include_usage": True}
    assert json.loads(encode_body(LoadRequest("x", 1, priority=-1), BodyOptions("m")))["priority"] == -1
    chat = BodyOptions("m", StreamEndpoint.CHAT)
    assert json.loads(encode_body(LoadRequest("hi", 1), chat))["messages"] == [{"role": "user", "content": "hi"}]
    asked = json.loads(encode_body(LoadRequest("x", 1, messages=(ChatTurn("system", "s"),)), chat))
    assert asked["messages"] == [{"role": "system", "content": "s"}]
    with pytest.raises(InvalidInputError, match="text"):
        encode_body(request, chat)
    with pytest.raises(InvalidInputError, match="JSON object"):
        parse_extra("[1]")


def test_error_text() -> None:
    assert error_text(b'{"error": {"message": "a\\nb"}}') == "a b"
    assert error_text(b'{"detail": "x"}') == "x"
    assert error_text(b"<p>no</p>") == "<p>no</p>"
    assert len(error_text(b"x" * 5000)) == 200


def test_targets() -> None:
    assert parse_target("127.0.0.1:80").url == "http://127.0.0.1:80"
    assert parse_target("https://host/api/v1/").url == "https://host:443/api"
    assert b"Host: [::1]:80\r\n" in parse_target("http://[::1]").head("GET", "/", 0)
    head = parse_target("http://h:1/p", "k").head("POST", "/v1/x", 3).decode()
    assert head.startswith("POST /p/v1/x HTTP/1.1\r\nHost: h:1\r\n")
    assert "Authorization: Bearer k\r\n" in head
    for wrong in ("ftp://x", "http://", "http://h:99999", "http://h:x"):
        with pytest.raises(InvalidInputError):
            parse_target(wrong)
    with pytest.raises(InvalidInputError):
        parse_target("http://h", "a\r\nb")
