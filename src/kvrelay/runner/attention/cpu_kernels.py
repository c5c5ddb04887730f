"""Numba kernels of paged attention on the CPU: one for decode rows, two for prefill chunks.

The head size and the number of query heads per KV head arrive as the types of ``head`` and ``group`` (see
``constant_marker``), so that LLVM unrolls the loops. All memory is passed in; bfloat16 is uint16; arithmetic is
float32.

Decode: one task per (row, KV head) rotates its new key and query, writes key and value, and attends, the scores of
``CHUNK`` keys at a time with a running maximum (online softmax, Milakov and Gimelshein 2018).
Prefill: first all keys and values are written; then one task per (tile of queries, KV head) widens ``KEYS`` keys and
values at once and uses them for all of the tile's queries, ``ROWS`` at a time. Chunks of keys begin at multiples of
``KEYS``, so a token's result does not depend on how its prompt was cut.

The entries at the end are cached on disk. Numba renews the cache when this file changes, not when one that it imports
does: touch this file after a change of those.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange

from kvrelay.runner.kernels.numba_math import (
    OPTIONS,
    constant,
    constant_marker,
    exp_negative,
    largest,
    narrow,
    widen,
)
from kvrelay.runner.kernels.numba_vector import add_weighted, block_scores, prefetch

CHUNK = 256
KEYS = 64
ROWS = 4
# Blocks of keys that are asked for before they are read: enough to cover a cache miss.
_AHEAD = 4
_KEYS, _ROWS, _ONE_ROW = constant_marker(KEYS), constant_marker(ROWS), constant_marker(1)
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_MINUS_INFINITY = np.float32(-np.inf)


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _soften(scores: Any, count: int, state: Any, i: int) -> Any:
    """scores[:count] become weights relative to the running maximum state[i, 0]; state[i, 1] is their sum.

    Returns the factor for what was accumulated under the old maximum. A score of minus infinity gets a weight of 1e-38.
    """
    old = state[i, 0]
    new = max(old, largest(scores, count))
    total = _ZERO
    for j in range(count):
        weight = exp_negative(scores[j] - new)
        scores[j] = weight
        total += weight
    factor = exp_negative(old - new)
    state[i, 0] = new
    state[i, 1] = state[i, 1] * factor + total
    return factor


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _rotate(
    head: Any, group: Any, source: Any, start: int, norm: Any, eps: Any, angles: Any, scale: Any, out: Any
) -> None:
    """out = rope(norm(source[start : start + D])) * scale; an empty ``norm`` means none."""
    D = constant(head)  # noqa: N806
    HALF = D // 2  # noqa: N806
    for d in range(D):
        out[d] = widen(source[start + d])
    if len(norm) > 0:
        total = _ZERO
        for d in range(D):
            total += out[d] * out[d]
        inverse = _ONE / np.sqrt(total / np.float32(D) + eps)
        for d in range(D):
            out[d] = out[d] * inverse * norm[d]
    for d in range(HALF):
        cos, sin = angles[0, d], angles[1, d]
        a, b = out[d], out[d + HALF]
        out[d] = (a * cos - b * sin) * scale
        out[d + HALF] = (b * cos + a * sin) * scale


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _write(
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
    _rotate(head, group, qkv, k_start, k_norm, eps, angles, _ONE, scratch)
    key, value = pool[block, layer, 0, h, offset], pool[block, layer, 1, h, offset]
    for d in range(D):
        key[d] = narrow(scratch[d], pool)
    for d in range(D):
        value[d] = qkv[v_start + d]


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
        place = _offset(pool, layer, 0, h, blocks[at // block_size], first)
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
        place = _offset(pool, layer, 1, h, blocks[at // block_size], first)
        add_weighted(head, group, weights, at - start, CHUNK, flat, place, count, sums, 0)
        at += count


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _fetch_keys(pool: Any, layer: int, h: int, blocks: Any, start: int, end: int) -> None:
    """Ask for the blocks of keys that hold start..end."""
    flat, block_size, width = pool.reshape(-1), pool.shape[4], pool.shape[5]
    for at in range(start, end, block_size):
        prefetch(flat, _offset(pool, layer, 0, h, blocks[at // block_size], 0), block_size * width)


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _offset(pool: Any, layer: int, kind: int, h: int, block: int, position: int) -> Any:
    """Where in the flat pool the vector of a position begins."""
    _, num_layers, kinds, num_kv_heads, block_size, width = pool.shape
    row = ((np.int64(block) * num_layers + layer) * kinds + kind) * num_kv_heads + h
    return (row * block_size + position) * width


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
        _write(
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
            _rotate(head, group, source, (h * G + g) * D, q_norm, eps, angles, scale, q[g])
            state[g, 0] = _MINUS_INFINITY
            state[g, 1] = _ZERO
            for d in range(D):
                sums[g, d] = _ZERO
        start = max(0, position + 1 - window) if window > 0 else 0
        while start <= position:
            end = min(start + CHUNK, position + 1)
            _score(head, group, flat_q, pool, layer, h, blocks, start, end, flat_scores)
            count = end - start
            padded = (count + KEYS - 1) // KEYS * KEYS
            for g in range(G):
                scores[g, count:padded] = _MINUS_INFINITY
                factor = _soften(scores[g], padded, state, g)
                for d in range(D):
                    sums[g, d] *= factor
            _gather(head, group, flat_scores, pool, layer, h, blocks, start, end, flat_sums)
            start = end
        for g in range(G):
            inverse = _ONE / state[g, 1]
            target = out[row, (h * G + g) * D : (h * G + g + 1) * D]
            for d in range(D):
                target[d] = narrow(sums[g, d] * inverse, out)


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

    num_kv_heads, block_size = pool.shape[3], pool.shape[4]
    count = len(positions) - first_token
    for i in range(count * thread // num_threads, count * (thread + 1) // num_threads):
        token = first_token + i
        position = positions[token]
        block = table[token_slots[token], position // block_size]
        for h in range(num_kv_heads):
            _write(
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
        key = _offset(pool, layer, 0, h, block, offset)
        value = _offset(pool, layer, 1, h, block, offset)
        for d in range(D):
            keys[d * KEYS + i] = widen(flat[key + d])
        for d in range(D):
            values[i * D + d] = widen(flat[value + d])
    for d in range(D):
        for i in range(count, KEYS):
            keys[d * KEYS + i] = _ZERO


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
        scores[i] = _ZERO
    add_weighted(_KEYS, rows, q, first_row * D, D, keys, 0, D, scores, 0)
    for r in range(R):
        row = first_row + r
        high = min(num_keys, before + row // G + 1)
        low = max(0, before + row // G + 1 - window) if window > 0 else 0
        weights = scores[r * KEYS : (r + 1) * KEYS]
        if low < high:
            if low > 0 or high < KEYS:
                for i in range(KEYS):
                    weights[i] = weights[i] if low <= i < high else _MINUS_INFINITY
            factor = _soften(weights, KEYS, state, row)
            if factor != _ONE:
                for d in range(row * D, (row + 1) * D):
                    sums[d] *= factor
        else:
            for i in range(KEYS):
                weights[i] = _ZERO
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
            _rotate(head, group, qkv[token], (h * G + i % G) * D, q_norm, eps, angles, scale, place)
            state[i, 0] = _MINUS_INFINITY
            state[i, 1] = _ZERO
        sums[: num_rows * D] = _ZERO
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
            inverse = _ONE / state[i, 1]
            q_head = h * G + i % G
            target = out[first + i // G, q_head * D : (q_head + 1) * D]
            for d in range(D):
                target[d] = narrow(sums[i * D + d] * inverse, out)


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
