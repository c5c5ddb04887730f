"""The Numba kernels of attention over the paged KV pool: decode rows, and prefill chunks.

    decode     one task per (row, KV head): rotates the new query and key, writes key and value, and attends to CHUNK
               keys at a time
    prefill    first all keys and values are written; then one task per (tile of queries, KV head) widens KEYS keys and
               values at once and uses them for all of the tile's queries, ROWS at a time

Both keep a running maximum (online softmax, Milakov and Gimelshein 2018). Chunks of keys begin at multiples of
``KEYS`` in a prefill, so a token's result does not depend on how its prompt was cut.

The head size and the number of query heads per KV head arrive as the types of ``AttentionStep.head`` and
``AttentionStep.group`` (see ``constant_marker``), so that LLVM unrolls the loops. All memory is
passed in; bfloat16 is uint16; arithmetic is float32.

The entry at the end is cached on disk: touch this file after a change of those that it imports.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit, prange

from kvrelay.executors.torch.kernels.numba_math import (
    OPTIONS,
    constant,
    constant_marker,
    exp_negative,
    largest,
    narrow,
    widen,
)
from kvrelay.executors.torch.kernels.numba_vector import add_weighted, block_scores, prefetch

KEYS = 64
"""Scores are softened so many at a time, so that the loops over them have a fixed length."""
CHUNK = 256
ROWS = 6
# Blocks of keys that are asked for before they are read: enough to cover a cache miss.
_AHEAD = 4
_KEYS, _ROWS, _ONE_ROW = constant_marker(KEYS), constant_marker(ROWS), constant_marker(1)
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_MINUS_INFINITY = np.float32(-np.inf)


class AttentionStep(NamedTuple):
    """One layer of a step of T tokens. G query heads share a KV head; D is the head size.

    ``head``, ``group``: constant markers of D and G; ``qkv`` [T, (q, k and v heads) * D]; ``slots``, ``positions`` [T];
    ``table``: block ids by slot; ``rope`` [positions, 2, D / 2]; an empty norm means none; ``window`` 0: all tokens are
    seen; ``out`` [T, query heads * D]; ``scratch`` [threads, floats]; ``state`` [threads, rows, 2]: running maximum and
    sum of weights of each query at work.
    """

    head: Any
    group: Any
    qkv: Any
    pool: Any
    layer: int
    slots: Any
    positions: Any
    table: Any
    rope: Any
    q_norm: Any
    k_norm: Any
    eps: Any
    scale: Any
    window: int
    out: Any
    scratch: Any
    state: Any


def scratch_size(group: int, head: int, tile_rows: int) -> int:
    """Floats of one thread's scratch memory: the larger of the needs of decode and prefill."""
    decode = 2 * group * head + group * CHUNK
    prefill = 2 * tile_rows * head + 2 * KEYS * head + ROWS * KEYS
    return max(decode, prefill)


# -- shared -----------------------------------------------------------------------------------------------------------


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
def _rotate(head: Any, source: Any, start: int, norm: Any, eps: Any, angles: Any, scale: Any, out: Any) -> None:
    """out = rope(norm(source[start : start + D])) * scale."""
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
def _place_of(pool: Any, layer: int, kind: int, h: int, block: int, position: int) -> Any:
    """Where in the flat pool the vector of a position begins."""
    _, num_layers, kinds, num_kv_heads, block_size, width = pool.shape
    row = ((np.int64(block) * num_layers + layer) * kinds + kind) * num_kv_heads + h
    return (row * block_size + position) * width


