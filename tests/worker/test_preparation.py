from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import msgspec
import pytest
from tests.patience import PATIENCE_S

from kvrelay.core.grammar import Grammar, GrammarKind
from kvrelay.core.messages import GenerateRequest, RequestRefused
from kvrelay.core.sampling import SamplingParams
from kvrelay.core.status import RefusalKind
from kvrelay.core.tasks import TaskSet
from kvrelay.core.token_ids import to_bytes
from kvrelay.errors import InvalidInputError, WorkerUnavailableError
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
        if sampling.grammar is not None and sampling.grammar.source == "broken":
            raise OSError("no memory")

    def go_on(self, peer: Peer, message: GenerateRequest) -> None:
        self.went_on.append((peer, message.request_id))

    def refuse(self, peer: Peer, refusal: RequestRefused) -> None:
        self.refused.append((peer, refusal))

    async def finish(self) -> None:
        self.allowed.set()
        await self.tasks.wait()


def request(name: str, source: str = "good") -> GenerateRequest:
    return GenerateRequest(name, "w", to_bytes((1, 2)), SamplingParams(grammar=Grammar(GrammarKind.REGEX, source)))


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


async def test_whatever_else_a_compiler_raises_the_client_gets_an_answer(side: Side) -> None:
    side.preparation.begin(ONE, request("a", "broken"))
    await side.finish()
    ((peer, refusal),) = side.refused
    assert (peer, refusal.request_id, refusal.status, refusal.retryable) == (ONE, "a", 500, False)
    assert "no memory" in refusal.reason


async def test_nothing_goes_on_for_an_aborted_request_or_a_lost_connection(side: Side) -> None:
    for peer, name in ((ONE, "a"), (ONE, "b"), (OTHER, "a"), (OTHER, "c")):
        side.preparation.begin(peer, request(name, "bad" if name == "b" else "good"))
    side.preparation.drop(OTHER, "a")
    side.preparation.drop(OTHER, "unknown")
    side.preparation.drop_all(ONE)
    await side.finish()
    assert side.went_on == [(OTHER, "c")]
    assert side.refused == []


def of_client(tenant: str, name: str, source: str) -> GenerateRequest:
    return msgspec.structs.replace(request(name, source), tenant=tenant)


class Turns(Side):
    """Each compilation waits until its grammar is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[str] = []
        self.let_go: dict[str, threading.Event] = {}

    def compile(self, sampling: SamplingParams) -> None:
        assert sampling.grammar is not None
        source = sampling.grammar.source
        event = self.let_go.setdefault(source, threading.Event())
        self.begun.append(source)
        assert event.wait(PATIENCE_S)

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await asyncio.sleep(0.001)

    def end(self, *sources: str) -> None:
        for source in sources:
            self.let_go.setdefault(source, threading.Event()).set()


async def test_one_clients_slow_grammars_delay_no_other_clients() -> None:
    side = Turns()
    for number in range(6):
        side.preparation.begin(ONE, of_client("bad", f"b{number}", f"slow {number}"))
    side.preparation.begin(OTHER, of_client("good", "g", "quick"))
    side.end("quick")
    await side.until(lambda: bool(side.went_on))
    assert side.went_on == [(OTHER, "g")]
    assert side.begun == ["slow 0", "quick"]
    side.end(*(f"slow {number}" for number in range(6)))
    await side.finish()
    assert len(side.went_on) == 7


async def test_clients_take_turns() -> None:
    side = Turns()
    for name, tenant in enumerate("aabbccc"):
        side.preparation.begin(ONE, of_client(tenant, str(name), f"{tenant}{name}"))
    side.end("a0")
    await side.until(lambda: len(side.begun) == 3)
    side.end("b2")
    await side.until(lambda: len(side.begun) == 4)
    assert set(side.begun[:2]) == {"a0", "b2"}
    assert side.begun[2:] == ["c4", "a1"]
    side.end("a1", "b3", "c4", "c5", "c6")
    await side.finish()
    assert len(side.went_on) == 7


async def test_a_known_grammar_waits_for_no_turn_and_a_dropped_request_takes_none() -> None:
    side = Turns()
    side.end("known")
    side.preparation.begin(ONE, of_client("a", "first", "known"))
    await side.finish()
    for name in ("slow", "gone", "next"):
        side.preparation.begin(ONE, of_client("a", name, name))
    side.preparation.begin(ONE, of_client("a", "second", "known"))
    side.preparation.drop(ONE, "gone")
    await side.until(lambda: (ONE, "second") in side.went_on)
    side.end("slow", "next")
    await side.finish()
    assert side.begun.count("known") == 2
    assert [source for source in side.begun if source != "known"] == ["slow", "next"]


async def test_another_worker_may_take_what_cannot_be_compiled_here_now(side: Side) -> None:
    def compile_nothing(sampling: SamplingParams) -> None:
        raise WorkerUnavailableError("the worker leaves")

    preparation = Preparation(compile_nothing, side.go_on, side.refuse, side.tasks)
    preparation.begin(ONE, request("a"))
    await side.finish()
    ((_, refusal),) = side.refused
    assert refusal.retryable
    assert refusal.status == 503
