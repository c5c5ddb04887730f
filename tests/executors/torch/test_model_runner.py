"""The executor's own duties: logprobs, prompt logprobs over chunks, seeds, slots, what it says of itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvrelay.core.layout import KVRegion
from kvrelay.core.sampling import SamplingParams
from kvrelay.engine.step import Executor, SchedulerOutput
from kvrelay.executors.torch.kernels.numba_kernels import multiplies_bfloat16
from kvrelay.executors.torch.slots import SlotStates

GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def executor(executor_of: Any) -> Executor:
    chosen: Executor = executor_of("llama")
    return chosen


def test_the_executor_reports_its_layout_pool_and_limits(executor: Executor) -> None:
    layout = executor.kv_layout
    assert layout.model == (KVRegion("kv", 4, 4, 32, "float32"),)
    assert executor.num_blocks == 256
    assert executor.kv_region.num_bytes == 256 * layout.block_bytes
    assert (executor.max_model_len, executor.vocab_size) == (512, 1024)
    assert len(executor.eos_token_ids) == 1
    assert len(executor.weights_fingerprint) == 16


def test_prompt_logprobs_do_not_depend_on_chunks(executor: Executor, harness_of: Any, random_prompts: Any) -> None:
    (prompt,) = random_prompts((40,), 1000, 4)
    sampling = SamplingParams(temperature=0.0, prompt_logprobs=2, logprobs=1)
    results = []
    for chunk in (100, 7, 1):
        harness = harness_of(executor)
        sequence = harness.add(0, prompt, sampling=sampling)
        bystander = harness.add(1, prompt[:9])
        harness.run_to_end([sequence, bystander], 3, chunk)
        assert bystander.prompt_logprobs == []
        assert len(sequence.logprobs) == 3
        assert [entry.chosen.token_id for entry in sequence.prompt_logprobs] == prompt[1:]
        assert [entry.chosen.token_id for entry in sequence.logprobs] == sequence.outputs
        assert all(entry.chosen == entry.top[0] for entry in sequence.logprobs)
        results.append([entry.chosen.logprob for entry in sequence.prompt_logprobs])
    assert results[0] == results[1]
    assert results[2] == pytest.approx(results[0], abs=1e-4)


def test_prompt_logprobs_equal_the_models(executor: Executor, harness_of: Any, random_prompts: Any) -> None:
    """The entry for position p is what sampling after p tokens reports for the token that follows."""
    (prompt,) = random_prompts((12,), 1000, 5)
    harness = harness_of(executor)
    sequence = harness.add(0, prompt, sampling=SamplingParams(temperature=0.0, prompt_logprobs=0))
    harness.run_to_end([sequence], 1)
    for position in (1, 6, 11):
        other = harness.add(1, prompt[:position], sampling=SamplingParams(temperature=0.0, logprobs=20))
        harness.run_to_end([other], 1)
        best = other.logprobs[0].top[0]
        entry = sequence.prompt_logprobs[position - 1].chosen
        assert entry.token_id == prompt[position]
        assert entry.logprob <= best.logprob + 1e-4
        if entry.rank == 1:
            assert entry.logprob == pytest.approx(best.logprob, abs=1e-4)


def test_seeded_output_does_not_depend_on_the_batch_or_on_where_it_continues(
    executor: Executor, harness_of: Any, random_prompts: Any
) -> None:
    prompts = random_prompts((20, 30, 11), 1000, 6)
    sampling = SamplingParams(temperature=0.8, top_k=40)
    harness = harness_of(executor)
    alone = harness.run_to_end([harness.add(0, prompts[0], sampling=sampling, seed=77)], 8)[0]
    others = [harness.add(slot, prompt, sampling=sampling, seed=slot) for slot, prompt in enumerate(prompts[1:], 1)]
    together = harness.run_to_end([harness.add(5, prompts[0], sampling=sampling, seed=77), *others], 8)[0]
    assert together == alone
    continued = harness.add(2, prompts[0] + alone[:3], sampling=sampling, seed=77, num_prompt=len(prompts[0]))
    assert harness.run_to_end([continued], 5)[0] == alone[3:]
    different = harness.run_to_end([harness.add(0, prompts[0], sampling=sampling, seed=78)], 8)[0]
    assert different != alone


def test_a_step_without_rows_releases_and_enters(executor: Executor, harness_of: Any, random_prompts: Any) -> None:
    nothing, no_flags = np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.bool_)
    output = executor.execute(SchedulerOutput(0, (), (0, 1), nothing, nothing, no_flags, nothing, nothing, nothing))
    assert output.token_ids == []


def test_chunks_that_end_nowhere_give_no_token(executor: Executor, harness_of: Any, random_prompts: Any) -> None:
    (prompt,) = random_prompts((30,), 1000, 7)
    harness = harness_of(executor)
    sequence = harness.add(0, prompt)
    assert harness.step((sequence, 10)).token_ids == []
    assert harness.step((sequence, 10)).token_ids == []
    assert len(harness.step((sequence, 10)).token_ids) == 1
    harness.release(sequence)


def test_warm_up_leaves_no_trace(build: Any, checkpoint_of: Any, harness_of: Any, random_prompts: Any) -> None:
    prompts = random_prompts((25, 60), 1000, 8)
    outputs = []
    for warm in (False, True):
        executor = build(checkpoint_of("llama"))
        if warm:
            executor.warm_up()
        harness = harness_of(executor)
        sequences = [harness.add(slot, prompt) for slot, prompt in enumerate(prompts)]
        outputs.append(harness.run_to_end(sequences, 5))
        executor.shutdown()
    assert outputs[0] == outputs[1]


def test_two_executors_in_one_process(build: Any, checkpoint_of: Any, harness_of: Any, random_prompts: Any) -> None:
    """Interleaved, each with its own pool, they compute what each computes alone."""
    (prompt,) = random_prompts((35,), 1000, 9)
    first, second = (harness_of(build(checkpoint_of(arch))) for arch in ("llama", "qwen2"))
    expected = [h.run_to_end([h.add(0, prompt)], 4)[0] for h in (first, second)]
    a, b = first.add(0, prompt), second.add(0, prompt)
    first.step((a, 35))
    second.step((b, 35))
    for _ in range(3):
        first.step((a, 1))
        second.step((b, 1))
    assert [a.outputs, b.outputs] == expected


@pytest.mark.skipif(not multiplies_bfloat16(), reason="this CPU does not multiply bfloat16")
def test_bfloat16_is_close_to_float32(build: Any, checkpoint_of: Any, harness_of: Any, random_prompts: Any) -> None:
    """Its heads are the bundled checkpoint's: their kernels are compiled for other tests, too."""
    (prompt,) = random_prompts((50,), 1000, 10)
    logprobs = []
    for dtype in ("float32", "bfloat16"):
        harness = harness_of(build(checkpoint_of("qwen3"), dtype=dtype))
        sequence = harness.add(0, prompt, sampling=SamplingParams(temperature=0.0, prompt_logprobs=0))
        harness.run_to_end([sequence], 1)
        logprobs.append(torch.tensor([entry.chosen.logprob for entry in sequence.prompt_logprobs]))
    assert float((logprobs[0] - logprobs[1]).abs().mean()) < 0.1


def test_slots_prepare_a_mixed_batch() -> None:
    states = SlotStates(4, 64, 16)
    states.tokens[2, :9], states.tokens[0, :5] = np.arange(9), np.arange(100, 105)
    states.computed[2], states.computed[0], states.known[2], states.known[0] = 8, 1, 9, 5
    nothing = np.zeros(0, dtype=np.int32)
    batch = states.batch(
        SchedulerOutput(
            1, (), (), np.array([2, 0], np.int32), np.array([1, 3], np.int32), np.array([True, False]), *[nothing] * 3
        )
    )
    assert batch.num_decodes == 1
    assert batch.token_ids.tolist() == [8, 101, 102, 103]
    assert batch.positions.tolist() == [8, 1, 2, 3]
    assert batch.row_offsets.tolist() == [0, 1, 4]
    states.advance(batch)
    states.append(np.array([2], np.int32), np.array([42]))
    assert (states.computed[2], states.computed[0], states.known[2], states.tokens[2, 9]) == (9, 4, 10, 42)
    assert repr(states) == "SlotStates(0 of 4 slots, 15 tokens)"
