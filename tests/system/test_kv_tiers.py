"""KV tiers over real processes: answers stay what they are, prefixes outlive their worker, and an operator sees it.

The mock engine's answer depends on every byte of KV that it reads, so a wrong block would show.
"""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.chaos.brokers import own_state_directory
from tests.patience import until
from tests.system.serving import Serve, kvrelay_here
from tests.system.streams import CONFIG, EOS_IDS

from kvrelay.executors.mock import mock_generate

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

PROMPTS = range(8)
LENGTH, NUM_TOKENS = 300, 6
FLAGS = (
    *("--engine", "mock", "--prefill", "0", "--decode", "1", "--num-blocks", "64", "--lease-ttl-s", "2"),
    *("--prefill-token-s", "0.0005", "--host-kv-linger-s", "600"),
)


def prompt(number: int) -> list[int]:
    return [16 + (number * 31 + 7 * at + at * at % 13) % (CONFIG["vocab_size"] - 20) for at in range(LENGTH)]


def ask(server: Serve, number: int, **headers: str) -> tuple[dict[str, Any], str]:
    """The answer, which must be right, and the decision's header."""
    body = {"prompt": prompt(number), "max_tokens": NUM_TOKENS, "temperature": 0, "return_token_ids": True}
    request = urllib.request.Request(
        f"{server.url}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json", "x-kvrelay-decision": "1", **headers},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        decision = answer.headers["x-kvrelay-decision"]
        told: dict[str, Any] = json.loads(answer.read())
    (choice,) = told["choices"]
    expected = mock_generate(prompt(number), NUM_TOKENS, vocab_size=CONFIG["vocab_size"], eos_token_ids=EOS_IDS)
    assert choice["token_ids"] == expected
    return told, decision


def num_cached(told: dict[str, Any]) -> int:
    count: int = told["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiers")


@pytest.fixture(scope="module")
def server(home: Path) -> Iterator[Serve]:
    """Host memory and disk, both the test's own; the broker ends with it."""
    flags = ("--host-kv-cache", "64MiB", "--disk-kv-cache", f"{home / 'disk'},1GiB")
    with own_state_directory():
        with Serve((*FLAGS, *flags)) as running:
            yield running
        assert running.process.returncode == 0, running.output


def the_worker(server: Serve) -> dict[str, Any]:
    (worker,) = server.workers("both")
    return worker


def test_evicted_prompts_are_loaded_and_everything_tells_of_it(server: Serve) -> None:
    for number in PROMPTS:
        assert num_cached(ask(server, number)[0]) == 0, "each for the first time"
    # Whether each one is loaded or computed depends on measured times.
    answers = [ask(server, number, **{"x-kvrelay-waterfall": "1"}) for number in PROMPTS]
    loaded = [
        (told, decision)
        for told, decision in answers
        if "load" in {span["phase"] for span in told["kvrelay_waterfall"]["spans"]}
    ]
    assert loaded
    assert all(num_cached(told) > 0 and ";load=" in decision for told, decision in loaded)
    counts = the_worker(server)["kv_tiers"]["counts"]
    assert counts["num_hits"] >= len(loaded)
    assert counts["num_failed_loads"] == 0
    assert counts["saved_s"] > 0
    shown = kvrelay_here("status", "--control", server.control)
    assert f"KV tiers: {counts['num_hits']} prompts loaded" in shown.stdout
    until(server.is_idle)


def prefetch(server: Serve, number: int) -> int:
    """How many tokens are in the pool because of it."""
    body = {"prompt": prompt(number), "kv_hints": {"prefetch": True}}
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        told: dict[str, Any] = json.loads(answer.read())
    assert (told["choices"][0]["text"], told["usage"]["completion_tokens"]) == ("", 0)
    return num_cached(told)


def test_a_prompt_that_was_prefetched_waits_for_no_load(server: Serve) -> None:
    for number in PROMPTS:
        ask(server, number)
    until(server.is_idle)
    num_loaded, num_placed = 0, num_prefills(server)
    for number in PROMPTS:
        num_tokens = prefetch(server, number)
        told, _ = ask(server, number, **{"x-kvrelay-waterfall": "1"})
        if num_tokens:  # else it was there, or computing it seemed to take no longer
            num_loaded += 1
            assert num_cached(told) >= num_tokens
            assert "load" not in {span["phase"] for span in told["kvrelay_waterfall"]["spans"]}
    assert num_loaded
    assert num_prefills(server) == num_placed + len(PROMPTS), "a prefetch computes no prompt"


def num_prefills(server: Serve) -> int:
    """Placed by the worker, anywhere."""
    return sum(the_worker(server)["decode"]["places"].values())


def test_prefixes_outlive_a_worker_that_is_killed(server: Serve) -> None:
    for number in PROMPTS:
        ask(server, number)
    before = the_worker(server)
    os.kill(before["pid"], signal.SIGKILL)
    until(lambda: any(worker["pid"] != before["pid"] for worker in server.workers("both")))
    cached = [num_cached(ask(server, number)[0]) for number in PROMPTS]
    assert any(cached), "the new worker's pool was empty: this was its predecessor's"
    assert the_worker(server)["kv_tiers"]["counts"]["num_failed_loads"] == 0


def test_a_cleared_cache_has_nothing_left(server: Serve, home: Path) -> None:
    for _ in range(2):
        for number in PROMPTS:
            ask(server, number)

    def num_files() -> int:
        return sum(len(files) for _, _, files in os.walk(home / "disk"))

    until(lambda: num_files() > 0)
    done = kvrelay_here("cache", "clear", "--control", server.control)
    assert done.returncode == 0, done.stderr
    until(lambda: num_files() == 0)
    assert num_cached(ask(server, 1)[0]) == 0


@pytest.mark.matrix
@pytest.mark.parametrize("ranks", [("--tp", "2"), ("--pp", "2")], ids=["tp", "pp"])
def test_kv_of_several_ranks_comes_back_whole(ranks: tuple[str, ...]) -> None:
    """A block in a tier is that of all ranks: they share the pool."""
    flags = ("--engine", "torch", "--dtype", "float32", "--prefill", "0", "--decode", "1", "--num-blocks", "40")
    with own_state_directory(), Serve((*flags, *ranks, "--max-model-len", "256", "--host-kv-cache", "64MiB")) as server:

        def answer(number: int) -> dict[str, Any]:
            body = {"prompt": prompt(number)[:200], "max_tokens": 16, "temperature": 0, "return_token_ids": True}
            request = urllib.request.Request(
                f"{server.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=120) as told:
                shown: dict[str, Any] = json.loads(told.read())
            return shown

        computed, loaded = ([answer(number) for number in PROMPTS] for _ in range(2))
        for before, after in zip(computed, loaded):
            assert after["choices"][0]["token_ids"] == before["choices"][0]["token_ids"]
            assert num_cached(before) == 0
        # Whether each prompt is loaded or computed depends on measured times.
        assert any(num_cached(after) for after in loaded)
        until(server.is_idle)


def test_a_tier_that_no_request_could_use_is_refused() -> None:
    worker = ("worker", "--engine", "mock", "--control", "nats://127.0.0.1:1")
    done = kvrelay_here(*worker, "--host-kv-cache", "1GiB", "--no-enable-prefix-caching")
    assert done.returncode == 2
    assert "--no-enable-prefix-caching reuses none" in done.stderr
    done = kvrelay_here(*worker, "--disk-kv-cache", "/var/cache/kv")
    assert done.returncode == 2
    assert "DIRECTORY,SIZE" in done.stderr
