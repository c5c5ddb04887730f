from __future__ import annotations

import asyncio
import threading

import pytest

from kvrelay.core.grammar import Grammar, GrammarKind
from kvrelay.core.messages import GenerateRequest, RequestRefused
from kvrelay.core.sampling import SamplingParams
from kvrelay.core.status import RefusalKind
from kvrelay.core.tasks import TaskSet
from kvrelay.errors import InvalidInputError
from kvrelay.rpc.base import Peer
from kvrelay.worker.decode.preparation import Preparation

ONE, OTHER = Peer(b"one"), Peer(b"other")


class Side:
    """Records what the preparation leads to; compiling waits until it is allowed."""

    def __init__(self) -> None:
        self.allowed = threading.Event()
        self.threads: list[threading.Thread] = []
        self.went_on: list[tuple[Peer, str]] = []
        self.refused: list[tuple[Peer, RequestRefused]] = []
        self.tasks = TaskSet()
        self.preparation = Preparation(self.compile, self.go_on, self.refuse, self.tasks)

    def compile(self, sampling: SamplingParams) -> None:
        self.threads.append(threading.current_thread())
        self.allowed.wait(20)
        if sampling.grammar is not None and sampling.grammar.source == "bad":
            raise InvalidInputError("regex cannot be used")

    def go_on(self, peer: Peer, message: GenerateRequest) -> None:
        self.went_on.append((peer, message.request_id))

    def refuse(self, peer: Peer, refusal: RequestRefused) -> None:
        self.refused.append((peer, refusal))

    async def finish(self) -> None:
        self.allowed.set()
        await self.tasks.wait()


def request(name: str, source: str = "good") -> GenerateRequest:
    return GenerateRequest(name, "w", (1, 2), SamplingParams(grammar=Grammar(GrammarKind.REGEX, source)))


@pytest.fixture
def side() -> Side:
    return Side()


async def test_compiling_happens_beside_the_event_loop(side: Side) -> None:
    side.preparation.begin(ONE, request("a"))
    while not side.threads:
        await asyncio.sleep(0.001)
    assert side.went_on == []
    assert side.threads[0] is not threading.main_thread()
    await side.finish()
    assert side.went_on == [(ONE, "a")]


async def test_what_cannot_be_compiled_is_refused_for_good(side: Side) -> None:
    side.preparation.begin(ONE, request("a", "bad"))
    await side.finish()
    assert side.went_on == []
    assert side.refused == [(ONE, RequestRefused("a", "regex cannot be used", 400, False, kind=RefusalKind.INVALID))]


async def test_nothing_goes_on_for_an_aborted_request_or_a_lost_connection(side: Side) -> None:
    for peer, name in ((ONE, "a"), (ONE, "b"), (OTHER, "a"), (OTHER, "c")):
        side.preparation.begin(peer, request(name, "bad" if name == "b" else "good"))
    side.preparation.drop(OTHER, "a")
    side.preparation.drop(OTHER, "unknown")
    side.preparation.drop_all(ONE)
    await side.finish()
    assert side.went_on == [(OTHER, "c")]
    assert side.refused == []
