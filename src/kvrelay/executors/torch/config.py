"""A Hugging Face ``config.json`` as one frozen value, from which the models are built.

Reads ``config.json``, and refuses by name everything that the runner does not compute.
Knows no tensors: importing it does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec
from msgspec.structs import replace

from kvrelay.errors import CheckpointError, UnsupportedModelError
from kvrelay.executors.checkpoint_facts import JsonObject, end_token_ids, read_json_object

Family = Literal["llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe"]

ARCHITECTURES: dict[str, Family] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "MixtralForCausalLM": "mixtral",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}
DTYPES = ("float32", "bfloat16", "float16")

LARGEST_INTEGER = 2**24
"""Above every size and context of a real model; larger ones would exhaust memory before a tensor contradicts them."""
MOST_LAYERS = 10_000
LARGEST_NUMBER, SMALLEST_POSITIVE = 1e38, 1e-38
"""Within the range of float32, in which the runner computes."""

_COMMON: dict[str, object] = {"rms_norm_eps": 1e-6, "rope_theta": 10_000.0}
_QWEN = _COMMON | {"num_key_value_heads": 32, "max_position_embeddings": 32_768, "sliding_window": 4096}
_MISTRAL = _COMMON | {"num_key_value_heads": 8, "max_position_embeddings": 131_072}
_ABSENT: dict[Family, dict[str, object]] = {
    "llama": _COMMON | {"max_position_embeddings": 2048},
    "mistral": _MISTRAL | {"sliding_window": 4096},
    "qwen2": _QWEN,
    "qwen3": _QWEN | {"head_dim": 128},
    "mixtral": _MISTRAL | {"rms_norm_eps": 1e-5, "rope_theta": 1e6},
    "qwen3_moe": _QWEN | {"num_key_value_heads": 4},
}
"""What absent keys mean in transformers. Where null means something else, its reader says so."""


class RopeConfig(msgspec.Struct, frozen=True):
    """Rotary embedding.

    ``kind`` default and linear use ``theta`` and ``factor``. llama3 also uses the two frequency factors and
    ``original_max_position``, the context before it was extended. yarn also uses that context and the fields below it:
    between ``beta_fast`` and ``beta_slow`` rotations in it, frequencies change gradually from unscaled to divided by
    ``factor``; ``attention_factor`` multiplies cosines and sines. longrope divides each pair's frequency by its own one
    of ``pair_factors``, within the original context.
    """

    theta: float = 10_000.0
    kind: Literal["default", "linear", "llama3", "yarn", "longrope"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    pair_factors: tuple[float, ...] = ()


class MoeConfig(msgspec.Struct, frozen=True):
    """Sparse feed-forward: ``top_k`` of ``num_experts`` per token; ``normalize`` rescales their weights to 1."""

    num_experts: int
    top_k: int
    intermediate: int
    normalize: bool


class ModelConfig(msgspec.Struct, frozen=True):
    """A decoder-only transformer. ``windows[i]`` is layer i's sliding window in tokens, 0 for full attention;
    ``sparse[i]`` says whether its feed-forward is the mixture of experts ``moe``."""

    family: Family
    vocab_size: int
    hidden: int
    intermediate: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_position: int
    rope: RopeConfig
    dtype: str
    windows: tuple[int, ...]
    sparse: tuple[bool, ...]
    eos_token_ids: tuple[int, ...] = ()
    moe: MoeConfig | None = None
    tied_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False


class ModelFacts(msgspec.Struct, frozen=True):
    """What others want to know of a loaded model."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    weights_fingerprint: str
    max_num_batched_tokens: int


def load_model_config(model_dir: Path, *, warns: bool = True) -> ModelConfig:
    """Read ``config.json`` of a checkpoint directory, and its end tokens as ``end_token_ids`` does.

    Raises CheckpointError for a missing or damaged file, UnsupportedModelError for a model that the runner does not
    compute.
    """
    if not model_dir.is_dir():
        raise CheckpointError(f"{model_dir} is not a checkpoint directory")
    raw = read_json_object(model_dir / "config.json")
    config = parse_model_config(raw)
    return replace(config, eos_token_ids=end_token_ids(model_dir, raw, config.vocab_size, warns=warns))


