"""Two stock ``vllm serve`` with vLLM's NIXL connector behind kvrelay: real KV moves between real servers.

Needs vLLM in an environment of its own; ``KVRELAY_VLLM_PYTHON`` names its Python. Only by name: ``pytest -m vllm``.
"""

from __future__ import annotations

import json
import os
import random
import re
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from tests.patience import PATIENCE_S, until
from tests.system.serving import Serve

from kvrelay.data import bundled_checkpoint_path

PYTHON = os.environ.get("KVRELAY_VLLM_PYTHON", "")
TRANSFER = {
    "kv_connector": "NixlConnector",
    "kv_role": "kv_both",
    "kv_buffer_device": "cpu",
    "kv_load_failure_policy": "recompute",
}
SERVER_ENV = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "0-1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "UCX_TLS": "posix,sysv,cma,self,tcp",
}
LENGTHS = [1, 2, 127, 128, 129, 300, 700, 1000, 1500, 900, 257, 400]
NUM_TOKENS = 16

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not PYTHON, reason="KVRELAY_VLLM_PYTHON is not set"),
]


@dataclass
class Server:
    url: str
    process: subprocess.Popen[bytes]

    def count(self, metric: str) -> float:
        """A metric's value; 0 if it has none yet."""
        text = httpx.get(f"{self.url}/metrics", timeout=PATIENCE_S).text
        found = re.search(rf"^{re.escape(metric)}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        return float(found.group(1)) if found else 0.0

    def is_healthy(self) -> bool:
        assert self.process.poll() is None, "vllm serve has ended; its output is in the test's directory"
        try:
            return httpx.get(f"{self.url}/health", timeout=5.0).status_code == 200
        except httpx.HTTPError:
            return False


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    ports = _free_ports(4)
    logs = tmp_path_factory.mktemp("vllm")
    with ExitStack() as stack:
        found = tuple(stack.enter_context(_serving(logs / f"{n}.log", *ports[2 * n : 2 * n + 2])) for n in range(2))
        for server in found:
            until(server.is_healthy, timeout_s=900.0)
        yield found[0], found[1]


@contextmanager
def _serving(log: Path, port: int, side_port: int) -> Iterator[Server]:
    words = ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "m", "--dtype", "float32"]
    transfer = ["--enforce-eager", "--kv-transfer-config", json.dumps(TRANSFER)]
    command = [PYTHON, "-m", "vllm.entrypoints.cli.main", "serve", str(bundled_checkpoint_path()), *words, *transfer]
    env = {**os.environ, **SERVER_ENV, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_port)}
    preload = [str(path) for path in Path(PYTHON).parents[1].glob("lib/libiomp5.so")]
    env |= {"LD_PRELOAD": ":".join(preload)} if preload else {}
    env.pop("PYTHONPATH", None)
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=env)
        try:
            yield Server(f"http://127.0.0.1:{port}", process)
        finally:
            process.terminate()
            try:
                process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _prompts(seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    shared = [draw.randrange(20, 1000) for _ in range(256)]
    own = [[draw.randrange(20, 1000) for _ in range(length)] for length in LENGTHS]
    return [(shared + tokens)[: len(tokens)] if number % 3 == 0 else tokens for number, tokens in enumerate(own)]


def _answer(url: str, model: str, prompt: list[int]) -> list[int]:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=300.0)
    response.raise_for_status()
    return list(response.json()["choices"][0]["token_ids"])


def _arguments(servers: tuple[Server, Server]) -> tuple[str, ...]:
    urls = ",".join(server.url for server in servers)
    words = ("--engine", "openai", "--upstream", urls, "--upstream-kv-transfer", "vllm", "--block-size", "128")
    return (*words, "--prefill", "1", "--decode", "1", "--disagg-policy", "always")


def test_answers_equal_plain_vllm_and_the_servers_have_moved_the_kv(servers: tuple[Server, Server]) -> None:
    prefill, decode = servers
    prompts = _prompts(1)
    with Serve(_arguments(servers)) as kvrelay, ThreadPoolExecutor(4) as pool:
        before = decode.count("vllm:nixl_xfer_time_seconds_count")
        found = list(pool.map(lambda prompt: _answer(kvrelay.url, kvrelay.model, prompt), prompts))
        num_transfers = decode.count("vllm:nixl_xfer_time_seconds_count") - before
        (worker,) = kvrelay.workers("decode")
        until(lambda: prefill.count("vllm:kv_cache_usage_perc") == 0.0)
    # A prompt that the decode server holds whole is only acknowledged.
    assert num_transfers >= len(prompts) - 2
    assert worker["decode"]["num_remote_done"] == len(prompts)
    assert found == [_answer(prefill.url, "m", prompt) for prompt in prompts]


def test_a_prefill_server_that_is_killed_amid_requests_costs_no_answer(servers: tuple[Server, Server]) -> None:
    prefill, decode = servers
    prompts = _prompts(2)
    with Serve(_arguments(servers)) as kvrelay, ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(_answer, kvrelay.url, kvrelay.model, prompt) for prompt in prompts]
        until(lambda: any(answer.done() for answer in answers), timeout_s=300.0)
        prefill.process.kill()
        found = [answer.result(600.0) for answer in answers]
    assert found == [_answer(decode.url, "m", prompt) for prompt in prompts]
