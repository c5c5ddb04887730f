"""Rotary tables are those of transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.lazily import transformers

from kvrelay.errors import CheckpointError
from kvrelay.executors.torch.config import parse_model_config
from kvrelay.executors.torch.rope import rope_table

HEAD_DIM = 64
NUM_POSITIONS = 512
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 256,
    "short_factor": [1 + pair / 8 for pair in range(HEAD_DIM // 2)],
    "long_factor": [3 + pair / 4 for pair in range(HEAD_DIM // 2)],
}


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "dynamic", "factor": 4.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        | {"original_max_position_embeddings": 64},
        YARN,
        YARN | {"beta_fast": 16.0, "beta_slow": 2.0},
        YARN | {"truncate": False},
        YARN | {"attention_factor": 1.5},
        YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
        YARN | {"mscale": 2.0},
        YARN | {"factor": 1.0},
        LONGROPE,
        LONGROPE | {"factor": 16.0},
        LONGROPE | {"attention_factor": 1.5},
    ],
    ids=str,
)
def test_the_table_is_that_of_transformers(scaling: dict[str, Any]) -> None:
    theirs = transformers.LlamaConfig(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        max_position_embeddings=NUM_POSITIONS,
        rope_parameters={"rope_theta": 50_000.0, **scaling},
    )
    ours = parse_model_config({**theirs.to_dict(), "architectures": ["LlamaForCausalLM"]})
    positions = torch.arange(ours.max_position)[None]
    cosines, sines = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(theirs)(torch.zeros(1), positions)
    table = rope_table(ours.rope, HEAD_DIM, ours.max_position)
    # The angles grow with the position, and so does what rounding makes of them.
    for number, expected in enumerate((cosines, sines)):
        np.testing.assert_allclose(table[:, number], expected[0, :, : HEAD_DIM // 2].numpy(), atol=1e-4, rtol=0)


def longrope_config(**own: object) -> dict[str, object]:
    """As in Phi-3: the type's older name, and the original context beside it."""
    scaling = {**LONGROPE, "type": "su", **own}
    del scaling["rope_type"], scaling["original_max_position_embeddings"]
    return {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 4 * HEAD_DIM, "num_attention_heads": 4, "vocab_size": 9,
        "intermediate_size": 8, "num_hidden_layers": 1, "max_position_embeddings": NUM_POSITIONS,
        "original_max_position_embeddings": 256, "rope_theta": 50_000.0, "rope_scaling": scaling,
    }  # fmt: skip


def test_longrope_ends_with_the_original_context() -> None:
    config = parse_model_config(longrope_config())
    assert (config.max_position, config.rope.kind, config.rope.factor) == (256, "longrope", 2.0)


@pytest.mark.parametrize("factors", [None, [1.0], [0.0] * (HEAD_DIM // 2), ["x"] * (HEAD_DIM // 2)])
def test_longrope_without_factors_is_refused(factors: object) -> None:
    with pytest.raises(CheckpointError, match="short_factor must be 32 positive numbers"):
        parse_model_config(longrope_config(short_factor=factors))
