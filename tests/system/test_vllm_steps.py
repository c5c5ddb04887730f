"""Our scheduler in real vLLM: each step's composition is what vLLM computes, prompts are cut by the objective, and the
worker publishes what the steps cost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from tests.patience import until
from tests.system.real_vllm import START_TIMEOUT_S, Asking
from tests.system.serving import Serve

from kvrelay.core.step_cost import StepCost, StepWork
from kvrelay.data import bundled_checkpoint_path
from kvrelay.engines.vllm.library import preloaded_libraries

pytestmark = [pytest.mark.vllm, pytest.mark.system, pytest.mark.timeout(1200)]

SHORT, LONG, NUM_TOKENS = 40, 1000, 24
CHUNK = 250
"""Within 70 % of the objective: 1 ms and 10 us a token."""


Run = tuple[list[tuple[StepWork, float]], dict[str, list[int]]]


def runs_of_vllm(*itls_s: float) -> Iterator[Run]:
    """For each objective: the steps and what they took; the answers."""
    script = Path(__file__).with_name("vllm_steps.py")
    words = [str(bundled_checkpoint_path()), *map(str, (SHORT, LONG, NUM_TOKENS, *itls_s))]
    done = subprocess.run(
        [sys.executable, str(script), *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=START_TIMEOUT_S,
        env={**os.environ, "LD_PRELOAD": ":".join(preloaded_libraries())},
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("found ")]
    assert len(lines) == len(itls_s), done.stderr[-3000:]
    for line in lines:
        found: dict[str, Any] = json.loads(line.removeprefix("found "))
        assert found["is_on"]
        yield [(StepWork(*counts), seconds) for counts, seconds in found["steps"]], found["answers"]


def test_each_step_is_told_and_a_long_prompt_is_cut_by_the_objective() -> None:
    (fixed, expected), (cut, answers) = runs_of_vllm(0.0, (0.001 + CHUNK * 1e-5 + 1e-7) / 0.7)
    assert answers == expected, "where a prompt is cut changes no token"
    for steps, chunks in ((fixed, [LONG]), (cut, [CHUNK] * (LONG // CHUNK))):
        works = [work for work, _ in steps]
        # All short prompts at once; then chunks of the long one beside three answers that go on.
        before = [0, *accumulate(chunks)]
        assert works[:3] == [
            StepWork(3 * SHORT, 3 * SHORT**2 // 2, 0, 0),
            *(StepWork(0, 0, 3, 3 * (SHORT + number)) for number in (1, 2)),
        ]
        assert works[3 : 3 + len(chunks)] == [
            StepWork(chunk, chunk * begun + chunk**2 // 2, 3, 3 * (SHORT + 3 + number))
            for number, (chunk, begun) in enumerate(zip(chunks, before))
        ]
        assert sum(work.num_decodes for work in works) == 4 * (NUM_TOKENS - 1)
        assert len(works) == 3 + len(chunks) + NUM_TOKENS - 1, "the long prompt's answer ends last"
        assert all(0.0 < seconds < START_TIMEOUT_S for _, seconds in steps)


def test_a_worker_publishes_what_vllms_steps_cost() -> None:
    flags = ("--engine", "vllm", "--dtype", "float32", "--enforce-eager", "--kv-cache-memory", "512MiB")
    shape = ("--engine-args", '{"block_size": 32}', "--prefill", "0", "--decode", "1")
    with Serve((*flags, *shape)) as server, Asking(server) as asking:
        prompts = [[(number * 13 + at) % 500 + 20 for at in range(60 * (number % 5 + 1))] for number in range(20)]
        asking.ask(prompts)

        def load() -> dict[str, Any]:
            (worker,) = server.workers("both")
            assert worker["num_steps"] >= 0
            found: dict[str, Any] = worker["load"] | {
                "places": worker["decode"]["places"],
                "steps": worker["num_steps"],
            }
            return found

        # The last steps are taken in within a second.
        until(lambda: load()["steps"] >= NUM_TOKENS)
        found = load()
        assert found["step_cost_source"] == "measured"
        cost, prior = StepCost(**found["step_cost"]), StepCost()
        assert cost.is_sound
        assert cost.step_s != prior.step_s
        assert cost.prefill_token_s != prior.prefill_token_s
        assert found["places"] == {"local_no_prefill_worker": len(prompts)}
