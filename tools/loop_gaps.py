"""How long one client's request keeps a frontend's event loop from everybody else: the longest gap of a heartbeat.

    python tools/loop_gaps.py [NAME ...]

A frontend runs here, with a worker that answers at once; a process of its own sends one hostile request after the
other. The heartbeat wakes up every millisecond. On a busy machine the gaps are those of the machine as well, so each
request is sent a few times, and the least of its longest gaps counts. CPU time of the frontend is told beside it.
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
from kvrelay.core.messages import GenerateRequest, OutputBatch, TokenOutput
from kvrelay.core.status import FinishReason
from kvrelay.core.workers import WorkerInfo
from kvrelay.data import bundled_checkpoint_path
from kvrelay.frontend import Frontend
from kvrelay.router import Router
from kvrelay.rpc.base import Peer
from kvrelay.rpc.loopback import LoopbackNetwork
from kvrelay.rpc.wire import Message

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
WORDS = "The quick brown fox, it jumped over 13 lazy dogs.\n"
NUM_CONNECTIONS = 3000
MAX_MODEL_LEN = 1_000_000
LEASE_S = 3600.0


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
    """Wakes up every millisecond and keeps the longest gap, in seconds."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._task = asyncio.get_running_loop().create_task(self._beat())

    async def _beat(self) -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            self.longest_s = max(self.longest_s, now - last)
            last = now

    def stop(self) -> None:
        self._task.cancel()


async def start_frontend() -> Frontend:
    """A frontend whose only worker ends every request with one token."""
    network, keys, plane = LoopbackNetwork(), Keys("gaps"), MemoryBroker().plane()
    server = network.server()

    def on_message(peer: Peer, message: Message) -> None:
        if isinstance(message, GenerateRequest):
            server.send(peer, OutputBatch((TokenOutput(message.request_id, (10,), FinishReason.LENGTH),)))

    server.on_message(on_message)
    await server.start()
    info = WorkerInfo(
        worker_id="w",
        epoch=1,
        role=WorkerRole.BOTH,
        model="tiny",
        model_path=str(bundled_checkpoint_path()),
        address=server.address,
        max_model_len=MAX_MODEL_LEN,
        block_size=16,
        num_blocks=100_000,
        vocab_size=1024,
        kv_compatibility="x",
    )
    lease = await plane.discovery.grant(LEASE_S)
    await plane.discovery.put(keys.worker("w"), msgspec.json.encode(info), lease)
    frontend = Frontend(
        FrontendConfig(port=0),
        plane,
        keys,
        lambda worker: network.client(worker.address),
        lambda block_size, replay, stage: Router(RouterConfig(), block_size, MonotonicClock(), stage, replay),
    )
    await frontend.start()
    return frontend


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of: {', '.join((*REQUESTS, CONNECTS))}")
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--send", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.send:
        print(send(options.send, options.port))
        return
    sys.setswitchinterval(0.0005)
    uvloop.run(measure(options.names or [*REQUESTS, CONNECTS], options.times))


if __name__ == "__main__":
    main()
