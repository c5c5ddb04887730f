"""What a config.json means, and what is refused by name."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from kvrelay.errors import CheckpointError, UnsupportedModelError
from kvrelay.executors.torch.config import MoeConfig, RopeConfig, load_model_config, parse_model_config

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "torch_dtype": "bfloat16",
}


def test_defaults() -> None:
    config = parse_model_config(LLAMA)
    assert (config.head_dim, config.num_kv_heads, config.dtype) == (16, 2, "bfloat16")
    assert config.windows == (0, 0, 0)
    assert config.rope == RopeConfig(10_000.0)
    assert (config.qkv_bias, config.qk_norm, config.tied_embeddings, config.moe) == (False, False, False, None)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}},
    ],
)
def test_both_spellings_of_rope(rope: dict[str, object]) -> None:
    assert parse_model_config(LLAMA | rope).rope == RopeConfig(5e5, "linear", 2.0)


def test_windows_and_experts_by_layer() -> None:
    mistral = LLAMA | {"architectures": ["MistralForCausalLM"], "sliding_window": 32}
    assert parse_model_config(mistral).windows == (32, 32, 32)
    qwen = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 32, "max_window_layers": 2}
    assert parse_model_config(qwen).windows == (0, 0, 0)
    assert parse_model_config(qwen | {"use_sliding_window": True}).windows == (0, 0, 32)
    moe = LLAMA | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "decoder_sparse_step": 2,
    }
    config = parse_model_config(moe)
    assert config.sparse == (False, True, False)
    assert config.moe == MoeConfig(8, 2, 32, normalize=False)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "proportional", "factor": 2.0}}, "proportional"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
    ],
)
def test_unsupported_is_named(change: dict[str, object], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        parse_model_config(LLAMA | change)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"vocab_size": None}, "vocab_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"num_hidden_layers": -1}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "KV heads"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
        ({"architectures": []}, "architecture"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be an integer from 1 to 10,000, got 1000000000"),
        ({"hidden_size": 2**40}, "hidden_size"),
        ({"hidden_size": 10**5000}, r"hidden_size .* got more than 10\^18"),
        ({"max_position_embeddings": 10**15}, "max_position_embeddings"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps must be a positive number, got nan"),
        ({"rms_norm_eps": math.inf}, "rms_norm_eps"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"rope_theta": 1.0}, "rope_theta must be above 1"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": math.nan}}, "rope_theta"),
        ({"rope_scaling": {"type": "linear", "factor": 0.0}}, "factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": math.nan}}, "factor"),
        ({"rope_scaling": {"rope_type": "llama3", "low_freq_factor": 4.0}}, "low_freq_factor 4.0 must be below"),
        ({"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 10**15}}, "original_max_position"),
    ],
)
def test_damaged_is_named(change: dict[str, object], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        parse_model_config(LLAMA | change)


def test_eos_ids_of_the_generation_config_win(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"eos_token_id": 2}))
    assert load_model_config(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
    assert load_model_config(tmp_path).eos_token_ids == (5, 7)


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a checkpoint directory"):
        load_model_config(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        load_model_config(tmp_path)
    for content in ("{", "[]", "\udcff", "[" * 100_000):
        (tmp_path / "config.json").write_bytes(content.encode("utf-8", "surrogateescape"))
        with pytest.raises(CheckpointError, match=r"config\.json"):
            load_model_config(tmp_path)
