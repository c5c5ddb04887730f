"""Small models with random weights, of kinds that the bundled one is not: for tests with real vLLM.

Usage: python random_models.py KIND DIRECTORY
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

from kvrelay.data import bundled_checkpoint_path

SIZES: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
"""With wide weights, so that two tokens are seldom nearly as likely."""


def _config(kind: str) -> Any:
    from transformers import (
        DeepseekV2Config,
        Exaone4Config,
        GraniteMoeHybridConfig,
        Lfm2Config,
        LlamaConfig,
        MistralConfig,
        MixtralConfig,
    )

    if kind == "moe":
        return MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=None)
    if kind == "many-heads":
        return LlamaConfig(
            **SIZES | {"num_hidden_layers": 7, "num_attention_heads": 16, "num_key_value_heads": 16}, head_dim=64
        )
    if kind == "sliding-window":
        return MistralConfig(**SIZES, head_dim=32, sliding_window=128)
    if kind == "interleaved":
        # Two groups of layers with windows of 64 tokens, and one without: the heads of all are alike.
        layers = ["sliding_attention", "sliding_attention", "full_attention"] * 2
        sizes = SIZES | {"num_hidden_layers": len(layers), "layer_types": layers, "sliding_window": 64}
        return Exaone4Config(**sizes)
    if kind == "short-convolution":
        layers = ["conv", "conv", "full_attention", "conv"]
        widths = dict.fromkeys(("block_dim", "conv_dim", "conv_dim_out"), SIZES["hidden_size"])
        return Lfm2Config(
            **SIZES | {"layer_types": layers},
            conv_L_cache=3,
            block_auto_adjust_ff_dim=False,
            tie_embedding=False,
            **widths,
        )
    if kind == "mamba":
        sizes = {"mamba_n_heads": 8, "mamba_d_state": 16, "shared_intermediate_size": 256, "num_local_experts": 0}
        layers = ["linear_attention", "full_attention"] * 2
        return GraniteMoeHybridConfig(**SIZES | sizes, layer_types=layers, position_embedding_type="rope")
    assert kind == "mla", kind
    return DeepseekV2Config(
        **SIZES | {"num_key_value_heads": 4},
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        q_lora_rank=None,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        first_k_dense_replace=1,
        moe_layer_freq=1,
        topk_method="greedy",
        n_group=1,
        topk_group=1,
        routed_scaling_factor=1.0,
    )


def write_model(kind: str, directory: Path) -> Path:
    """``kind``: moe, sliding-window, interleaved (windows beside whole attention), short-convolution, mamba, many-heads
    (56 KiB of KV for a token), or mla (a latent of 512 + 64 values, the only size that vLLM's CPU build knows)."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(_config(kind), dtype=torch.float32).save_pretrained(directory)
    for file in bundled_checkpoint_path().glob("*token*"):
        shutil.copy(file, directory)
    return directory


if __name__ == "__main__":
    write_model(sys.argv[1], Path(sys.argv[2]))
