"""One prefill and one decode worker on GPUs: KV moves from one device's memory to the other's, both ways, per rank."""

from __future__ import annotations

import json
import random
import urllib.request

import pytest
from tests.patience import PATIENCE_S
from tests.system.serving import Serve, by_threshold

torch = pytest.importorskip("torch")

from kvrelay import LLM, SamplingParams  # noqa: E402
from kvrelay.data import bundled_checkpoint_path  # noqa: E402

NUM_DEVICES = torch.cuda.device_count() if torch.cuda.is_available() else 0

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.system,
    pytest.mark.timeout(900),
    pytest.mark.skipif(NUM_DEVICES == 0, reason="no CUDA device"),
]

NUM_OUTPUT = 8
FLAGS = (
    *("--device", "cuda", "--dtype", "float32", "--num-blocks", "512", *by_threshold(64)),
    *("--rank-timeout-s", str(PATIENCE_S)),
)
BASE_LEN = 60
"""Prefilled locally; the next prompts begin with it, and the prefill worker reads its blocks."""


def make_prompts() -> list[list[int]]:
    draw = random.Random(5)
    vocab = json.loads((bundled_checkpoint_path() / "config.json").read_text(encoding="utf-8"))["vocab_size"]

    def tokens(count: int) -> list[int]:
        return [draw.randrange(16, vocab) for _ in range(count)]

    base = tokens(BASE_LEN)
    return [base, base + tokens(100), base + tokens(333), tokens(127), tokens(900)]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """What the plain engine answers on one device."""
    torch.backends.cuda.matmul.allow_tf32 = False
    with LLM(dtype="float32", num_blocks=512, device="cuda") as llm:
        outputs = llm.generate(make_prompts(), SamplingParams(max_tokens=NUM_OUTPUT, temperature=0.0, ignore_eos=True))
    return [list(output.token_ids) for output in outputs]


def complete(server: Serve, prompt: list[int]) -> list[int]:
    body = {"model": server.model, "prompt": prompt, "max_tokens": NUM_OUTPUT, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"{server.url}/v1/completions",
        data=json.dumps({**body, "return_token_ids": True}).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=3 * PATIENCE_S) as answer:
        return json.load(answer)["choices"][0]["token_ids"]


@pytest.mark.parametrize("way", ["nixl PUT_ASYNC", "nixl GET"])
@pytest.mark.parametrize(("of_prefill", "of_decode"), [(1, 1), (2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("checksums", [False, True], ids=["plain", "checksums"])
def test_kv_of_one_gpu_is_that_of_another(
    way: str, of_prefill: int, of_decode: int, checksums: bool, expected: list[list[int]]
) -> None:
    """Each rank has a device of its own, which the two workers share. So p2p has no case: NCCL refuses that."""
    num_needed = max(of_prefill, of_decode)
    if num_needed > NUM_DEVICES:
        pytest.skip(f"tp {num_needed} needs as many CUDA devices; there are {NUM_DEVICES}")
    transport, send_type = way.split()
    pytest.importorskip("nixl_cu13")
    flags = (*FLAGS, "--tp-prefill", str(of_prefill), "--tp-decode", str(of_decode))
    flags = (*flags, "--transport", transport, "--send-type", send_type, *(("--kv-checksums",) if checksums else ()))
    with Serve(flags) as server:
        prompts = make_prompts()
        assert [complete(server, prompt) for prompt in prompts] == expected
        (giver,), (taker,) = server.idle_workers("prefill"), server.workers("decode")
        assert taker["decode"]["num_remote_done"] == len(prompts) - 1
        assert giver["prefill"]["num_failed"] == 0
        assert sum(peer["num_bytes"] for worker in (giver, taker) for peer in worker["transfer"]["peers"]) > 0
        server.check_idle()
