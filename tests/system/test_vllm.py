"""Real vLLM in the workers (``make test-vllm``): answers are those of vLLM by itself, also if a worker is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from tests.patience import until
from tests.system.real_vllm import NUM_PROMPTS, NUM_TOKENS, Asked, Asking
from tests.system.serving import Serve

pytestmark = [pytest.mark.vllm, pytest.mark.system, pytest.mark.timeout(1200)]

VLLM = (
    *("--engine", "vllm", "--dtype", "float32", "--enforce-eager", "--kv-cache-memory", "512MiB"),
    *("--engine-args", '{"block_size": 32}'),
)
SPLIT = (*VLLM, "--prefill", "1", "--decode", "1", "--disagg-policy", "always")
CONNECTORS = {
    "nixl": (),
    "kvrelay": ("--vllm-connector", "kvrelay", "--block-size", "32", "--transport", "shm", "--kv-checksums"),
}


def test_a_killed_worker_loses_no_token(asked: list[Asked]) -> None:
    prompts, expected = asked[0].prompts, asked[0].answers
    with Serve((*VLLM, "--prefill", "0", "--decode", "2")) as server, Asking(server) as asking:
        first, second = (int(worker["pid"]) for worker in server.workers("both"))
        answers = asking.begin(prompts)
        until(lambda: asking.num_tokens > NUM_TOKENS)
        os.kill(first, signal.SIGKILL)
        assert [answer.result() for answer in answers] == expected
        (left,) = server.workers("both")
        assert left["pid"] == second


@pytest.fixture(scope="module", params=CONNECTORS.values(), ids=CONNECTORS)
def split(request: pytest.FixtureRequest) -> Iterator[Serve]:
    """One prefill and one decode worker."""
    with Serve((*SPLIT, *request.param)) as server:
        yield server


@pytest.mark.parametrize("order", ["decode-first", "prefill-first"])
def test_prefill_and_decode_apart(split: Serve, asked: list[Asked], order: str) -> None:
    # Other prompts for each order: those of the first one are cached.
    chosen = asked[order == "prefill-first"]
    before = _num_remote(split)
    with Asking(split, order) as asking:
        assert asking.ask(chosen.prompts) == chosen.answers
    # On a busy machine a prefill may come too late.
    assert _num_remote(split) - before >= NUM_PROMPTS // 2
    (decode,) = split.workers("decode")
    is_nixl = "--vllm-connector" not in split.arguments
    # vLLM's own connector moves KV that kvrelay does not see.
    assert is_nixl or decode["decode"]["num_received_bytes"] > 0
    until(split.is_idle)


def _num_remote(server: Serve) -> int:
    (worker,) = server.workers("decode")
    return int(worker["decode"]["num_remote_done"])
