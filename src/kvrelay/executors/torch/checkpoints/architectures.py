"""Which random checkpoints can be made: sizes, ``config.json`` and the tensors of each architecture.

Owns the table of sizes and Hugging Face's names and shapes, as plain data. Knows nothing of torch, files or
tokenizers. Names and shapes follow the checkpoints that the families' authors publish, and so does ``config.json``
(with ``torch_dtype``, ``rope_theta`` and ``rope_scaling``, which every version of transformers reads).
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

import msgspec
from msgspec.structs import replace

from kvrelay.executors.torch.checkpoints.tokenizer import BOS_ID, EOS_ID, Pieces

ConfigValue = str | int | float | bool | list[str] | list[int] | dict[str, float | int | str] | None


class Init(Enum):
    """How a tensor is filled: scaled by its inputs, near one, or small around zero."""

    MATRIX = "matrix"
    NORM = "norm"
    BIAS = "bias"


class TensorSpec(msgspec.Struct, frozen=True):
    """One tensor of a checkpoint; ``shape`` as stored, [outputs, inputs] for a matrix."""

    name: str
    shape: tuple[int, ...]
    init: Init


class Size(msgspec.Struct, frozen=True):
    """Sizes by Hugging Face's meaning. ``num_experts`` 0 is a dense model; ``sliding_window`` in tokens."""

    num_layers: int
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    max_position: int = 8192
    num_experts: int = 0
    sliding_window: int | None = None
    tied: bool = False


class Family(msgspec.Struct, frozen=True):
    """The differences between architectures."""

    class_name: str
    model_type: str
    rope_theta: float
    norm_eps: float = 1e-6
    qkv_bias: bool = False
    qk_norm: bool = False
    pieces: Pieces = Pieces.GPT2


FAMILIES = {
    "llama": Family("LlamaForCausalLM", "llama", 10_000.0, norm_eps=1e-5),
    "mistral": Family("MistralForCausalLM", "mistral", 10_000.0, norm_eps=1e-5),
    "qwen2": Family("Qwen2ForCausalLM", "qwen2", 1_000_000.0, qkv_bias=True, pieces=Pieces.QWEN),
    "qwen3": Family("Qwen3ForCausalLM", "qwen3", 1_000_000.0, qk_norm=True, pieces=Pieces.QWEN),
    "mixtral": Family("MixtralForCausalLM", "mixtral", 1_000_000.0, norm_eps=1e-5),
    "qwen3-moe": Family("Qwen3MoeForCausalLM", "qwen3_moe", 1_000_000.0, qk_norm=True, pieces=Pieces.QWEN),
}
EXPERTS_PER_TOKEN = 2

_TINY = Size(4, 256, 688, num_heads=8, num_kv_heads=4, head_dim=32, vocab=1024)
_SMALL = Size(8, 512, 1408, num_heads=8, num_kv_heads=4, head_dim=64, vocab=8192)
_400M = Size(24, 896, 4864, num_heads=14, num_kv_heads=2, head_dim=64, vocab=32_000, max_position=32_768)
_SIZES = {"tiny": _TINY, "small": _SMALL, "400m": _400M}

# Differences from the sizes above. The tiny window is shorter than most prompts, so that it has an effect in tests.
_VARIANTS: dict[tuple[str, str], Size] = {
    ("mistral", "tiny"): replace(_TINY, sliding_window=64),
    ("mistral", "small"): replace(_SMALL, sliding_window=1024),
    ("mistral", "400m"): replace(_400M, sliding_window=4096),
    ("qwen2", "tiny"): replace(_TINY, tied=True),
    ("qwen2", "400m"): replace(_400M, tied=True),
    ("qwen3", "tiny"): replace(_TINY, tied=True, head_dim=64),
    ("qwen3", "small"): replace(_SMALL, tied=True, head_dim=128),
    ("mixtral", "tiny"): replace(_TINY, intermediate=352, num_experts=4),
    ("mixtral", "small"): replace(_SMALL, intermediate=512, num_experts=4),
    ("mixtral", "400m"): replace(_400M, num_layers=12, intermediate=2432, num_experts=4),
    ("qwen3-moe", "tiny"): replace(_TINY, intermediate=192, num_experts=4),
    ("qwen3-moe", "small"): replace(_SMALL, intermediate=384, num_experts=4),
    ("qwen3-moe", "400m"): replace(_400M, num_layers=12, intermediate=1216, num_experts=8),
}

ARCHITECTURES = tuple(FAMILIES)
SIZES = tuple(_SIZES)


def size_of(arch: str, size: str) -> Size:
    """The sizes of one of ``ARCHITECTURES`` at one of ``SIZES``. Raises KeyError for others."""
    return _VARIANTS.get((arch, size), _SIZES[size])


