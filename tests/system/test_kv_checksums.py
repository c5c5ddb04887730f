"""``serve --kv-checksums``: every hand-off is verified, in both directions, and the answers stay what they were."""

from __future__ import annotations

import json
import random
import urllib.request

import pytest
from tests.patience import PATIENCE_S
from tests.system.serving import Serve, by_threshold

from kvrelay import LLM, SamplingParams
from kvrelay.data import bundled_checkpoint_path

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

FLAGS = ("--dtype", "float32", *by_threshold(64), "--kv-cache-memory", "128MiB")


def make_prompts() -> list[list[int]]:
    """A short one, long ones for prefill workers, and the first with more behind it: a hit for these to read."""
    config = json.loads((bundled_checkpoint_path() / "config.json").read_text(encoding="utf-8"))
    draw = random.Random(3)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(16, config["vocab_size"]) for _ in range(count)]

    short = tokens(60)
    return [short, *(tokens(length) for length in (65, 128, 500, 2500)), short + tokens(100), short + tokens(300)]


def complete(server: Serve, prompt: list[int]) -> list[int]:
    body = {"model": server.model, "prompt": prompt, "max_tokens": 12, "temperature": 0, "return_token_ids": True}
    request = urllib.request.Request(
        f"{server.url}/v1/completions",
        data=json.dumps({**body, "ignore_eos": True}).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=2 * PATIENCE_S) as answer:
        return json.load(answer)["choices"][0]["token_ids"]


def plain_tokens() -> list[list[int]]:
    """What the plain engine answers."""
    with LLM(dtype="float32", num_blocks=512, device="cpu") as llm:
        outputs = llm.generate(make_prompts(), SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True))
    return [list(output.token_ids) for output in outputs]


def test_answers_are_the_same_with_checksums():
    with Serve((*FLAGS, "--kv-checksums")) as server:
        checked = [complete(server, prompt) for prompt in make_prompts()]
        (decode,), (prefill,) = server.workers("decode"), server.workers("prefill")
        assert server.is_idle()
    decode, prefill = decode["decode"], prefill["prefill"]
    assert checked == plain_tokens()
    assert all(len(tokens) == 12 for tokens in checked)
    assert decode["num_remote_done"] == prefill["num_prefills"] == 6
    assert decode["num_kv_checksum_mismatches"] == prefill["num_kv_checksum_mismatches"] == 0
    assert decode["num_verified_blocks"] > 200
    assert prefill["num_verified_blocks"] > 0
