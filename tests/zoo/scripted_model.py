"""A Llama whose next token depends on its last one only, by a table: it writes any text on purpose.

Each token's embedding is a direction of its own, attention and feed-forward add nothing, and the head's row of a token
lies along the embeddings of the tokens that it follows. So greedy and random sampling take the table's token, on any
engine that computes Llama. Several followers of one token share its probability by their weights.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import save_file

SHARPNESS = 40.0
"""Score of the table's token; all others have 0."""
Followers = Mapping[int, Mapping[int, float]]
"""By token: the logits of those that follow it."""


def chain(*token_ids: int) -> dict[int, dict[int, float]]:
    """Each token follows the one before it, surely. Raises ValueError if a token would have two followers."""
    followers: dict[int, dict[int, float]] = {}
    for token, following in pairwise(token_ids):
        if followers.setdefault(token, {following: SHARPNESS}) != {following: SHARPNESS}:
            raise ValueError(f"token {token} is followed by two tokens")
    return followers


def write_model(
    directory: Path,
    followers: Followers,
    vocab_size: int,
    eos_token_id: int | Sequence[int] | None,
    generation: Mapping[str, object] | None = None,
    **config: object,
) -> None:
    """``config.json``, ``generation_config.json`` if there is one, and the weights in float32. ``config``: changes."""
    hidden = max(64, -(-vocab_size // 64) * 64)
    directory.mkdir(parents=True, exist_ok=True)
    document = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "eos_token_id": eos_token_id,
        **config,
    }
    (directory / "config.json").write_text(json.dumps(document))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    embedding = torch.zeros(vocab_size, hidden)
    embedding[:, :vocab_size] = torch.eye(vocab_size)
    head = torch.zeros(vocab_size, hidden)
    rows = [(token, *each) for token, scores in followers.items() for each in scores.items()]
    for token, following, score in rows:
        if max(token, following) < vocab_size:
            head[following, token] = score / math.sqrt(hidden)  # the norm makes a unit vector of length sqrt(hidden)
    layer = "model.layers.0."
    tensors = {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": head,
        "model.norm.weight": torch.ones(hidden),
        f"{layer}input_layernorm.weight": torch.ones(hidden),
        f"{layer}post_attention_layernorm.weight": torch.ones(hidden),
        f"{layer}self_attn.q_proj.weight": torch.zeros(64, hidden),
        f"{layer}self_attn.k_proj.weight": torch.zeros(32, hidden),
        f"{layer}self_attn.v_proj.weight": torch.zeros(32, hidden),
        f"{layer}self_attn.o_proj.weight": torch.zeros(hidden, 64),
        f"{layer}mlp.gate_proj.weight": torch.zeros(32, hidden),
        f"{layer}mlp.up_proj.weight": torch.zeros(32, hidden),
        f"{layer}mlp.down_proj.weight": torch.zeros(hidden, 32),
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
