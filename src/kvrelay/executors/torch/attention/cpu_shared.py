"""What the Numba kernels of decode and prefill share: rotating heads, writing the pool, softening scores.

The head size and the number of query heads per KV head arrive as the types of ``head`` and ``group`` (see
``constant_marker``), so that LLVM unrolls the loops. All memory is passed in; bfloat16 is uint16; arithmetic is
float32.

Nothing here is cached on disk, but the kernels that compile it in are. Numba renews their cache when their own file
changes, not when this one does: touch ``cpu_decode.py`` and ``cpu_prefill.py`` after a change here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from kvrelay.executors.torch.kernels.numba_math import OPTIONS, constant, exp_negative, largest, narrow, widen

KEYS = 64
"""Scores are softened so many at a time, so that the loops over them have a fixed length."""

ZERO, ONE = np.float32(0.0), np.float32(1.0)
MINUS_INFINITY = np.float32(-np.inf)


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def soften(scores: Any, count: int, state: Any, i: int) -> Any:
    """scores[:count] become weights relative to the running maximum state[i, 0]; state[i, 1] is their sum.

    Returns the factor for what was accumulated under the old maximum. A score of minus infinity gets a weight of 1e-38.
    """
    old = state[i, 0]
    new = max(old, largest(scores, count))
    total = ZERO
    for j in range(count):
        weight = exp_negative(scores[j] - new)
        scores[j] = weight
        total += weight
    factor = exp_negative(old - new)
    state[i, 0] = new
    state[i, 1] = state[i, 1] * factor + total
    return factor


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def rotate(
    head: Any, group: Any, source: Any, start: int, norm: Any, eps: Any, angles: Any, scale: Any, out: Any
) -> None:
    """out = rope(norm(source[start : start + D])) * scale; an empty ``norm`` means none."""
    D = constant(head)  # noqa: N806
    HALF = D // 2  # noqa: N806
    for d in range(D):
        out[d] = widen(source[start + d])
    if len(norm) > 0:
        total = ZERO
        for d in range(D):
            total += out[d] * out[d]
        inverse = ONE / np.sqrt(total / np.float32(D) + eps)
        for d in range(D):
            out[d] = out[d] * inverse * norm[d]
    for d in range(HALF):
        cos, sin = angles[0, d], angles[1, d]
        a, b = out[d], out[d + HALF]
        out[d] = (a * cos - b * sin) * scale
        out[d + HALF] = (b * cos + a * sin) * scale


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def write_position(
    head: Any,
    group: Any,
    qkv: Any,
    h: int,
    pool: Any,
    layer: int,
    block: int,
    offset: int,
    k_norm: Any,
    eps: Any,
    angles: Any,
    scratch: Any,
) -> None:
    """The new key and value of KV head ``h`` go to their place in the pool."""
    D = constant(head)  # noqa: N806
    G = constant(group)  # noqa: N806
    num_kv_heads = pool.shape[3]
    k_start = (num_kv_heads * G + h) * D
    v_start = k_start + num_kv_heads * D
    rotate(head, group, qkv, k_start, k_norm, eps, angles, ONE, scratch)
    key, value = pool[block, layer, 0, h, offset], pool[block, layer, 1, h, offset]
    for d in range(D):
        key[d] = narrow(scratch[d], pool)
    for d in range(D):
        value[d] = qkv[v_start + d]


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def place_of(pool: Any, layer: int, kind: int, h: int, block: int, position: int) -> Any:
    """Where in the flat pool the vector of a position begins."""
    _, num_layers, kinds, num_kv_heads, block_size, width = pool.shape
    row = ((np.int64(block) * num_layers + layer) * kinds + kind) * num_kv_heads + h
    return (row * block_size + position) * width
