"""Numba kernels of paged attention on the CPU: one for decode rows, two for prefill chunks.

The head size and the number of query heads per KV head arrive as the types of ``head`` and ``group`` (see
``constant_marker``), so that LLVM unrolls the loops. All memory is passed in; bfloat16 is uint16; arithmetic is
float32.

Decode: one task per (row, KV head) rotates its new key and query, writes key and value, and attends, the scores of
``CHUNK`` keys at a time with a running maximum (online softmax, Milakov and Gimelshein 2018).
Prefill: first all keys and values are written; then one task per (tile of ``TILE`` queries, KV head) widens ``KEYS``
keys and values at once and uses them for all of the tile's queries. Chunks of keys begin at multiples of ``KEYS``, so
a token's result does not depend on how its prompt was cut.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange

from kvrelay.runner.kernels.numba_math import OPTIONS, constant, exp_negative, largest, narrow, widen

CHUNK = 256
TILE = 16
KEYS = 64
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_MINUS_INFINITY = np.float32(-np.inf)


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _soften(scores: Any, start: int, end: int, state: Any, i: int) -> Any:
    """scores[start:end] become weights relative to the running maximum state[i, 0]; state[i, 1] is their sum.

    Returns the factor for what was accumulated under the old maximum.
    """
    old = state[i, 0]
    new = max(old, largest(scores, start, end))
    total = _ZERO
    for j in range(start, end):
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
    D = constant(head)  # noqa: N806
    G = constant(group)  # noqa: N806
    block_size = pool.shape[4]
    at = start
    while at < end:
        keys = pool[blocks[at // block_size], layer, 0, h]
        first = at % block_size
        count = min(block_size - first, end - at)
        for i in range(count):
            key = keys[first + i]
            for g in range(G):
                total = _ZERO
                for d in range(D):
                    total += q[g, d] * widen(key[d])
                scores[g, at - start + i] = total
        at += count


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _gather(
    head: Any, group: Any, weights: Any, pool: Any, layer: int, h: int, blocks: Any, start: int, end: int, sums: Any
) -> None:
    D = constant(head)  # noqa: N806
    G = constant(group)  # noqa: N806
    block_size = pool.shape[4]
    at = start
    while at < end:
        values = pool[blocks[at // block_size], layer, 1, h]
        first = at % block_size
        count = min(block_size - first, end - at)
        i = 0
        while i + 4 <= count:
            v0, v1, v2, v3 = values[first + i], values[first + i + 1], values[first + i + 2], values[first + i + 3]
            w = at - start + i
            for g in range(G):
                w0, w1, w2, w3 = weights[g, w], weights[g, w + 1], weights[g, w + 2], weights[g, w + 3]
                target = sums[g]
                for d in range(D):
                    target[d] += w0 * widen(v0[d]) + w1 * widen(v1[d]) + w2 * widen(v2[d]) + w3 * widen(v3[d])
            i += 4
        while i < count:
            v0 = values[first + i]
            for g in range(G):
                w0 = weights[g, at - start + i]
                target = sums[g]
                for d in range(D):
                    target[d] += w0 * widen(v0[d])
            i += 1
        at += count


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
    q = scratch[: G * D].reshape((G, D))
    sums = scratch[G * D : 2 * G * D].reshape((G, D))
    scores = scratch[2 * G * D : 2 * G * D + G * CHUNK].reshape((G, CHUNK))
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
            _score(head, group, q, pool, layer, h, blocks, start, end, scores)
            for g in range(G):
                factor = _soften(scores[g], 0, end - start, state, g)
                for d in range(D):
                    sums[g, d] *= factor
            _gather(head, group, scores, pool, layer, h, blocks, start, end, sums)
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
    """keys [D, KEYS] transposed, values [KEYS, D]; keys past ``count`` are 0."""
    D = constant(head)  # noqa: N806
    block_size = pool.shape[4]
    for i in range(count):
        block, offset = blocks[(start + i) // block_size], (start + i) % block_size
        key, value = pool[block, layer, 0, h, offset], pool[block, layer, 1, h, offset]
        for d in range(D):
            keys[d, i] = widen(key[d])
        target = values[i]
        for d in range(D):
            target[d] = widen(value[d])
    for d in range(D):
        for i in range(count, KEYS):
            keys[d, i] = _ZERO


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _score_chunk(head: Any, group: Any, q: Any, keys: Any, scores: Any) -> None:
    """scores [KEYS] = q @ keys; D is even, and a multiple of 4 in all but odd models."""
    D = constant(head)  # noqa: N806
    for i in range(KEYS):
        scores[i] = _ZERO
    for d in range(0, D - D % 4, 4):
        q0, q1, q2, q3 = q[d], q[d + 1], q[d + 2], q[d + 3]
        k0, k1, k2, k3 = keys[d], keys[d + 1], keys[d + 2], keys[d + 3]
        for i in range(KEYS):
            scores[i] += q0 * k0[i] + q1 * k1[i] + q2 * k2[i] + q3 * k3[i]
    for d in range(D - D % 4, D):
        q0, k0 = q[d], keys[d]
        for i in range(KEYS):
            scores[i] += q0 * k0[i]


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _gather_chunk(head: Any, group: Any, weights: Any, values: Any, start: int, end: int, sums: Any) -> None:
    D = constant(head)  # noqa: N806
    i = start
    while i + 4 <= end:
        w0, w1, w2, w3 = weights[i], weights[i + 1], weights[i + 2], weights[i + 3]
        v0, v1, v2, v3 = values[i], values[i + 1], values[i + 2], values[i + 3]
        for d in range(D):
            sums[d] += w0 * v0[d] + w1 * v1[d] + w2 * v2[d] + w3 * v3[d]
        i += 4
    while i < end:
        w0, v0 = weights[i], values[i]
        for d in range(D):
            sums[d] += w0 * v0[d]
        i += 1


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
    """``scratch`` [2 * TILE * G * D + 2 * KEYS * D + KEYS]: queries, sums, keys, values, scores."""
    D = constant(head)  # noqa: N806
    G = constant(group)  # noqa: N806
    num_kv_heads = pool.shape[3]
    size = TILE * G * D
    q = scratch[:size].reshape((TILE * G, D))
    sums = scratch[size : 2 * size].reshape((TILE * G, D))
    keys = scratch[2 * size : 2 * size + KEYS * D].reshape((D, KEYS))
    values = scratch[2 * size + KEYS * D : 2 * size + 2 * KEYS * D].reshape((KEYS, D))
    scores = scratch[2 * size + 2 * KEYS * D : 2 * size + 2 * KEYS * D + KEYS]
    for task in range(thread, len(tile_slots) * num_kv_heads, num_threads):
        tile, h = task // num_kv_heads, task % num_kv_heads
        first, count, blocks = tile_tokens[tile], tile_counts[tile], table[tile_slots[tile]]
        for i in range(count * G):
            token = first + i // G
            _rotate(head, group, qkv[token], (h * G + i % G) * D, q_norm, eps, rope[positions[token]], scale, q[i])
            state[i, 0] = _MINUS_INFINITY
            state[i, 1] = _ZERO
            for d in range(D):
                sums[i, d] = _ZERO
        last = positions[first + count - 1]
        lowest = max(0, positions[first] + 1 - window) if window > 0 else 0
        for start in range(lowest - lowest % KEYS, last + 1, KEYS):
            num_keys = min(KEYS, last + 1 - start)
            _widen_chunk(head, group, pool, layer, h, blocks, start, num_keys, keys, values)
            for i in range(count * G):
                position = positions[first + i // G]
                low = max(0, position + 1 - window - start) if window > 0 else 0
                high = min(num_keys, position + 1 - start)
                if low < high:
                    _score_chunk(head, group, q[i], keys, scores)
                    factor = _soften(scores, low, high, state, i)
                    for d in range(D):
                        sums[i, d] *= factor
                    _gather_chunk(head, group, scores, values, low, high, sums[i])
        for i in range(count * G):
            inverse = _ONE / state[i, 1]
            q_head = h * G + i % G
            target = out[first + i // G, q_head * D : (q_head + 1) * D]
            for d in range(D):
                target[d] = narrow(sums[i, d] * inverse, out)


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
    for t in prange(num_threads):
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
    for t in prange(num_threads):
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
    for t in prange(num_threads):
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
