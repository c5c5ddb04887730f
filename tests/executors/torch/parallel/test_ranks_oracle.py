"""The tokens of several ranks equal those of one process, for every family and however the work is cut."""

from __future__ import annotations

from typing import Any

import pytest
from tests.executors.harness import Harness

from kvrelay.core.sampling import SamplingParams
from kvrelay.engine.step import Executor

LENGTHS, NUM_OUTPUTS = (1, 5, 33, 90, 200), 6
NEAR_TIE = 1e-4
"""Logprobs that differ less may change places: sums over ranks are rounded otherwise than in one process."""

GREEDY = SamplingParams(temperature=0.0, logprobs=2)
SHAPES = [
    ("qwen3-moe", 2, 2),
    # What these have is in the others, too: qwen3-moe has norms and experts, biases are in the test of more ranks than
    # KV heads, mistral's window is cut by no rank. Starting ranks takes most of the time.
    *(
        pytest.param(*shape, marks=pytest.mark.matrix)
        for shape in (
            *((arch, 2, 1) for arch in ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3-moe")),
            *((arch, 1, 2) for arch in ("llama", "qwen3-moe")),
            ("llama", 2, 2),
        )
    ),
]


def answers(executor: Executor, prompts: list[list[int]], chunk: int) -> list[Any]:
    harness = Harness(executor, chunk)
    sequences = [harness.add(slot, prompt, sampling=GREEDY) for slot, prompt in enumerate(prompts)]
    harness.run_to_end(sequences, NUM_OUTPUTS, chunk)
    return sequences


def assert_same(found: Any, expected: Any) -> None:
    """Equal up to a near-tie, after which the texts differ and say nothing any more."""
    for position, (ours, theirs) in enumerate(zip(found.outputs, expected.outputs, strict=True)):
        entry = expected.logprobs[position]
        if ours != theirs:
            best, second = entry.top
            assert ours == second.token_id
            assert best.logprob - second.logprob < NEAR_TIE
            return
        assert found.logprobs[position].chosen.logprob == pytest.approx(entry.chosen.logprob, abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "tp", "pp"), SHAPES, ids=lambda value: str(value))
def test_tokens_equal_one_process(
    arch: str, tp: int, pp: int, checkpoint_of: Any, executor_of: Any, start_ranks: Any, random_prompts: Any
) -> None:
    prompts = random_prompts(LENGTHS, 1000)
    ranks = start_ranks(checkpoint_of(arch), tp, pp)
    ranks.warm_up()
    plain = executor_of(arch)
    plain.warm_up()
    expected = answers(plain, prompts, 1000)
    # The longest prompt alone is several micro-batches; the small chunks are one.
    for chunk in (1000, 17):
        for found, one in zip(answers(ranks, prompts, chunk), expected, strict=True):
            assert_same(found, one)


@pytest.mark.slow
def test_more_ranks_than_kv_heads(checkpoint_of: Any, start_ranks: Any, random_prompts: Any, tmp_path: Any) -> None:
    """Two ranks hold the one KV head; an odd vocabulary is cut unevenly; biases count once.

    The plain engine has torch's attention, as no other test needs kernels for its four heads in a group."""
    import torch
    import transformers
    from tests.executors.torch.conftest import build

    config = transformers.LlamaConfig(
        vocab_size=1001,
        hidden_size=128,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
        initializer_range=0.3,
        eos_token_id=1,
        bos_token_id=0,
        pad_token_id=0,
        attention_bias=True,
        mlp_bias=True,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).float()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path / "model")
    prompts = random_prompts((3, 80), 1000)
    expected = answers(build(tmp_path / "model", attention="torch"), prompts, 1000)
    ranks = start_ranks(tmp_path / "model", 2, 1)
    ranks.warm_up()
    assert ranks.kv_layout.regions[0].num_slots == 2
    for found, one in zip(answers(ranks, prompts, 30), expected, strict=True):
        assert_same(found, one)
