"""Frames that nobody meant: random bytes, mutations of real ones, and well-formed nonsense, for every listening port.

Everything follows from a seed. The senders talk to processes of a cluster that the caller has started on loopback, are
bounded in count and time, and never look at the answers: what matters is what is left of the cluster afterwards.
``python -m tests.system.test_fuzz --frames 100000`` runs many of them against a cluster of its own.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import random
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import msgspec
import zmq

from kvrelay.control.base import ControlPlane, Keys
from kvrelay.control.nats.connection import NatsConnection
from kvrelay.core.activity import Activity, Spent
from kvrelay.core.control_codec import decode_prefill
from kvrelay.core.event_codec import ReplayRequest, encode_frame
from kvrelay.core.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Flow,
    KvEventBatch,
    LoadCost,
    LoadMetrics,
    TokenCounts,
    TransferCost,
)
from kvrelay.core.handoff import FIRST_PREFIX, HandoffId, HandoffOrder, Pair, PrefixHolder, RemotePrefillRequest
from kvrelay.core.messages import (
    PROTOCOL_VERSION,
    AbortRequest,
    AdminReply,
    AdminRequest,
    GenerateRequest,
    OutputBatch,
    Ping,
    PrefillLost,
    SessionPaused,
    TokenOutput,
)
from kvrelay.core.sampling import SamplingParams
from kvrelay.core.step_cost import StepCost
from kvrelay.core.token_ids import to_bytes
from kvrelay.core.workers import CallerInfo, KvMetadata, WorkerInfo
from kvrelay.handoff.messages import (
    HandoffAbandon,
    HandoffClaim,
    HandoffDone,
    HandoffFetched,
    HandoffGrant,
    HandoffProgress,
    HandoffReady,
    HandoffReleased,
    Prefix,
)
from kvrelay.rpc import CurveKeys, new_curve_keys
from kvrelay.rpc.wire import encode_message

INTEGERS = (0, -1, 1, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, -(2**63), 2**64 - 1)
PICKLE = pickle.dumps({"cmd": "__import__('os')._exit(3)", "data": list(range(50))})
MARKER = bytes(range(256))
FRAMES_PER_CONNECTION = 100
SEND_TIMEOUT_MS = 20_000
CONNECT_TIMEOUT_S = 5.0
FUZZING_WORKER = "prefill-0"
HTTP_PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/models", "/health", "/x")


def random_bytes(rng: random.Random, most: int = 200) -> bytes:
    return rng.randbytes(rng.randrange(most))


def mutated(rng: random.Random, frame: bytes, other: bytes) -> bytes:
    """``frame`` with one to four wounds: bits, bytes and pieces changed, cut, doubled, or taken from ``other``."""
    data = bytearray(frame)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(7):
            case 0 if at < len(data):
                data[at] ^= 1 << rng.randrange(8)
            case 1 if at < len(data):
                data[at] = rng.choice((0, 0x7F, 0x80, 0xC0, 0xCF, 0xD3, 0xDF, 0xFF))
            case 2:
                del data[at : at + rng.randrange(9)]
            case 3:
                data[at:at] = data[at : at + rng.randrange(30)]
            case 4:
                data[at:at] = random_bytes(rng, 9)
            case 5:
                data[at : at + 9] = b"\xcf" + rng.choice(INTEGERS[:-1]).to_bytes(8, "big", signed=True)
            case _:
                data[at:] = other[rng.randrange(len(other) + 1) :]
    return bytes(data)


def nonsense(rng: random.Random, value: Any) -> Any:
    """A decoded message with a few of its values replaced by others, mostly of the same type: it still parses."""
    if isinstance(value, dict):
        return {key: nonsense(rng, item) if key != "type" else item for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [nonsense(rng, item) for item in value]
        return items * rng.choice((0, 1, 1, 1, 1, 3))
    if rng.random() > 0.15 or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return rng.choice(INTEGERS)
    if isinstance(value, float):
        return rng.choice((0.0, -1.0, 1e308, float("nan"), float("inf"), 1e-320))
    if isinstance(value, str):
        return rng.choice(("", "x" * 300, "é\0\n", "../..", value * 2))
    return rng.choice((None, 0, "", []))


class Corpus:
    """Real frames of every plane, addressed to a real worker, and their descendants."""

    def __init__(self, rng: random.Random, worker: WorkerInfo) -> None:
        self._rng = rng
        name = worker.worker_id
        sampling = SamplingParams(max_tokens=4, temperature=0.0, stop_token_ids=(3,), logit_bias={5: 1.0})
        tokens = to_bytes(range(20, 60))
        # ``drain`` and ``role`` are admin commands, not noise: a worker that runs them has not failed.
        self.requests = [
            encode_message(message)
            for message in (
                GenerateRequest("fuzz", name, tokens, sampling, (7, 8)),
                GenerateRequest("fuzz-2", name, tokens * 8, msgspec.structs.replace(sampling, logprobs=3, seed=1)),
                GenerateRequest(
                    "fuzz-3",
                    name,
                    tokens * 8,
                    sampling,
                    priority=1,
                    order=HandoffOrder.PREFILL_FIRST,
                    pair=Pair(FUZZING_WORKER, name),
                    slo_ttft_ms=1.0,
                    slo_itl_ms=1.0,
                    explain=True,
                    report_interval=16,
                    holder=PrefixHolder(FUZZING_WORKER, 32),
                ),
                PrefillLost("fuzz"),
                SessionPaused("fuzz", "bash", within_s=2.0),
                AbortRequest("fuzz"),
                HandoffClaim(HandoffId(name, 1), FUZZING_WORKER, worker.kv_compatibility),
                HandoffClaim(
                    HandoffId(name, 2), FUZZING_WORKER, worker.kv_compatibility, prefix=Prefix(tuple(range(20, 60)))
                ),
                HandoffClaim(
                    HandoffId(name, FIRST_PREFIX),
                    FUZZING_WORKER,
                    worker.kv_compatibility,
                    prefix=Prefix(tuple(range(20, 60))),
                ),
                HandoffProgress(HandoffId(name, 1), 1, 5),
                HandoffDone(HandoffId(name, 1), 1, 7, None, 1024, 0.5, (1, 2), 5),
                HandoffReady(HandoffId(name, 1), 1, (1, 2), 7, None, 0.5, (1, 2), 5),
                HandoffFetched(HandoffId(name, 1), 1),
                HandoffReleased(HandoffId(name, 1), FUZZING_WORKER, "gone"),
                HandoffGrant(HandoffId(name, 1), 1, (1, 2, 3), 16),
                HandoffAbandon(HandoffId(name, 1), 1),
                OutputBatch((TokenOutput("fuzz", (1, 2)),)),
                Ping(1),
                AdminRequest(1, "status"),
                AdminRequest(2, "check_integrity"),
                AdminReply(1, "{}"),
            )
        ]
        stored = BlockStored(None, (2**63, 2), worker.block_size)
        self.events = [
            encode_frame(KvEventBatch(name, worker.epoch, 0, (stored, BlockRemoved((2,))))),
            encode_frame(KvEventBatch(name, worker.epoch, 7, (AllBlocksCleared(),))),
        ]
        load = LoadMetrics(name, 1, 2, 3, 4, 5, 0.5, 0.5)
        costs = {
            "step_cost": StepCost(),
            "transfer_costs": (TransferCost(FUZZING_WORKER, 1e-6),),
            "load_costs": (LoadCost("host", 1e-6, 1e-3),),
            "flows": (Flow(FUZZING_WORKER, True, 1, 2, 0.5),),
            "tokens": TokenCounts(1, 2),
            "activity": Activity({"remote": 1}, {"host": 2}, Spent(1, 0.5), prefills=(1, 2), cpu_s=0.5, rss_bytes=9),
        }
        self.loads = [encode_frame(load), encode_frame(msgspec.structs.replace(load, **costs))]
        self.replays = [encode_frame(ReplayRequest(0)), encode_frame(ReplayRequest(-1, 5, 2))]
        prefill = RemotePrefillRequest(
            HandoffId(name, 1),
            name,
            "fuzz",
            tuple(range(20, 60)),
            0,
            sampling,
            (1, 2, 3),
            0,
            decode_address=worker.address,
            model=worker.model,
            kv_compatibility=worker.kv_compatibility,
            timeout_s=60,
        )
        self.prefills = [msgspec.msgpack.encode(prefill)]
        decode_prefill(self.prefills[0])

    def frame(self, kind: Sequence[bytes]) -> bytes:
        """Random, mutated, nonsense or as it should be."""
        rng, frame = self._rng, self._rng.choice(kind)
        match rng.randrange(8):
            case 0:
                return random_bytes(rng)
            case 1 | 2 | 3:
                return mutated(rng, frame, rng.choice((*kind, PICKLE, MARKER)))
            case 4 | 5 | 6:
                return self._nonsense(frame)
            case _:
                return frame

    def _nonsense(self, frame: bytes) -> bytes:
        if frame.startswith(b"{"):
            return json.dumps(nonsense(self._rng, json.loads(frame))).encode()
        head, body = (frame[:1], frame[1:]) if frame[:1] == bytes([PROTOCOL_VERSION]) else (b"", frame)
        value = nonsense(self._rng, msgspec.msgpack.decode(body))
        try:
            return head + msgspec.msgpack.encode(value)
        except (OverflowError, msgspec.MsgspecError):
            return frame


def fuzz_request_plane(worker: WorkerInfo, callers: Sequence[CurveKeys], count: int, seed: int) -> None:
    """``count`` ZMQ messages over many connections of ``callers``, which the worker knows, some messages of several
    frames, and broken ZMTP beside them."""
    rng = random.Random(seed)
    corpus = Corpus(rng, worker)
    context = zmq.Context()
    try:
        for begin in range(0, count, FRAMES_PER_CONNECTION):
            with context.socket(zmq.DEALER) as dealer:
                dealer.setsockopt(zmq.LINGER, 2000)
                dealer.setsockopt(zmq.SNDTIMEO, SEND_TIMEOUT_MS)
                keys = rng.choice(callers)
                dealer.curve_serverkey = worker.public_key.encode()
                dealer.curve_publickey, dealer.curve_secretkey = keys.public, keys.secret
                dealer.connect(worker.address)
                for _ in range(min(FRAMES_PER_CONNECTION, count - begin)):
                    frames = [corpus.frame(corpus.requests)]
                    if rng.random() < 0.05:
                        frames += [random_bytes(rng) for _ in range(rng.randrange(3))]
                    dealer.send_multipart(frames)
            _send_raw(rng, worker.address.removeprefix("tcp://"), _broken_greeting(rng))
    finally:
        context.term()


@asynccontextmanager
async def known_callers(control: ControlPlane, keys: Keys, worker: WorkerInfo) -> AsyncIterator[list[CurveKeys]]:
    """A frontend, an operator and a prefill worker, as far as discovery can tell."""
    callers = [new_curve_keys() for _ in range(3)]
    frontend, operator, prefill = (each.public.decode() for each in callers)
    metadata = KvMetadata(
        FUZZING_WORKER, 0, "nixl", b"", 0, 0, 1, "cpu", 0, worker.kv_compatibility, prefill, worker.lease_ttl_s
    )
    entries = {
        keys.frontend("fuzz"): CallerInfo("fuzz", frontend),
        keys.operator("fuzz"): CallerInfo("fuzz", operator),
        keys.worker_kv_metadata(FUZZING_WORKER, 0): metadata,
    }
    lease = await control.discovery.grant(worker.lease_ttl_s)
    for key, entry in entries.items():
        await control.discovery.put(key, msgspec.json.encode(entry), lease)
    try:
        yield callers
    finally:
        await lease.revoke()


def _broken_greeting(rng: random.Random) -> bytes:
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL".ljust(54, b"\0")
    return rng.choice((mutated(rng, greeting, PICKLE), greeting + random_bytes(rng), random_bytes(rng, 2000), PICKLE))


def _send_raw(rng: random.Random, address: str, data: bytes) -> None:
    """Connect, send, and leave: at once, or after the first answer."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S) as connection:
        try:
            connection.sendall(data)
            if rng.random() < 0.5:
                connection.settimeout(0.05)
                connection.recv(4096)
        except OSError:
            pass


