"""Plain vLLM to measure kvrelay against: one server, or a prefill and a decode server that were tuned by hand.

    python tools/vllm_servers.py MODEL --port 8001 [--cores 0-1] [-- vLLM arguments]
    python tools/vllm_servers.py MODEL --port 8001 --pair [-- vLLM arguments]

The pair is two servers on a core each, with vLLM's NIXL connector, behind a proxy that asks one after the other, as in
vLLM's own examples. Tuned by hand means: a progress thread in NIXL that sleeps, computing threads on their cores again
after vLLM's connector has moved them, and the libraries preloaded that vLLM's build for CPUs wants. The number of
computing threads, and how long they spin, are those of a kvrelay worker.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import aiohttp
import psutil
from aiohttp import web

from kvrelay.engines.vllm.cores import parse_cores, thread_environment
from kvrelay.engines.vllm.library import preloaded_libraries
from kvrelay.http import reserve_port

TRANSFER = {
    "kv_connector": "NixlConnector",
    "kv_role": "kv_both",
    "kv_buffer_device": "cpu",
    "kv_connector_extra_config": {"num_threads": 0},
}
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "UCX_TLS": "posix,sysv,cma,self,tcp",
}
QUIET = "kvrelay.engines.vllm.nixl_child.NixlWorkerExtension"
"""Without it NIXL's progress thread spins and takes most of the two cores."""
POLL_S = 0.2


def server_command(model: str, port: int, cores: str, more: Sequence[str], side_port: int | None = None) -> list[str]:
    """The command line of one server, with its environment. With ``side_port`` it exchanges KV."""
    threads = thread_environment(parse_cores(cores), 1)
    values = {**ENVIRONMENT, **threads, "LD_PRELOAD": ":".join(preloaded_libraries())}
    words = ["--model", model, "--host", "127.0.0.1", "--port", str(port), "--served-model-name", "m"]
    if side_port is not None:
        values["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(side_port)
        words += ["--kv-transfer-config", json.dumps(TRANSFER), "--worker-extension-cls", QUIET]
    environment = [f"{name}={value}" for name, value in values.items()]
    # ``vllm serve`` runs this module; from the wheel for CPUs that command does not start.
    main = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    return ["env", *environment, *main, *words, "--enforce-eager", *more]


class Proxy:
    """Sends a prompt to the prefill server for one token, and then, with the KV's address, to the decode server."""

    def __init__(self, prefill: str, decode: str) -> None:
        self._prefill, self._decode = prefill, decode

    async def run(self, port: int, on_healthy: Callable[[], None]) -> None:
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as self._session:
            await self._until_healthy()
            on_healthy()
            app = web.Application(client_max_size=64 << 20)
            app.router.add_post("/v1/completions", self._complete)
            app.router.add_get("/{path:.*}", self._look)
            runner = web.AppRunner(app, access_log=None)
            await runner.setup()
            try:
                await web.TCPSite(runner, "127.0.0.1", port).start()
                await asyncio.Event().wait()
            finally:
                await runner.cleanup()

    async def _until_healthy(self) -> None:
        for url in (self._prefill, self._decode):
            while not await self._is_healthy(url):
                await asyncio.sleep(POLL_S)

    async def _is_healthy(self, url: str) -> bool:
        try:
            async with self._session.get(f"{url}/health") as response:
                return response.status == 200
        except aiohttp.ClientError:
            return False

    async def _look(self, request: web.Request) -> web.Response:
        async with self._session.get(f"{self._decode}{request.path_qs}") as response:
            return web.Response(body=await response.read(), status=response.status, content_type=response.content_type)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body: dict[str, Any] = await request.json()
        params = {"do_remote_decode": True, "do_remote_prefill": False}
        first = {**body, "stream": False, "max_tokens": 1, "min_tokens": 0, "kv_transfer_params": params}
        first.pop("stream_options", None)
        async with self._session.post(f"{self._prefill}/v1/completions", json=first) as answer:
            params = (await answer.json())["kv_transfer_params"]
        rest = {**body, "kv_transfer_params": params}
        async with self._session.post(f"{self._decode}/v1/completions", json=rest) as answer:
            response = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.content_type})
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
        return response


@contextmanager
def _started(commands: Sequence[Sequence[str]]) -> Iterator[list[subprocess.Popen[bytes]]]:
    processes = [subprocess.Popen(command) for command in commands]
    try:
        yield processes
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()


async def serve_pair(model: str, port: int, cores: Sequence[int], more: Sequence[str]) -> None:
    with ExitStack() as stack:
        # Kept until vLLM listens, many seconds later: the kernel would give them to any other program.
        reserved = [stack.enter_context(reserve_port("127.0.0.1", 0)) for _ in range(4)]
        ports = [each.getsockname()[1] for each in reserved]
        commands = [
            server_command(model, ports[2 * number], str(cores[number % len(cores)]), more, ports[2 * number + 1])
            for number in range(2)
        ]
        processes = stack.enter_context(_started(commands))

        def bind() -> None:
            for number, process in enumerate(processes):
                for each in psutil.Process(process.pid).children(recursive=True):
                    if each.name().startswith("VLLM::"):
                        os.sched_setaffinity(each.pid, {cores[number % len(cores)]})

        proxy = Proxy(f"http://127.0.0.1:{ports[0]}", f"http://127.0.0.1:{ports[2]}")
        proxying = asyncio.ensure_future(proxy.run(port, bind))
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, proxying.cancel)
        (ended,) = await asyncio.gather(proxying, return_exceptions=True)
        if isinstance(ended, Exception):
            raise ended


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--pair", action="store_true", help="a prefill and a decode server, a core each")
    parser.add_argument("--cores", default="", help="for one server; default: all")
    # By hand, since argparse would give all positional arguments to the model.
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    given, more = parser.parse_args(words[:end]), words[end + 1 :]
    cores = sorted(os.sched_getaffinity(0))
    if given.pair:
        asyncio.run(serve_pair(given.model, given.port, cores, more))
        return
    command = server_command(given.model, given.port, given.cores or f"{cores[0]}-{cores[-1]}", more)
    print(shlex.join(command), flush=True)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
