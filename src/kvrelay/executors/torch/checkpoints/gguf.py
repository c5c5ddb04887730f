"""GGUF files as checkpoint directories: dequantised once, then loaded like any other.

A GGUF file holds weights (often quantised), configuration and tokenizer in one. ``convert`` writes the directory that
Hugging Face's tools would: ``config.json``, ``tokenizer.json``, ``chat_template.jinja`` and float32 ``.safetensors``.
The ``gguf`` package dequantises; ``transformers`` reads configuration and tokenizer. This module owns the mapping of
tensor names and the order of rotary pairs.

It runs in a separate process (``python -m``): transformers costs seconds, and memory that a server need not keep.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvrelay.errors import CheckpointError, KvrelayError, UnsupportedModelError

if TYPE_CHECKING:
    from gguf import GGUFReader

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
SHARD_BYTES = 2 * 1024**3

_GLOBAL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_ORIGINAL = 1.0, 4.0, 8192

# For files without one: at 1.0, small quantised models write nonsense; at 0 they repeat themselves.
TEMPERATURE = 0.3
_SCALING = {"type", "factor", "original_context_length", "finetuned", "attn_factor", "yarn_log_multiplier"} | {
    f"yarn_{name}" for name in ("ext_factor", "attn_factor", "beta_fast", "beta_slow")
}
_SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}

Float32Array = npt.NDArray[np.float32]


def convert(file: Path, directory: Path) -> None:
    """Write the checkpoint in ``file`` into ``directory``, which must not exist; nothing is left there on failure.

    Raises CheckpointError for a damaged file, UnsupportedModelError for an unknown architecture or tensor.
    """
    partial = directory.with_name(f"{directory.name}.partial")
    _remove(partial)
    partial.mkdir(parents=True)
    try:
        reader = _open(file)
        architecture = _architecture(reader)
        config = _write_config(file, partial, architecture, reader)
        _write_weights(reader, partial, architecture, config)
        partial.rename(directory)
    finally:
        _remove(partial)


def tensor_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor. Raises UnsupportedModelError."""
    stem, _, kind = name.rpartition(".")
    if kind in ("weight", "bias"):
        if stem in _GLOBAL_NAMES:
            return f"{_GLOBAL_NAMES[stem]}.{kind}"
        prefix, _, rest = stem.partition(".")
        number, _, part = rest.partition(".")
        if prefix == "blk" and number.isdigit() and part in _LAYER_NAMES:
            return f"model.layers.{number}.{_LAYER_NAMES[part]}.{kind}"
    raise UnsupportedModelError(f"the GGUF file has a tensor {name}, which no supported architecture has")


def adjacent_to_halves(weight: Float32Array, num_heads: int) -> Float32Array:
    """Rows [num_heads * head_dim, ...] from GGUF's rotary pairs, (2i, 2i + 1), to Hugging Face's, (i, i + d/2)."""
    pairs = weight.reshape(num_heads, -1, 2, *weight.shape[1:])
    result: Float32Array = pairs.swapaxes(1, 2).reshape(weight.shape)
    return result


def llama3_factor(factors: Float32Array, theta: float, head_dim: int) -> float:
    """The ``factor`` of llama3 rope scaling that gives these divisors of the frequencies, [head_dim / 2].

    Raises UnsupportedModelError if they are not a llama3 scaling with the published parameters.
    """
    from kvrelay.executors.torch.config import RopeConfig
    from kvrelay.executors.torch.rope import inverse_frequencies

    factor = float(factors.max())
    scaled = RopeConfig(theta, "llama3", factor, _LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_ORIGINAL)
    expected = inverse_frequencies(RopeConfig(theta), head_dim) / inverse_frequencies(scaled, head_dim)
    if expected.shape != factors.shape or not np.allclose(expected, factors, rtol=1e-3):
        raise UnsupportedModelError("the GGUF file scales rotary frequencies in a way that is not llama3's")
    return factor