def parse_model_config(raw: JsonObject) -> ModelConfig:
    """The configuration in ``raw``, a parsed ``config.json``, without end tokens. Raises as ``load_model_config``
    does."""
    family = _family(raw)
    _refuse_unsupported(raw, family)
    fields = _Fields(_ABSENT[family] | dict(raw))
    hidden, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    head_dim = fields.integer("head_dim", max(hidden // num_heads, 1))
    if num_heads % num_kv_heads or head_dim % 2:
        raise CheckpointError(
            f"config.json: {num_heads} heads, {num_kv_heads} KV heads and head_dim {head_dim} do not fit together"
        )
    num_layers = fields.integer("num_hidden_layers", largest=MOST_LAYERS)
    attention_bias = fields.flag("attention_bias")
    moe = _moe(family, fields)
    rope, max_position = _rope(fields, head_dim)
    return ModelConfig(
        family=family,
        vocab_size=fields.integer("vocab_size"),
        hidden=hidden,
        intermediate=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=fields.positive("rms_norm_eps"),
        max_position=max_position,
        rope=rope,
        dtype=_dtype(raw),
        windows=_windows(family, fields, num_layers),
        sparse=_sparse_layers(family, fields, num_layers),
        moe=moe,
        # In transformers all these architectures default to untied embeddings.
        tied_embeddings=fields.flag("tie_word_embeddings"),
        qkv_bias=family == "qwen2" or attention_bias,
        output_bias=attention_bias and family != "qwen2",
        mlp_bias=fields.flag("mlp_bias") and family == "llama",
        qk_norm=family in ("qwen3", "qwen3_moe"),
    )


class _Fields(msgspec.Struct, frozen=True):
    """Typed reading of ``config.json``; null counts as absent, and without a default is refused."""

    raw: JsonObject

    def integer(self, name: str, default: int | None = None, largest: int = LARGEST_INTEGER) -> int:
        value = self.raw.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= largest:
            raise CheckpointError(f"config.json: {name} must be an integer from 1 to {largest:,}, got {_shown(value)}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """At least 0."""
        return self._number(name, default, 0.0)

    def positive(self, name: str, default: float | None = None) -> float:
        return self._number(name, default, SMALLEST_POSITIVE)

    def _number(self, name: str, default: float | None, smallest: float) -> float:
        value = self.raw.get(name)
        if value is None and default is not None:
            return default
        # Compared before it is converted: an integer of JSON may be too large for a float.
        if isinstance(value, bool) or not isinstance(value, int | float) or not smallest <= value <= LARGEST_NUMBER:
            kind = "positive number" if smallest else "number of at least 0"
            raise CheckpointError(f"config.json: {name} must be a {kind}, got {_shown(value)}")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.raw.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise CheckpointError(f"config.json: {name} must be true or false, got {value!r}")
        return value

    def nested(self, name: str) -> _Fields:
        value = self.raw.get(name)
        if not isinstance(value, Mapping | None):
            raise CheckpointError(f"config.json: {name} must be an object, got {_shown(value)}")
        return _Fields(value or {})


def _shown(value: object) -> str:
    """Short enough for a line; Python does not even print integers of more than 4,300 digits."""
    if isinstance(value, int) and abs(value) > 10**18:
        return "more than 10^18" if value > 0 else "less than -10^18"
    return repr(value)[:80]


def _family(raw: JsonObject) -> Family:
    names = raw.get("architectures")
    if not isinstance(names, list) or not names:
        raise CheckpointError(f"config.json names no architecture; supported: {', '.join(ARCHITECTURES)}")
    for name in names:
        if isinstance(name, str) and name in ARCHITECTURES:
            return ARCHITECTURES[name]
    raise UnsupportedModelError(
        f"architecture {names[0]} is not supported; supported: {', '.join(ARCHITECTURES)}", param="architectures"
    )


def _refuse_unsupported(raw: JsonObject, family: Family) -> None:
    if raw.get("quantization_config") is not None:
        raise UnsupportedModelError("quantized checkpoints (quantization_config) are not supported")
    activation = raw.get("hidden_act") or "silu"
    if activation not in ("silu", "swish"):
        raise UnsupportedModelError(f"hidden_act {activation} is not supported, only silu")
    _refuse_partial(raw)
    if family in ("mistral", "mixtral") and raw.get("attention_bias"):
        # transformers ignores it, vLLM does not.
        raise UnsupportedModelError(f"attention_bias is not supported for {family}")


def _refuse_partial(raw: JsonObject) -> None:
    partial = raw.get("partial_rotary_factor")
    if partial not in (None, 1, 1.0):
        raise UnsupportedModelError(f"partial_rotary_factor {partial} is not supported, only 1")


def _dtype(raw: JsonObject) -> str:
    value = raw.get("torch_dtype") or raw.get("dtype") or "float32"
    if value not in DTYPES:
        raise UnsupportedModelError(f"weights of type {value} are not supported; supported: {', '.join(DTYPES)}")
    return str(value)


_ORIGINAL = "original_max_position_embeddings"


def _rope(fields: _Fields, head_dim: int) -> tuple[RopeConfig, int]:
    """The rotary embedding and the longest context. Both spellings: ``rope_theta`` with ``rope_scaling``, which wins,
    and transformers 5's ``rope_parameters``."""
    scaling = fields.nested("rope_scaling")
    if not scaling.raw:
        scaling = fields.nested("rope_parameters")
    _refuse_partial(scaling.raw)
    for name, value in scaling.raw.items():
        if isinstance(value, Mapping):
            raise UnsupportedModelError(f"rotary parameters by kind of layer ({name}) are not supported")
    theta = (fields if scaling.raw.get("rope_theta") is None else scaling).positive("rope_theta")
    if theta <= 1:
        raise CheckpointError(f"config.json: rope_theta must be above 1, got {theta}")
    max_position = fields.integer("max_position_embeddings")
    kind = scaling.raw.get("rope_type") or scaling.raw.get("type") or "default"
    # Dynamic NTK scaling changes nothing within max_position_embeddings, and no sequence here is longer.
    if kind in ("default", "dynamic"):
        return RopeConfig(theta), max_position
    if kind == "linear":
        return RopeConfig(theta, "linear", scaling.positive("factor")), max_position
    original = fields.integer(_ORIGINAL, scaling.integer(_ORIGINAL, max_position))
    is_given = fields.raw.get(_ORIGINAL) is not None or scaling.raw.get(_ORIGINAL) is not None
    if kind == "llama3":
        low, high = scaling.positive("low_freq_factor"), scaling.positive("high_freq_factor")
        if low >= high:
            raise CheckpointError(f"config.json: low_freq_factor {low} must be below high_freq_factor {high}")
        return RopeConfig(theta, "llama3", scaling.positive("factor"), low, high, original), max_position
    if kind == "yarn":
        rope = _yarn(theta, scaling, max_position, original)
        # As in vLLM, unless the file has a longer one.
        extended = original * rope.factor if is_given else 0
        if extended > LARGEST_INTEGER:
            raise CheckpointError(f"config.json: factor {rope.factor} makes a context of more than {LARGEST_INTEGER:,}")
        return rope, max(max_position, int(extended))
    if kind in ("longrope", "su"):
        return _longrope(theta, scaling, max_position, original, head_dim), original
    supported = "default, linear, dynamic, llama3, yarn, longrope"
    raise UnsupportedModelError(f"rope type {kind} is not supported; supported: {supported}")


def _yarn(theta: float, scaling: _Fields, max_position: int, original: int) -> RopeConfig:
    factor = scaling.positive("factor", max_position / original)
    mscale, mscale_all = scaling.number("mscale", 0.0), scaling.number("mscale_all_dim", 0.0)
    if mscale and mscale_all:
        attention_factor = _yarn_scale(factor, mscale) / _yarn_scale(factor, mscale_all)
    else:
        attention_factor = _yarn_scale(factor, 1.0)
    return RopeConfig(
        theta,
        "yarn",
        factor,
        original_max_position=original,
        beta_fast=scaling.number("beta_fast", 32.0) or 32.0,
        beta_slow=scaling.number("beta_slow", 1.0) or 1.0,
        truncate=scaling.flag("truncate", True),
        attention_factor=scaling.positive("attention_factor", attention_factor),
    )


def _longrope(theta: float, scaling: _Fields, max_position: int, original: int, head_dim: int) -> RopeConfig:
    """Only the short factors. A sequence that outgrows the original context changes to the long ones at all of its
    positions, so the KV of a prefix would depend on what follows, and could be neither cached nor handed over. The
    context therefore ends there."""
    factors = scaling.raw.get("short_factor")
    if not isinstance(factors, list) or len(factors) != head_dim // 2 or not all(_is_positive(f) for f in factors):
        raise CheckpointError(f"config.json: short_factor must be {head_dim // 2} positive numbers")
    factor = scaling.positive("factor", max_position / original)
    attention_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
    return RopeConfig(
        theta,
        "longrope",
        factor,
        original_max_position=original,
        attention_factor=scaling.positive("attention_factor", attention_factor),
        pair_factors=tuple(map(float, factors)),
    )


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _windows(family: Family, fields: _Fields, num_layers: int) -> tuple[int, ...]:
    """Llama has none. Qwen2 and Qwen3 have them in layers of their own, the others in all; the Qwen models only if
    ``use_sliding_window`` is set. A null ``sliding_window`` is none."""
    window, differ = 0, family in ("qwen2", "qwen3")
    is_used = family in ("mistral", "mixtral") or (family != "llama" and fields.flag("use_sliding_window"))
    if is_used and fields.raw.get("sliding_window") is not None:
        window = fields.integer("sliding_window")
    first = fields.number("max_window_layers", 28) if differ else 0
    windows = tuple(window if layer >= first else 0 for layer in range(num_layers))
    kinds = fields.raw.get("layer_types")
    if kinds is None:
        return windows
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise CheckpointError(f"config.json: layer_types must be a list of {num_layers} names, got {_shown(kinds)}")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise UnsupportedModelError(f"layer_types: {_shown(kind)} is not supported")
    wanted = tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    # transformers ignores such types of other families, vLLM does not.
    if (wanted != windows and not differ) or ("sliding_attention" in kinds and not window):
        raise UnsupportedModelError(f"layer_types contradicts the sliding windows that a {family} model has without it")
    return wanted


def _moe(family: Family, fields: _Fields) -> MoeConfig | None:
    # Each family's name for the number of experts is also that of the other.
    if family == "mixtral":
        moe = MoeConfig(
            fields.integer("num_local_experts", fields.integer("num_experts", 8)),
            fields.integer("num_experts_per_tok", 2),
            fields.integer("intermediate_size"),
            normalize=True,
        )
    elif family == "qwen3_moe":
        moe = MoeConfig(
            fields.integer("num_experts", fields.integer("num_local_experts", 128)),
            fields.integer("num_experts_per_tok", 8),
            fields.integer("moe_intermediate_size", 768),
            normalize=fields.flag("norm_topk_prob"),
        )
    else:
        return None
    if moe.top_k > moe.num_experts:
        raise CheckpointError(f"config.json: {moe.top_k} experts per token of {moe.num_experts} experts")
    return moe


def _sparse_layers(family: Family, fields: _Fields, num_layers: int) -> tuple[bool, ...]:
    if family == "mixtral":
        return (True,) * num_layers
    if family != "qwen3_moe":
        return (False,) * num_layers
    step = fields.integer("decoder_sparse_step", 1)
    dense = fields.raw.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise CheckpointError(f"config.json: mlp_only_layers must be a list of integers, got {_shown(dense)}")
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers))
