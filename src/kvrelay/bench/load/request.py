"""The vocabulary of load: one request to send, and one class of requests with its arrivals."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

Prompt = str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation that a data set brought along."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A request to send.

    ``prompt`` is text or token ids; where ``messages`` is not empty, the request is a conversation and ``prompt`` its
    text. ``output_len`` is in tokens. ``prompt_len`` is the number of prompt tokens where known beforehand.
    ``arrival_s`` is the time since the trace's start, for data sets that have one.
    """

    prompt: Prompt
    output_len: int
    prompt_len: int | None = None
    messages: tuple[ChatMessage, ...] = ()
    arrival_s: float | None = None


@dataclass(frozen=True, slots=True)
class LoadClass:
    """A named stream of requests with its own arrivals.

    ``offsets`` are send times in seconds since the start, one per request; without them the class is a closed loop of
    ``max_concurrency`` users, each sending its next request when the last one is answered. With both, arrivals wait
    while ``max_concurrency`` requests are in flight. ``num_requests`` ends the class; without it, the iterators or the
    run's time limit do. ``rate`` repeats the offered rate (requests per second) for the report.
    """

    name: str
    requests: Iterator[LoadRequest]
    offsets: Iterator[float] | None = None
    max_concurrency: int | None = None
    num_requests: int | None = None
    rate: float | None = None
