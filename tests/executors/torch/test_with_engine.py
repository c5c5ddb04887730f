"""The runner under the real scheduler: chunks, prefix hits and preemption leave greedy output as it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvrelay.config.settings import EngineConfig, RunnerConfig
from kvrelay.core.clock import MonotonicClock
from kvrelay.core.sampling import SamplingParams
from kvrelay.engine.core import EngineCore
from kvrelay.engine.request import Request
from kvrelay.executors.torch import build_executor

NUM_OUTPUTS = 24


def run(model: Any, prompts: Sequence[Sequence[int]], **settings: int) -> list[list[int]]:
    config = EngineConfig(**({"num_blocks": 256, "max_model_len": 512, "max_num_seqs": 16} | settings))
    executor = build_executor(model, RunnerConfig(dtype="float32", device="cpu"), config)
    core = EngineCore(executor, config, MonotonicClock(), worker_id="w")
    for i, prompt in enumerate(prompts):
        sampling = SamplingParams(max_tokens=NUM_OUTPUTS, temperature=0.0, ignore_eos=True)
        core.add_request(Request(str(i), prompt, sampling))
    outputs: list[list[int]] = [[] for _ in prompts]
    while core.has_unfinished():
        for output in core.step().outputs:
            outputs[int(output.request_id)] += output.token_ids
    executor.shutdown()
    return outputs


def test_tight_memory_and_small_budgets_change_nothing(
    checkpoint_of: Any, random_prompts: Any, executor_of: Any, harness_of: Any
) -> None:
    prompts = random_prompts((40, 3, 75, 120, 20, 64), 1000, 11)
    prompts += [prompts[3][:96] + prompts[0], prompts[3]]
    harness = harness_of(executor_of("llama"))
    expected = [harness.run_to_end([harness.add(0, prompt)], NUM_OUTPUTS)[0] for prompt in prompts]
    model = checkpoint_of("llama")
    assert run(model, prompts) == expected
    assert run(model, prompts, max_num_batched_tokens=32) == expected
    # 18 blocks of 16 tokens hold two of the eight sequences: the others wait or are preempted.
    assert run(model, prompts, num_blocks=18, max_model_len=256, max_num_batched_tokens=64) == expected
    assert run(model, prompts, block_size=8, enable_prefix_caching=0) == expected
