"""The same tokens wherever the prefill ran: 1P1D, aggregated, the offline engine and transformers agree.

Mixed prompts with shared prefixes, streaming and not, through the ``openai`` client, against real processes: 18 of up
to 513 tokens in steps of 512, in the matrix 200 of up to 3,000 in steps of 2,048. Afterwards the pools are whole and
nothing is in use.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.chaos.brokers import own_state_directory
from tests.lazily import openai
from tests.system.serving import Serve, by_threshold

from kvrelay.config import EngineConfig, RunnerConfig
from kvrelay.core.clock import MonotonicClock
from kvrelay.core.sampling import SamplingParams
from kvrelay.data import bundled_checkpoint_path
from kvrelay.engine.core import EngineCore
from kvrelay.engine.request import Request

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(1200)]

NUM_PROMPTS, NUM_PROMPTS_OF_MATRIX = 18, 200
EDGES = (1, 15, 16, 17, 256, 257)
"""Lengths about a block, and about the Numba kernels' tiles."""
EDGES_OF_MATRIX = (2, 255, 2047, 3000)
OUTPUT_LEN = 12
TIE = 1e-3
"""Where the oracle's two best logits are closer than this, rounding may decide; such prompts prove nothing."""


def step_of(num_prompts: int) -> int:
    """Tokens of a step."""
    return 2048 if num_prompts == NUM_PROMPTS_OF_MATRIX else 512


def make_prompts(vocab_size: int, num_prompts: int) -> list[tuple[int, ...]]:
    """Most of them short; a third of them share one of four prefixes."""
    step = step_of(num_prompts)
    is_long = step > 512
    draw = random.Random(7 if is_long else 8)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(16, vocab_size) for _ in range(count))

    prefixes = [tokens(length) for length in ((40, 160, 700, 1500) if is_long else (40, 80, 160, 320))]
    lengths = [*EDGES, step, step + 1, *(EDGES_OF_MATRIX if is_long else ())]
    lengths += [int(10 ** draw.uniform(0, 3.3 if is_long else 2.7)) for _ in range(num_prompts - len(lengths))]
    prompts = []
    for number, length in enumerate(lengths):
        prefix = prefixes[number % 4] if number % 3 == 0 else ()
        prompts.append((prefix + tokens(max(1, length - len(prefix))))[:3000])
    return prompts


def serve_arguments(num_prefill: int, num_prompts: int) -> tuple[str, ...]:
    flags = (
        "--max-num-batched-tokens",
        str(step_of(num_prompts)),
        "--dtype",
        "float32",
        "--num-threads",
        "1",
        *by_threshold(64),
        "--kv-cache-memory",
        "512MiB",
    )
    return ("--prefill", str(num_prefill), "--decode", "1", *flags)


def with_tiers(disk: Path) -> tuple[str, ...]:
    """Pools for 750 tokens, host memory for another 1,000, and a disk for the rest."""
    tiers = ("--host-kv-cache", "4MiB", "--host-kv-linger-s", "0", "--disk-kv-cache", f"{disk},1GiB")
    return (*serve_arguments(1, NUM_PROMPTS), "--kv-cache-memory", "3MiB", "--max-model-len", "640", *tiers)


