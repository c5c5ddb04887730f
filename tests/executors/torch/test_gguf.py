"""GGUF files are written here by the ``gguf`` package from random checkpoints, and must come back as those."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize, quantize
from safetensors.numpy import load_file

from kvrelay.errors import CheckpointError, UnsupportedModelError
from kvrelay.executors.torch.checkpoints.gguf import (
    TEMPERATURE,
    adjacent_to_halves,
    convert,
    llama3_factor,
    main,
    rope_parameters,
    tensor_name,
)
from kvrelay.executors.torch.config import RopeConfig, load_model_config
from kvrelay.executors.torch.rope import inverse_frequencies
from kvrelay.frontend.tokens.tokenizer import load_tokenizer

TO_GGUF = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
QUANTISED = gguf.GGMLQuantizationType.Q8_0


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, number, part = stem.split(".", 3)
        return f"blk.{number}.{TO_GGUF[part]}.{kind}"
    return f"{TO_GGUF[stem]}.{kind}"


def halves_to_adjacent(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """What the llama converters do to query and key rows."""
    return weight.reshape(num_heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    model: Path, file: Path, architecture: str, add: Callable[[gguf.GGUFWriter], None] = lambda writer: None
) -> dict[str, np.ndarray]:
    """Linear layers of the query projections quantised, everything else as it is; returns what should come back.
    ``add`` writes more metadata."""
    config = json.loads((model / "config.json").read_text())
    weights = load_file(model / "model.safetensors")
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(10000.0)
    vocab = tokenizer["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.get)
    tokens += [token["content"] for token in tokenizer["added_tokens"] if token["id"] >= len(tokens)]
    tokens += [f"<pad{number}>" for number in range(config["vocab_size"] - len(tokens))]
    special = {token["content"] for token in tokenizer["added_tokens"]}
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges(
        [" ".join(merge) if isinstance(merge, list) else merge for merge in tokenizer["model"]["merges"]]
    )
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(config["eos_token_id"] if isinstance(config["eos_token_id"], int) else 1)
    add(writer)
    expected = {}
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, weight in weights.items():
        stored, part = weight, name.split(".")[-2]
        if architecture == "llama" and part in heads:
            stored = np.ascontiguousarray(halves_to_adjacent(weight, heads[part]))
        expected[name] = weight
        if part == "q_proj" and name.endswith("weight"):
            packed = quantize(stored, QUANTISED)
            writer.add_tensor(gguf_name(name), packed, raw_dtype=QUANTISED)
            back = dequantize(packed, QUANTISED)
            expected[name] = adjacent_to_halves(back, heads[part]) if architecture == "llama" else back
        else:
            writer.add_tensor(gguf_name(name), stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_weights_and_tokenizer_come_back(
    architecture: str, tmp_path: Path, checkpoint_of: Callable[[str], Path]
) -> None:
    model = checkpoint_of(architecture)
    file, directory = tmp_path / "model.gguf", tmp_path / "converted"
    expected = write_gguf(model, file, architecture)
    convert(file, directory)
    index = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    found = load_file(directory / index["model.norm.weight"])
    assert found.keys() == expected.keys() == index.keys()
    for name, weight in expected.items():
        np.testing.assert_array_equal(found[name], weight, err_msg=name)
    text = "Once upon a time 12, naïve"
    assert load_tokenizer(directory).encode(text, False) == load_tokenizer(model).encode(text, False)
    config, original = (json.loads((path / "config.json").read_text()) for path in (directory, model))
    for name in ("hidden_size", "num_hidden_layers", "num_key_value_heads", "head_dim", "vocab_size"):
        assert config[name] == original[name], name
    loaded = load_model_config(directory)
    assert (loaded.tied_embeddings, loaded.eos_token_ids) == (original["tie_word_embeddings"], (1,))
    assert loaded.rope == RopeConfig(10_000.0)


def test_scaling_ends_and_sampling_are_taken_over(tmp_path: Path, checkpoint_of: Callable[[str], Path]) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(512)
        writer.add_eot_token_id(3)
        writer.add_eom_token_id(1)
        del writer.kv_data[0]["qwen3.attention.head_count_kv"]  # then each head has its own
        writer.add_sampling_temp(0.5)
        writer.add_sampling_top_k(20)

    write_gguf(checkpoint_of("qwen3"), tmp_path / "model.gguf", "qwen3", add)
    convert(tmp_path / "model.gguf", tmp_path / "out")
    config = load_model_config(tmp_path / "out")
    assert config.rope == RopeConfig(
        10_000.0, "yarn", 4.0, original_max_position=512, attention_factor=0.1 * math.log(4) + 1
    )
    assert config.num_kv_heads == config.num_heads
    assert config.eos_token_ids == (1, 3)
    sampling = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert (sampling["temperature"], sampling["top_k"]) == (0.5, 20)


def test_a_file_without_a_temperature_gets_a_low_one(tmp_path: Path, checkpoint_of: Callable[[str], Path]) -> None:
    write_gguf(checkpoint_of("llama"), tmp_path / "model.gguf", "llama")
    convert(tmp_path / "model.gguf", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == {
        "eos_token_id": [1],
        "temperature": TEMPERATURE,
    }


@pytest.mark.parametrize(
    ("name", "value"), [("attention.value_length", 16), ("rope.dimension_count", 16), ("rope.scaling.type", "longrope")]
)
def test_what_is_not_computed_is_refused_by_name(
    name: str, value: int | str, tmp_path: Path, checkpoint_of: Callable[[str], Path]
) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        del writer.kv_data[0]["qwen3.attention.value_length"]
        (writer.add_uint32 if isinstance(value, int) else writer.add_string)(f"qwen3.{name}", value)

    write_gguf(checkpoint_of("qwen3"), tmp_path / "model.gguf", "qwen3", add)
    with pytest.raises(UnsupportedModelError, match=rf"{name}\b.* {value}\b"):
        convert(tmp_path / "model.gguf", tmp_path / "out")


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({}, {"rope_type": "default"}),
        ({"type": "none", "factor": 4.0}, {"rope_type": "default"}),
        ({"factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"type": "linear", "factor": 0.0}, {"rope_type": "default"}),
        ({"type": "linear", "factor": 2.0, "finetuned": True}, {"rope_type": "linear", "factor": 2.0}),
        ({"type": "yarn", "factor": 4.0, "attn_factor": 1.5}, {"attention_factor": 1.5 * (0.1 * math.log(4) + 1)}),
        (
            {"type": "yarn", "factor": 4.0, "yarn_log_multiplier": 0.5, "yarn_ext_factor": 1.0},
            {"attention_factor": (0.1 * math.log(4) + 1) / (0.05 * math.log(4) + 1)},
        ),
        (
            {"type": "yarn", "factor": 4.0, "yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0, "yarn_attn_factor": 3.0},
            {"factor": 4.0, "original_max_position_embeddings": None, "beta_fast": 16.0, "beta_slow": 2.0}
            | {"attention_factor": 0.1 * math.log(4) + 1},
        ),
    ],
    ids=str,
)
def test_scaling_is_llama_cpps(scaling: dict[str, object], expected: dict[str, object]) -> None:
    """A factor without a type is linear, and 0 is none; YaRN's magnitude is computed from the factor."""
    found = rope_parameters(scaling, 10_000.0)
    assert {name: found[name] for name in expected} == pytest.approx(expected)


