"""Cutting a stream into events: by the standard, wherever the network cuts the bytes."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.core.event_stream import EventParser, EventTooLongError

STREAM = b': hello\n\ndata: {"a":\ndata:1}\nid: 7\n\nevent: x\ndata:b\ndata\nretry: 5\n\ndata:\n\ndata: [DONE]\n\n'
EVENTS = [b'{"a":\n1}', b"b", b"[DONE]"]


def parse(pieces: list[bytes]) -> list[bytes]:
    parser = EventParser(1000)
    return [data for piece in pieces for data in parser.feed(piece)] + parser.end()


@pytest.mark.parametrize("line_end", [b"\n", b"\r", b"\r\n"])
@given(cuts=st.lists(st.integers(0, 200), max_size=12))
def test_any_line_end_and_any_cut(line_end: bytes, cuts: list[int]) -> None:
    stream = STREAM.replace(b"\n", line_end)
    places = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    assert parse([stream[begin:end] for begin, end in pairwise(places)]) == EVENTS
    assert parse([stream[at : at + 1] for at in range(len(stream))]) == EVENTS


def test_a_byte_order_mark_and_a_missing_last_line() -> None:
    assert parse([b"\xef\xbb", b"\xbfdata: a\n\n", b"data: b\n"]) == [b"a", b"b"]
    assert parse([b"data: a\n\ndata: b"]) == [b"a"], "the line may go on"
    assert parse([]) == []


@pytest.mark.parametrize("piece", [b"x" * 100, b"data: x\n" * 10, b"data:\n" * 10, b"data: " + b"x" * 100])
def test_an_event_that_does_not_end_is_an_error(piece: bytes) -> None:
    parser = EventParser(1000)

    def feed() -> None:
        for _ in range(100):
            parser.feed(piece)

    with pytest.raises(EventTooLongError, match="more than 1000 bytes"):
        feed()


def test_the_limit_is_for_one_event() -> None:
    parser = EventParser(100)
    for _ in range(100):
        assert parser.feed(b"data: " + b"x" * 50 + b"\n\n") == [b"x" * 50]
        parser.feed(b": " + b"y" * 50 + b"\n")
