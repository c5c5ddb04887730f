"""What a config.json means, and what is refused by name."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.lazily import transformers

from kvrelay.errors import CheckpointError, UnsupportedModelError
from kvrelay.executors.torch.config import ARCHITECTURES, MoeConfig, RopeConfig, load_model_config, parse_model_config

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


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


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


SMALL: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 32,
}
WINDOW = {"use_sliding_window": True, "sliding_window": 16}


@pytest.mark.parametrize(
    "own",
    [
        {},
        {"sliding_window": None},
        WINDOW,
        WINDOW | {"max_window_layers": 1},
        {"attention_bias": True},
        {"tie_word_embeddings": True, "num_key_value_heads": 4, "head_dim": 8, "rms_norm_eps": 1e-4},
        {"num_experts": 4, "num_experts_per_tok": 1, "norm_topk_prob": True, "decoder_sparse_step": 2},
        {"num_local_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": [1]},
        {"rope_theta": 7.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 5.0}, "rope_theta": 7.0},
        {"rope_parameters": {"rope_theta": 5.0}, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"original_max_position_embeddings": 512, "rope_scaling": {"type": "llama3"} | LLAMA3},
        {"max_position_embeddings": 640, "rope_scaling": {"type": "llama3"} | LLAMA3},
    ],
    ids=str,
)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_field_is_that_of_transformers(architecture: str, own: dict[str, Any]) -> None:
    """Given, absent or null: the values of the configuration's class, and what its model makes of them."""
    if "attention_bias" in own and architecture in ("MistralForCausalLM", "MixtralForCausalLM"):
        pytest.skip("refused: transformers ignores it, vLLM does not")
    theirs = getattr(transformers, architecture.replace("ForCausalLM", "Config"))(**copy.deepcopy(SMALL | own))
    ours = parse_model_config({"architectures": [architecture]} | SMALL | own)
    with torch.device("meta"):
        layers = getattr(transformers, architecture)(theirs).model.layers
    attention, rope = layers[0].self_attn, theirs.rope_parameters
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == attention.head_dim
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.max_position == theirs.max_position_embeddings
    assert ours.tied_embeddings == theirs.tie_word_embeddings
    assert (ours.rope.kind, ours.rope.theta, ours.rope.factor) == (
        rope["rope_type"], rope["rope_theta"], rope.get("factor", 1.0)
    )  # fmt: skip
    if ours.rope.kind == "llama3":
        assert ours.rope.original_max_position == rope["original_max_position_embeddings"]
    everywhere = theirs.sliding_window if ours.family in ("mistral", "mixtral") else None
    assert ours.windows == tuple(getattr(layer.self_attn, "sliding_window", everywhere) or 0 for layer in layers)
    assert (ours.qkv_bias, ours.output_bias) == tuple(p.bias is not None for p in (attention.q_proj, attention.o_proj))
    assert ours.qk_norm == hasattr(attention, "q_norm")
    assert ours.sparse == tuple(hasattr(layer.mlp, "experts") for layer in layers)
    for layer in layers:
        if hasattr(layer.mlp, "experts"):
            router, experts = layer.mlp.gate, layer.mlp.experts
            normalizes = getattr(router, "norm_topk_prob", True)
            assert ours.moe == MoeConfig(experts.num_experts, router.top_k, experts.intermediate_dim, normalizes)


@pytest.mark.parametrize(
    ("architecture", "kinds", "own", "windows"),
    [
        ("Qwen2ForCausalLM", "fsf", WINDOW, (0, 16, 0)),
        ("Qwen3ForCausalLM", "fff", {}, (0, 0, 0)),
        ("Qwen3MoeForCausalLM", "sss", WINDOW, (16, 16, 16)),
        ("MistralForCausalLM", "sss", {"sliding_window": 16}, (16, 16, 16)),
        ("LlamaForCausalLM", "fff", {}, (0, 0, 0)),
        # Qwen3's model of transformers has no window here, and fails.
        ("Qwen3ForCausalLM", "fsf", {}, None),
        # transformers ignores these, vLLM does not.
        ("Qwen3MoeForCausalLM", "fsf", WINDOW, None),
        ("MistralForCausalLM", "fsf", {"sliding_window": 16}, None),
        ("MixtralForCausalLM", "sss", {}, None),
        ("LlamaForCausalLM", "sss", {"sliding_window": 16}, None),
        ("Qwen2ForCausalLM", "fcf", {}, None),
        ("Qwen2ForCausalLM", "ff", {}, None),
    ],
)
def test_layer_types_decide_or_are_refused(
    architecture: str, kinds: str, own: dict[str, Any], windows: tuple[int, ...] | None
) -> None:
    names = {"f": "full_attention", "s": "sliding_attention", "c": "chunked_attention"}
    raw = {"architectures": [architecture]} | SMALL | own | {"layer_types": [names[kind] for kind in kinds]}
    if windows is None:
        with pytest.raises((CheckpointError, UnsupportedModelError), match="layer_types"):
            parse_model_config(raw)
    else:
        assert parse_model_config(raw).windows == windows


@pytest.mark.parametrize(
    ("scaling", "max_position", "expected"),
    [
        ({"factor": 4.0, "original_max_position_embeddings": 1024}, 1024, 4096),
        ({"factor": 4.0, "original_max_position_embeddings": 1024}, 8192, 8192),
        ({"factor": 2.5, "original_max_position_embeddings": 1023}, 1024, 2557),
        ({"original_max_position_embeddings": 512}, 1024, 1024),
        ({"factor": 4.0}, 1024, 1024),
    ],
)
def test_yarn_extends_the_context(scaling: dict[str, Any], max_position: int, expected: int) -> None:
    """By its factor, as in vLLM, also where max_position_embeddings is that of the original."""
    raw = LLAMA | {"max_position_embeddings": max_position, "rope_scaling": {"rope_type": "yarn"} | scaling}
    assert parse_model_config(raw).max_position == expected


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
        ({"architectures": [["LlamaForCausalLM"]]}, "architecture"),
        ({"architectures": ["Qwen2VLForConditionalGeneration"], "text_config": LLAMA}, "Qwen2VLForConditionalGen"),
        ({"architectures": ["MistralForCausalLM"], "attention_bias": True}, "attention_bias"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
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
        ({"rope_scaling": "linear"}, "rope_scaling must be an object"),
        ({"rope_scaling": {"type": "linear"}}, "factor must be a positive number, got None"),
        ({"rms_norm_eps": None}, "rms_norm_eps"),
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
        (
            {"rope_scaling": {"rope_type": "llama3"} | LLAMA3 | {"low_freq_factor": 4.0}},
            "low_freq_factor 4.0 must be below",
        ),
        ({"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 10**15}}, "original_max_position"),
        ({"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 9, "factor": 1e30}}, "factor"),
    ],
)
def test_damaged_is_named(change: dict[str, object], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        parse_model_config(LLAMA | change)


def test_end_tokens_come_from_both_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"eos_token_id": 2}))
    assert load_model_config(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
    assert load_model_config(tmp_path).eos_token_ids == (5, 7, 2)


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a checkpoint directory"):
        load_model_config(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        load_model_config(tmp_path)
    for content in ("{", "[]", "\udcff", "[" * 100_000):
        (tmp_path / "config.json").write_bytes(content.encode("utf-8", "surrogateescape"))
        with pytest.raises(CheckpointError, match=r"config\.json"):
            load_model_config(tmp_path)