def rope_parameters(scaling: dict[str, Any], theta: float) -> dict[str, Any]:
    """Hugging Face's parameters for what a file has under ``rope.scaling``, as llama.cpp computes them.

    Raises UnsupportedModelError for scaling that has no such parameters.
    """
    kind, factor = scaling.get("type", "linear"), scaling.get("factor") or 1.0
    is_yarn, extrapolation = kind == "yarn", scaling.get("yarn_ext_factor", -1.0)
    odd = scaling.keys() - _SCALING
    if kind not in ("none", "linear", "yarn"):
        odd.add("type")
    if extrapolation >= 0 and extrapolation != is_yarn:
        odd.add("yarn_ext_factor")
    if not is_yarn:
        odd |= {name for name in ("attn_factor", "yarn_attn_factor") if scaling.get(name, 1.0) != 1}
    if odd:
        name = min(odd)
        raise UnsupportedModelError(f"the GGUF file has rope.scaling.{name} {scaling[name]}, which is not supported")
    if is_yarn:
        # llama.cpp ignores yarn_attn_factor here.
        attention = _magnitude(factor, 1.0) / _magnitude(factor, scaling.get("yarn_log_multiplier", 0.0))
        return {
            "rope_type": "yarn",
            "rope_theta": theta,
            "factor": factor,
            # None: the file's context.
            "original_max_position_embeddings": scaling.get("original_context_length") or None,
            "attention_factor": attention * scaling.get("attn_factor", 1.0),
            "beta_fast": scaling.get("yarn_beta_fast", 32.0),
            "beta_slow": scaling.get("yarn_beta_slow", 1.0),
        }
    if kind == "linear" and factor != 1:
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    return {"rope_type": "default", "rope_theta": theta}


def _magnitude(factor: float, multiplier: float) -> float:
    """Of YaRN's cosines and sines."""
    return 1.0 if factor <= 1 else 0.1 * multiplier * math.log(factor) + 1.0


def _open(file: Path) -> GGUFReader:
    try:
        from gguf import GGUFReader
    except ImportError as exc:
        raise CheckpointError("a GGUF checkpoint needs the gguf package: pip install kvrelay[gguf]") from exc
    try:
        return GGUFReader(file)
    except (OSError, ValueError, IndexError, KeyError) as exc:
        raise CheckpointError(f"cannot read {file}: {exc}") from exc


def _architecture(reader: GGUFReader) -> str:
    field = reader.get_field("general.architecture")
    name = str(field.contents()) if field is not None else ""
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise UnsupportedModelError(f"GGUF architecture {name or '(none)'} is not supported; supported: {known}")
    return name


def _write_config(file: Path, directory: Path, architecture: str, reader: GGUFReader) -> dict[str, Any]:
    """``config.json``, ``generation_config.json`` and the tokenizer's files; returns the configuration."""
    from transformers import AutoConfig, AutoTokenizer

    from kvrelay.executors.torch.config import parse_model_config

    try:
        config: dict[str, Any] = AutoConfig.from_pretrained(file.parent, gguf_file=file.name).to_dict()
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        tokenizer.save_pretrained(directory)
        config["architectures"] = [ARCHITECTURES[architecture]]
        config["dtype"] = "bfloat16"
        config["tie_word_embeddings"] = all(tensor.name != "output.weight" for tensor in reader.tensors)
        _complete(config, _values(reader, f"{architecture}."))
        for tensor in reader.tensors:
            if tensor.name == _ROPE_FACTORS:
                config["rope_parameters"] = _llama3_parameters(np.asarray(tensor.data, dtype=np.float32), config)
        generation = _generation(_values(reader, "tokenizer.ggml."), _values(reader, "general.sampling."))
    except KvrelayError:
        raise
    except Exception as exc:  # a third-party reader may raise anything for a damaged file
        raise CheckpointError(f"cannot read the configuration in {file}: {exc}") from exc
    parse_model_config(config)
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        (directory / name).write_text(json.dumps(content, indent=2), encoding="utf-8")
    return config


def _values(reader: GGUFReader, prefix: str) -> dict[str, Any]:
    """The metadata whose keys begin with ``prefix``, without it."""
    return {key.removeprefix(prefix): f.contents() for key, f in reader.fields.items() if key.startswith(prefix)}


