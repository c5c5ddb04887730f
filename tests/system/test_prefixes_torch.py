"""Prefixes read from other workers of a real model, whose pools are cut alike or not: the tokens are transformers'."""

from __future__ import annotations

import json
import random
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests import nursery
from tests.patience import PATIENCE_S, until
from tests.system.serving import Serve
from tests.system.test_equality import check_against_transformers

from kvrelay.data import bundled_checkpoint_path
from kvrelay.handoff.base import EndReason

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(900)]

CONFIG = json.loads((bundled_checkpoint_path() / "config.json").read_text(encoding="utf-8"))
LENGTH, NUM_OUTPUT, BLOCK_SIZE = 2000, 8, 16
"""So long that reading a prefix is faster than computing it, whatever else the machine does."""
MAX_PROMPTS = 60
FLAGS = (
    "--dtype",
    "float32",
    "--num-threads",
    "1",
    "--num-blocks",
    "4096",
    "--lease-ttl-s",
    "5",
    "--rank-timeout-s",
    str(PATIENCE_S),
)
CASES = {
    "TP1-TP2": ((), ("--tp", "2")),
    "TP2-PP2": (("--tp", "2"), ("--pp", "2")),
    "TP1-TP1": ((), ()),
    "TP2-TP1-per-rank": (("--tp", "2", "--kv-transfer-per-rank"), ("--kv-transfer-per-rank",)),
}
THIN = ("TP1-TP2", "nixl")
MATRIX = [
    pytest.param(
        case, transport, id=f"{case}-{transport}", marks=() if (case, transport) == THIN else pytest.mark.matrix
    )
    for case, transport in (
        THIN,
        ("TP1-TP2", "shm"),
        ("TP1-TP2", "p2p"),
        ("TP2-PP2", "nixl"),
        ("TP1-TP1", "shm"),
        ("TP2-TP1-per-rank", "nixl"),
        ("TP2-TP1-per-rank", "shm"),
    )
]


@contextmanager
def two_workers(first: tuple[str, ...], second: tuple[str, ...]) -> Iterator[Serve]:
    """The frontend draws the worker of each request, whatever it has."""
    serve = (*FLAGS, *first, "--prefill", "0", "--decode", "1", "--temperature", "1000", "--router-seed", "3")
    with Serve(serve) as server:
        command = [sys.executable, "-m", "kvrelay", "worker", "--role", "both", "--control", server.control]
        process = nursery.popen([*command, *FLAGS, *second])
        try:
            until(lambda: len(server.workers("both")) == 2)
            yield server
        finally:
            process.terminate()
            process.wait(PATIENCE_S)


def post(server: Serve, path: str, prompt: tuple[int, ...]) -> Any:
    body = {"model": server.model, "prompt": list(prompt), "max_tokens": NUM_OUTPUT, "temperature": 0}
    request = urllib.request.Request(
        server.url + path,
        data=json.dumps({**body, "ignore_eos": True, "return_token_ids": True}).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=3 * PATIENCE_S) as answer:
        return json.load(answer)


def ask(server: Serve, prompt: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(post(server, "/v1/completions", prompt)["choices"][0]["token_ids"])


def is_known(server: Serve, prefix: tuple[int, ...]) -> bool:
    """Whether the frontend would have a worker that lacks the prefix read all of it: the last events of a prompt, or of
    its last chunk, may come after its answer. It draws the worker, so it is asked until it has drawn such a one."""
    num_blocks = LENGTH // BLOCK_SIZE
    decision = post(server, "/v1/kvrelay/route", prefix)["decision"]
    overlaps = [each["overlap_blocks"] for each in decision["candidates"]]
    if min(overlaps) == num_blocks:
        return True
    return decision["overlap_blocks"] < num_blocks <= decision["overlap_blocks"] + decision["load_blocks"]


def num_read(server: Serve) -> list[int]:
    """Prefixes that each worker has read."""
    counts = [worker["prefixes"]["counts"] for worker in server.workers("both")]
    return [count["num_hits"] - count["num_failed_loads"] for count in counts]


@pytest.mark.parametrize(("case", "transport"), MATRIX)
def test_what_was_read_gives_the_tokens_of_transformers(case: str, transport: str) -> None:
    draw = random.Random(11)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(16, CONFIG["vocab_size"]) for _ in range(count))

    first, second = CASES[case]
    asked: dict[tuple[int, ...], tuple[int, ...]] = {}
    with two_workers((*first, "--transport", transport), (*second, "--transport", transport)) as server:
        while min(num_read(server)) == 0:
            assert len(asked) < MAX_PROMPTS, "no worker reads from the other"
            shared = tokens(LENGTH)
            for _ in range(3):
                prompt = shared + tokens(20)
                asked[prompt] = ask(server, prompt)
                until(lambda: is_known(server, shared + prompt[-1:]))  # noqa: B023 - it is called here and now
        stats = [worker["prefixes"] for worker in server.workers("both")]
        # The one with the prefix may answer too late on a busy machine.
        assert {reason for each in stats for reason in each["stores"]["peer"]["misses"]} <= {EndReason.CLAIM_TIMEOUT}
        num_blocks = sum(each["counts"]["num_hit_blocks"] for each in stats)
        assert num_blocks == sum(num_read(server)) * (LENGTH // BLOCK_SIZE)
        until(server.is_idle)
    ties = check_against_transformers(list(asked), list(asked.values()))
    assert len(ties) < len(asked) / 4
