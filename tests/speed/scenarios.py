"""What is counted: each scenario does one thing often enough, warm, on a clock that stands still.

A scenario yields its name and the counts of one unit: a step, a request, a chunk, a decision, a hand-off.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from unittest import mock

import numpy as np
import numpy.typing as npt
from tests.engine.conftest import VOCAB_SIZE
from tests.frontend.doubles import FakeCluster, Script, write_model_dir
from tests.speed import workers
from tests.speed.counting import Counts, counting

from kvrelay.config import EngineConfig, MockConfig, RouterConfig, RunnerConfig, WorkerRole
from kvrelay.core.clock import ManualClock, MonotonicClock
from kvrelay.core.event_log import KvEventLog
from kvrelay.core.events import BlockStored, LoadMetrics
from kvrelay.core.grammar import Grammar, GrammarKind
from kvrelay.core.handoff import RemotePrefillRequest
from kvrelay.core.hashing import compute_sequence_hashes
from kvrelay.core.layout import BlockRun
from kvrelay.core.messages import OutputBatch, Ping, TokenOutput
from kvrelay.core.sampling import SamplingParams
from kvrelay.core.workers import WorkerInfo
from kvrelay.data import bundled_checkpoint_path
from kvrelay.engine.core import EngineCore
from kvrelay.engine.request import Request
from kvrelay.engine.step import Executor
from kvrelay.executors import grammars
from kvrelay.executors.grammars import GrammarCompiler, GrammarMasks
from kvrelay.executors.mock import MockExecutor
from kvrelay.executors.torch import build_executor
from kvrelay.executors.torch.checkpoints import make_model
from kvrelay.handoff import decode_events as de
from kvrelay.handoff import prefill_events as pe
from kvrelay.handoff.base import Registered
from kvrelay.handoff.decode_ledger import DecodeLedger
from kvrelay.handoff.decode_state import DecodeRules
from kvrelay.handoff.messages import HandoffClaim, HandoffDone, HandoffFetched, HandoffGrant
from kvrelay.handoff.prefill_ledger import PrefillLedger
from kvrelay.handoff.prefill_state import PrefillRules
from kvrelay.router import Router, RoutingRequest
from kvrelay.rpc.base import Peer
from kvrelay.rpc.wire import Message
from kvrelay.rpc.zmq_client import ZmqRpcClient
from kvrelay.rpc.zmq_server import ZmqRpcServer

Measured = Iterator[tuple[str, dict[str, float]]]

BATCHES = (1, 16, 128)
BLOCK_SIZE = 16


def per_unit(counts: Counts, num_units: int) -> dict[str, float]:
    return {name: round(count / num_units, 2) for name, count in sorted(counts.items()) if count}


# -- engine steps -----------------------------------------------------------------------------------------------------


def engine_steps(directory: Path) -> Measured:
    """A decode step, the mean over one block: one of these steps gives every sequence its next block."""
    model = directory / "model"
    make_model(model, "llama", "tiny", dtype="float32")
    for num_seqs in BATCHES:
        config = EngineConfig(
            num_blocks=8 * num_seqs, block_size=BLOCK_SIZE, max_num_seqs=num_seqs, max_model_len=8 * BLOCK_SIZE
        )
        runner = RunnerConfig(dtype="float32", device="cpu", attention_backend="cpu", num_threads=1)
        mocked = MockExecutor(config, MockConfig(speedup_ratio=0), vocab_size=VOCAB_SIZE, max_model_len=8 * BLOCK_SIZE)
        yield f"step of {num_seqs}, mock", decode_steps(mocked, config, num_seqs)
        yield f"step of {num_seqs}, torch", decode_steps(build_executor(model, runner, config), config, num_seqs)


def decode_steps(executor: Executor, config: EngineConfig, num_seqs: int) -> dict[str, float]:
    core = EngineCore(executor, config, ManualClock(), worker_id="w")
    sampling = SamplingParams(max_tokens=5 * BLOCK_SIZE, temperature=0.0, ignore_eos=True)
    for number in range(num_seqs):
        core.add_request(Request(f"r{number}", [number % 50 + at for at in range(BLOCK_SIZE)], sampling))
    num_tokens = [0] * num_seqs
    while min(num_tokens) < BLOCK_SIZE:
        for output in core.step().outputs:
            num_tokens[int(output.request_id[1:])] += len(output.token_ids)
    with counting() as counts:
        for _ in range(BLOCK_SIZE):
            core.step()
    executor.shutdown()
    return per_unit(counts, BLOCK_SIZE)


# -- grammars ---------------------------------------------------------------------------------------------------------


RECORDS = Grammar(
    GrammarKind.JSON_SCHEMA,
    """{"type":"array","minItems":1000,"items":{"type":"object","required":["name","age"],"additionalProperties":false,
    "properties":{"name":{"type":"string","maxLength":9},"age":{"type":"integer","minimum":0}}}}""",
)


def guessed_steps(directory: Path) -> Measured:
    """What a step does for grammars that the model obeys by itself, without the model."""
    tokenizer_file, (eos_token_id, vocab_size) = bundled_checkpoint_path() / "tokenizer.json", (1, 1024)
    compiler = GrammarCompiler(tokenizer_file, vocab_size, [eos_token_id])
    never_long = {"SLOW_S": 1e9, "PATIENCE_S": 1e9, "INLINE_S": 1e9}
    with mock.patch.multiple(grammars, **never_long):
        for num_rows in (1, 32):
            masks, slots = GrammarMasks(compiler, vocab_size), list(range(num_rows))
            for slot in slots:
                masks.enter(slot, SamplingParams(temperature=0.0, grammar=RECORDS), [])
            answers = np.array([record_tokens(compiler, vocab_size, 16 + 128, seed) for seed in slots])
            for best in answers.T[:16]:
                guess(masks, slots, best)
            with counting() as counts:
                for best in answers.T[16:]:
                    guess(masks, slots, best)
            masks.close()
            yield f"grammars of {num_rows}", per_unit(counts, 128)
    compiler.close()


def record_tokens(compiler: GrammarCompiler, vocab_size: int, num_tokens: int, seed: int) -> list[int]:
    """Any answer that RECORDS allows."""
    masks, draw, answer = GrammarMasks(compiler, vocab_size), Random(seed), list[int]()
    masks.enter(0, SamplingParams(grammar=RECORDS), [])
    for _ in range(num_tokens):
        computing = masks.begin([0])
        step = computing.result() if computing is not None else None
        assert step is not None
        answer.append(draw.choice(np.flatnonzero(~step.forbidden()[0]).tolist()))
        masks.advance([0], answer[-1:])
    masks.close()
    return answer


def guess(masks: GrammarMasks, slots: list[int], best: npt.NDArray[np.int64]) -> None:
    """A step whose rows' best tokens are these."""
    computing = masks.begin(slots, may_guess=True)
    assert computing is not None
    computing.result()
    computing.refused(best.copy())
    if not computing.is_settled:
        masks.advance(slots, best.tolist())


