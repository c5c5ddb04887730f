"""Real vLLM in the workers (``make test-vllm``): answers are those of vLLM by itself, also if a worker is killed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
from tests.patience import PATIENCE_S, until
from tests.system.serving import Serve

from kvrelay.data import bundled_checkpoint_path

pytestmark = [pytest.mark.vllm, pytest.mark.system, pytest.mark.timeout(1200)]

NUM_PROMPTS, NUM_TOKENS = 60, 48
LENGTHS = (1, 2, 17, 31, 32, 33, 64, 300, 1000, 1500)
VLLM = (
    *("--engine", "vllm", "--dtype", "float32", "--enforce-eager", "--kv-cache-memory", "512MiB"),
    *("--engine-args", '{"block_size": 32}'),
)


def _prompts() -> list[list[int]]:
    """Of many lengths; every third begins with a prefix that it shares with others."""
    drawn = random.Random(5)
    vocab_size = json.loads((bundled_checkpoint_path() / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    shared = [drawn.randrange(20, vocab_size) for _ in range(1500)]
    prompts = []
    for number in range(NUM_PROMPTS):
        length = LENGTHS[number] if number < len(LENGTHS) else drawn.randrange(1, 600)
        own = [drawn.randrange(20, vocab_size) for _ in range(length)]
        prompts.append((shared[: length // 2] + own)[:length] if number % 3 == 0 else own)
    return prompts


def _plain(prompts: list[list[int]]) -> list[list[int]]:
    script = Path(__file__).with_name("plain_vllm.py")
    done = subprocess.run(
        [sys.executable, str(script), str(bundled_checkpoint_path()), str(NUM_TOKENS)],
        input=json.dumps(prompts),
        capture_output=True,
        text=True,
        check=False,
    )
    answers = [line for line in done.stdout.splitlines() if line.startswith("answers ")]
    assert answers, done.stderr[-3000:]
    found: list[list[int]] = json.loads(answers[0].removeprefix("answers "))
    return found


class _Asking:
    """Answers to prompts, eight at once, as streams of token ids."""

    def __init__(self, server: Serve) -> None:
        self._server = server
        self._client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=4 * PATIENCE_S)
        self._pool = ThreadPoolExecutor(8)
        self.num_tokens = 0

    def __enter__(self) -> _Asking:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()
        self._client.close()

    def ask(self, prompts: list[list[int]]) -> list[list[int]]:
        return list(self._pool.map(self._answer, prompts))

    def _answer(self, prompt: list[int]) -> list[int]:
        tokens: list[int] = []
        for chunk in self._client.completions.create(
            model=self._server.model,
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


def test_answers_are_those_of_plain_vllm_and_a_killed_worker_loses_none() -> None:
    prompts = _prompts()
    expected = _plain(prompts)
    with Serve((*VLLM, "--prefill", "0", "--decode", "2")) as server, _Asking(server) as asking:
        assert asking.ask(prompts) == expected
        stored = [worker for worker in server.workers("both") if "error" not in worker]
        assert len(stored) == 2
        asking.num_tokens = 0
        with ThreadPoolExecutor(1) as thread:
            again = thread.submit(asking.ask, prompts)
            until(lambda: asking.num_tokens > NUM_TOKENS)
            os.kill(int(stored[0]["pid"]), signal.SIGKILL)
            assert again.result() == expected


KVRELAY = ("--vllm-connector", "kvrelay", "--block-size", "32")


@pytest.mark.parametrize(
    "connector",
    [
        (),
        (*KVRELAY, "--transport", "shm", "--kv-checksums"),
        (*KVRELAY, "--transport", "p2p", "--order", "prefill-first"),
    ],
    ids=["nixl", "kvrelay shm", "kvrelay p2p prefill-first"],
)
def test_prefill_and_decode_apart(connector: tuple[str, ...]) -> None:
    prompts = _prompts()
    expected = _plain(prompts)
    with Serve((*VLLM, "--prefill", "1", "--decode", "1", "--disagg-policy", "always", *connector)) as server:
        with _Asking(server) as asking:
            assert asking.ask(prompts) == expected
        counted = [worker["decode"] for worker in server.workers("decode")]
        assert sum(int(decode["num_remote_done"]) for decode in counted) >= NUM_PROMPTS // 2
        if connector:
            assert sum(int(decode["num_received_bytes"]) for decode in counted)