def _complete(config: dict[str, Any], values: dict[str, Any]) -> None:
    """Set what transformers reads otherwise or not at all: the number of KV heads, the size of heads, and the scaling
    of rotary frequencies."""
    config["num_key_value_heads"] = values.get("attention.head_count_kv", config["num_attention_heads"])
    head_dim = values.get("attention.key_length", config["hidden_size"] // config["num_attention_heads"])
    for name in ("attention.value_length", "rope.dimension_count"):
        if values.get(name, head_dim) != head_dim:
            raise UnsupportedModelError(
                f"the GGUF file has {name} {values[name]}, which is not supported beside heads of {head_dim}"
            )
    config["head_dim"] = head_dim
    scaling = {name.removeprefix("rope.scaling."): v for name, v in values.items() if name.startswith("rope.scaling.")}
    if "rope.scale_linear" in values:  # the factor's older name
        scaling.setdefault("factor", values["rope.scale_linear"])
    theta = float(values.get("rope.freq_base", 10_000.0))
    config["rope_parameters"] = rope_parameters(scaling, theta)


def _generation(tokens: dict[str, Any], sampling: dict[str, Any]) -> dict[str, Any]:
    """``generation_config.json``: the tokens that end an answer or a turn, and how the file's author samples."""
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    ends = list(dict.fromkeys(tokens[name] for name in names if name in tokens))
    own = {ours: sampling[name] for name, ours in _SAMPLING.items() if name in sampling}
    return ({"eos_token_id": ends} if ends else {}) | {"temperature": TEMPERATURE} | own


def _llama3_parameters(factors: Float32Array, config: dict[str, Any]) -> dict[str, object]:
    plain, head_dim = config["rope_parameters"], config["head_dim"]
    if plain["rope_type"] != "default":
        raise UnsupportedModelError(f"the GGUF file has {_ROPE_FACTORS} beside rope.scaling, which is not supported")
    theta = plain["rope_theta"]
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": llama3_factor(factors.reshape(-1), theta, head_dim),
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_ORIGINAL,
    }


def _write_weights(reader: GGUFReader, directory: Path, architecture: str, config: dict[str, Any]) -> None:
    """Write shards of at most SHARD_BYTES, so that a large model is never in memory as a whole."""
    from safetensors.numpy import save_file

    shard: dict[str, Float32Array] = {}
    shard_bytes = num_shards = 0
    index: dict[str, str] = {}

    def flush() -> None:
        nonlocal shard, shard_bytes, num_shards
        num_shards += 1
        name = f"model-{num_shards:05}.safetensors"
        save_file(shard, directory / name, metadata={"format": "pt"})
        index.update(dict.fromkeys(shard, name))
        shard, shard_bytes = {}, 0

    for name, weight in _tensors(reader, architecture, config):
        if shard and shard_bytes + weight.nbytes > SHARD_BYTES:
            flush()
        shard[name] = weight
        shard_bytes += weight.nbytes
    flush()
    document = {"metadata": {}, "weight_map": index}
    (directory / "model.safetensors.index.json").write_text(json.dumps(document), encoding="utf-8")


def _tensors(reader: GGUFReader, architecture: str, config: dict[str, Any]) -> Iterator[tuple[str, Float32Array]]:
    """Hugging Face names and float32 weights. Only the llama converters reorder rotary pairs."""
    from gguf.quants import dequantize

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for tensor in reader.tensors:
        if tensor.name == _ROPE_FACTORS:
            continue
        name = tensor_name(tensor.name)
        try:
            weight = dequantize(tensor.data, tensor.tensor_type)
        except (NotImplementedError, ValueError) as exc:
            raise UnsupportedModelError(f"{tensor.name} of type {tensor.tensor_type.name}: {exc}") from exc
        weight = np.ascontiguousarray(weight, dtype=np.float32)
        part = tensor.name.split(".")[-2]
        if architecture == "llama" and part in heads:
            weight = np.ascontiguousarray(adjacent_to_halves(weight, heads[part]))
        yield name, weight


def _remove(directory: Path) -> None:
    import shutil

    shutil.rmtree(directory, ignore_errors=True)


def main(arguments: list[str]) -> int:
    """``python -m kvrelay.executors.torch.checkpoints.gguf FILE DIRECTORY``: one line on stderr if it fails."""
    file, directory = map(Path, arguments)
    try:
        convert(file, directory)
    except KvrelayError as exc:
        print(exc.message, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
