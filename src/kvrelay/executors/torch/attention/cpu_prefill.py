"""The Numba kernels of prefill chunks.

First all keys and values are written; then one task per (tile of queries, KV head) widens ``KEYS`` keys and values at
once and uses them for all of the tile's queries, ``ROWS`` at a time. Chunks of keys begin at multiples of
``KEYS``, so a token's result does not depend on how its prompt was cut.

The entries at the end are cached on disk: touch this file after a change of those that it imports.
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
from kvrelay.executors.torch.kernels.numba_math import OPTIONS, constant, constant_marker, narrow, widen
from kvrelay.executors.torch.kernels.numba_vector import add_weighted

ROWS = 4
_KEYS, _ROWS, _ONE_ROW = constant_marker(KEYS), constant_marker(ROWS), constant_marker(1)


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _write_tasks(
    head: Any,
    group: Any,
    qkv: Any,
    pool: Any,
    layer: int,
    table: Any,
    token_slots: Any,
    positions: Any,
    first_token: int,
    rope: Any,
    k_norm: Any,
    eps: Any,
    scratch: Any,
    thread: int,
    num_threads: int,
) -> None:
    """This thread's share of the new tokens: their keys and values go into the pool."""
    num_kv_heads, block_size = pool.shape[3], pool.shape[4]
    count = len(positions) - first_token
    for i in range(count * thread // num_threads, count * (thread + 1) // num_threads):
        token = first_token + i
        position = positions[token]
        block = table[token_slots[token], position // block_size]
        for h in range(num_kv_heads):
            write_position(
                head,
                group,
                qkv[token],
                h,
                pool,
                layer,
                block,
                position % block_size,
                k_norm,
                eps,
                rope[position],
                scratch,
            )


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _widen_chunk(
    head: Any, group: Any, pool: Any, layer: int, h: int, blocks: Any, start: int, count: int, keys: Any, values: Any
) -> None:
    """keys [D, KEYS] transposed, values [KEYS, D], both flat; keys past ``count`` are 0."""
    D = constant(head)  # noqa: N806
    flat, block_size = pool.reshape(-1), pool.shape[4]
    for i in range(count):
        block, offset = blocks[(start + i) // block_size], (start + i) % block_size
        key = place_of(pool, layer, 0, h, block, offset)
        value = place_of(pool, layer, 1, h, block, offset)
        for d in range(D):
            keys[d * KEYS + i] = widen(flat[key + d])
        for d in range(D):
            values[i * D + d] = widen(flat[value + d])
    for d in range(D):
        for i in range(count, KEYS):
            keys[d * KEYS + i] = ZERO


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _attend_chunk(
    head: Any,
    group: Any,
    rows: Any,
    first_row: int,
    q: Any,
    keys: Any,
    values: Any,
    num_keys: int,
    before: Any,
    window: int,
    scores: Any,
    state: Any,
    sums: Any,
) -> None:
    """The chunk's keys [D, KEYS] and values [KEYS, D] for as many queries, from ``first_row`` on, as ``rows`` says.

    Row r is of query r // G, which has ``before + r // G`` tokens before it from the chunk's first key on. All flat.
    """
    D = constant(head)  # noqa: N806
    G = constant(group)  # noqa: N806
    R = constant(rows)  # noqa: N806
    for i in range(R * KEYS):
        scores[i] = ZERO
    add_weighted(_KEYS, rows, q, first_row * D, D, keys, 0, D, scores, 0)
    for r in range(R):
        row = first_row + r
        high = min(num_keys, before + row // G + 1)
        low = max(0, before + row // G + 1 - window) if window > 0 else 0
        weights = scores[r * KEYS : (r + 1) * KEYS]
        if low < high:
            if low > 0 or high < KEYS:
                for i in range(KEYS):
                    weights[i] = weights[i] if low <= i < high else MINUS_INFINITY
            factor = soften(weights, KEYS, state, row)
            if factor != ONE:
                for d in range(row * D, (row + 1) * D):
                    sums[d] *= factor
        else:
            for i in range(KEYS):
                weights[i] = ZERO
    add_weighted(head, rows, scores, 0, KEYS, values, 0, num_keys, sums, first_row * D)


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _prefill_tasks(
    head: Any,
    group: Any,
    qkv: Any,
    pool: Any,
    layer: int,
    table: Any,
    tile_slots: Any,
    tile_tokens: Any,
    tile_counts: Any,
    positions: Any,
    rope: Any,
    q_norm: Any,
    eps: Any,
    scale: Any,
    window: int,
    out: Any,
    scratch: Any,
    state: Any,
    thread: int,
    num_threads: int,
) -> None:
    """``scratch`` [2 * tile rows * D + 2 * KEYS * D + ROWS * KEYS]: queries, sums, keys, values, scores."""
    D = constant(head)  # noqa: N806
    G = constant(group)  # noqa: N806
    num_kv_heads, size = pool.shape[3], state.shape[0] * D
    q, sums = scratch[:size], scratch[size : 2 * size]
    keys = scratch[2 * size : 2 * size + KEYS * D]
    values = scratch[2 * size + KEYS * D : 2 * size + 2 * KEYS * D]
    scores = scratch[2 * size + 2 * KEYS * D : 2 * size + 2 * KEYS * D + ROWS * KEYS]
    for task in range(thread, len(tile_slots) * num_kv_heads, num_threads):
        tile, h = task // num_kv_heads, task % num_kv_heads
        first, count, blocks = tile_tokens[tile], tile_counts[tile], table[tile_slots[tile]]
        num_rows = count * G
        for i in range(num_rows):
            token = first + i // G
            angles, place = rope[positions[token]], q[i * D : (i + 1) * D]
            rotate(head, group, qkv[token], (h * G + i % G) * D, q_norm, eps, angles, scale, place)
            state[i, 0] = MINUS_INFINITY
            state[i, 1] = ZERO
        sums[: num_rows * D] = ZERO
        position = positions[first]
        lowest = max(0, position + 1 - window) if window > 0 else 0
        for start in range(lowest - lowest % KEYS, position + count, KEYS):
            num_keys = min(KEYS, position + count - start)
            _widen_chunk(head, group, pool, layer, h, blocks, start, num_keys, keys, values)
            before, at = position - start, 0
            while at + ROWS <= num_rows:
                _attend_chunk(head, group, _ROWS, at, q, keys, values, num_keys, before, window, scores, state, sums)
                at += ROWS
            while at < num_rows:
                _attend_chunk(head, group, _ONE_ROW, at, q, keys, values, num_keys, before, window, scores, state, sums)
                at += 1
        for i in range(num_rows):
            inverse = ONE / state[i, 1]
            q_head = h * G + i % G
            target = out[first + i // G, q_head * D : (q_head + 1) * D]
            for d in range(D):
                target[d] = narrow(sums[i * D + d] * inverse, out)


@njit(cache=True, parallel=True, **OPTIONS)  # type: ignore[untyped-decorator]
def write(
    head: Any,
    group: Any,
    qkv: Any,
    pool: Any,
    layer: int,
    table: Any,
    token_slots: Any,
    positions: Any,
    first_token: int,
    rope: Any,
    k_norm: Any,
    eps: Any,
    scratch: Any,
    num_threads: int,
) -> None:
    for index in prange(num_threads):
        t = np.int64(index)  # the index is unsigned: mixed with signed ones it would make floats
        _write_tasks(
            head,
            group,
            qkv,
            pool,
            layer,
            table,
            token_slots,
            positions,
            first_token,
            rope,
            k_norm,
            eps,
            scratch[t],
            t,
            num_threads,
        )


@njit(cache=True, parallel=True, **OPTIONS)  # type: ignore[untyped-decorator]
def prefill(
    head: Any,
    group: Any,
    qkv: Any,
    pool: Any,
    layer: int,
    table: Any,
    tile_slots: Any,
    tile_tokens: Any,
    tile_counts: Any,
    positions: Any,
    rope: Any,
    q_norm: Any,
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
        _prefill_tasks(
            head,
            group,
            qkv,
            pool,
            layer,
            table,
            tile_slots,
            tile_tokens,
            tile_counts,
            positions,
            rope,
            q_norm,
            eps,
            scale,
            window,
            out,
            scratch[t],
            state[t],
            t,
            num_threads,
        )
