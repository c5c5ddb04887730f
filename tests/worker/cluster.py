"""A cluster in one process: mock engines, loopback RPC and KV transfer with faults on request, a real NATS server.

Each worker is the production ``Worker``, wired as ``launch`` does it. Whatever a test does, at its end no write may
have landed in blocks that were not granted at that moment: that is the hazard all of this is about.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
from tests.contracts import control_servers
from tests.patience import PATIENCE_S, noticed
from tests.rpc.pausing import PausingNetwork
from tests.transfer.faulty_loopback import FaultyFabric, FaultyTransport

from kvrelay.config import (
    ControlConfig,
    DisaggConfig,
    EngineConfig,
    MockConfig,
    TransferConfig,
    WorkerConfig,
    WorkerRole,
)
from kvrelay.control import connect_control
from kvrelay.control.base import ControlPlane, Keys, Lease
from kvrelay.control.nats import connection as nats_connection
from kvrelay.control.nats.bucket import Bucket
from kvrelay.control.nats.connection import NatsConnection
from kvrelay.control.nats.jetstream import JetStream
from kvrelay.control.nats_process import NatsServerProcess
from kvrelay.core.clock import MonotonicClock
from kvrelay.core.event_codec import decode_load
from kvrelay.core.events import LoadMetrics
from kvrelay.core.messages import AbortRequest, GenerateRequest, OutputBatch, Ping, Pong, RequestRefused, TokenOutput
from kvrelay.core.sampling import SamplingParams
from kvrelay.core.sealing import unseal
from kvrelay.core.status import FinishReason
from kvrelay.core.token_ids import to_bytes
from kvrelay.core.workers import CallerInfo
from kvrelay.engine.contract import EngineHost
from kvrelay.engine.core import EngineCore
from kvrelay.engine.step import Executor
from kvrelay.engine.thread import EngineThread
from kvrelay.errors import WorkerUnavailableError
from kvrelay.executors.mock import MockExecutor, mock_generate
from kvrelay.handoff.decode_ledger import DecodeLedger
from kvrelay.handoff.prefill_ledger import PrefillLedger
from kvrelay.rpc.base import RpcClient
from kvrelay.rpc.loopback import LoopbackRpcClient, LoopbackRpcServer
from kvrelay.rpc.wire import Message
from kvrelay.transfer import build_transport, pool_allocator, shared_memory
from kvrelay.transfer import thread as transfer_thread
from kvrelay.transfer.base import Post, PostEnd
from kvrelay.transfer.values import TransferOp
from kvrelay.worker import turns
from kvrelay.worker.cluster import callers
from kvrelay.worker.identity import WorkerIdentity, new_worker_id
from kvrelay.worker.worker import Worker

VOCAB_SIZE = 1000
FRONTEND_KEY = "key of the frontend"
FRONTEND_LEASE_TTL_S = 60.0
WAIT_S = PATIENCE_S
LEASE_TTL_S = PATIENCE_S
"""No machine is so busy that it loses a lease. A test ends one with ``expire_lease``, ``bury`` or ``run_out``."""
LOOPBACK = TransferConfig(transport="loopback", transfer_timeout_s=10.0)
"""Its time limit is shorter than what a fence leaves of a lease: ``Cluster.time_out_transfers`` passes no fence."""


class SkippingClock(MonotonicClock):
    """A time by which something is due; a test skips what it would have to wait for."""

    def __init__(self) -> None:
        self._skipped_s = 0.0

    def now(self) -> float:
        return super().now() + self._skipped_s

    def skip(self, seconds: float) -> None:
        self._skipped_s += seconds


def prompt(length: int, start: int = 0) -> tuple[int, ...]:
    return tuple((7 * number + start) % VOCAB_SIZE for number in range(length))


def expected(tokens: tuple[int, ...], count: int) -> list[int]:
    return mock_generate(tokens, count, vocab_size=VOCAB_SIZE)


@dataclass
class Node:
    """One worker and what a test wants to reach of it."""

    worker: Worker
    engine: EngineHost
    core: EngineCore
    server: LoopbackRpcServer
    transport: FaultyTransport
    control: ControlPlane
    running: asyncio.Task[None]
    lease: Lease
    clients: list[RpcClient]
    """Its connections to other workers."""
    is_held: bool = False
    """A step of its engine waits (``hold_steps``)."""

    @property
    def id(self) -> str:
        return self.worker.identity.worker_id

    @property
    def ledger(self) -> DecodeLedger:
        """Of the hand-offs that bring KV here."""
        return self.worker.decode.handoffs.ledger

    @property
    def outgoing(self) -> PrefillLedger:
        """Of the hand-offs that take KV elsewhere."""
        return self.worker.prefill.handoffs.ledger

    def granted_blocks(self) -> frozenset[int]:
        """Blocks that some prefill worker may write now."""
        return self.worker.inspect().writable_blocks

    async def status(self) -> dict:
        return await self.worker.status()

    async def kill(self, cluster: Cluster) -> None:
        """As SIGKILL would: connections break, memory is out of reach, nothing is revoked (see ``Cluster.bury``)."""
        cluster.fabric.kill(self.id)
        await self.server.close()
        for client in self.clients:
            await client.close()
        cluster.connectors[self.id] = _dead
        await self.control.close()
        self.running.cancel()
        await self.worker.close()
        cluster.nodes.remove(self)

    def cut_from_nats(self) -> Callable[[], None]:
        """As a partition does; other connections stay. Returns what mends it."""
        connection = self.control.connection
        client = connection.client

        class Cut:
            is_connected = False

            def __getattr__(self, name: str) -> object:
                return getattr(client, name)

        def mend() -> None:
            connection.client = client

        connection.client = Cut()
        return mend

    def run_out(self) -> None:
        """Its lease ends by its own clock, until the next keepalive."""
        self.lease.alive_until_s = -math.inf

    def slow_down(self, step_s: float) -> None:
        """Every step takes so long, by the test's event loop: while a busy machine keeps the loop from its turns, the
        engine gets no further either."""
        execute, loop = self.core.executor.execute, asyncio.get_running_loop()

        def slow(work: object) -> object:
            asyncio.run_coroutine_threadsafe(asyncio.sleep(step_s), loop).result(PATIENCE_S)
            return execute(work)

        self.core.executor.execute = slow

    def hold_steps(self) -> threading.Event:
        """Steps wait in the middle until the event is set; ``is_held`` while one does."""
        execute, may_go_on = self.core.executor.execute, threading.Event()

        def held(work: object) -> object:
            self.is_held = not may_go_on.is_set()
            may_go_on.wait(PATIENCE_S)
            self.is_held = False
            return execute(work)

        self.core.executor.execute = held
        return may_go_on

    def count_posts(self) -> Counter[str]:
        """What is posted to its engine from now on, by name."""
        post, names = self.engine.post, Counter[str]()

        def counted(callback: Any) -> None:
            names[getattr(callback, "func", callback).__name__] += 1
            post(callback)

        self.engine.post = counted
        return names

    def hold_checksums(self) -> tuple[threading.Event, threading.Event]:
        """Checksums wait: the first event tells that one does, the second lets them all go on."""
        checksum = self.core.executor.checksum_blocks
        waiting, go_on = threading.Event(), threading.Event()

        def held(block_ids: Sequence[int]) -> tuple[int, ...]:
            waiting.set()
            assert go_on.wait(PATIENCE_S)
            return checksum(block_ids)

        self.core.executor.checksum_blocks = held
        return waiting, go_on

    def lose_notifications(self, on_lost: Callable[[], object] = lambda: None) -> None:
        """What peers notify after their last writes does not arrive. ``on_lost`` runs on the transfer thread."""
        poll = self.transport.poll

        def polling() -> tuple[list[PostEnd], list[bytes]]:
            completions, notifications = poll()
            for _ in notifications:
                on_lost()
            return completions, []

        self.transport.poll = polling

    def fail_at_step(self, number: int) -> None:
        """The device breaks."""
        execute = self.core.executor.execute
        steps = itertools.count(1)

        def failing(work: object) -> object:
            if next(steps) == number:
                raise RuntimeError("device lost")
            return execute(work)

        self.core.executor.execute = failing


async def _dead(address: str, public_key: str) -> RpcClient:
    raise WorkerUnavailableError("this process has been killed")


@dataclass
class Client:
    """A frontend's end of one connection."""

    connection: RpcClient
    worker_id: str
    tokens: dict[str, list[int]] = field(default_factory=dict)
    last: dict[str, TokenOutput] = field(default_factory=dict)
    refused: dict[str, RequestRefused] = field(default_factory=dict)
    decisions: dict[str, str] = field(default_factory=dict)
    cached: dict[str, int] = field(default_factory=dict)
    """Tokens of each prompt that were not computed."""
    pongs: list[Pong] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def receive(self, message: Message) -> None:
        if isinstance(message, OutputBatch):
            for output in message.outputs:
                self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
                if output.num_cached_tokens is not None:
                    self.cached[output.request_id] = output.num_cached_tokens
                if output.decision:
                    self.decisions[output.request_id] = output.decision
                if output.finish_reason is not None:
                    self.last[output.request_id] = output
        elif isinstance(message, RequestRefused):
            self.refused[message.request_id] = message
        elif isinstance(message, Pong):
            self.pongs.append(message)
        self.changed.set()

    def send(self, request_id: str, tokens: tuple[int, ...], max_tokens: int = 8, **settings: object) -> None:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, **settings)
        self.connection.send(GenerateRequest(request_id, self.worker_id, to_bytes(tokens), sampling))

    def send_message(self, request_id: str, tokens: tuple[int, ...], salt: str | None = None, **fields: object) -> None:
        """With other fields of the message set."""
        sampling = SamplingParams(max_tokens=8, temperature=0.0, cache_salt=salt)
        self.connection.send(GenerateRequest(request_id, self.worker_id, to_bytes(tokens), sampling, **fields))

    async def loads(self, node: Node) -> list[LoadMetrics]:
        """The load samples that the worker publishes from now on. Their seals are verified, as by a frontend."""
        self.connection.send(Ping(1))
        await self.until(lambda: self.pongs)
        secret, samples = self.pongs[-1].publish_secret, []
        assert secret
        await node.control.events.subscribe(
            Keys(node.worker.settings.control.namespace).worker_load(node.id),
            lambda subject, data: samples.append(decode_load(unseal(secret, subject, data))),
        )
        return samples

    def abort(self, request_id: str) -> None:
        self.connection.send(AbortRequest(request_id))

    async def until(self, condition) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    async def answer(self, request_id: str) -> list[int]:
        await self.until(lambda: request_id in self.last or request_id in self.refused)
        assert request_id not in self.refused, self.refused[request_id]
        assert self.last[request_id].finish_reason is FinishReason.LENGTH, self.last[request_id].error
        return self.tokens[request_id]


