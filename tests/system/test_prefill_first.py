"""Prefill-first against real processes: the tokens of decode-first and of the plain engine, over each transport."""

from __future__ import annotations

import json
import random
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.system.serving import Serve, by_threshold, kvrelay_here

from kvrelay.config import EngineConfig, RunnerConfig
from kvrelay.core.clock import MonotonicClock
from kvrelay.core.sampling import SamplingParams
from kvrelay.data import bundled_checkpoint_path
from kvrelay.engine.core import EngineCore
from kvrelay.engine.request import Request

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(600)]

ORDERS = ("decode-first", "prefill-first")
OUTPUT_LEN = 10
FLAGS = ("--dtype", "float32", "--num-threads", "1", *by_threshold(64), "--num-blocks", "1024")
FEATURES: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0, "seed": 5},
    {"logprobs": 2},
    {"n": 2, "temperature": 0.8, "seed": 3},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    {"guided_regex": "[0-9]{4,8}"},
    {"stop": ["e"], "temperature": 0.7, "seed": 1},
    {"max_tokens": 1},
    {"prompt_logprobs": 1},
)


def make_prompts(count: int) -> list[list[int]]:
    """From 1 to 700 tokens; a third share a prefix."""
    draw = random.Random(11)
    prefix = [draw.randrange(16, 500) for _ in range(160)]
    lengths = [1, 16, 64, 65, 80, 300, 700] + [draw.randrange(65, 400) for _ in range(count)]
    prompts = [[draw.randrange(16, 500) for _ in range(length)] for length in lengths[:count]]
    return [(prefix + tokens)[:700] if number % 3 == 2 else tokens for number, tokens in enumerate(prompts)]


def complete(server: Serve, order: str, prompt: list[int], **fields: Any) -> list[Any]:
    """Everything that the choices say, in order."""
    body = {"prompt": prompt, "max_tokens": OUTPUT_LEN, "temperature": 0, "return_token_ids": True, **fields}
    request = urllib.request.Request(
        f"{server.url}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json", "x-kvrelay-order": order},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        choices = json.loads(answer.read())["choices"]
    return sorted(choices, key=lambda choice: choice["index"])


def tokens_of(server: Serve, order: str, prompts: list[list[int]]) -> list[list[int]]:
    with ThreadPoolExecutor(4) as pool:
        answers = pool.map(lambda prompt: complete(server, order, prompt, ignore_eos=True), prompts)
        return [choices[0]["token_ids"] for choices in answers]


def plain_tokens(prompts: list[list[int]]) -> list[list[int]]:
    """The engine in this process, without any server."""
    from kvrelay.executors.torch import build_executor

    engine = EngineConfig(num_blocks=1024)
    executor = build_executor(bundled_checkpoint_path(), RunnerConfig(dtype="float32", num_threads=1), engine)
    core = EngineCore(executor, engine, MonotonicClock(), worker_id="plain")
    sampling = SamplingParams(max_tokens=OUTPUT_LEN, temperature=0.0, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        core.add_request(Request(str(number), prompt, sampling))
    outputs: dict[str, list[int]] = {str(number): [] for number in range(len(prompts))}
    while core.has_unfinished():
        for output in core.step().outputs:
            outputs[output.request_id] += output.token_ids
    executor.shutdown()
    return [outputs[str(number)] for number in range(len(prompts))]


@pytest.mark.parametrize(
    "transport", ["p2p", *(pytest.param(name, marks=pytest.mark.matrix) for name in ("shm", "nixl"))]
)
def test_both_orders_give_the_tokens_of_the_plain_engine(transport: str) -> None:
    prompts = make_prompts(24)
    with Serve(("--prefill", "1", "--decode", "1", "--transport", transport, *FLAGS)) as server:
        # Prefill-first comes first, so that no prefix is known to the decode worker.
        found = {order: tokens_of(server, order, prompts) for order in reversed(ORDERS)}
        (decode,) = server.idle_workers("decode")
        (prefill,) = server.workers("prefill")
        for fields in FEATURES:
            prompt = random.Random(str(fields)).choices(range(16, 500), k=200)
            given = [complete(server, order, prompt, **fields) for order in reversed(ORDERS)]
            assert given[0] == given[1], fields
        explained = kvrelay_here("status", "--url", server.url, "--explain-tokens", "500")
        assert explained.returncode == 0, explained.stderr
        server.check_idle()
    num_long = sum(len(prompt) > 64 for prompt in prompts)
    assert decode["decode"]["places"]["remote"] >= num_long / 2
    assert decode["decode"]["num_remote_done"] == prefill["prefill"]["num_prefills"] > 0
    assert decode["decode"]["places"]["local_unpaired"] > 0
    assert found["prefill-first"] == found["decode-first"] == plain_tokens(prompts)
