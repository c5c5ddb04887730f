"""Outputs that do not get through: the connection ends, nothing runs for nobody, and nothing is lost in silence."""

from __future__ import annotations

import threading

import msgspec
import pytest
from tests.worker.cluster import cluster, expected, prompt

from kvrelay.config import WorkerRole
from kvrelay.core.logprobs import PositionLogprobs, TokenLogprob
from kvrelay.core.messages import OutputBatch, TokenOutput
from kvrelay.core.status import FinishReason
from kvrelay.errors import PayloadTooLargeError
from kvrelay.rpc import wire
from kvrelay.rpc.base import Peer
from kvrelay.rpc.wire import Message, encode_message
from kvrelay.worker.decode.outputs import joined, send_outputs

PEER = Peer(b"frontend")


class NarrowServer:
    """A request plane whose limit is small."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.batches: list[OutputBatch] = []

    def send(self, peer: Peer, message: Message) -> bool:
        if len(encode_message(message)) > self.max_bytes:
            raise PayloadTooLargeError("too large")
        assert isinstance(message, OutputBatch)
        self.batches.append(message)
        return True


@pytest.mark.parametrize("max_bytes", [10_000, 300, 120, 80])
def test_a_batch_that_is_too_large_is_split(max_bytes: int) -> None:
    outputs = [TokenOutput(f"request-{number}", (number,), position=number) for number in range(50)]
    server = NarrowServer(max_bytes)
    assert send_outputs(server, PEER, outputs) == []  # type: ignore[arg-type]
    assert [output for batch in server.batches for output in batch.outputs] == outputs
    assert (len(server.batches) == 1) == (max_bytes == 10_000)


def test_what_fits_nowhere_is_given_back_and_the_rest_is_sent() -> None:
    large = [TokenOutput(name, tuple(range(200))) for name in ("x", "y")]
    small = [TokenOutput(str(number), (1,)) for number in range(5)]
    server = NarrowServer(200)
    left = send_outputs(server, PEER, [*small[:2], large[0], *small[2:], large[1]])  # type: ignore[arg-type]
    assert left == large
    assert [output for batch in server.batches for output in batch.outputs] == small


async def test_a_frontend_that_does_not_read_loses_its_connection() -> None:
    """Paused until its queue is full, it gets what was sent before the gap and then the end; the worker cancels."""
    async with cluster() as c:
        node = await c.join(WorkerRole.BOTH)
        node.slow_down(0.002)  # else all tokens may travel in fewer messages than the queue holds
        slow, other = await c.client(node), await c.client(node)
        slow.connection.high_water_mark = 8  # type: ignore[attr-defined]
        losses: list[int] = []
        slow.connection.on_disconnect(lambda: losses.append(len(slow.tokens["a"])))
        slow.send("a", prompt(20), max_tokens=3000)
        other.send("b", prompt(30), max_tokens=100)
        await slow.until(lambda: bool(slow.tokens.get("a")))
        slow.connection.is_paused = True  # type: ignore[attr-defined]
        assert await other.answer("b") == expected(prompt(30), 100)
        await c.until(lambda: node.worker.inspect().num_requests == 0)
        assert node.worker.stats().decode.num_aborted == 1
        slow.connection.resume()  # type: ignore[attr-defined]
        await c.until(lambda: bool(losses))
        got = slow.tokens["a"]
        assert losses == [len(got)]
        assert got == expected(prompt(20), len(got))
        assert "a" not in slow.last
        assert not slow.connection.is_connected


async def test_an_output_that_fits_into_no_message_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster() as c:
        node = await c.join(WorkerRole.BOTH)
        client = await c.client(node)
        monkeypatch.setattr(wire, "MAX_FRAME_BYTES", 5_000)
        client.send("large", prompt(400), max_tokens=3000, prompt_logprobs=5)
        client.send("small", prompt(30), max_tokens=20)
        await client.until(lambda: "large" in client.refused)
        refusal = client.refused["large"]
        assert (refusal.status, refusal.retryable) == (413, False)
        assert await client.answer("small") == expected(prompt(30), 20)
        await c.until(lambda: node.worker.inspect().num_requests == 0)


def test_outputs_that_wait_together_are_joined_without_a_loss() -> None:
    first = TokenOutput("a", (7,), num_cached_tokens=4, prompt_logprobs=(None,), decision="local")
    outputs = [first, TokenOutput("a", (8, 9), position=1), TokenOutput("a", (3,), position=3)]
    last = TokenOutput("a", (5,), position=4, finish_reason=FinishReason.STOP, stop_token=5)
    whole = msgspec.structs.replace(first, token_ids=(7, 8, 9, 3, 5), finish_reason=FinishReason.STOP, stop_token=5)
    assert joined([*outputs, last]) == [whole]
    assert joined([first]) == [first]


@pytest.mark.parametrize(
    "output",
    [
        TokenOutput("a", (), position=1, finish_reason=FinishReason.ABORT),
        TokenOutput("a", (), position=1, finish_reason=FinishReason.ERROR, error="NaN", is_final=True),
        TokenOutput("a", (), position=1, finish_reason=FinishReason.STOP),
        TokenOutput("a", (8,), position=0),
        TokenOutput("a", (8,), position=2),
        TokenOutput("a", (8,), position=1, logprobs=(PositionLogprobs(TokenLogprob(8, -1.0, 1), ()),)),
    ],
)
def test_an_output_that_does_not_continue_the_one_before_stays_alone(output: TokenOutput) -> None:
    outputs = [TokenOutput("a", (7,)), output]
    assert joined(outputs) == outputs


def test_an_answer_that_has_ended_goes_on_in_none() -> None:
    outputs = [TokenOutput("a", (7,), finish_reason=FinishReason.LENGTH), TokenOutput("a", (8,), position=1)]
    assert joined(outputs) == outputs


async def test_steps_that_the_loop_is_behind_with_are_sent_together() -> None:
    async with cluster() as c:
        node = await c.join(WorkerRole.BOTH)
        client = await c.client(node)
        batches: list[list[tuple[int, ...]]] = []

        def receive(message: Message) -> None:
            if isinstance(message, OutputBatch):
                batches.append([output.token_ids for output in message.outputs])
            client.receive(message)

        client.connection.on_message(receive)
        begin = threading.Event()
        node.engine.post(lambda _: begin.wait(60.0))
        client.send("a", prompt(20), max_tokens=8)
        await c.until(lambda: node.worker.inspect().num_requests == 1)
        for position in range(3):
            node.worker.decode.hand_on([TokenOutput("a", (position,), position=position)])
        await client.until(lambda: client.tokens.get("a") == [0, 1, 2])
        assert batches == [[(0, 1, 2)]]
        begin.set()