async def expire_lease(node: Node, by: Node | None = None) -> str:
    """As another worker's watch does after a pause. Gives the id of the lease."""
    old = node.lease.lease_id
    await control_servers.expire_lease(Bucket(JetStream((by or node).control.connection), "default"), old)
    return old


@dataclass
class Cluster:
    """The shared planes, and how a worker joins."""

    control: ControlConfig
    disagg: DisaggConfig
    mock: MockConfig
    transfer: TransferConfig
    clock: SkippingClock = field(default_factory=SkippingClock)
    """Of all its workers' ledgers."""
    transfer_clock: SkippingClock = field(default_factory=SkippingClock)
    """Of all its workers' transfer threads."""
    fabric: FaultyFabric = field(default_factory=FaultyFabric)
    network: PausingNetwork = field(default_factory=PausingNetwork)
    nodes: list[Node] = field(default_factory=list)
    late_writes: list[str] = field(default_factory=list)
    connectors: dict[str, Callable[[str, str], Awaitable[RpcClient]]] = field(default_factory=dict)
    """By worker id: what a worker connects by, instead of ``connect``."""

    async def join(
        self,
        role: WorkerRole,
        build: Callable[[EngineConfig], Executor] | None = None,
        host: Callable[[str], EngineHost] | None = None,
        **engine: int,
    ) -> Node:
        """``build``: another executor than the mock; ``host``: the whole engine of a worker of this id."""
        config = EngineConfig(**{"num_blocks": 512, "max_num_seqs": 16, "max_num_batched_tokens": 256, **engine})
        worker_id = new_worker_id()
        memory = shared_memory(self.transfer)
        allocate = pool_allocator(self.transfer, memory)
        if build is None:
            executor: Executor = MockExecutor(
                config,
                self.mock,
                vocab_size=VOCAB_SIZE,
                max_model_len=4096,
                allocate=allocate,
                holding_bytes=self.transfer.kv_buffer_size,
            )
        else:
            executor = await asyncio.to_thread(build, config)
        core = EngineCore(executor, config, MonotonicClock(), worker_id=worker_id)
        engine_host = EngineThread(core) if host is None else await asyncio.to_thread(host, worker_id)
        key = f"key of {worker_id}"
        settings = WorkerConfig(
            model_path=Path("m"),
            model="m",
            role=role,
            engine_kind="mock",
            engine=config,
            transfer=self.transfer,
            control=self.control,
            disagg=self.disagg,
        )
        control = await connect_control(self.control)
        server = self.network.server()
        transport = build_transport(self.transfer, worker_id, self.fabric, memory)
        if isinstance(transport, FaultyTransport):
            self._watch_writes(transport)
        grant, leases, clients = control.discovery.grant, [], []

        async def granting(ttl_s: float) -> Lease:
            leases.append(await grant(ttl_s))
            return leases[-1]

        async def connect(address: str, public_key: str) -> RpcClient:
            clients.append(await self.connectors.get(worker_id, partial(self.connect, key))(address, public_key))
            return clients[-1]

        control.discovery.grant = granting
        worker = Worker(settings, WorkerIdentity(worker_id, key), engine_host, transport, control, server, connect)
        await worker.start()
        control.discovery.grant = grant
        running = asyncio.create_task(worker.run())
        node = Node(worker, engine_host, core, server, transport, control, running, leases[0], clients)
        self.nodes.append(node)
        return node

    def _watch_writes(self, transport: FaultyTransport) -> None:
        def check(post: Post) -> None:
            owner = next((node for node in self.nodes if node.id == post.worker_id), None)
            if owner is not None and post.op is TransferOp.WRITE:
                block_bytes = owner.engine.facts.kv_layout.block_bytes
                pieces = zip(post.pieces.remote_offsets.tolist(), post.pieces.lengths.tolist(), strict=True)
                blocks = {
                    block for at, size in pieces for block in range(at // block_bytes, -(-(at + size) // block_bytes))
                }
                granted = owner.granted_blocks()
                if not blocks <= granted:
                    self.late_writes.append(f"{transport!r} wrote {blocks - granted} of {owner.id}")

        transport.before.append(check)

    async def connect(self, own_key: str, address: str, public_key: str) -> LoopbackRpcClient:
        client = self.network.client(address, own_key)
        await client.start()
        return client

    async def client(self, node: Node) -> Client:
        """Of a frontend that discovery knows."""
        await self.register_frontend()
        connection = self.network.client(node.server.address, FRONTEND_KEY)
        client = Client(connection, node.id)
        connection.on_message(client.receive)
        await connection.start()
        return client

    async def register_frontend(self) -> None:
        discovery = self.nodes[0].control.discovery
        entry = CallerInfo("f", FRONTEND_KEY)
        key = Keys(self.control.namespace).frontend(entry.caller_id)
        await discovery.put(key, msgspec.json.encode(entry), await discovery.grant(FRONTEND_LEASE_TTL_S))

    async def pair(self) -> tuple[Node, Node, Client]:
        """A prefill and a decode worker that know of each other, and a client of the latter."""
        prefill = await self.join(WorkerRole.PREFILL)
        decode = await self.join(WorkerRole.DECODE)
        await self.acquainted(prefill, decode)
        return prefill, decode, await self.client(decode)

    async def acquainted(self, prefill: Node, decode: Node) -> None:
        await self.until(lambda: len(decode.worker.inspect().peers.prefill) == 1)
        await self.until(lambda: decode.id in prefill.worker.inspect().peers.leased)

    async def until(self, condition, timeout_s: float = PATIENCE_S) -> None:
        await noticed(condition, timeout_s)

    async def check_idle(self) -> None:
        """Every pool is whole and nothing is in use, once what is in flight has ended."""
        for node in self.nodes:
            # Entries that nobody waits for any more may still be pulled: those are computed until they are refused.
            await self.until(
                lambda node=node: (
                    not node.core.has_unfinished()
                    and all(pool.num_free == pool.num_blocks for pool in (node.core.pool, node.core.holding.blocks))
                )
            )
            # Its transfer thread sleeps again.
            await self.until(lambda node=node: node.worker.stats().transfer.num_open_handoffs == 0)
            await node.engine.call(lambda core: core.check_integrity())
            node.worker.check_integrity()

    async def bury(self, dead: Node) -> None:
        """The lease of a worker that was killed expires, and the time passes after which it writes nothing more."""
        await expire_lease(dead, by=self.nodes[0])
        await self.until(lambda: not any(dead.id in node.worker.inspect().peers.leased for node in self.nodes))
        self.clock.skip(self.control.lease_ttl_s)

    def time_out_transfers(self) -> None:
        """Those that have not ended yet."""
        self.transfer_clock.skip(self.transfer.transfer_timeout_s)

    async def gone(self, node: Node) -> BaseException | None:
        """Wait until the worker has left by itself; what it ended with."""
        await asyncio.wait([node.running], timeout=PATIENCE_S)
        await node.control.close()
        self.nodes.remove(node)
        return node.running.exception()

    async def leave(self) -> None:
        for node in self.nodes:
            node.worker.request_drain()
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*(node.running for node in self.nodes))
        for node in self.nodes:
            await node.control.close()


