"""A burst for a decode worker with a small pool, over real processes: KV comes to the holding area, answers stay what
they are, and nothing is left."""

from __future__ import annotations

import json
import random
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.patience import PATIENCE_S, until
from tests.system.serving import Serve, by_threshold
from tests.system.streams import CONFIG, EOS_IDS

from kvrelay import LLM, SamplingParams
from kvrelay.data import bundled_checkpoint_path
from kvrelay.executors.mock import mock_generate

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(600)]

NUM_OUTPUT = 24
LENGTHS = (200, 131, 176, 250, 97, 221, 180, 300, 145, 208, 192, 163)
FLAGS = (
    *("--prefill", "1", "--decode", "1", "--num-blocks", "40", "--kv-watermark", "0", *by_threshold(64)),
    *(
        "--max-prefill-queue-size",
        "1000",
        "--dtype",
        "float32",
        "--num-threads",
        "1",
        "--rank-timeout-s",
        str(PATIENCE_S),
    ),
)
UNLIKE = "torch, blocks of unlike size, pull"
"""In the matrix: ``worker/test_holding`` pulls, and ``worker/test_layouts`` pairs blocks of unlike size."""
CASES = {
    "mock, nixl": ("mock", "--engine", "mock", "--transport", "nixl"),
    "torch to two ranks, shm, checksums": ("torch", "--transport", "shm", "--tp-decode", "2", "--kv-checksums"),
    UNLIKE: ("torch", "--transport", "shm", "--send-type", "GET", "--block-size-prefill", "32"),
}


def prompts() -> list[list[int]]:
    draw = random.Random(5)
    return [[draw.randrange(16, CONFIG["vocab_size"]) for _ in range(length)] for length in LENGTHS]


@pytest.fixture(scope="module")
def answers() -> dict[str, list[list[int]]]:
    """Those of one engine with room for everything, by engine."""
    sampling = SamplingParams(max_tokens=NUM_OUTPUT, temperature=0, ignore_eos=True)
    with LLM(bundled_checkpoint_path(), dtype="float32", num_blocks=512) as plain:
        torch = [list(output.outputs[0].token_ids) for output in plain.generate(prompts(), sampling)]
    mock = [mock_generate(p, NUM_OUTPUT, vocab_size=CONFIG["vocab_size"], eos_token_ids=EOS_IDS) for p in prompts()]
    return {"torch": torch, "mock": mock}


@pytest.fixture(
    scope="module", params=[pytest.param(case, marks=pytest.mark.matrix if case == UNLIKE else ()) for case in CASES]
)
def served(request: pytest.FixtureRequest) -> Iterator[tuple[str, Serve]]:
    engine, *flags = CASES[request.param]
    with Serve((*FLAGS, *flags)) as server:
        yield engine, server


def ask(server: Serve, tokens: list[int], order: str) -> list[int]:
    body = {"prompt": tokens, "max_tokens": NUM_OUTPUT, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
    request = urllib.request.Request(
        f"{server.url}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json", "x-kvrelay-order": order},
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        (choice,) = json.loads(answer.read())["choices"]
    found: list[int] = choice["token_ids"]
    return found


@pytest.mark.parametrize("order", ["decode-first", "prefill-first"])
def test_a_burst_for_a_full_decode_worker(
    served: tuple[str, Serve], answers: dict[str, list[list[int]]], order: str
) -> None:
    engine, server = served
    (before,) = server.workers("decode")
    with ThreadPoolExecutor(len(LENGTHS)) as threads:
        found = list(threads.map(lambda tokens: ask(server, tokens, order), prompts()))
    assert found == answers[engine]
    until(server.is_idle)
    (after,) = server.workers("decode")
    assert after["kv_holding"]["num_held"] > before["kv_holding"]["num_held"]
    assert after["kv_holding"]["num_blocks_in_use"] == 0
    assert after["decode"]["num_remote_done"] > before["decode"]["num_remote_done"]
    assert after["decode"]["num_kv_checksum_mismatches"] == 0
