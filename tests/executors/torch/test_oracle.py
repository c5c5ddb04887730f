"""Greedy tokens equal those of transformers in float32, for every family and however the work is cut."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvrelay.engine.step import Executor
from kvrelay.executors.torch.config import ARCHITECTURES

ARCHS = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3-moe")
LENGTHS, NUM_OUTPUTS = (1, 5, 33, 90), 6


def reference(model: Path, prompts: list[list[int]], num_outputs: int) -> list[list[int]]:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        oracle: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    results = []
    with torch.inference_mode():
        for prompt in prompts:
            tokens = list(prompt)
            for _ in range(num_outputs):
                logits = oracle(torch.tensor([tokens]), use_cache=False).logits[0, -1]
                tokens.append(int(logits.argmax()))
            results.append(tokens[len(prompt) :])
    return results


@pytest.fixture(scope="module")
def expected(
    checkpoint_of: Callable[[str], Path], random_prompts: Callable[..., list[list[int]]]
) -> Callable[[str], tuple[list[list[int]], list[list[int]]]]:
    """Prompts and what transformers continues them with, by architecture."""
    known: dict[str, tuple[list[list[int]], list[list[int]]]] = {}

    def get(arch: str) -> tuple[list[list[int]], list[list[int]]]:
        if arch not in known:
            prompts = random_prompts(LENGTHS, 1000)
            known[arch] = prompts, reference(checkpoint_of(arch), prompts, NUM_OUTPUTS)
        return known[arch]

    return get


def test_every_supported_architecture_is_tested() -> None:
    assert len(ARCHS) == len(ARCHITECTURES)


@pytest.mark.parametrize("arch", ARCHS)
def test_batched_and_chunked(arch: str, executor_of: Any, expected: Any, harness_of: Any) -> None:
    prompts, outputs = expected(arch)
    for chunk in (1000, 17):
        harness = harness_of(executor_of(arch), seed=chunk)
        sequences = [harness.add(slot, prompt) for slot, prompt in enumerate(prompts)]
        assert harness.run_to_end(sequences, NUM_OUTPUTS, chunk) == outputs


@pytest.mark.parametrize("arch", ARCHS)
def test_one_by_one_in_a_reused_slot(arch: str, executor_of: Any, expected: Any, harness_of: Any) -> None:
    prompts, outputs = expected(arch)
    harness = harness_of(executor_of(arch))
    for prompt, output in reversed(list(zip(prompts, outputs))):
        assert harness.run_to_end([harness.add(3, prompt)], NUM_OUTPUTS) == [output]


@pytest.mark.parametrize("arch", ["llama", "mistral", "qwen3-moe"])
def test_prefix_hit_and_continued_sequence(arch: str, executor_of: Any, expected: Any, harness_of: Any) -> None:
    """A second sequence takes the first's full blocks; a third also takes its tokens, as after a preemption."""
    prompts, outputs = expected(arch)
    harness = harness_of(executor_of(arch))
    first = harness.add(0, prompts[-1])
    assert harness.run_to_end([first], NUM_OUTPUTS) == [outputs[-1]]
    shared = len(prompts[-1]) // harness.block_size
    blocks, computed = first.blocks[:shared], shared * harness.block_size
    second = harness.add(1, prompts[-1], computed=computed, blocks=blocks)
    known = prompts[-1] + outputs[-1][:3]
    third = harness.add(2, known, computed=computed, blocks=blocks, num_prompt=len(prompts[-1]))
    assert harness.run_to_end([third], NUM_OUTPUTS - 3) == [outputs[-1][3:]]
    assert harness.run_to_end([second], NUM_OUTPUTS) == [outputs[-1]]


@pytest.mark.parametrize("attention", ["torch"])
@pytest.mark.parametrize("arch", ["mistral", "qwen3"])
def test_torch_attention(
    arch: str, attention: str, checkpoint_of: Any, build: Any, expected: Any, harness_of: Any
) -> None:
    prompts, outputs = expected(arch)
    harness = harness_of(build(checkpoint_of(arch), attention=attention))
    sequences = [harness.add(slot, prompt) for slot, prompt in enumerate(prompts)]
    assert harness.run_to_end(sequences, NUM_OUTPUTS, 17) == outputs


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64},
        {
            "rope_type": "longrope",
            "original_max_position_embeddings": 512,
            "short_factor": [1 + pair / 2 for pair in range(16)],
            "long_factor": [9.0] * 16,
        },
    ],
    ids=["linear", "llama3", "yarn", "longrope"],
)
def test_rope_scaling(
    scaling: dict[str, object], tmp_path: Path, checkpoint_of: Any, build: Any, harness_of: Any, random_prompts: Any
) -> None:
    model = shutil.copytree(checkpoint_of("llama"), tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"rope_scaling": scaling}))
    assert_equal(model, build(model), harness_of, random_prompts)


def test_a_head_beside_tied_embeddings(
    tmp_path: Path,
    checkpoint_of: Any,
    build: Any,
    harness_of: Any,
    random_prompts: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The file has both and they differ: transformers does not tie them."""
    model = shutil.copytree(checkpoint_of("llama"), tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    with caplog.at_level("WARNING"):
        assert_equal(model, build(model), harness_of, random_prompts)
    assert "using lm_head.weight" in caplog.text


def test_bfloat16_weights_in_float32(
    tmp_path: Path, build: Any, harness_of: Any, random_prompts: Callable[..., list[list[int]]]
) -> None:
    from kvrelay.executors.torch.checkpoints import make_model

    make_model(tmp_path / "model", "qwen2", "tiny", seed=3, shards=3, dtype="bfloat16")
    assert_equal(tmp_path / "model", build(tmp_path / "model"), harness_of, random_prompts)


def common(**own: Any) -> dict[str, Any]:
    return {
        "vocab_size": 1000,
        "hidden_size": 128,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
        "eos_token_id": 1,
        "bos_token_id": 0,
        "pad_token_id": 0,
    } | own


@pytest.mark.parametrize(
    ("family", "own"),
    [
        (
            "Qwen3Moe",
            {
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 64,
                "norm_topk_prob": False,
                "decoder_sparse_step": 2,
                "mlp_only_layers": [],
            },
        ),
        ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "mlp_only_layers": [1]}),
        (
            "Qwen3Moe",
            {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
            | {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2},
        ),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
        ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ],
    ids=["sparse-step", "dense-layer", "window-everywhere", "window-by-layer", "biases"],
)
def test_options_as_transformers_writes_them(
    family: str, own: dict[str, Any], tmp_path: Path, build: Any, harness_of: Any, random_prompts: Any
) -> None:
    import transformers

    config = getattr(transformers, f"{family}Config")(**common(**own))
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).float()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path / "model")
    assert_equal(tmp_path / "model", build(tmp_path / "model"), harness_of, random_prompts)


def assert_equal(model: Path, executor: Executor, harness_of: Any, random_prompts: Any) -> None:
    prompts = random_prompts((3, 80), 1000)
    harness = harness_of(executor)
    sequences = [harness.add(slot, prompt) for slot, prompt in enumerate(prompts)]
    assert harness.run_to_end(sequences, 5, 30) == reference(model, prompts, 5)
