"""How long a frontend's event loop is away when a worker with thousands of streams dies: a heartbeat's longest gap.

    python tools/migration_gap.py [--streams 2000] [--prompt-tokens 500] [--output-tokens 100] [--late]

The frontend runs here, on the loopback network, with workers that answer at once. A process of its own opens the
streams. Then their worker's connections break, and all streams go to another one, which ends each with one token. With
``--late`` the other worker appears a second later, and all streams wait for it. On a busy machine the loop also waits
for a core, which the gap's CPU time leaves out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time

import msgspec
import uvloop

from kvrelay.config import FrontendConfig, RouterConfig, WorkerRole
from kvrelay.control.base import Keys
from kvrelay.control.memory import MemoryBroker
from kvrelay.core.clock import MonotonicClock
from kvrelay.core.messages import GenerateRequest, OutputBatch, TokenOutput
from kvrelay.core.status import FinishReason
from kvrelay.core.workers import WorkerInfo
from kvrelay.data import bundled_checkpoint_path
from kvrelay.frontend import Frontend
from kvrelay.launch.process import spare_what_stays
from kvrelay.router import Router
from kvrelay.rpc.base import Peer
from kvrelay.rpc.loopback import LoopbackNetwork
from kvrelay.rpc.wire import Message

MAX_MODEL_LEN = 100_000
LEASE_S = 3600.0
BATCH = 200


class Heartbeat:
    """Wakes up every millisecond and keeps the longest gap, and the longest by the thread's CPU time, in seconds."""

    def __init__(self) -> None:
        self.longest_s = self.longest_cpu_s = 0.0
        self._task = asyncio.get_running_loop().create_task(self._beat())

    async def _beat(self) -> None:
        last, last_cpu = time.perf_counter(), time.thread_time()
        while True:
            await asyncio.sleep(0.001)
            now, now_cpu = time.perf_counter(), time.thread_time()
            self.longest_s = max(self.longest_s, now - last)
            self.longest_cpu_s = max(self.longest_cpu_s, now_cpu - last_cpu)
            last, last_cpu = now, now_cpu

    def stop(self) -> None:
        self._task.cancel()


class MockWorker:
    """Counts its requests. The first worker sends each some tokens and never ends it; its successor ends it."""

    def __init__(self, network: LoopbackNetwork, name: str, num_tokens: int, finish: FinishReason | None) -> None:
        self.server = network.server()
        self.server.on_message(self._on_message)
        self.name = name
        self.requests: list[str] = []
        self._num_tokens, self._finish = num_tokens, finish

    def _on_message(self, peer: Peer, message: Message) -> None:
        if isinstance(message, GenerateRequest):
            self.requests.append(message.request_id)
            position = len(message.output_token_ids)
            output = TokenOutput(message.request_id, (10,) * self._num_tokens, self._finish, position=position)
            self.server.send(peer, OutputBatch((output,)))

    def entry(self) -> bytes:
        info = WorkerInfo(
            worker_id=self.name,
            epoch=1,
            role=WorkerRole.BOTH,
            model="tiny",
            model_path=str(bundled_checkpoint_path()),
            address=self.server.address,
            max_model_len=MAX_MODEL_LEN,
            block_size=16,
            num_blocks=1_000_000,
            vocab_size=1024,
            kv_compatibility="x",
        )
        return msgspec.json.encode(info)


async def open_streams(port: int, num_streams: int, num_prompt_tokens: int) -> None:
    """Open the streams, and read them to their ends. Prints how many ended with [DONE]."""
    body = json.dumps({"prompt": [5] * num_prompt_tokens, "max_tokens": 1000, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"

    async def stream() -> bool:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head.encode() + b"\r\nConnection: close\r\n\r\n" + body)
        answer = await reader.read()
        writer.close()
        return b"[DONE]" in answer

    tasks = []
    for begin in range(0, num_streams, BATCH):
        tasks += [asyncio.create_task(stream()) for _ in range(begin, min(begin + BATCH, num_streams))]
        await asyncio.sleep(0.3)
    print(sum(await asyncio.gather(*tasks)))


async def until(worker: MockWorker, num_requests: int) -> None:
    while len(worker.requests) < num_requests:
        await asyncio.sleep(0.01)


async def measure(num_streams: int, num_prompt_tokens: int, num_output_tokens: int, is_late: bool) -> None:
    network, keys, plane = LoopbackNetwork(), Keys("gaps"), MemoryBroker().plane()
    dying = MockWorker(network, "dying", num_output_tokens, None)
    heir = MockWorker(network, "heir", 1, FinishReason.LENGTH)
    frontend = Frontend(
        FrontendConfig(port=0),
        plane,
        keys,
        lambda worker: network.client(worker.address),
        lambda block_size, replay, stage: Router(RouterConfig(), block_size, MonotonicClock(), stage, replay),
    )
    lease = await plane.discovery.grant(LEASE_S)
    await dying.server.start()
    await plane.discovery.put(keys.worker(dying.name), dying.entry(), lease)
    await frontend.start()
    command = [sys.executable, __file__, "--port", str(frontend.port)]
    command += ["--streams", str(num_streams), "--prompt-tokens", str(num_prompt_tokens)]
    clients = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    await until(dying, num_streams)
    await heir.server.start()
    if not is_late:
        await plane.discovery.put(keys.worker(heir.name), heir.entry(), lease)
        await asyncio.sleep(1.0)
    heartbeat = Heartbeat()
    await asyncio.sleep(0.1)
    heartbeat.longest_s = heartbeat.longest_cpu_s = 0.0
    begun_s, cpu_s = time.perf_counter(), time.process_time()
    await dying.server.close()
    if is_late:
        await asyncio.sleep(1.0)
        begun_s = time.perf_counter()
        await plane.discovery.put(keys.worker(heir.name), heir.entry(), lease)
    await until(heir, num_streams)
    moved_s = time.perf_counter() - begun_s
    num_done = int((await clients.communicate())[0])
    in_order = [name.partition("~")[0] for name in heir.requests] == [name.partition("~")[0] for name in dying.requests]
    heartbeat.stop()
    gap = f"{heartbeat.longest_s * 1e3:.0f} ms ({heartbeat.longest_cpu_s * 1e3:.0f} ms of CPU)"
    order = "in order" if in_order else "in another order"
    print(f"{num_streams} streams: longest gap {gap}, {num_done} ended whole, placed {order}")
    print(f"all placed again after {moved_s * 1e3:.0f} ms, CPU {(time.process_time() - cpu_s) * 1e3:.0f} ms")
    await frontend.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--prompt-tokens", type=int, default=500)
    parser.add_argument("--output-tokens", type=int, default=100)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--late", action="store_true")
    options = parser.parse_args()
    if options.port:
        asyncio.run(open_streams(options.port, options.streams, options.prompt_tokens))
        return
    sys.setswitchinterval(0.0005)
    spare_what_stays()
    uvloop.run(measure(options.streams, options.prompt_tokens, options.output_tokens, options.late))


if __name__ == "__main__":
    main()
