"""The Numba kernel of decode rows.

One task per (row, KV head) rotates its new key and query, writes key and value, and attends, the scores of ``CHUNK``
keys at a time with a running maximum (online softmax, Milakov and Gimelshein 2018).

The entry at the end is cached on disk: touch this file after a change of those that it imports.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange

from kvrelay.executors.torch.attention.cpu_shared import (
    KEYS,
    MINUS_INFINITY,
    ONE,
    ZERO,
    place_of,
    rotate,
    soften,
    write_position,
)
from kvrelay.executors.torch.kernels.numba_math import OPTIONS, constant, narrow
from kvrelay.executors.torch.kernels.numba_vector import add_weighted, block_scores, prefetch

CHUNK = 256
# Blocks of keys that are asked for before they are read: enough to cover a cache miss.
_AHEAD = 4


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _score(
    head: Any, group: Any, q: Any, pool: Any, layer: int, h: int, blocks: Any, start: int, end: int, scores: Any
) -> None:
    """scores [G, CHUNK] of the keys start..end against q [G, D]; both flat."""
    flat, block_size, width = pool.reshape(-1), pool.shape[4], pool.shape[5]
    at = start
    while at < end:
        first = at % block_size
        count = min(block_size - first, end - at)
        place = place_of(pool, layer, 0, h, blocks[at // block_size], first)
        # Blocks lie anywhere, so the hardware does not foresee the next ones, nor the values of this one.
        _fetch_keys(pool, layer, h, blocks, at + _AHEAD * block_size, min(end, at + (_AHEAD + 1) * block_size))
        prefetch(flat, place + pool.shape[3] * block_size * width, count * width)
        block_scores(head, group, q, flat, place, count, scores, at - start, CHUNK)
        at += count


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _gather(
    head: Any, group: Any, weights: Any, pool: Any, layer: int, h: int, blocks: Any, start: int, end: int, sums: Any
) -> None:
    """sums [G, D] += weights [G, CHUNK] @ values start..end; both flat."""
    flat, block_size = pool.reshape(-1), pool.shape[4]
    at = start
    while at < end:
        first = at % block_size
        count = min(block_size - first, end - at)
        place = place_of(pool, layer, 1, h, blocks[at // block_size], first)
        add_weighted(head, group, weights, at - start, CHUNK, flat, place, count, sums, 0)
        at += count


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _fetch_keys(pool: Any, layer: int, h: int, blocks: Any, start: int, end: int) -> None:
    """Ask for the blocks of keys that hold start..end."""
    flat, block_size, width = pool.reshape(-1), pool.shape[4], pool.shape[5]
    for at in range(start, end, block_size):
        prefetch(flat, place_of(pool, layer, 0, h, blocks[at // block_size], 0), block_size * width)


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _decode_tasks(
    head: Any,
    group: Any,
    qkv: Any,
    pool: Any,
    layer: int,
    table: Any,
    slots: Any,
    starts: Any,
    rope: Any,
    q_norm: Any,
    k_norm: Any,
    eps: Any,
    scale: Any,
    window: int,
    out: Any,
    scratch: Any,
    state: Any,
    thread: int,
    num_threads: int,
) -> None:
    """``scratch`` [2 * G * D + G * CHUNK]: queries, sums, scores."""
    D = constant(head)  # noqa: N806
    G = constant(group)  # noqa: N806
    num_kv_heads, block_size = pool.shape[3], pool.shape[4]
    flat_q, flat_sums = scratch[: G * D], scratch[G * D : 2 * G * D]
    flat_scores = scratch[2 * G * D : 2 * G * D + G * CHUNK]
    q, sums, scores = flat_q.reshape((G, D)), flat_sums.reshape((G, D)), flat_scores.reshape((G, CHUNK))
    for task in range(thread, len(slots) * num_kv_heads, num_threads):
        row, h = task // num_kv_heads, task % num_kv_heads
        position = starts[row]
        blocks, angles, source = table[slots[row]], rope[position], qkv[row]
        write_position(
            head,
            group,
            source,
            h,
            pool,
            layer,
            blocks[position // block_size],
            position % block_size,
            k_norm,
            eps,
            angles,
            sums[0],
        )
        for g in range(G):
            rotate(head, group, source, (h * G + g) * D, q_norm, eps, angles, scale, q[g])
            state[g, 0] = MINUS_INFINITY
            state[g, 1] = ZERO
            for d in range(D):
                sums[g, d] = ZERO
        start = max(0, position + 1 - window) if window > 0 else 0
        while start <= position:
            end = min(start + CHUNK, position + 1)
            _score(head, group, flat_q, pool, layer, h, blocks, start, end, flat_scores)
            count = end - start
            padded = (count + KEYS - 1) // KEYS * KEYS
            for g in range(G):
                scores[g, count:padded] = MINUS_INFINITY
                factor = soften(scores[g], padded, state, g)
                for d in range(D):
                    sums[g, d] *= factor
            _gather(head, group, flat_scores, pool, layer, h, blocks, start, end, flat_sums)
            start = end
        for g in range(G):
            inverse = ONE / state[g, 1]
            target = out[row, (h * G + g) * D : (h * G + g + 1) * D]
            for d in range(D):
                target[d] = narrow(sums[g, d] * inverse, out)


@njit(cache=True, parallel=True, **OPTIONS)  # type: ignore[untyped-decorator]
def decode(
    head: Any,
    group: Any,
    qkv: Any,
    pool: Any,
    layer: int,
    table: Any,
    slots: Any,
    starts: Any,
    rope: Any,
    q_norm: Any,
    k_norm: Any,
    eps: Any,
    scale: Any,
    window: int,
    out: Any,
    scratch: Any,
    state: Any,
    num_threads: int,
) -> None:
    for index in prange(num_threads):
        t = np.int64(index)  # the index is unsigned: mixed with signed ones it would make floats
        _decode_tasks(
            head,
            group,
            qkv,
            pool,
            layer,
            table,
            slots,
            starts,
            rope,
            q_norm,
            k_norm,
            eps,
            scale,
            window,
            out,
            scratch[t],
            state[t],
            t,
            num_threads,
        )