@pytest.mark.parametrize(
    ("scaling", "named"),
    [
        ({"type": "longrope"}, "longrope"),
        ({"type": "yarn", "factor": 2.0, "alpha": 3.0}, "alpha"),
        ({"type": "yarn", "factor": 2.0, "yarn_ext_factor": 0.5}, "yarn_ext_factor"),
        ({"type": "linear", "factor": 2.0, "yarn_ext_factor": 1.0}, "yarn_ext_factor"),
        ({"type": "linear", "factor": 2.0, "attn_factor": 1.5}, "attn_factor"),
        ({"type": "none", "yarn_attn_factor": 1.5}, "attn_factor"),
    ],
)
def test_other_scaling_is_refused_by_name(scaling: dict[str, object], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"rope\.scaling\.\w*.*{named}"):
        rope_parameters(scaling, 10_000.0)


def test_rotary_pairs_are_put_in_hugging_faces_order() -> None:
    """GGUF's llama files hold the pair (i, i + d/2) at (2i, 2i + 1)."""
    weight = np.arange(2 * 6 * 3, dtype=np.float32).reshape(12, 3)
    assert adjacent_to_halves(weight[:6], 1)[:, 0].tolist() == [0, 6, 12, 3, 9, 15]
    assert np.array_equal(adjacent_to_halves(halves_to_adjacent(weight, 2), 2), weight)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_found_in_its_factors(factor: float) -> None:
    plain = inverse_frequencies(RopeConfig(500_000.0), 64)
    scaled = inverse_frequencies(RopeConfig(500_000.0, "llama3", factor), 64)
    assert llama3_factor(plain / scaled, 500_000.0, 64) == pytest.approx(factor, rel=1e-3)
    with pytest.raises(UnsupportedModelError, match="not llama3's"):
        llama3_factor(np.linspace(1, factor, 32, dtype=np.float32), 500_000.0, 64)


@pytest.mark.parametrize(
    "name", ["blk.0.attn_sinks.weight", "blk.x.attn_q.weight", "output.scale", "vision.weight", ""]
)
def test_an_unknown_tensor_is_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"a tensor {name}"):
        tensor_name(name)


@pytest.mark.parametrize("content", [b"GGUF", b"GGUF\x03\x00\x00\x00" + b"\xff" * 16, b"GGUF" + bytes(60)])
def test_a_damaged_file_is_one_line_and_leaves_nothing(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    assert main([str(file), str(tmp_path / "out")]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match="architecture mamba is not supported; supported: llama, qwen2"):
        convert(tmp_path / "model.gguf", tmp_path / "out")


def test_large_models_are_written_in_shards(
    tmp_path: Path, checkpoint_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvrelay.executors.torch.checkpoints.gguf.SHARD_BYTES", 2**20)
    file = tmp_path / "model.gguf"
    expected = write_gguf(checkpoint_of("llama"), file, "llama")
    convert(file, tmp_path / "out")
    shards = [load_file(path) for path in sorted((tmp_path / "out").glob("*.safetensors"))]
    assert len(shards) > 3
    assert sorted(name for shard in shards for name in shard) == sorted(expected)


def test_a_failure_to_read_the_configuration_names_the_file(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"configuration in .*model\.gguf"):
        convert(tmp_path / "model.gguf", tmp_path / "out")
