"""kvrelay's connector in a plain ``vllm serve`` (``make test-vllm``): a kvrelay worker with vLLM prefills for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from tests.patience import PATIENCE_S, until
from tests.system.real_vllm import (
    BLOCK_SIZE,
    NUM_PROMPTS,
    NUM_TOKENS,
    START_TIMEOUT_S,
    Asked,
    Asking,
    StockServer,
    stock_servers,
)
from tests.system.serving import Serve

from kvrelay.data import bundled_checkpoint_path
from kvrelay.engines.connector.directory import CONFIG_KEY, POOL, StagingDirectory
from kvrelay.engines.connector.terms import StagedKv, StagingPlace, encode_request

pytestmark = [pytest.mark.vllm, pytest.mark.system, pytest.mark.timeout(1200)]

NUM_LOADED = "vllm:external_prefix_cache_hits_total"
COMMON = ("--block-size", str(BLOCK_SIZE), "--transport", "shm", "--kv-checksums")
PREFILL = (
    *("--engine", "vllm", "--dtype", "float32", "--enforce-eager", "--kv-cache-memory", "512MiB"),
    *("--vllm-connector", "kvrelay", "--role", "prefill"),
)


@pytest.fixture(scope="module")
def staging(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("connector") / "staging"


@pytest.fixture(scope="module")
def server(staging: Path) -> Iterator[StockServer]:
    transfer = {
        "kv_connector": "KvrelayConnector",
        "kv_connector_module_path": "kvrelay.engines.connector.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {CONFIG_KEY: str(staging)},
    }
    with stock_servers(1, staging.parent, transfer) as (found,):
        yield found


@pytest.fixture(scope="module")
def pair(server: StockServer, staging: Path) -> Iterator[Serve]:
    """A worker in front of the server decodes, one with a vLLM of its own prefills."""
    upstream = ("--engine", "openai", "--upstream", server.url, "--upstream-kv-transfer", "kvrelay")
    decode = ("--upstream-staging", str(staging), "--prefill", "0", "--decode", "1", "--disagg-policy", "always")
    with Serve((*upstream, *decode, *COMMON)) as kvrelay:
        names = ("--served-model-name", kvrelay.model, "--control", kvrelay.control)
        command = [sys.executable, "-m", "kvrelay", "worker", str(bundled_checkpoint_path())]
        with (staging.parent / "prefill.log").open("wb") as log:
            prefill = subprocess.Popen([*command, *PREFILL, *names, *COMMON], stdout=log, stderr=subprocess.STDOUT)
        try:
            until(lambda: kvrelay.workers("prefill"), timeout_s=START_TIMEOUT_S)
            yield kvrelay
        finally:
            prefill.terminate()
            prefill.wait(2 * PATIENCE_S)


def _decode_worker(kvrelay: Serve) -> dict[str, Any]:
    (worker,) = kvrelay.workers("both")
    return worker


@pytest.mark.parametrize("order", ["decode-first", "prefill-first"])
def test_the_server_loads_what_the_worker_has_computed(
    server: StockServer, pair: Serve, asked: list[Asked], order: str
) -> None:
    chosen = asked[order == "prefill-first"]
    num_loaded, num_remote = server.count(NUM_LOADED), _decode_worker(pair)["decode"]["num_remote_done"]
    with Asking(pair, order) as asking:
        assert asking.ask(chosen.prompts) == chosen.answers
    decode = _decode_worker(pair)["decode"]
    # On a busy machine a prefill may come too late.
    assert decode["num_remote_done"] - num_remote >= NUM_PROMPTS // 2
    assert decode["num_received_bytes"] > 0
    assert server.count(NUM_LOADED) - num_loaded >= sum(map(len, chosen.prompts)) // 4
    until(pair.is_idle)


def test_what_the_connector_must_not_load_is_computed(
    server: StockServer, pair: Serve, staging: Path, asked: list[Asked]
) -> None:
    """A ticket that is not valid is noticed when vLLM already counts on the KV; the rest before that."""
    place = StagingDirectory(str(staging)).read(POOL, StagingPlace)
    assert place is not None
    prompt, answer = asked[0].prompts[-1], asked[0].answers[-1]
    blocks = tuple(range(-(-len(prompt) // BLOCK_SIZE)))
    good = StagedKv("load", blocks, len(prompt), place.pool, 5)
    for number, wrong in enumerate(
        (good, msgspec.structs.replace(good, pool="of a worker before"), msgspec.structs.replace(good, block_ids=()))
    ):
        params = msgspec.json.decode(encode_request(wrong))
        # Each has a prefix cache of its own.
        assert _ask(server, prompt, kv_transfer_params=params, cache_salt=f"salt {number}") == answer
    assert _ask(server, prompt, cache_salt="plain") == answer


def _ask(server: StockServer, prompt: list[int], **fields: object) -> list[int]:
    body = {
        "model": "m",
        "prompt": prompt,
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **fields,
    }
    response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S)
    response.raise_for_status()
    return list(response.json()["choices"][0]["token_ids"])


def test_a_killed_worker_comes_back_with_another_pool(
    server: StockServer, pair: Serve, staging: Path, asked: list[Asked]
) -> None:
    prompts, expected = asked[0].prompts, asked[0].answers
    before = _decode_worker(pair)
    pools = StagingDirectory(str(staging))
    place = pools.read(POOL, StagingPlace)
    with Asking(pair) as asking:
        answers = asking.begin(prompts)
        until(lambda: asking.num_tokens > NUM_TOKENS)
        os.kill(int(before["pid"]), signal.SIGKILL)
        # It was the only one: a request may fail, but none gets a wrong token.
        for answer, tokens in zip(answers, expected):
            if answer.exception() is None:
                assert answer.result() == tokens
        until(
            lambda: [worker["pid"] != before["pid"] for worker in pair.workers("both")] == [True],
            timeout_s=START_TIMEOUT_S,
        )
        assert asking.ask(prompts) == expected
    assert pools.read(POOL, StagingPlace) != place
    assert _decode_worker(pair)["decode"]["num_remote_done"]
    until(pair.is_idle)