def fuzz_http(url: str, count: int, seed: int) -> None:
    """``count`` HTTP requests: broken syntax, broken bodies, and clients that leave in the middle."""
    rng = random.Random(seed)
    parts = urlsplit(url)
    for _ in range(count):
        _send_raw(rng, parts.netloc, _http_frame(rng))


def _http_frame(rng: random.Random) -> bytes:
    body: dict[str, Any] = {
        "prompt": rng.choice(("hello", [5, 6, 7], ["a", "b"], "x" * 3000)),
        "messages": [{"role": "user", "content": "hi"}],
        "tokens": [5, 6],
        "max_tokens": 3,
        "temperature": 0.5,
        "stop": ["a"],
        "stream": rng.random() < 0.5,
        "logit_bias": {"5": 1},
        "n": 1,
        "seed": 1,
    }
    data = json.dumps(nonsense(rng, body)).encode()
    if rng.random() < 0.3:
        data = mutated(rng, data, PICKLE)
    length = len(data) if rng.random() < 0.9 else rng.choice((-1, 0, 10**30, len(data) + 7))
    method = rng.choice(("POST", "POST", "POST", "GET", "PUT", "HEAD", "BREW"))
    head = f"{method} {rng.choice(HTTP_PATHS)} HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\n".encode()
    match rng.randrange(6):
        case 0:
            return random_bytes(rng, 400)
        case 1:
            return mutated(rng, head + data, head)
        case 2:
            return (head + data)[: rng.randrange(len(head + data) + 1)]
        case _:
            return head + data


async def fuzz_control(url: str, namespace: str, worker: WorkerInfo, count: int, seed: int) -> None:
    """``count`` messages on the subjects of cache events, load samples, replays and the prefill queue."""
    rng = random.Random(seed)
    corpus, keys = Corpus(rng, worker), Keys(namespace)
    subjects = [
        (keys.worker_kv_events(worker.worker_id), corpus.events),
        (keys.worker_load(worker.worker_id), corpus.loads),
        (keys.worker_replay(worker.worker_id), corpus.replays),
        (keys.worker_kv_events("nobody"), corpus.events),
        (keys.worker_load("nobody"), corpus.loads),
    ]
    queue = (f"{keys.subject_root}prefill.queue", corpus.prefills)
    connection = await NatsConnection.connect(url, CONNECT_TIMEOUT_S)
    try:
        for number in range(count):
            subject, kind = queue if number % 40 == 0 else rng.choice(subjects)
            reply = connection.new_inbox() if rng.random() < 0.2 else ""
            await connection.publish(subject, corpus.frame(kind), reply=reply)
            if number % 200 == 199:
                await connection.flush(10.0)
                await asyncio.sleep(0)
    finally:
        await connection.close()