def config_of(arch: str, size: str, dtype: str) -> dict[str, ConfigValue]:
    """``config.json`` of the checkpoint; ``dtype`` is that of the stored weights."""
    family, sizes = FAMILIES[arch], size_of(arch, size)
    config: dict[str, ConfigValue] = {
        "architectures": [family.class_name],
        "model_type": family.model_type,
        "vocab_size": sizes.vocab,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.intermediate,
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "head_dim": sizes.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": family.norm_eps,
        "max_position_embeddings": sizes.max_position,
        "rope_theta": family.rope_theta,
        "rope_scaling": None,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": sizes.tied,
        "use_cache": True,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": EOS_ID,
        "torch_dtype": dtype,
    }
    return config | _own_keys(arch, sizes)


def _own_keys(arch: str, sizes: Size) -> dict[str, ConfigValue]:
    """The keys of ``config.json`` that only this architecture has."""
    experts: dict[str, ConfigValue] = {
        "num_experts_per_tok": EXPERTS_PER_TOKEN,
        "router_aux_loss_coef": 0.001,
        "output_router_logits": False,
    }
    if arch == "llama":
        return {"attention_bias": False, "mlp_bias": False}
    if arch == "mistral":
        return {"sliding_window": sizes.sliding_window}
    if arch == "mixtral":
        return experts | {"num_local_experts": sizes.num_experts, "sliding_window": None}
    if arch == "qwen2":
        return {"use_sliding_window": False, "sliding_window": None, "max_window_layers": sizes.num_layers}
    qwen3: dict[str, ConfigValue] = {
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": sizes.num_layers,
    }
    if arch == "qwen3":
        return qwen3
    own: dict[str, ConfigValue] = {
        "num_experts": sizes.num_experts,
        "moe_intermediate_size": sizes.intermediate,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list[int](),
    }
    return qwen3 | experts | own


def tensors_of(arch: str, size: str) -> Iterator[TensorSpec]:
    """Every tensor of the checkpoint, in the order of the layers."""
    sizes = size_of(arch, size)
    yield TensorSpec("model.embed_tokens.weight", (sizes.vocab, sizes.hidden), Init.MATRIX)
    for layer in range(sizes.num_layers):
        prefix = f"model.layers.{layer}."
        yield TensorSpec(prefix + "input_layernorm.weight", (sizes.hidden,), Init.NORM)
        yield from _attention(prefix + "self_attn.", FAMILIES[arch], sizes)
        yield TensorSpec(prefix + "post_attention_layernorm.weight", (sizes.hidden,), Init.NORM)
        yield from _feed_forward(prefix, arch, sizes)
    yield TensorSpec("model.norm.weight", (sizes.hidden,), Init.NORM)
    if not sizes.tied:
        yield TensorSpec("lm_head.weight", (sizes.vocab, sizes.hidden), Init.MATRIX)


def _attention(prefix: str, family: Family, sizes: Size) -> Iterator[TensorSpec]:
    width, kv_width = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    for name, outputs in (("q_proj", width), ("k_proj", kv_width), ("v_proj", kv_width)):
        yield TensorSpec(f"{prefix}{name}.weight", (outputs, sizes.hidden), Init.MATRIX)
        if family.qkv_bias:
            yield TensorSpec(f"{prefix}{name}.bias", (outputs,), Init.BIAS)
    yield TensorSpec(f"{prefix}o_proj.weight", (sizes.hidden, width), Init.MATRIX)
    if family.qk_norm:
        yield TensorSpec(f"{prefix}q_norm.weight", (sizes.head_dim,), Init.NORM)
        yield TensorSpec(f"{prefix}k_norm.weight", (sizes.head_dim,), Init.NORM)


def _feed_forward(prefix: str, arch: str, sizes: Size) -> Iterator[TensorSpec]:
    if arch == "mixtral":
        block, (gate, up, down) = prefix + "block_sparse_moe.", ("w1", "w3", "w2")
    else:
        block, (gate, up, down) = prefix + "mlp.", ("gate_proj", "up_proj", "down_proj")
    if sizes.num_experts:
        yield TensorSpec(f"{block}gate.weight", (sizes.num_experts, sizes.hidden), Init.MATRIX)
    experts = [f"experts.{i}." for i in range(sizes.num_experts)] or [""]
    for expert in experts:
        yield TensorSpec(f"{block}{expert}{gate}.weight", (sizes.intermediate, sizes.hidden), Init.MATRIX)
        yield TensorSpec(f"{block}{expert}{up}.weight", (sizes.intermediate, sizes.hidden), Init.MATRIX)
        yield TensorSpec(f"{block}{expert}{down}.weight", (sizes.hidden, sizes.intermediate), Init.MATRIX)
