"""Real vLLM for tests: prompts with the greedy answers of vLLM by itself, stock servers, and requests.

Everything runs on the Python that runs the tests (``make test-vllm``).
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
from tests.lazily import openai
from tests.patience import PATIENCE_S, until
from tests.ports import free_ports
from tests.system import plain_vllm
from tests.system.serving import Serve
from tools.vllm_servers import ENVIRONMENT, QUIET, TRANSFER

from kvrelay.data import bundled_checkpoint_path
from kvrelay.engines.vllm.cores import parse_cores, shares, thread_environment
from kvrelay.engines.vllm.library import preloaded_libraries

NUM_PROMPTS, NUM_TOKENS = 60, 24
LENGTHS = (1, 2, 17, 31, 32, 33, 64, 300, 1000, 1500)
BLOCK_SIZE = 32
START_TIMEOUT_S = 10 * PATIENCE_S
"""vLLM computes for half a minute before it is ready, and may share the machine."""

NIXL = {**TRANSFER, "kv_load_failure_policy": "recompute"}


@dataclass(frozen=True)
class Asked:
    """Prompts, and what vLLM by itself answers."""

    prompts: list[list[int]]
    answers: list[list[int]]


def draw_prompts(seed: int) -> list[list[int]]:
    """Of many lengths; every third begins with a prefix that it shares with others."""
    drawn = random.Random(seed)
    vocab_size = json.loads((bundled_checkpoint_path() / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    shared = [drawn.randrange(20, vocab_size) for _ in range(1500)]
    prompts = []
    for number in range(NUM_PROMPTS):
        length = LENGTHS[number] if number < len(LENGTHS) else drawn.randrange(1, 600)
        own = [drawn.randrange(20, vocab_size) for _ in range(length)]
        prompts.append((shared[: length // 2] + own)[:length] if number % 3 == 0 else own)
    return prompts


class PlainVllm:
    """vLLM by itself, with as many computing threads as a worker of a pair has: in bfloat16 their number changes what
    is rounded how. A context manager."""

    def __enter__(self) -> PlainVllm:
        threads = thread_environment(parse_cores(shares("", num_workers=2)[0]), num_ranks=1)
        env = {**os.environ, **threads, "LD_PRELOAD": ":".join(preloaded_libraries())}
        command = [sys.executable, plain_vllm.__file__]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()  # it ends with its input

    def ask(self, *sets: list[list[int]], model: Path | None = None, **arguments: object) -> list[Asked]:
        """One engine answers all sets."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        prompts = [prompt for each in sets for prompt in each]
        question = {
            "model": str(model or bundled_checkpoint_path()), "max_tokens": NUM_TOKENS, "arguments": arguments,
            "prompts": prompts,
        }  # fmt: skip
        print(json.dumps(question), file=self._process.stdin, flush=True)
        lines = (line for line in self._process.stdout if line.startswith((plain_vllm.ANSWERS, plain_vllm.FAILED)))
        found = next(lines, plain_vllm.FAILED)
        assert not found.startswith(plain_vllm.FAILED), f"vLLM by itself has {found}: stderr says why"
        answers = iter(json.loads(found.removeprefix(plain_vllm.ANSWERS)))
        return [Asked(each, [next(answers) for _ in each]) for each in sets]


class Asking:
    """Requests to a server, eight at once, as streams of token ids. ``order`` is asked for by kvrelay's header."""

    def __init__(self, server: Serve, order: str | None = None) -> None:
        self._model = server.model
        headers = None if order is None else {"x-kvrelay-order": order}
        self._client = openai.OpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=4 * PATIENCE_S, default_headers=headers
        )
        self._pool = ThreadPoolExecutor(8)
        self.num_tokens = 0

    def __enter__(self) -> Asking:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._client.close()

    def ask(self, prompts: list[list[int]]) -> list[list[int]]:
        return [answer.result() for answer in self.begin(prompts)]

    def begin(self, prompts: list[list[int]], model: str | None = None) -> list[Future[list[int]]]:
        """``model``: another one than the server's first, e.g. an adapter."""
        return [self._pool.submit(self._answer, prompt, model or self._model) for prompt in prompts]

    def _answer(self, prompt: list[int], model: str) -> list[int]:
        tokens: list[int] = []
        for chunk in self._client.completions.create(
            model=model,
            prompt=prompt,
            max_tokens=NUM_TOKENS,
            temperature=0,
            stream=True,
            extra_body={"return_token_ids": True, "ignore_eos": True},
        ):
            for choice in chunk.choices:
                tokens += choice.token_ids or []
                self.num_tokens += len(choice.token_ids or [])
        return tokens


def count(url: str, metric: str) -> float:
    """A server's value of a metric; 0 if it has none yet."""
    text = httpx.get(f"{url}/metrics", timeout=PATIENCE_S).text
    found = re.search(rf"^{re.escape(metric)}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
    return float(found.group(1)) if found else 0.0


@dataclass
class StockServer:
    """A running ``vllm serve``."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def count(self, metric: str) -> float:
        return count(self.url, metric)

    def is_healthy(self) -> bool:
        assert self.process.poll() is None, f"vllm serve has ended:\n{self.log.read_text()[-3000:]}"
        try:
            return httpx.get(f"{self.url}/health", timeout=5.0).status_code == 200
        except httpx.HTTPError:
            return False

    def end(self, how: signal.Signals) -> None:
        """Send this signal; on return the server and its helpers have ended."""
        if self.process.poll() is not None:
            return
        helpers = psutil.Process(self.process.pid).children(recursive=True)
        self.process.send_signal(how)
        try:
            self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        _, left = psutil.wait_procs(helpers, PATIENCE_S / 4)
        for helper in left:
            with suppress(psutil.NoSuchProcess):
                helper.kill()


@contextmanager
def stock_servers(count: int, directory: Path) -> Iterator[list[StockServer]]:
    """So many ``vllm serve`` with vLLM's NIXL connector, all healthy. Their cores are equal parts of the machine's."""
    ports = free_ports(2 * count)
    cores = sorted(os.sched_getaffinity(0))
    with ExitStack() as stack:
        found = []
        for number in range(count):
            core = cores[number % len(cores)]
            log = directory / f"vllm-{number}.log"
            found.append(stack.enter_context(_stock_server(log, core, *ports[2 * number : 2 * number + 2])))
        for server in found:
            until(server.is_healthy, timeout_s=START_TIMEOUT_S)
        yield found


@contextmanager
def _stock_server(log: Path, core: int, port: int, side_port: int) -> Iterator[StockServer]:
    words = ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "m", "--dtype", "float32"]
    blocks = ["--enforce-eager", "--block-size", str(BLOCK_SIZE), "--kv-transfer-config", json.dumps(NIXL)]
    # Stock but for NIXL's progress thread, which sleeps: two that spin take both cores of a small machine.
    blocks += ["--worker-extension-cls", QUIET]
    # The server of ``vllm serve``. That command does not start from the wheel for CPUs, whose distribution has another
    # name.
    main = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(bundled_checkpoint_path())]
    env = {
        **os.environ,
        **ENVIRONMENT,
        "LD_PRELOAD": ":".join(preloaded_libraries()),
        "VLLM_CPU_OMP_THREADS_BIND": str(core),
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_port),
    }
    with log.open("wb") as output:
        process = subprocess.Popen([*main, *words, *blocks], stdout=output, stderr=subprocess.STDOUT, env=env)
        server = StockServer(f"http://127.0.0.1:{port}", process, log)
        try:
            yield server
        finally:
            server.end(signal.SIGTERM)
