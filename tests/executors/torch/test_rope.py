"""Rotary tables are those of transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from kvrelay.executors.torch.config import parse_model_config
from kvrelay.executors.torch.rope import rope_table

HEAD_DIM = 64
NUM_POSITIONS = 512
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}


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
    ],
    ids=str,
)
def test_the_table_is_that_of_transformers(scaling: dict[str, Any]) -> None:
    theirs = LlamaConfig(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        max_position_embeddings=NUM_POSITIONS,
        rope_parameters={"rope_theta": 50_000.0, **scaling},
    )
    positions = torch.arange(NUM_POSITIONS)[None]
    cosines, sines = LlamaRotaryEmbedding(theirs)(torch.zeros(1), positions)
    ours = parse_model_config({**theirs.to_dict(), "architectures": ["LlamaForCausalLM"]})
    table = rope_table(ours.rope, HEAD_DIM, NUM_POSITIONS)
    # The angles grow with the position, and so does what rounding makes of them.
    for number, expected in enumerate((cosines, sines)):
        np.testing.assert_allclose(table[:, number], expected[0, :, : HEAD_DIM // 2].numpy(), atol=1e-4, rtol=0)