# -- routing decisions ------------------------------------------------------------------------------------------------


def routing(directory: Path) -> Measured:
    """A prompt of 512 tokens among 8 workers; one of them holds half of it."""
    built = Router(RouterConfig(), BLOCK_SIZE, ManualClock())
    prompt = tuple(range(512))
    for number in range(8):
        info = WorkerInfo(
            worker_id=f"w{number}",
            epoch=1,
            role=WorkerRole.DECODE,
            model="m",
            model_path="",
            address="tcp://127.0.0.1:1",
            max_model_len=4096,
            block_size=BLOCK_SIZE,
            num_blocks=1000,
            vocab_size=1000,
            kv_compatibility="x",
        )
        built.add_worker(info)
        built.apply_metrics(LoadMetrics(info.worker_id, number, 8, 10 * number, 1000, 0, 0.01 * number, 0.0, 1))
    held = prompt[:256]
    hashes = compute_sequence_hashes(held, BLOCK_SIZE)
    log = KvEventLog("w3", 1)
    built.apply_events(log.append([BlockStored(None, hashes, BLOCK_SIZE)]))

    def decide(first: int, count: int) -> None:
        for number in range(first, first + count):
            built.choose(RoutingRequest(request_id=f"r{number}", token_ids=prompt))
            built.first_token(f"r{number}")
            built.finished(f"r{number}", 8)

    decide(0, 20)
    with counting() as counts:
        decide(20, 20)
    yield "routing decision", per_unit(counts, 20)


# -- hand-offs --------------------------------------------------------------------------------------------------------


def ledgers(directory: Path) -> Measured:
    """A hand-off without faults, in the ledger of either side: 4 chunks of 4 blocks."""
    blocks, tokens = tuple(range(16)), tuple(range(256))
    decode = DecodeLedger(DecodeRules(block_size=BLOCK_SIZE, kv_compatibility="same"), lambda: 9)
    decode.handle(Registered("p", 10.0, 1), 0.0)

    def at_decode(name: str) -> None:
        decode.handle(de.Opened(name, f"request {name}", blocks, 0, len(tokens)), 0.0)
        actions = decode.handle(de.Claimed(HandoffClaim(name, "p", "same", term=1), "to p"), 0.0)
        (grant,) = [action.message for action in actions if isinstance(action, de.SendGrant)]
        decode.handle(de.Done(HandoffDone(name, grant.generation, 7, None, 0, 0.0, None, 9)), 0.0)
        assert name not in decode.handoffs

    prefill = PrefillLedger(PrefillRules(worker_id="p", block_size=BLOCK_SIZE, kv_compatibility="same"))
    prefill.handle(Registered("d", 10.0, 1), 0.0)
    sampling = SamplingParams()

    def at_prefill(name: str) -> None:
        prefill.handle(pe.Pulled(RemotePrefillRequest(name, "d", name, tokens, 0, sampling, (), 0), 1), 0.0)
        prefill.handle(HandoffGrant(name, 1, blocks, 0, secret=9), 0.0)
        for first in range(0, len(blocks), 4):
            token = pe.FirstToken(7) if first + 4 == len(blocks) else None
            prefill.handle(pe.ChunkComputed(name, BlockRun(first, blocks[first : first + 4]), token), 0.0)
            prefill.handle(pe.Written(name, True), 0.0)
        prefill.handle(HandoffFetched(name, 1), 0.0)
        assert name not in prefill.handoffs

    yield "hand-off, decode ledger", repeated(at_decode)
    yield "hand-off, prefill ledger", repeated(at_prefill)


