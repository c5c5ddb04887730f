"""The runner under the real scheduler: chunks, prefix hits and preemption leave greedy output as it is."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.tiers.conftest import PrivateMemory

from kvrelay.config.settings import EngineConfig, RunnerConfig
from kvrelay.core.clock import MonotonicClock
from kvrelay.core.sampling import SamplingParams
from kvrelay.core.step_cost import StepCost
from kvrelay.engine.core import EngineCore
from kvrelay.engine.request import Request
from kvrelay.executors.torch import build_executor
from kvrelay.tiers.block import shape_of
from kvrelay.tiers.carrier import ThreadCarrier
from kvrelay.tiers.disk import DiskStore
from kvrelay.tiers.host import HostStore
from kvrelay.tiers.tiers import KvTiers

NUM_OUTPUTS = 24


def run(model: Any, prompts: Sequence[Sequence[int]], **settings: int) -> list[list[int]]:
    return run_with(model, prompts, lambda _: None, **settings)


def run_with(
    model: Any, prompts: Sequence[Sequence[int]], prepare: Callable[[EngineCore], Any], **settings: int
) -> list[list[int]]:
    config = EngineConfig(**({"num_blocks": 256, "max_model_len": 512, "max_num_seqs": 16} | settings))
    executor = build_executor(model, RunnerConfig(dtype="float32", device="cpu"), config)
    core = EngineCore(executor, config, MonotonicClock(), worker_id="w")
    storage = prepare(core)
    ended: queue.Queue[tuple[str, bool, int]] = queue.Queue()
    if storage is not None:
        core.attach(storage)
        storage.start(lambda *load: ended.put(load))
    for i, prompt in enumerate(prompts):
        sampling = SamplingParams(max_tokens=NUM_OUTPUTS, temperature=0.0, ignore_eos=True)
        core.add_request(Request(str(i), prompt, sampling))
    outputs: list[list[int]] = [[] for _ in prompts]
    while core.has_unfinished():
        if not core.has_work():
            core.kv_loaded(*ended.get(timeout=60.0))
        for output in core.step().outputs:
            outputs[int(output.request_id)] += output.token_ids
    core.check_integrity()
    if storage is not None:
        storage.flush(core.pool)
        storage.close()
    executor.shutdown()
    return outputs


@pytest.mark.parametrize("model", ["llama", pytest.param("qwen3-moe", marks=pytest.mark.matrix)])
def test_evicted_kv_comes_back_from_host_memory_and_disk_as_it_was(
    model: str, checkpoint_of: Any, random_prompts: Any, tmp_path: Path
) -> None:
    """Prompts return after their blocks were evicted, preempted sequences get theirs back, and a second worker begins
    with what the first one kept."""
    prompts = random_prompts((70, 75, 120, 90), 1000, 12)
    prompts += [[*prompt, 5, 6, 7] for prompt in prompts]
    checkpoint = checkpoint_of(model)
    expected = run(checkpoint, prompts)
    memory = PrivateMemory(1 << 24)
    tiers: list[KvTiers] = []

    def with_tiers(core: EngineCore) -> KvTiers:
        shape = shape_of("model", core.executor.kv_layout)
        stores = [HostStore(memory, shape), DiskStore(tmp_path, shape, 1 << 24, 1e6)]
        carrier = ThreadCarrier(core.executor.kv_region, shape.block_bytes)
        tiers.append(KvTiers(shape, stores, lambda: StepCost(prefill_token_s=1.0), carrier))
        return tiers[-1]

    for _ in range(2):
        assert run_with(checkpoint, prompts, with_tiers, num_blocks=20, max_model_len=256) == expected
    assert tiers[-1].counts.num_hits >= 4
    assert tiers[-1].counts.num_failed_loads == 0


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
