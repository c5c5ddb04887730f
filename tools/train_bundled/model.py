"""A Llama for training: float32 parameters under Hugging Face's names, bf16 matrix products.

Owns the forward pass and the configuration of the bundled checkpoint. Knows nothing of text or optimizers. Written for
throughput on one CPU thread, and apart from kvrelay's runner on purpose: serving code never sees gradients.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvrelay.executors.torch.checkpoints.architectures import ConfigValue, config_of


@dataclass(frozen=True)
class Shape:
    """Sizes of the model; ``head_dim`` and counts as in Hugging Face's LlamaConfig."""

    num_layers: int = 4
    hidden: int = 192
    intermediate: int = 512
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    vocab: int = 1024
    rope_theta: float = 100_000.0
    norm_eps: float = 1e-5
    max_position: int = 8192


def hf_config(shape: Shape) -> dict[str, ConfigValue]:
    """``config.json`` of the checkpoint."""
    return config_of("llama", "tiny", "bfloat16") | {
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "max_position_embeddings": shape.max_position,
        "tie_word_embeddings": True,
    }


class Attention(nn.Module):
    """Grouped-query attention with rotary embedding (rotation of halves, as in Hugging Face's Llama)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        width, kv_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, width, bias=False)
        self.k_proj = nn.Linear(shape.hidden, kv_width, bias=False)
        self.v_proj = nn.Linear(shape.hidden, kv_width, bias=False)
        self.o_proj = nn.Linear(width, shape.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``x``: bf16 [rows, length, hidden]; ``cos``, ``sin``: [length, head_dim]."""
        rows, length, _ = x.shape
        shape = self.shape
        fused = torch.cat((self.q_proj.weight, self.k_proj.weight, self.v_proj.weight)).bfloat16()
        qkv = F.linear(x, fused).view(rows, length, -1, shape.head_dim).transpose(1, 2)
        q, k, v = torch.split(qkv, [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=1)
        group = shape.num_heads // shape.num_kv_heads
        k, v = (t.repeat_interleave(group, dim=1) for t in (_rotate(k, cos, sin), v))
        out = F.scaled_dot_product_attention(_rotate(q, cos, sin), k, v, is_causal=True)
        out = out.transpose(1, 2).reshape(rows, length, -1)
        return F.linear(out, self.o_proj.weight.bfloat16())


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + turned * sin


class Mlp(nn.Module):
    """SiLU-gated feed-forward layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``x``: bf16 [..., hidden]."""
        fused = torch.cat((self.gate_proj.weight, self.up_proj.weight)).bfloat16()
        gate, up = F.linear(x, fused).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.down_proj.weight.bfloat16())


class Layer(nn.Module):
    """One decoder layer; the residual stream is float32."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = Mlp(shape)
        self.input_layernorm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``x``: float32 [rows, length, hidden]."""
        attended: Tensor = self.self_attn(self.input_layernorm(x).bfloat16(), cos, sin)
        x = x + attended
        thought: Tensor = self.mlp(self.post_attention_layernorm(x).bfloat16())
        return x + thought


class Body(nn.Module):
    """Everything but the (tied) head; the name ``model`` inside ``TrainedLlama`` gives the checkpoint's names."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)

    def decoder_layers(self) -> list[Layer]:
        """The layers, in order."""
        return [layer for layer in self.layers if isinstance(layer, Layer)]


class TrainedLlama(nn.Module):
    """The model; ``state_dict()`` has the names of a Hugging Face Llama with tied embeddings."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Body(shape)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                small = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * shape.num_layers) ** 0.5 if small else 0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits, bf16 [rows, length, vocab], of token ids [rows, length]."""
        positions = torch.arange(ids.shape[1], dtype=torch.float32)
        exponents = torch.arange(0, self.shape.head_dim, 2, dtype=torch.float32) / self.shape.head_dim
        angles = torch.outer(positions, self.shape.rope_theta**-exponents).repeat(1, 2)
        cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
        x = self.model.embed_tokens(ids)
        for layer in self.model.decoder_layers():
            x = layer(x, cos, sin)
        return F.linear(self.model.norm(x).bfloat16(), self.model.embed_tokens.weight.bfloat16())
