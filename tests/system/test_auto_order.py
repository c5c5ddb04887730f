"""Order auto over real processes: a lone prompt takes a pair, a burst mostly the queue, and every answer is right.

The mock engine's answer depends on every byte of KV that it reads.
"""

from __future__ import annotations

import json
import re
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.patience import until
from tests.system.serving import Serve, kvrelay_here
from tests.system.streams import CONFIG, EOS_IDS

from kvrelay.executors.mock import mock_generate

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

NUM_TOKENS = 6
FLAGS = (
    *("--engine", "mock", "--prefill", "1", "--decode", "1", "--num-blocks", "2048", "--prefill-token-s", "0.0003"),
    # Local is closed and every gap is in time, so that the machine's own speed decides nothing.
    *("--disagg-policy", "always", "--slo-itl-ms", "100000", "--slo-ttft-ms", "100000"),
)


def prompt(number: int) -> list[int]:
    return [16 + (number * 37 + 7 * at + at * at % 13) % (CONFIG["vocab_size"] - 20) for at in range(600)]


def ask(server: Serve, number: int) -> str:
    """The decision's header of an answer, which must be right."""
    body = {"prompt": prompt(number), "max_tokens": NUM_TOKENS, "temperature": 0, "return_token_ids": True}
    request = urllib.request.Request(
        f"{server.url}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json", "x-kvrelay-decision": "1"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        decision = answer.headers["x-kvrelay-decision"]
        (choice,) = json.loads(answer.read())["choices"]
    expected = mock_generate(prompt(number), NUM_TOKENS, vocab_size=CONFIG["vocab_size"], eos_token_ids=EOS_IDS)
    assert choice["token_ids"] == expected
    return str(decision)


def test_a_lone_prompt_takes_a_pair_and_a_burst_the_queue() -> None:
    with Serve(FLAGS) as server:
        # Workers publish what their steps cost when they start; the frontend may hear it a little later.
        until(lambda: ask(server, 0) != "remote")
        lone = [ask(server, number) for number in range(1, 5)]
        assert all(re.fullmatch(r"pair;pair=\d+\.\d{4}s;queue=\d+\.\d{4}s", decision) for decision in lone), lone
        with ThreadPoolExecutor(12) as pool:
            burst = list(pool.map(lambda number: ask(server, number), range(10, 22)))
        assert any(decision.startswith("remote;") and ";pair=" in decision for decision in burst), burst
        shown = kvrelay_here("status", "--url", server.url, "--explain-tokens", "600")
        assert "pair, pair 0." in shown.stdout, shown
        assert "prefills: queue " in shown.stdout, shown