_idle_servers: list[NatsServerProcess] = []
"""Without streams. To start one takes as long as most tests."""


def end_servers() -> None:
    """Once no more tests come."""
    while _idle_servers:
        _idle_servers.pop().stop()


async def remove_streams(nats: NatsServerProcess) -> None:
    connection = await NatsConnection.connect(nats.url, PATIENCE_S)
    for name in json.loads((await connection.request("$JS.API.STREAM.NAMES", b"")).data)["streams"] or ():
        await connection.request(f"$JS.API.STREAM.DELETE.{name}", b"")
    await connection.close()


@asynccontextmanager
async def cluster(
    *, lease_ttl_s: float = LEASE_TTL_S, transfer: TransferConfig = LOOPBACK, tail_tokens: int = 0, **settings: float
) -> AsyncIterator[Cluster]:
    """A cluster on a NATS server that no other one uses meanwhile; checked and taken down at the end. Its workers wait
    for the keys of those who call them, and for the server, as patiently as the tests do."""
    nats = _idle_servers.pop() if _idle_servers else NatsServerProcess()
    disagg = replace(DisaggConfig(disagg_policy="threshold", max_local_prefill_length=64), **settings)
    control = ControlConfig(control=nats.start(), lease_ttl_s=lease_ttl_s)
    shared = Cluster(control, disagg, MockConfig(speedup_ratio=0, tail_tokens=tail_tokens), transfer)
    try:
        with (
            mock.patch.object(turns, "MonotonicClock", return_value=shared.clock),
            mock.patch.object(transfer_thread, "MonotonicClock", return_value=shared.transfer_clock),
            mock.patch.object(callers, "ADMISSION_WAIT_S", PATIENCE_S),
            mock.patch.object(nats_connection, "REQUEST_TIMEOUT_S", PATIENCE_S),
        ):
            yield shared
            await shared.check_idle()
            await shared.leave()
        assert shared.late_writes == []
        await remove_streams(nats)
    except BaseException:
        try:
            for node in list(shared.nodes):
                await node.kill(shared)
        finally:
            nats.stop()
        raise
    _idle_servers.append(nats)
