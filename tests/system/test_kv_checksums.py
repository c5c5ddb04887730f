"""``serve --kv-checksums``: every hand-off is verified, in both directions, and the answers stay what they were."""

from __future__ import annotations

import json
import random
import urllib.request

import pytest
from tests.patience import PATIENCE_S
from tests.system.serving import Serve, by_threshold
from tests.system.streams import CONFIG, EOS_IDS

from kvrelay.executors.mock import mock_generate

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

FLAGS = ("--engine", "mock", "--speedup-ratio", "0", "--order", "decode-first", *by_threshold(64))
"""The mock engine's answer depends on every token of the KV that it reads."""
NUM_OUTPUT = 12


def make_prompts() -> list[list[int]]:
    """A short one, long ones for prefill workers, and the first with more behind it: a hit for these to read."""
    draw = random.Random(3)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(16, CONFIG["vocab_size"]) for _ in range(count)]

    short = tokens(60)
    return [short, *(tokens(length) for length in (65, 128, 500, 2500)), short + tokens(100), short + tokens(300)]


def complete(server: Serve, prompt: list[int]) -> list[int]:
    body = {
        "model": server.model,
        "prompt": prompt,
        "max_tokens": NUM_OUTPUT,
        "temperature": 0,
        "return_token_ids": True,
    }
    request = urllib.request.Request(
        f"{server.url}/v1/completions", data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=2 * PATIENCE_S) as answer:
        return json.load(answer)["choices"][0]["token_ids"]


def test_answers_are_the_same_with_checksums():
    with Serve((*FLAGS, "--kv-checksums")) as server:
        checked = [complete(server, prompt) for prompt in make_prompts()]
        (decode,), (prefill,) = server.idle_workers("decode"), server.workers("prefill")
    decode, prefill = decode["decode"], prefill["prefill"]
    known = {"vocab_size": CONFIG["vocab_size"], "eos_token_ids": EOS_IDS}
    assert checked == [mock_generate(prompt, NUM_OUTPUT, **known) for prompt in make_prompts()]
    assert decode["num_remote_done"] == prefill["num_prefills"] == 6
    assert decode["num_kv_checksum_mismatches"] == prefill["num_kv_checksum_mismatches"] == 0
    assert decode["num_verified_blocks"] > 200
    assert prefill["num_verified_blocks"] > 0