def complete_all(server: Serve, prompts: list[tuple[int, ...]], *, stream: bool) -> list[tuple[int, ...]]:
    """Greedy output tokens for each prompt, eight requests at a time."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)

    def one(prompt: tuple[int, ...]) -> tuple[int, ...]:
        answer = client.completions.create(
            model=server.model,
            prompt=list(prompt),
            max_tokens=OUTPUT_LEN,
            temperature=0,
            stream=stream,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        if not stream:
            return tuple(answer.choices[0].token_ids)
        return tuple(token for chunk in answer for choice in chunk.choices for token in choice.token_ids or ())

    with client, ThreadPoolExecutor(8) as pool:
        return list(pool.map(one, prompts))


def offline(prompts: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The engine in this process, without any server."""
    from kvrelay.executors.torch import build_executor

    engine = EngineConfig(kv_cache_memory="512MiB", max_num_batched_tokens=step_of(len(prompts)))
    executor = build_executor(bundled_checkpoint_path(), RunnerConfig(dtype="float32", num_threads=2), engine)
    core = EngineCore(executor, engine, MonotonicClock(), worker_id="offline")
    sampling = SamplingParams(max_tokens=OUTPUT_LEN, temperature=0.0, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        core.add_request(Request(str(number), prompt, sampling))
    outputs: dict[str, tuple[int, ...]] = {}
    while core.has_unfinished():
        for output in core.step().outputs:
            outputs[output.request_id] = outputs.get(output.request_id, ()) + output.token_ids
    core.check_integrity()
    executor.shutdown()
    return [outputs[str(number)] for number in range(len(prompts))]


def check_against_transformers(prompts: list[tuple[int, ...]], outputs: list[tuple[int, ...]]) -> set[tuple[int, ...]]:
    """Every output token must be the oracle's best one. Returns the prompts that were left out for a near tie."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(bundled_checkpoint_path(), dtype=torch.float32)
    ties = set()
    for prompt, output in zip(prompts, outputs, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *output[:-1]]])).logits[0, len(prompt) - 1 :]
        best = logits.topk(2).values
        if float((best[:, 0] - best[:, 1]).min()) < TIE:
            ties.add(prompt)
            continue
        assert tuple(logits.argmax(-1).tolist()) == output, f"a prompt of {len(prompt)} tokens"
    return ties


class Known(NamedTuple):
    """Prompts and the offline engine's answers, which are transformers' but for some near ties."""

    prompts: list[tuple[int, ...]]
    answers: list[tuple[int, ...]]
    ties: set[tuple[int, ...]]


@cache
def known(num_prompts: int) -> Known:
    config = json.loads((bundled_checkpoint_path() / "config.json").read_text(encoding="utf-8"))
    prompts = make_prompts(config["vocab_size"], num_prompts)
    answers = offline(prompts)
    ties = check_against_transformers(prompts, answers)
    assert len(ties) < num_prompts * 0.1
    return Known(prompts, answers, ties)


@pytest.mark.parametrize("num_prompts", [NUM_PROMPTS, pytest.param(NUM_PROMPTS_OF_MATRIX, marks=pytest.mark.matrix)])
def test_disaggregated_equals_offline_equals_transformers(num_prompts: int) -> None:
    prompts, expected, _ = known(num_prompts)
    num_long = sum(len(prompt) > 64 for prompt in prompts)
    with Serve(serve_arguments(1, num_prompts)) as server:
        streamed = complete_all(server, prompts, stream=True)
        (decode,) = server.idle_workers("decode")
        (prefill,) = server.workers("prefill")
        plain = complete_all(server, prompts, stream=False)
        server.check_idle()
    # Metrics prove where prefills ran and what moved: long ones were remote unless the prefix was cached already.
    num_remote = decode["decode"]["num_remote_done"]
    assert num_long * 0.5 < num_remote <= num_long
    assert prefill["prefill"]["num_prefills"] == num_remote
    assert prefill["prefill"]["num_failed"] == 0
    assert decode["decode"]["num_received_bytes"] > num_remote * 64 * 100
    assert decode["decode"]["places"]["local_short"] >= num_prompts - num_long
    assert plain == streamed == expected


@pytest.mark.matrix
def test_aggregated_equals_offline() -> None:
    """In the suite ``test_prefixes_torch`` asks workers that do both."""
    prompts, expected, _ = known(NUM_PROMPTS_OF_MATRIX)
    with Serve(serve_arguments(0, NUM_PROMPTS_OF_MATRIX)) as server:
        aggregated = complete_all(server, prompts, stream=False)
        server.check_idle()
    assert aggregated == expected


def test_kv_of_every_tier_equals_transformers(tmp_path: Path) -> None:
    """Prompts of three times the pools, asked again and again: most of their KV comes from host memory and disk."""
    prompts, expected, ties = known(NUM_PROMPTS)
    with own_state_directory(), Serve(with_tiers(tmp_path / "kv")) as server:
        first = complete_all(server, prompts, stream=False)
        loaded: Counter[str] = Counter()
        for _ in range(2):  # a disk gets what is evicted for the second time
            assert complete_all(server, prompts, stream=True) == first
        for worker in (*server.workers("prefill"), *server.workers("decode")):
            loaded.update({medium: store["num_loaded"] for medium, store in worker["kv_tiers"]["stores"].items()})
        server.check_idle()
    assert loaded["host"] > 0
    assert loaded["disk"] > 0
    wrong = {prompt for prompt, found, right in zip(prompts, first, expected, strict=True) if found != right}
    assert wrong <= ties
