"""Two production workers on one thread: what a request costs them, with a local prefill and with a remote one.

Their engine and transfer threads are not started. The event loop takes their turns, and only when there is something to
do, so that each run does the same work in the same order.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from tests.speed.counting import Counts, counting

from kvrelay.config import DisaggConfig, EngineConfig, MockConfig, TransferConfig, WorkerConfig, WorkerRole
from kvrelay.control.memory import MemoryBroker
from kvrelay.core.clock import ManualClock
from kvrelay.core.messages import GenerateRequest, OutputBatch
from kvrelay.core.sampling import SamplingParams
from kvrelay.core.token_ids import to_bytes
from kvrelay.engine.core import EngineCore
from kvrelay.engine.thread import EngineThread
from kvrelay.executors.mock import MockExecutor
from kvrelay.rpc.loopback import LoopbackNetwork, LoopbackRpcClient
from kvrelay.rpc.wire import Message
from kvrelay.transfer.loopback import LoopbackFabric, LoopbackTransport
from kvrelay.worker.identity import WorkerIdentity
from kvrelay.worker.worker import Worker

NUM_REQUESTS = 8
THREADS = {"engine", "transfer", "watchdog"}
PREFILL, DECODE = "prefill-0", "decode-0"


@contextlib.contextmanager
def uncounted() -> Iterator[None]:
    traced, profiled = sys.gettrace(), sys.getprofile()
    sys.settrace(None)
    sys.setprofile(None)
    try:
        yield
    finally:
        sys.setprofile(profiled)
        sys.settrace(traced)


@contextlib.contextmanager
def no_threads() -> Iterator[None]:
    start = threading.Thread.start

    def start_others(thread: threading.Thread) -> None:
        if thread.name not in THREADS:
            start(thread)

    with mock.patch.object(threading.Thread, "start", start_others):
        yield


class Pair:
    def __init__(self) -> None:
        self.broker = MemoryBroker()
        self.network = LoopbackNetwork()
        self.fabric = LoopbackFabric()
        self.workers: list[Worker] = []
        self.turns: list[asyncio.Task[None]] = []
        self.ended = asyncio.Event()

    async def join(self, role: WorkerRole, worker_id: str) -> str:
        """The address of a new worker."""
        config = EngineConfig(num_blocks=512, max_num_seqs=16, max_num_batched_tokens=256)
        executor = MockExecutor(config, MockConfig(speedup_ratio=0), vocab_size=1000, max_model_len=4096)
        core = EngineCore(executor, config, ManualClock(), worker_id=worker_id)
        disagg = DisaggConfig(disagg_policy="threshold", max_local_prefill_length=64)
        transfer = TransferConfig(transport="loopback")
        settings = WorkerConfig(
            model_path=Path("m"),
            model="m",
            role=role,
            engine_kind="mock",
            engine=config,
            transfer=transfer,
            disagg=disagg,
        )
        engine, server = EngineThread(core), self.network.server()
        transport = LoopbackTransport(self.fabric, worker_id)
        worker = Worker(
            settings, WorkerIdentity(worker_id), engine, transport, self.broker.plane(), server, self._connect
        )
        self.turns.append(asyncio.create_task(self._take_turns(worker, engine, core, transport)))
        await worker.start()
        self.workers.append(worker)
        return server.address

    async def _connect(self, address: str, public_key: str) -> LoopbackRpcClient:
        client = self.network.client(address)
        await client.start()
        return client

    async def _take_turns(
        self, worker: Worker, engine: EngineThread, core: EngineCore, transport: LoopbackTransport
    ) -> None:
        """Turns of the engine's and of the transfer thread, while there is something for them."""
        transfer, worker_id = worker.transfer, worker.identity.worker_id
        while True:
            await asyncio.sleep(0)
            with uncounted():
                end = self.fabric.ends.get(worker_id)
                moves = transfer.has_turn or (end is not None and end.inbox)
                steps = engine.has_turn
            if moves:
                transfer.take_commands()
                transfer.step()
            if steps:
                engine.drain_inbox()
                engine.deliver(core.step(announce=engine.deliver))

    async def client(self, address: str) -> LoopbackRpcClient:
        client = self.network.client(address)
        client.on_message(self._received)
        await client.start()
        return client

    def _received(self, message: Message) -> None:
        if isinstance(message, OutputBatch) and any(output.finish_reason for output in message.outputs):
            self.ended.set()


async def requests() -> dict[str, Counts]:
    """By place of the prefill, the counts of ``NUM_REQUESTS`` requests; each has 8 tokens and shares no prefix."""
    pair = Pair()
    await pair.join(WorkerRole.PREFILL, PREFILL)
    client = await pair.client(await pair.join(WorkerRole.DECODE, DECODE))
    decode = pair.workers[1]
    while not decode.inspect().peers.prefill:
        await asyncio.sleep(0)
    counted = {}
    for place, length in (("local", 48), ("remote", 480)):

        async def ask(first: int, length: int = length) -> None:
            for number in range(first, first + NUM_REQUESTS):
                pair.ended.clear()
                prompt = to_bytes([(number + 7 * at) % 1000 for at in range(length)])
                sampling = SamplingParams(max_tokens=8, temperature=0.0)
                client.send(GenerateRequest(f"{length}-{number}", DECODE, prompt, sampling))
                await pair.ended.wait()

        await ask(0)
        with counting() as counts:
            await ask(NUM_REQUESTS)
        counted[place] = counts
    assert decode.stats().handoffs.num_done == 2 * NUM_REQUESTS
    return counted
