"""How long a frontend's event loop is kept from everybody else: the longest gap of a heartbeat every millisecond.

    python tools/loop_gaps.py [NAME ...]                                                  by one client's request
    python tools/loop_gaps.py --streams 2000 [--prompt-tokens 500] [--output-tokens 100] [--late]    by a migration

The frontend runs here, on the loopback network, with workers that answer at once.

Requests: a process of its own sends one hostile request after the other. On a busy machine the gaps are those of the
machine as well, so each is sent a few times, and the least of its longest gaps counts. CPU time of the frontend is told
beside it.

Migration: a process of its own opens the streams. Then their worker's connections break, and all streams go to another
one, which ends each with one token. With ``--late`` the other worker appears a second later, and all streams wait for
it. On a busy machine the loop also waits for a core, which the gap's CPU time leaves out.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import socket
import sys
import time
from collections.abc import Callable

import msgspec
import uvloop

from kvrelay.config import FrontendConfig, RouterConfig, WorkerRole
from kvrelay.control.base import Keys
from kvrelay.control.memory import MemoryBroker
from kvrelay.core.clock import MonotonicClock
from kvrelay.core.garbage import spare_what_stays
from kvrelay.core.messages import GenerateRequest, OutputBatch, Ping, Pong, TokenOutput
from kvrelay.core.status import FinishReason
from kvrelay.core.workers import WorkerInfo
from kvrelay.data import bundled_checkpoint_path
from kvrelay.frontend.api.server import Frontend
from kvrelay.router import Router
from kvrelay.rpc.base import Peer
from kvrelay.rpc.loopback import LoopbackNetwork
from kvrelay.rpc.wire import Message

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
WORDS = "The quick brown fox, it jumped over 13 lazy dogs.\n"
NUM_CONNECTIONS = 3000
MAX_MODEL_LEN = 1_000_000
LEASE_S = 3600.0
BATCH = 200


def _text(num_bytes: int) -> str:
    return (WORDS * (num_bytes // len(WORDS) + 1))[:num_bytes]


def _completion(**fields: object) -> tuple[str, bytes]:
    return COMPLETIONS, json.dumps({"max_tokens": 1, **fields}).encode()


def _chat(num_messages: int, content: str) -> tuple[str, bytes]:
    return CHAT, json.dumps({"messages": [{"role": "user", "content": content}] * num_messages}).encode()


REQUESTS: dict[str, Callable[[], tuple[str, bytes]]] = {
    "nothing": lambda: ("/tokenize", b'{"prompt": "x"}'),
    "text of 1 MB": lambda: _completion(prompt=_text(10**6)),
    "text of 4 MB": lambda: _completion(prompt=_text(4 * 10**6)),
    "text of 1 MB, one word": lambda: _completion(prompt="x" * 10**6),
    "1,024 prompts, 3 MB": lambda: _completion(prompt=[_text(3000)] * 1024),
    "n=128 of 100,000 token ids": lambda: _completion(prompt=[5] * 100_000, n=128),
    "n=4 of 1,024 prompts": lambda: _completion(prompt=["Once upon"] * 1024, n=4),
    "1 million token ids": lambda: _completion(prompt=[5] * 10**6),
    "5 million token ids": lambda: _completion(prompt=[5] * (5 * 10**6)),
    "stop_token_ids, 15 MB, n=48": lambda: _completion(prompt="x", n=48, stop_token_ids=[5] * (5 * 10**6)),
    "400,000 chat messages": lambda: _chat(400_000, "a"),
    "4,096 chat messages, 4 MB": lambda: _chat(4096, _text(1000)),
    "1.7 million empty lists": lambda: ("/v1/completions", b'{"prompt": [' + b"[]," * (17 * 10**5) + b"5]}"),
    "16 MB of escapes": lambda: ("/v1/completions", b'{"prompt": "' + b"\\n" * (75 * 10**5) + b'"}'),
    "tokenize 1 MB with strings": lambda: (
        "/tokenize",
        json.dumps({"prompt": _text(10**6), "return_token_strs": True}).encode(),
    ),
    "detokenize 1 million": lambda: ("/detokenize", json.dumps({"tokens": [300] * 10**6}).encode()),
}
CONNECTS = f"{NUM_CONNECTIONS:,} connects"


def send(name: str, port: int) -> str:
    """One hostile request, and the answer's status."""
    if name == CONNECTS:
        sockets = []
        for _ in range(NUM_CONNECTIONS):
            sock = socket.socket()
            sock.setblocking(False)
            sock.connect_ex(("127.0.0.1", port))
            sockets.append(sock)
        time.sleep(2.0)
        return "connected"
    path, body = REQUESTS[name]()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        connection.request("POST", path, body, {"content-type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        return str(answer.status)
    except OSError as exc:
        return type(exc).__name__
    finally:
        connection.close()


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


class InstantWorker:
    """Sends each request some tokens at once, and ends it, or never does."""

    def __init__(
        self,
        network: LoopbackNetwork,
        name: str,
        num_tokens: int = 1,
        finish: FinishReason | None = FinishReason.LENGTH,
    ) -> None:
        self.server = network.server()
        self.server.on_message(self._on_message)
        self.name = name
        self.requests: list[str] = []
        self._num_tokens, self._finish = num_tokens, finish

    def _on_message(self, peer: Peer, message: Message) -> None:
        if isinstance(message, Ping):
            self.server.send(peer, Pong(message.nonce, self.name))
        elif isinstance(message, GenerateRequest):
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

    async def until(self, num_requests: int) -> None:
        while len(self.requests) < num_requests:
            await asyncio.sleep(0.01)


class World:
    """A frontend, and where its workers are."""

    def __init__(self) -> None:
        self.network, self._keys, self._plane = LoopbackNetwork(), Keys("gaps"), MemoryBroker().plane()
        self.frontend = Frontend(
            FrontendConfig(port=0),
            self._plane,
            self._keys,
            lambda worker: self.network.client(worker.address),
            lambda block_size, replay, stage: Router(RouterConfig(), block_size, MonotonicClock(), stage, replay),
        )

    async def start(self, worker: InstantWorker) -> None:
        await worker.server.start()
        await self.register(worker)
        await self.frontend.start()

    async def register(self, worker: InstantWorker) -> None:
        lease = await self._plane.discovery.grant(LEASE_S)
        await self._plane.discovery.put(self._keys.worker(worker.name), worker.entry(), lease)


async def start_frontend() -> Frontend:
    """A frontend whose only worker ends every request with one token."""
    world = World()
    await world.start(InstantWorker(world.network, "w"))
    return world.frontend


async def measure(names: list[str], num_times: int) -> None:
    frontend = await start_frontend()
    print("| request | answer | longest gap, ms | CPU, ms |\n|---|---|---|---|", flush=True)
    for name in names:
        gaps, cpu_s, status = [], [], ""
        for _ in range(num_times):
            command = [sys.executable, __file__, "--send", name, "--port", str(frontend.port)]
            sender = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
            heartbeat, began_s = Heartbeat(), time.process_time()
            status = (await sender.communicate())[0].decode().strip()
            heartbeat.stop()
            gaps.append(heartbeat.longest_s)
            cpu_s.append(time.process_time() - began_s)
        print(f"| {name} | {status} | {min(gaps) * 1e3:.0f} | {min(cpu_s) * 1e3:.0f} |", flush=True)
    await frontend.close()


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


async def measure_migration(num_streams: int, num_prompt_tokens: int, num_output_tokens: int, is_late: bool) -> None:
    world = World()
    dying = InstantWorker(world.network, "dying", num_output_tokens, None)
    heir = InstantWorker(world.network, "heir")
    await world.start(dying)
    command = [sys.executable, __file__, "--port", str(world.frontend.port)]
    command += ["--streams", str(num_streams), "--prompt-tokens", str(num_prompt_tokens)]
    clients = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    await dying.until(num_streams)
    await heir.server.start()
    if not is_late:
        await world.register(heir)
        await asyncio.sleep(1.0)
    heartbeat = Heartbeat()
    await asyncio.sleep(0.1)
    heartbeat.longest_s = heartbeat.longest_cpu_s = 0.0
    begun_s, cpu_s = time.perf_counter(), time.process_time()
    await dying.server.close()
    if is_late:
        await asyncio.sleep(1.0)
        begun_s = time.perf_counter()
        await world.register(heir)
    await heir.until(num_streams)
    moved_s = time.perf_counter() - begun_s
    num_done = int((await clients.communicate())[0])
    in_order = [name.partition("~")[0] for name in heir.requests] == [name.partition("~")[0] for name in dying.requests]
    heartbeat.stop()
    gap = f"{heartbeat.longest_s * 1e3:.0f} ms ({heartbeat.longest_cpu_s * 1e3:.0f} ms of CPU)"
    order = "in order" if in_order else "in another order"
    print(f"{num_streams} streams: longest gap {gap}, {num_done} ended whole, placed {order}")
    print(f"all placed again after {moved_s * 1e3:.0f} ms, CPU {(time.process_time() - cpu_s) * 1e3:.0f} ms")
    await world.frontend.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of: {', '.join((*REQUESTS, CONNECTS))}")
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--streams", type=int, help="measure a migration of so many streams")
    parser.add_argument("--prompt-tokens", type=int, default=500)
    parser.add_argument("--output-tokens", type=int, default=100)
    parser.add_argument("--late", action="store_true")
    parser.add_argument("--send", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.send:
        print(send(options.send, options.port))
        return
    if options.port:
        asyncio.run(open_streams(options.port, options.streams, options.prompt_tokens))
        return
    sys.setswitchinterval(0.0005)
    if options.streams:
        spare_what_stays()
        uvloop.run(measure_migration(options.streams, options.prompt_tokens, options.output_tokens, options.late))
    else:
        uvloop.run(measure(options.names or [*REQUESTS, CONNECTS], options.times))


if __name__ == "__main__":
    main()
