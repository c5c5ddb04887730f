"""Changes of role under load, over real processes: no answer is wrong, lost or hung, and no block leaks."""

from __future__ import annotations

import itertools
import json
import random
import threading
import urllib.request

import pytest
from tests.patience import PATIENCE_S, until
from tests.system.serving import Serve, by_threshold, kvrelay_here
from tests.system.streams import CONFIG, EOS_IDS

from kvrelay.executors.mock import mock_generate

pytestmark = [pytest.mark.system, pytest.mark.timeout(1200)]

NUM_OUTPUT = 24
ROLES = ("both", "prefill", "both", "decode", "prefill", "decode")
"""Every move there is."""


class Client(threading.Thread):
    """Asks until told to stop."""

    def __init__(self, server: Serve, seed: int) -> None:
        super().__init__(daemon=True)
        self._server, self._draw = server, random.Random(seed)
        self.stopped = threading.Event()
        self.num_right = 0
        self.problems: list[str] = []

    def run(self) -> None:
        while not self.stopped.is_set():
            prompt = [self._draw.randrange(16, CONFIG["vocab_size"]) for _ in range(self._draw.choice([20, 90, 700]))]
            try:
                answer = self._ask(prompt)
            except Exception as exc:  # noqa: BLE001 - whatever it is, it is a problem
                self.problems.append(repr(exc))
                continue
            right = mock_generate(prompt, NUM_OUTPUT, vocab_size=CONFIG["vocab_size"], eos_token_ids=EOS_IDS)
            if answer == right:
                self.num_right += 1
            else:
                self.problems.append(f"wrong: {answer}")

    def _ask(self, prompt: list[int]) -> list[int]:
        body = {"model": self._server.model, "prompt": prompt, "max_tokens": NUM_OUTPUT, "temperature": 0}
        request = urllib.request.Request(
            f"{self._server.url}/v1/completions",
            data=json.dumps(body | {"return_token_ids": True}).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=2 * PATIENCE_S) as answer:
            return json.load(answer)["choices"][0]["token_ids"]


@pytest.mark.parametrize("num_changes", [12, pytest.param(300, marks=pytest.mark.matrix)])
def test_changes_of_role_cost_nothing(num_changes: int) -> None:
    flags = ("--engine", "mock", "--decode-base-s", "0.001", "--prefill", "1", "--decode", "2", *by_threshold(64))
    with Serve((*flags, "--planner", "off")) as server:
        clients = [Client(server, seed) for seed in range(4)]
        for client in clients:
            client.start()
        changing = server.workers("decode")[0]["worker_id"]
        for role in itertools.islice(itertools.cycle(ROLES), num_changes):
            done = kvrelay_here("role", changing, role, "--control", server.control)
            assert done.returncode == 0, done.stderr
        for client in clients:
            client.stopped.set()
        for client in clients:
            client.join(2 * PATIENCE_S)
            assert not client.is_alive()
        assert [problem for client in clients for problem in client.problems] == []
        assert sum(client.num_right for client in clients) > num_changes
        until(server.is_idle)
