"""Prefixes read from other workers, over real processes: it happens, answers stay what they are, and it is seen.

The mock engine's answer depends on every byte of KV that it reads, so a wrong block would show.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.patience import stop, until
from tests.system.serving import Serve, kvrelay_here
from tests.system.streams import CONFIG, EOS_IDS

from kvrelay.executors.mock import mock_generate

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

LENGTH, NUM_TOKENS, NUM_BLOCKS = 640, 6, 40
FLAGS = (
    *("--engine", "mock", "--prefill", "0", "--decode", "3", "--num-blocks", "512", "--lease-ttl-s", "2"),
    # So hot that each worker gets about as many requests, whatever it has; and dear to compute.
    *("--prefill-token-s", "0.0005", "--temperature", "1000", "--router-seed", "3"),
)


def prompt(prefix: int, end: int) -> list[int]:
    """640 tokens that prompts of this prefix share, and 20 of its own."""
    shared = [16 + (prefix * 31 + 7 * at + at * at % 13) % (CONFIG["vocab_size"] - 20) for at in range(LENGTH)]
    return shared + [16 + (end * 17 + at) % (CONFIG["vocab_size"] - 20) for at in range(20)]


def ask(server: Serve, prefix: int, end: int) -> tuple[dict[str, Any], str, str]:
    """The answer, which must be right, the decision's header, and the worker."""
    body = {"prompt": prompt(prefix, end), "max_tokens": NUM_TOKENS, "temperature": 0, "return_token_ids": True}
    request = urllib.request.Request(
        f"{server.url}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json", "x-kvrelay-decision": "1", "x-kvrelay-waterfall": "1"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        decision, worker = answer.headers["x-kvrelay-decision"], answer.headers["x-kvrelay-worker"]
        told: dict[str, Any] = json.loads(answer.read())
    (choice,) = told["choices"]
    expected = mock_generate(prompt(prefix, end), NUM_TOKENS, vocab_size=CONFIG["vocab_size"], eos_token_ids=EOS_IDS)
    assert choice["token_ids"] == expected
    return told, decision, worker


@pytest.fixture(scope="module", params=[pytest.param("nixl", marks=pytest.mark.matrix), "shm"])
def server(request: pytest.FixtureRequest) -> Iterator[Serve]:
    # Real processes: workers and frontend must find the same hashes of blocks, whatever Python's own hashes are.
    with Serve((*FLAGS, "--transport", request.param), is_real=True) as running:
        yield running


def overlaps(server: Serve, prefix: int) -> list[tuple[int, float]]:
    """What the frontend knows of each worker: blocks of the prefix, and what reading it takes."""
    body = {"prompt": prompt(prefix, 99), "max_tokens": NUM_TOKENS, "model": server.model}
    request = urllib.request.Request(
        f"{server.url}/v1/kvrelay/route", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        candidates = json.loads(answer.read())["decision"]["candidates"]
    return [(score["overlap_blocks"], score["load_s"] or 0.0) for score in candidates]


def all_could_read(server: Serve, prefix: int) -> bool:
    return all(num_blocks == NUM_BLOCKS or load_s > 0.0 for num_blocks, load_s in overlaps(server, prefix))


def counts(server: Serve) -> dict[str, dict[str, Any]]:
    return {worker["worker_id"]: worker["prefixes"]["counts"] for worker in server.workers("both")}


def num_read(server: Serve) -> int:
    return sum(count["num_hit_blocks"] for count in counts(server).values())


def until_all_have(server: Serve, prefix: int) -> list[tuple[dict[str, Any], str]]:
    """The answers that it took, after the first one: to who lacked the prefix, and to others."""
    ask(server, prefix, 0)
    until(lambda: all_could_read(server, prefix))
    answers = []
    while any(num_blocks < NUM_BLOCKS for num_blocks, _ in overlaps(server, prefix)):
        answers.append(ask(server, prefix, len(answers) + 1)[:2])
    return answers


def test_a_prefix_that_one_worker_has_is_read_by_the_others_and_everything_tells_of_it(server: Serve) -> None:
    for prefix in range(10, 30):
        before = num_read(server)
        answers = until_all_have(server, prefix)
        if num_read(server) > before + NUM_BLOCKS:
            break  # else a holder has answered too late, and the prefix was computed again
    assert num_read(server) == before + 2 * NUM_BLOCKS, "each block once for each worker that lacked it"
    loaded = [
        (told, decision)
        for told, decision in answers
        if "load" in {span["phase"] for span in told["kvrelay_waterfall"]["spans"]}
    ]
    assert len(loaded) == 2
    for told, decision in loaded:
        assert told["usage"]["prompt_tokens_details"]["cached_tokens"] == LENGTH
        assert ";load=" in decision
    shown = kvrelay_here("status", "--control", server.control).stdout
    for count in counts(server).values():
        line = "other workers: {num_hits} prompts loaded, {num_not_worth} not worth it, {num_failed_loads} failed"
        assert not count["num_hits"] or line.format_map(count) in shown
        assert not count["num_hit_blocks"] or f"peer: {count['num_hit_blocks']} blocks loaded" in shown


def test_holders_that_are_killed_while_others_read_cost_the_reading_only(server: Serve) -> None:
    name = ask(server, 2, 0)[2]
    (holder,) = [worker for worker in server.workers("both") if worker["worker_id"] == name]
    until(lambda: all_could_read(server, 2))
    before = counts(server)
    stop(holder["pid"])
    try:
        with ThreadPoolExecutor(8) as clients:
            answers = [clients.submit(ask, server, 2, end) for end in range(8)]
            until(lambda: sum(answer.done() for answer in answers) >= 2)
            os.kill(holder["pid"], signal.SIGKILL)
            for answer in answers:
                answer.result(120)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(holder["pid"], signal.SIGKILL)
    until(lambda: name not in counts(server))
    after = counts(server)
    failed = sum(
        after[name]["num_failed_loads"] - before[name]["num_failed_loads"] for name in set(before) & set(after)
    )
    assert failed >= 1
    until(server.is_idle)
