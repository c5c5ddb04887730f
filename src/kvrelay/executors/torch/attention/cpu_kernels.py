"""The Numba kernels of attention over the paged KV pool: decode rows, and prefill chunks.

    decode     one task per (row, up to HEADS KV heads): rotates the new queries and keys, writes keys and values, and
               attends to CHUNK keys at a time
    prefill    first all keys and values are written; then one task per (tile of queries, KV head) widens CHUNK keys and
               values at once and uses them for all of the tile's queries, ROWS at a time

Both keep a running maximum (online softmax, Milakov and Gimelshein 2018). Chunks of keys begin at multiples of
``CHUNK`` in a prefill, so a token's result does not depend on how its prompt was cut.

The head size and the number of query heads per KV head arrive as the types of ``AttentionStep.head`` and
``AttentionStep.group`` (see ``constant_marker``). Whatever runs over a head's values or a chunk's scores is vector code
(``numba_vector``): LLVM unrolls such loops into scalar code. All memory is passed in; bfloat16 is uint16; arithmetic is
float32. With keys and values in bfloat16 a prefill multiplies pairs where the CPU can, twice as many numbers at once;
queries and weights are then rounded to bfloat16, as vLLM has them too.

The entry at the end is cached on disk: touch this file after a change of those that it imports.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit, prange, types
from numba.extending import overload

from kvrelay.executors.torch.kernels.numba_math import OPTIONS, constant, constant_marker
from kvrelay.executors.torch.kernels.numba_vector import (
    ADDS_PAIRS,
    HAS_AVX512,
    LANES,
    add_weighted,
    block_scores,
    copy_scaled,
    copy_value,
    prefetch,
    rotate,
    soften,
    tile_product,
    transpose,
)

CHUNK = 256
"""Scores are softened so many at a time."""
# Queries by keys that a product sums at once, in registers: see ``numba_products``.
ROWS, PANEL = 6, 64 if HAS_AVX512 else 16
HEADS, _TURN = 2, 4
"""A decode row's keys and values are read of so many KV heads by turns, a few tokens of each. A head's part of a block
is about a page, and within pages the hardware reads ahead: two such streams at once are half as fast again as one."""
_RUN = 16
"""Keys that are transposed at once; and scores are softened in multiples of it."""
_PANEL, _ROWS, _ONE_ROW = constant_marker(PANEL), constant_marker(ROWS), constant_marker(1)
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
    decode = HEADS * (2 * group * head + group * CHUNK)
    prefill = 2 * tile_rows * head + 2 * CHUNK * head + ROWS * CHUNK + _RUN * head
    return max(decode, prefill)


# -- shared -----------------------------------------------------------------------------------------------------------


@njit(forceinline=True, **OPTIONS)  # type: ignore[untyped-decorator]
def _rotate(step: Any, token: int, start: int, norm: Any, scale: Any, out: Any, at: int) -> None:
    """out[at : at + D] = rope(norm(the token's qkv[start : start + D])) * scale."""
    D = constant(step.head)  # noqa: N806
    place, angle = token * step.qkv.shape[1] + start, step.positions[token] * D
    if len(norm) == 0:
        rotate(step.head, step.qkv, place, step.rope, angle, scale, out, at)
        return
    copy_scaled(step.head, step.qkv, place, _ONE, out, at)
    total = _ZERO
    for d in range(at, at + D):
        total += out[d] * out[d]
    inverse = _ONE / np.sqrt(total / np.float32(D) + step.eps)
    for d in range(D):
        out[at + d] = out[at + d] * inverse * norm[d]
    rotate(step.head, out, at, step.rope, angle, scale, out, at)


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
    num_kv_heads, block_size = step.pool.shape[3], step.pool.shape[4]
    position, start = step.positions[token], (num_kv_heads * G + h) * D
    block, offset = step.table[step.slots[token], position // block_size], position % block_size
    _rotate(step, token, start, step.k_norm, _ONE, scratch, 0)
    copy_scaled(step.head, scratch, 0, _ONE, step.pool, _place_of(step.pool, step.layer, 0, h, block, offset))
    value = token * step.qkv.shape[1] + start + num_kv_heads * D
    copy_scaled(step.head, step.qkv, value, _ONE, step.pool, _place_of(step.pool, step.layer, 1, h, block, offset))


@njit(forceinline=True, **OPTIONS)  # type: ignore[untyped-decorator]
def _open_query(step: Any, token: int, q_head: int, i: int, q: Any, sums: Any, state: Any) -> None:
    """Row ``i`` of q, sums (both flat) and state begins with the token's query of a head. It is rotated in
    float32, which q need not be: in the room of the sums."""
    D = constant(step.head)  # noqa: N806
    _rotate(step, token, q_head * D, step.q_norm, step.scale, sums, i * D)
    copy_scaled(step.head, sums, i * D, _ONE, q, i * D)
    state[i, 0] = _MINUS_INFINITY
    state[i, 1] = _ZERO
    copy_scaled(step.head, sums, i * D, _ZERO, sums, i * D)


@njit(forceinline=True, **OPTIONS)  # type: ignore[untyped-decorator]
def _close_query(step: Any, token: int, q_head: int, i: int, sums: Any, state: Any) -> None:
    """The weighted sums of row ``i`` become the token's result."""
    D = constant(step.head)  # noqa: N806
    copy_scaled(step.head, sums, i * D, _ONE / state[i, 1], step.out, token * step.out.shape[1] + q_head * D)


# -- decode -----------------------------------------------------------------------------------------------------------


@njit(forceinline=True, **OPTIONS)  # type: ignore[untyped-decorator]
def _ask(step: Any, kind: int, h: int, num_heads: int, blocks: Any, at: int) -> None:
    """Prefetch the first of some heads' keys (kind 0) or values (1) of the block that holds position ``at``. Blocks lie
    anywhere, so the hardware foresees none; the rest of a block it does."""
    block_size, width = step.pool.shape[4], step.pool.shape[5]
    for j in range(h, h + num_heads):
        prefetch(step.pool, _place_of(step.pool, step.layer, kind, j, blocks[at // block_size], 0), width)


@njit(forceinline=True, **OPTIONS)  # type: ignore[untyped-decorator]
def _score(step: Any, h: int, num_heads: int, blocks: Any, start: int, end: int, q: Any, scores: Any) -> None:
    """scores [num_heads * G, CHUNK] of the keys start..end of heads h.. against q [num_heads * G, D]; both flat."""
    D = constant(step.head)  # noqa: N806
    G = constant(step.group)  # noqa: N806
    block_size = step.pool.shape[4]
    at = start
    while at < end:
        first = at % block_size
        count = min(block_size - first, end - at)
        place = _place_of(step.pool, step.layer, 0, h, blocks[at // block_size], first)
        if at + count < end:
            _ask(step, 0, h, num_heads, blocks, at + count)
        for i in range(0, count, _TURN):
            for j in range(num_heads):
                block_scores(
                    step.head,
                    step.group,
                    q,
                    j * G * D,
                    step.pool,
                    place + (j * block_size + i) * D,
                    min(_TURN, count - i),
                    scores,
                    j * G * CHUNK + at - start + i,
                    CHUNK,
                )
        at += count
    _ask(step, 1, h, num_heads, blocks, start)


@njit(forceinline=True, **OPTIONS)  # type: ignore[untyped-decorator]
def _gather(step: Any, h: int, num_heads: int, blocks: Any, start: int, end: int, weights: Any, sums: Any) -> None:
    """sums [num_heads * G, D] += weights [num_heads * G, CHUNK] @ values start..end of heads h..; both flat."""
    D = constant(step.head)  # noqa: N806
    G = constant(step.group)  # noqa: N806
    block_size = step.pool.shape[4]
    at = start
    while at < end:
        first = at % block_size
        count = min(block_size - first, end - at)
        place = _place_of(step.pool, step.layer, 1, h, blocks[at // block_size], first)
        if at + count < end:
            _ask(step, 1, h, num_heads, blocks, at + count)
        for i in range(0, count, _TURN):
            for j in range(num_heads):
                add_weighted(
                    step.head,
                    step.group,
                    weights,
                    j * G * CHUNK + at - start + i,
                    CHUNK,
                    step.pool,
                    place + (j * block_size + i) * D,
                    min(_TURN, count - i),
                    sums,
                    j * G * D,
                )
        at += count


@njit(forceinline=True, **OPTIONS)  # type: ignore[untyped-decorator]
def _first_seen(step: Any, row: int) -> int:
    return max(0, step.positions[row] + 1 - step.window) if step.window > 0 else 0


@njit(forceinline=True, **OPTIONS)  # type: ignore[untyped-decorator]
def _decode_tasks(step: Any, num_rows: int, at_once: int, thread: int, num_threads: int) -> None:
    """Each task is ``at_once`` KV heads of a row, the last of a row perhaps fewer.

    Scratch memory [HEADS * (2 * G * D + G * CHUNK)]: queries, sums, scores.
    """
    D = constant(step.head)  # noqa: N806
    G = constant(step.group)  # noqa: N806
    num_kv_heads, scratch, state = step.pool.shape[3], step.scratch[thread], step.state[thread]
    size = HEADS * G * D
    q, sums, scores = scratch[:size], scratch[size : 2 * size], scratch[2 * size : 2 * size + HEADS * G * CHUNK]
    per_row = (num_kv_heads + at_once - 1) // at_once
    for task in range(thread, num_rows * per_row, num_threads):
        row, h = task // per_row, task % per_row * at_once
        num_heads = min(at_once, num_kv_heads - h)
        position, blocks = step.positions[row], step.table[step.slots[row]]
        start = _first_seen(step, row)
        _ask(step, 0, h, num_heads, blocks, start)
        for j in range(num_heads):
            _write_token(step, row, h + j, sums)
        for g in range(num_heads * G):
            _open_query(step, row, h * G + g, g, q, sums, state)
        while start <= position:
            end = min(start + CHUNK, position + 1)
            _score(step, h, num_heads, blocks, start, end, q, scores)
            count = end - start
            padded = (count + _RUN - 1) // _RUN * _RUN
            for g in range(num_heads * G):
                for i in range(g * CHUNK + count, g * CHUNK + padded):
                    scores[i] = _MINUS_INFINITY
                factor = soften(scores, g * CHUNK, padded, state, g, scores)
                if start > 0:
                    copy_scaled(step.head, sums, g * D, factor, sums, g * D)
            if end <= position:
                _ask(step, 0, h, num_heads, blocks, end)
            _gather(step, h, num_heads, blocks, start, end, scores, sums)
            start = end
        for g in range(num_heads * G):
            _close_query(step, row, h * G + g, g, sums, state)


# -- prefill ----------------------------------------------------------------------------------------------------------


def _views(pool: Any, head: Any, room: Any) -> tuple[Any, Any]:
    """``room`` by numbers and by what a prefill multiplies at once: as bfloat16 and as pairs of them, if the pool holds
    such and the CPU adds pairs' products; else twice as it is."""
    raise AssertionError("only inside Numba")


@overload(_views, inline="always")  # type: ignore[untyped-decorator]
def _views_of(pool: Any, head: Any, room: Any) -> Any:
    if ADDS_PAIRS and pool.dtype == types.uint16 and head.dtype.size % LANES == 0:

        def in_pairs(pool: Any, head: Any, room: Any) -> Any:
            return room.view(np.uint16), room.view(np.uint32)

        return in_pairs

    def unchanged(pool: Any, head: Any, room: Any) -> Any:
        return room, room

    return unchanged


@njit(forceinline=True, **OPTIONS)  # type: ignore[untyped-decorator]
def _widen_chunk(step: Any, h: int, blocks: Any, start: int, count: int, keys: Any, values: Any, rows: Any) -> None:
    """keys [CHUNK / PANEL, D, PANEL], each panel transposed, and values [CHUNK, D], both flat; keys past ``count`` up
    to the end of their panel are what was there. ``rows`` [_RUN, D] is room for keys.

    As pairs of bfloat16: keys [CHUNK / PANEL, D / 2, PANEL], a pair of a key's numbers in a word, and values
    [CHUNK / 2, D], a word of two values' numbers.
    """
    D = constant(step.head)  # noqa: N806
    halves, words = _views(step.pool, step.head, rows)
    W = D // (len(halves) // len(words))  # noqa: N806
    block_size = step.pool.shape[4]
    for first in range(0, count, _RUN):
        for i in range(first, min(first + _RUN, count)):
            block, offset = blocks[(start + i) // block_size], (start + i) % block_size
            key = _place_of(step.pool, step.layer, 0, h, block, offset)
            value = _place_of(step.pool, step.layer, 1, h, block, offset)
            copy_scaled(step.head, step.pool, key, _ONE, halves, (i - first) * D)
            copy_value(step.head, step.pool, value, values, i)
        transpose(step.head, _PANEL, halves, keys, first // PANEL * PANEL * W + first % PANEL)


@njit(forceinline=True, **OPTIONS)  # type: ignore[untyped-decorator]
def _attend_chunk(
    step: Any,
    rows: Any,
    first_row: int,
    q: Any,
    keys: Any,
    values: Any,
    before: Any,
    scores: Any,
    state: Any,
    sums: Any,
) -> None:
    """The chunk's keys and values (see ``_widen_chunk``) for as many queries, from ``first_row`` on, as ``rows`` says.

    Row r is of query r // G, which has ``before + r // G`` tokens before it from the chunk's first key on. All flat.
    """
    D = constant(step.head)  # noqa: N806
    weights, added = _views(step.pool, step.head, scores)
    per_word = len(weights) // len(added)
    W = D // per_word  # noqa: N806
    G = constant(step.group)  # noqa: N806
    R = constant(rows)  # noqa: N806
    window = step.window
    seen = min(CHUNK, before + (first_row + R - 1) // G + 1)  # by the last of the rows, and by it the most
    padded = (seen + PANEL - 1) // PANEL * PANEL
    for at in range(0, padded, PANEL):
        tile_product(_PANEL, rows, q, first_row * W, W, keys, at * W, W, scores, at, CHUNK)
    for r in range(R):
        row, start = first_row + r, r * CHUNK
        high = min(seen, before + row // G + 1)
        low = max(0, before + row // G + 1 - window) if window > 0 else 0
        if low < high:
            for i in range(start, start + low):
                scores[i] = _MINUS_INFINITY
            for i in range(start + high, start + padded):
                scores[i] = _MINUS_INFINITY
            factor = soften(scores, start, padded, state, row, weights)
            if factor != _ONE:
                copy_scaled(step.head, sums, row * D, factor, sums, row * D)
        else:
            for i in range(start, start + padded):
                scores[i] = _ZERO
    count = (seen + per_word - 1) // per_word
    add_weighted(step.head, rows, added, 0, CHUNK, values, 0, count, sums, first_row * D)


@njit(forceinline=True, **OPTIONS)  # type: ignore[untyped-decorator]
def _write_tasks(step: Any, first_token: int, thread: int, num_threads: int) -> None:
    """This thread's share of the new tokens: their keys and values go into the pool."""
    count = len(step.positions) - first_token
    for i in range(count * thread // num_threads, count * (thread + 1) // num_threads):
        for h in range(step.pool.shape[3]):
            _write_token(step, first_token + i, h, step.scratch[thread])


@njit(forceinline=True, **OPTIONS)  # type: ignore[untyped-decorator]
def _prefill_tasks(step: Any, tile_tokens: Any, tile_counts: Any, thread: int, num_threads: int) -> None:
    """Scratch memory [2 * tile rows * D + 2 * CHUNK * D + ROWS * CHUNK]: queries, sums, keys, values, scores."""
    D = constant(step.head)  # noqa: N806
    G = constant(step.group)  # noqa: N806
    num_kv_heads, scratch, state = step.pool.shape[3], step.scratch[thread], step.state[thread]
    size, chunk = state.shape[0] * D, CHUNK * D
    sums = scratch[size : 2 * size]
    queries, q = _views(step.pool, step.head, scratch[:size])
    _, keys = _views(step.pool, step.head, scratch[2 * size : 2 * size + chunk])
    _, values = _views(step.pool, step.head, scratch[2 * size + chunk : 2 * size + 2 * chunk])
    scores = scratch[2 * size + 2 * chunk : 2 * size + 2 * chunk + ROWS * CHUNK]
    rows = scratch[2 * size + 2 * chunk + ROWS * CHUNK :]
    for task in range(thread, len(tile_tokens) * num_kv_heads, num_threads):
        tile, h = task // num_kv_heads, task % num_kv_heads
        first, count = tile_tokens[tile], tile_counts[tile]
        blocks, position, num_rows = step.table[step.slots[first]], step.positions[first], count * G
        for i in range(num_rows):
            _open_query(step, first + i // G, h * G + i % G, i, queries, sums, state)
        lowest = max(0, position + 1 - step.window) if step.window > 0 else 0
        for start in range(lowest - lowest % CHUNK, position + count, CHUNK):
            _widen_chunk(step, h, blocks, start, min(CHUNK, position + count - start), keys, values, rows)
            before = position - start
            at = max(0, -before) * G  # earlier queries do not see these keys
            while at + ROWS <= num_rows:
                _attend_chunk(step, _ROWS, at, q, keys, values, before, scores, state, sums)
                at += ROWS
            while at < num_rows:
                _attend_chunk(step, _ONE_ROW, at, q, keys, values, before, scores, state, sums)
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
    first token and the number of its tokens. Tokens in no tile only get their keys and values written.

    The fields of ``AttentionStep`` come one by one: Numba takes 3 us more to look at a tuple of arrays than at the
    arrays.
    """
    step = AttentionStep(
        head, group, qkv, pool, layer, slots, positions, table, rope,
        q_norm, k_norm, eps, scale, window, out, scratch, state,
    )
    # The indices are unsigned: mixed with signed numbers they would make floats.
    if num_decodes > 0:
        at_once = HEADS if num_decodes >= 2 * num_threads or num_threads == 1 else 1
        for index in prange(num_threads):
            _decode_tasks(step, num_decodes, at_once, np.int64(index), num_threads)
    if len(positions) > num_decodes:
        for index in prange(num_threads):
            _write_tasks(step, num_decodes, np.int64(index), num_threads)
    if len(tile_tokens) > 0:
        for index in prange(num_threads):
            _prefill_tasks(step, tile_tokens, tile_counts, np.int64(index), num_threads)