@njit(forceinline=True, **OPTIONS)  # type: ignore[untyped-decorator]
def _write_token(step: Any, token: int, h: int, scratch: Any) -> None:
    """The token's key and value of KV head ``h`` go to their place in the pool."""
    D = constant(step.head)  # noqa: N806
    G = constant(step.group)  # noqa: N806
    pool, source, position = step.pool, step.qkv[token], step.positions[token]
    num_kv_heads, block_size = pool.shape[3], pool.shape[4]
    k_start = (num_kv_heads * G + h) * D
    v_start = k_start + num_kv_heads * D
    _rotate(step.head, source, k_start, step.k_norm, step.eps, step.rope[position], _ONE, scratch)
    block, offset = step.table[step.slots[token], position // block_size], position % block_size
    key, value = pool[block, step.layer, 0, h, offset], pool[block, step.layer, 1, h, offset]
    for d in range(D):
        key[d] = narrow(scratch[d], pool)
    for d in range(D):
        value[d] = source[v_start + d]


@njit(forceinline=True, **OPTIONS)  # type: ignore[untyped-decorator]
def _open_query(step: Any, token: int, q_head: int, i: int, q: Any, sums: Any, state: Any) -> None:
    """Row ``i`` of q, sums (both flat) and state begins with the token's query of a head."""
    D = constant(step.head)  # noqa: N806
    angles, row = step.rope[step.positions[token]], q[i * D : (i + 1) * D]
    _rotate(step.head, step.qkv[token], q_head * D, step.q_norm, step.eps, angles, step.scale, row)
    state[i, 0] = _MINUS_INFINITY
    state[i, 1] = _ZERO
    sums[i * D : (i + 1) * D] = _ZERO


@njit(forceinline=True, **OPTIONS)  # type: ignore[untyped-decorator]
def _close_query(step: Any, token: int, q_head: int, i: int, sums: Any, state: Any) -> None:
    """The weighted sums of row ``i`` become the token's result."""
    D = constant(step.head)  # noqa: N806
    inverse = _ONE / state[i, 1]
    target = step.out[token, q_head * D : (q_head + 1) * D]
    for d in range(D):
        target[d] = narrow(sums[i * D + d] * inverse, step.out)


# -- decode -----------------------------------------------------------------------------------------------------------


@njit(forceinline=True, **OPTIONS)  # type: ignore[untyped-decorator]
def _score(step: Any, h: int, blocks: Any, start: int, end: int, q: Any, scores: Any) -> None:
    """scores [G, CHUNK] of the keys start..end against q [G, D]; both flat."""
    pool, layer = step.pool, step.layer
    flat, block_size, width = pool.reshape(-1), pool.shape[4], pool.shape[5]
    at = start
    while at < end:
        first = at % block_size
        count = min(block_size - first, end - at)
        place = _place_of(pool, layer, 0, h, blocks[at // block_size], first)
        # Blocks lie anywhere, so the hardware does not foresee the next ones, nor the values of this one.
        for ahead in range(at + _AHEAD * block_size, min(end, at + (_AHEAD + 1) * block_size), block_size):
            prefetch(flat, _place_of(pool, layer, 0, h, blocks[ahead // block_size], 0), block_size * width)
        prefetch(flat, place + pool.shape[3] * block_size * width, count * width)
        block_scores(step.head, step.group, q, flat, place, count, scores, at - start, CHUNK)
        at += count


@njit(forceinline=True, **OPTIONS)  # type: ignore[untyped-decorator]
def _gather(step: Any, h: int, blocks: Any, start: int, end: int, weights: Any, sums: Any) -> None:
    """sums [G, D] += weights [G, CHUNK] @ values start..end; both flat."""
    flat, block_size = step.pool.reshape(-1), step.pool.shape[4]
    at = start
    while at < end:
        first = at % block_size
        count = min(block_size - first, end - at)
        place = _place_of(step.pool, step.layer, 1, h, blocks[at // block_size], first)
        add_weighted(step.head, step.group, weights, at - start, CHUNK, flat, place, count, sums, 0)
        at += count


@njit(forceinline=True, **OPTIONS)  # type: ignore[untyped-decorator]
def _decode_tasks(step: Any, num_rows: int, thread: int, num_threads: int) -> None:
    """Scratch memory [2 * G * D + G * CHUNK]: queries, sums, scores."""
    D = constant(step.head)  # noqa: N806
    G = constant(step.group)  # noqa: N806
    num_kv_heads, scratch, state = step.pool.shape[3], step.scratch[thread], step.state[thread]
    q, sums, flat_scores = scratch[: G * D], scratch[G * D : 2 * G * D], scratch[2 * G * D : 2 * G * D + G * CHUNK]
    scores = flat_scores.reshape((G, CHUNK))
    for task in range(thread, num_rows * num_kv_heads, num_threads):
        row, h = task // num_kv_heads, task % num_kv_heads
        position, blocks = step.positions[row], step.table[step.slots[row]]
        _write_token(step, row, h, sums[:D])
        for g in range(G):
            _open_query(step, row, h * G + g, g, q, sums, state)
        start = max(0, position + 1 - step.window) if step.window > 0 else 0
        while start <= position:
            end = min(start + CHUNK, position + 1)
            _score(step, h, blocks, start, end, q, flat_scores)
            count = end - start
            padded = (count + KEYS - 1) // KEYS * KEYS
            for g in range(G):
                scores[g, count:padded] = _MINUS_INFINITY
                factor = _soften(scores[g], padded, state, g)
                for d in range(g * D, (g + 1) * D):
                    sums[d] *= factor
            _gather(step, h, blocks, start, end, flat_scores, sums)
            start = end
        for g in range(G):
            _close_query(step, row, h * G + g, g, sums, state)


# -- prefill ----------------------------------------------------------------------------------------------------------


@njit(forceinline=True, **OPTIONS)  # type: ignore[untyped-decorator]
def _widen_chunk(step: Any, h: int, blocks: Any, start: int, count: int, keys: Any, values: Any) -> None:
    """keys [D, KEYS] transposed, values [KEYS, D], both flat; keys past ``count`` are 0."""
    D = constant(step.head)  # noqa: N806
    flat, block_size = step.pool.reshape(-1), step.pool.shape[4]
    for i in range(count):
        block, offset = blocks[(start + i) // block_size], (start + i) % block_size
        key = _place_of(step.pool, step.layer, 0, h, block, offset)
        value = _place_of(step.pool, step.layer, 1, h, block, offset)
        for d in range(D):
            keys[d * KEYS + i] = widen(flat[key + d])
        for d in range(D):
            values[i * D + d] = widen(flat[value + d])
    for d in range(D):
        for i in range(count, KEYS):
            keys[d * KEYS + i] = _ZERO


@njit(forceinline=True, **OPTIONS)  # type: ignore[untyped-decorator]
def _attend_chunk(
    step: Any,
    rows: Any,
    first_row: int,
    q: Any,
    keys: Any,
    values: Any,
    num_keys: int,
    before: Any,
    scores: Any,
    state: Any,
    sums: Any,
) -> None:
    """The chunk's keys [D, KEYS] and values [KEYS, D] for as many queries, from ``first_row`` on, as ``rows`` says.

    Row r is of query r // G, which has ``before + r // G`` tokens before it from the chunk's first key on. All flat.
    """
    D = constant(step.head)  # noqa: N806
    G = constant(step.group)  # noqa: N806
    R = constant(rows)  # noqa: N806
    window = step.window
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
    add_weighted(step.head, rows, scores, 0, KEYS, values, 0, num_keys, sums, first_row * D)


@njit(forceinline=True, **OPTIONS)  # type: ignore[untyped-decorator]
def _write_tasks(step: Any, first_token: int, thread: int, num_threads: int) -> None:
    """This thread's share of the new tokens: their keys and values go into the pool."""
    count = len(step.positions) - first_token
    for i in range(count * thread // num_threads, count * (thread + 1) // num_threads):
        for h in range(step.pool.shape[3]):
            _write_token(step, first_token + i, h, step.scratch[thread])


@njit(forceinline=True, **OPTIONS)  # type: ignore[untyped-decorator]
def _prefill_tasks(step: Any, tile_tokens: Any, tile_counts: Any, thread: int, num_threads: int) -> None:
    """Scratch memory [2 * tile rows * D + 2 * KEYS * D + ROWS * KEYS]: queries, sums, keys, values, scores."""
    D = constant(step.head)  # noqa: N806
    G = constant(step.group)  # noqa: N806
    num_kv_heads, scratch, state = step.pool.shape[3], step.scratch[thread], step.state[thread]
    size = state.shape[0] * D
    q, sums = scratch[:size], scratch[size : 2 * size]
    keys = scratch[2 * size : 2 * size + KEYS * D]
    values = scratch[2 * size + KEYS * D : 2 * size + 2 * KEYS * D]
    scores = scratch[2 * size + 2 * KEYS * D : 2 * size + 2 * KEYS * D + ROWS * KEYS]
    for task in range(thread, len(tile_tokens) * num_kv_heads, num_threads):
        tile, h = task // num_kv_heads, task % num_kv_heads
        first, count = tile_tokens[tile], tile_counts[tile]
        blocks, position, num_rows = step.table[step.slots[first]], step.positions[first], count * G
        for i in range(num_rows):
            _open_query(step, first + i // G, h * G + i % G, i, q, sums, state)
        lowest = max(0, position + 1 - step.window) if step.window > 0 else 0
        for start in range(lowest - lowest % KEYS, position + count, KEYS):
            num_keys = min(KEYS, position + count - start)
            _widen_chunk(step, h, blocks, start, num_keys, keys, values)
            before = position - start
            at = max(0, -before) * G  # earlier queries do not see these keys
            while at + ROWS <= num_rows:
                _attend_chunk(step, _ROWS, at, q, keys, values, num_keys, before, scores, state, sums)
                at += ROWS
            while at < num_rows:
                _attend_chunk(step, _ONE_ROW, at, q, keys, values, num_keys, before, scores, state, sums)
                at += 1
        for i in range(num_rows):
            _close_query(step, first + i // G, h * G + i % G, i, sums, state)


# -- entry ------------------------------------------------------------------------------------------------------------


# fmt: off
@njit(cache=True, parallel=True, **OPTIONS)  # type: ignore[untyped-decorator]
def attend(
    head: Any, group: Any, qkv: Any, pool: Any, layer: int, slots: Any, positions: Any, table: Any, rope: Any,
    q_norm: Any, k_norm: Any, eps: Any, scale: Any, window: int, out: Any, scratch: Any, state: Any,
    num_decodes: int, tile_tokens: Any, tile_counts: Any, num_threads: int,
) -> None:
    """The first ``num_decodes`` tokens as decode rows, the others in tiles: runs of tokens of one row, each with its
    first token and the number of its tokens.

    The fields of ``AttentionStep`` come one by one: Numba takes 3 us more to look at a tuple of arrays than at the
    arrays.
    """
    step = AttentionStep(
        head, group, qkv, pool, layer, slots, positions, table, rope,
        q_norm, k_norm, eps, scale, window, out, scratch, state,
    )
    # The indices are unsigned: mixed with signed numbers they would make floats.
    if num_decodes > 0:
        for index in prange(num_threads):
            _decode_tasks(step, num_decodes, np.int64(index), num_threads)
    if len(tile_tokens) > 0:
        for index in prange(num_threads):
            _write_tasks(step, num_decodes, np.int64(index), num_threads)
        for index in prange(num_threads):
            _prefill_tasks(step, tile_tokens, tile_counts, np.int64(index), num_threads)