def repeated(act: Callable[[str], None], num_warm: int = 4, count: int = 16) -> dict[str, float]:
    for number in range(num_warm):
        act(f"warm {number}")
    with counting() as counts:
        for number in range(count):
            act(f"h{number}")
    return per_unit(counts, count)


def worker_requests(directory: Path) -> Measured:
    """A request of 8 tokens from frame to frames: a local prefill of 48 tokens, and a remote one of 480 with what it
    costs both workers."""
    with workers.no_threads(), standing_still():
        counted = asyncio.run(workers.requests())
    yield "worker request, local prefill", per_unit(counted["local"], workers.NUM_REQUESTS)
    yield "worker request, remote prefill, both workers", per_unit(counted["remote"], workers.NUM_REQUESTS)


# -- the request plane ------------------------------------------------------------------------------------------------


def request_plane(directory: Path) -> Measured:
    """A message with one token from worker to frontend over ZMQ: sent, and received until the socket is empty."""
    sent, received = asyncio.run(_messages())
    yield "message sent", per_unit(sent, NUM_MESSAGES)
    yield "message received", per_unit(received, NUM_MESSAGES)


NUM_MESSAGES = 4


async def _messages() -> tuple[Counts, Counts]:
    peers: list[Peer] = []
    messages: list[Message] = []
    server = ZmqRpcServer()
    server.on_message(lambda peer, _: peers.append(peer))
    await server.start()
    client = ZmqRpcClient(server.address)
    client.on_message(messages.append)
    await client.start()
    client.send(Ping(0))
    while not peers:
        await asyncio.sleep(0.01)
    sent, received = Counts(), Counts()
    assert client.endpoint is not None
    for position in range(NUM_MESSAGES):
        with counting() as counts:
            server.send(peers[0], OutputBatch((TokenOutput("r", (7,), position=position),)))
        sent.update(counts)
        assert client.endpoint.socket.poll(60_000)
        with counting() as counts:
            client.endpoint.reader.drain()
        received.update(counts)
    assert len(messages) == NUM_MESSAGES
    await client.close()
    await server.close()
    return sent, received


# -- the frontend -----------------------------------------------------------------------------------------------------


def frontend(directory: Path) -> Measured:
    """From an open connection to the last byte of the answer; the worker is a script and does not count."""
    counted = asyncio.run(_requests(write_model_dir(directory / "tiny")))
    yield "frontend request of 8 tokens", per_unit(counted[0], NUM_REQUESTS)
    yield "frontend stream of 8 tokens", per_unit(counted[1], NUM_REQUESTS)
    chunks = Counts(counted[2])
    chunks.subtract(counted[1])
    yield "streamed chunk", per_unit(chunks, 64 * NUM_REQUESTS)


NUM_REQUESTS = 4


async def _requests(model_dir: Path) -> list[Counts]:
    cluster = FakeCluster(model_dir)
    counted = []
    try:
        await cluster.add_worker("w0", Script(tokens=(40, 50, 60)))
        started = await cluster.start()
        await cluster.until(lambda: len(started.cluster.model(None).worker_ids) == 1)
        client = socket.create_connection(("127.0.0.1", started.port))
        client.setblocking(False)
        with client, standing_still():
            for num_tokens, stream in ((8, False), (8, True), (72, True)):
                await ask(client, num_tokens, stream=stream)
                with counting() as counts:
                    await ask(client, num_tokens, stream=stream)
                counted.append(counts)
    finally:
        await cluster.close()
    return counted


async def ask(client: socket.socket, num_tokens: int, *, stream: bool) -> None:
    """``NUM_REQUESTS`` requests, one after the other, each read to its end."""
    fields = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": num_tokens, "stream": stream}
    body = json.dumps(fields).encode()
    request = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
    for _ in range(NUM_REQUESTS):
        client.send(request)
        answer = b""
        while not is_whole(answer):
            answer += await asyncio.get_running_loop().sock_recv(client, 65536)
        assert answer.startswith(b"HTTP/1.1 200 "), answer


def is_whole(answer: bytes) -> bool:
    head, _, body = answer.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
    return len(body) == int(length[1]) if length else body.endswith(b"0\r\n\r\n")


@contextmanager
def standing_still() -> Iterator[None]:
    """The clocks that the event loop and the package read: each look is 100 ns after the one before, since outputs that
    come at one time are taken for those of one step. No timer runs."""
    looks = itertools.count(time.monotonic(), 1e-7)
    with (
        mock.patch("time.monotonic", side_effect=looks.__next__),
        mock.patch.object(MonotonicClock, "now", side_effect=looks.__next__),
    ):
        yield


SCENARIOS: tuple[Callable[[Path], Measured], ...] = (
    routing,
    ledgers,
    worker_requests,
    request_plane,
    frontend,
    engine_steps,
    guessed_steps,
)
