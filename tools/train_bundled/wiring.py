"""A start for training from which recall is near: attention heads set by hand, everything else random.

Owns the initial weights. From plain random weights a model of this size spends most of an hour of CPU time before it
finds out how to look a name up; then it learns the rest quickly. So the circuit that such models end up with (see
Olsson et al., "In-context Learning and Induction Heads", 2022) is laid out at the start, roughly, and trained on:

    layer 0, heads 0, 1   look 1 and 2 tokens back, by position alone, and write what they see into the stream
    layer 1, head 0       "The code of Ann is" -> the place that has Ann 2 tokens back (the value's first token)
    layer 1, head 2       any token -> the place that has the same token 1 token back (what followed it before)

Scales assume the embedding's standard deviation ``EMBED`` and RMSNorm weights of one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from train_bundled.model import Attention, Shape, TrainedLlama

EMBED = 0.02  # standard deviation of the embedding
SEEN = 0.03  # standard deviation of what layer 0 writes into the stream, per head
CONSTANT = 0.08  # dimension 0 of every embedding: what a head that attends by position alone can hold on to
STREAM = (EMBED**2 + 2 * SEEN**2) ** 0.5  # standard deviation of the stream before layer 1


def wire(model: TrainedLlama) -> None:
    """Set the heads that the module's docstring names, in place."""
    shape, layers = model.shape, model.model.decoder_layers()
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = CONSTANT
        sight, outputs = _look_back(layers[0].self_attn, shape)
        _look_up(layers[1].self_attn, shape, sight, outputs)


def _look_back(attention: Attention, shape: Shape) -> tuple[Tensor, list[Tensor]]:
    """Heads 0 and 1 of layer 0.

    Returns their value projection, [head_dim, hidden], and the output projection of each, [hidden, head_dim].
    """
    dim, half, num_fast = shape.head_dim, shape.head_dim // 2, 10
    frequencies = shape.rope_theta ** (-torch.arange(num_fast) / half)
    constant = CONSTANT / (EMBED**2 + CONSTANT**2 / shape.hidden) ** 0.5
    strength = 1.8 * 3.9 / constant
    attention.k_proj.weight[:dim] = 0.0
    attention.k_proj.weight[:num_fast, 0] = strength
    sight = torch.randn(dim, shape.hidden) / shape.hidden**0.5
    sight[:, 0] = 0.0
    attention.v_proj.weight[:dim] = sight
    outputs = []
    for head, back in enumerate((1, 2)):
        query = attention.q_proj.weight[head * dim : (head + 1) * dim]
        query.zero_()
        query[:num_fast, 0] = strength * torch.cos(back * frequencies)
        query[half : half + num_fast, 0] = -strength * torch.sin(back * frequencies)
        outputs.append(torch.randn(shape.hidden, dim) * SEEN / dim**0.5)
        attention.o_proj.weight[:, head * dim : (head + 1) * dim] = outputs[-1]
    return sight, outputs


def _look_up(attention: Attention, shape: Shape, sight: Tensor, outputs: list[Tensor]) -> None:
    """Heads 0 and 2 of layer 1, on the slow half of the rotary dimensions, which distance hardly turns."""
    dim, half = shape.head_dim, shape.head_dim // 2
    slow = torch.cat((torch.arange(20, half), torch.arange(half + 20, dim)))
    mixed = torch.zeros(dim, dim)
    mixed[slow] = 1.6 * torch.linalg.qr(torch.randn(dim, len(slow))).Q.T
    one_back, two_back = (mixed @ torch.linalg.pinv(output) * STREAM for output in outputs)
    here = mixed @ sight * (STREAM / EMBED)
    for head, query, key in ((0, one_back, two_back), (2, here, one_back)):
        kv_head = head // (shape.num_heads // shape.num_kv_heads)
        of_head, of_kv_head = slice(head * dim, (head + 1) * dim), slice(kv_head * dim, (kv_head + 1) * dim)
        copied = torch.linalg.qr(torch.randn(shape.hidden, dim)).Q
        attention.q_proj.weight[of_head] = query
        attention.k_proj.weight[of_kv_head] = key
        attention.v_proj.weight[of_kv_head] = copied.T
        attention.o_proj.weight[:, of_head] = 3 * EMBED * copied
