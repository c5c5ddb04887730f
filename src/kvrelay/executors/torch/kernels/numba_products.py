"""Products of activations with packed weights, in Numba: in float32, and in bfloat16 where the CPU multiplies it.

Weights lie in panels of WIDTH columns, [panels, inputs, WIDTH], the last one filled up with zeros. A tile of up to
ROWS rows by a panel is summed in registers, input by input in order. So a row's result has the same bits whatever other
rows, tiles and threads there are, and whether the weights are stored as float32 or, where that loses nothing, as
bfloat16. Activations in bfloat16 come as pairs, and panels hold pairs, [panels, inputs / 2, WIDTH] of uint32: the same
loops sum pair by pair.

The entry is cached on disk: touch this file after a change of those that it imports.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numba import njit, prange

from kvrelay.executors.torch.kernels.numba_math import OPTIONS, constant, constant_marker, narrow
from kvrelay.executors.torch.kernels.numba_vector import (
    ADDS_PAIRS,
    HAS_AVX512,
    MULTIPLIES_BFLOAT16,
    tile_product,
    widen_run,
)

# Sums of a tile take 24 of AVX-512's 32 registers, or 12 of AVX2's 16.
WIDTH, ROWS = (64, 6) if HAS_AVX512 else (16, 6)
# From so many rows on, a panel of bfloat16 is widened once for all of them.
WIDEN_FROM = 24
_WIDTH, _ZERO = constant_marker(WIDTH), np.float32(0.0)
_1, _2, _3, _4, _5, _6 = (constant_marker(rows) for rows in range(1, 7))


def multiplies(weight: torch.Tensor) -> bool:
    """Whether ours are the fastest products with such weights on this CPU."""
    return weight.dtype == torch.float32 or (MULTIPLIES_BFLOAT16 and holds_pairs(weight))


def holds_pairs(weight: torch.Tensor) -> bool:
    """Whether such weights are multiplied pair by pair, in bfloat16; else activations are float32."""
    return ADDS_PAIRS and weight.dtype == torch.bfloat16 and weight.shape[1] % 2 == 0


def pack(weight: torch.Tensor) -> torch.Tensor:
    """[outputs, inputs] as panels [panels, inputs, WIDTH], in bfloat16 if each value is one."""
    half = weight.bfloat16()
    stored = half if weight is half or torch.equal(half.float(), weight) else weight
    num_outputs, num_inputs = weight.shape
    num_panels = -(-num_outputs // WIDTH)
    padded = torch.zeros(num_panels * WIDTH, num_inputs, dtype=stored.dtype)
    padded[:num_outputs] = stored
    return padded.view(num_panels, WIDTH, num_inputs).transpose(1, 2).contiguous()


def pack_pairs(weight: torch.Tensor) -> npt.NDArray[np.uint32]:
    """[outputs, inputs] of bfloat16, an even number of inputs, as panels of pairs."""
    num_outputs, num_inputs = weight.shape
    num_panels = -(-num_outputs // WIDTH)
    padded = torch.zeros(num_panels * WIDTH, num_inputs, dtype=weight.dtype)
    padded[:num_outputs] = weight
    panels = padded.view(num_panels, WIDTH, num_inputs // 2, 2).transpose(1, 2).contiguous()
    pairs: npt.NDArray[np.uint32] = panels.view(torch.uint16).numpy().view(np.uint32)[..., 0]
    return pairs


def scratch(num_threads: int, num_inputs: int) -> npt.NDArray[np.float32]:
    """Each thread's room: a tile that goes beyond the last column, then a widened panel of ``num_inputs``; 0: none is
    widened. (Memory of torch's begins at a cache line, unlike NumPy's.)"""
    room: npt.NDArray[np.float32] = torch.zeros(num_threads, (ROWS + num_inputs) * WIDTH).numpy()
    return room


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _tile(x: Any, row: int, rows: int, panels: Any, start: int, out: Any, offset: int, stride: int) -> None:
    K = x.shape[1]  # noqa: N806
    at = row * K
    if rows == 1:
        tile_product(_WIDTH, _1, x, at, K, panels, start, K, out, offset, stride)
    elif rows == 2:
        tile_product(_WIDTH, _2, x, at, K, panels, start, K, out, offset, stride)
    elif rows == 3:
        tile_product(_WIDTH, _3, x, at, K, panels, start, K, out, offset, stride)
    elif rows == 4:
        tile_product(_WIDTH, _4, x, at, K, panels, start, K, out, offset, stride)
    elif rows == 5:
        tile_product(_WIDTH, _5, x, at, K, panels, start, K, out, offset, stride)
    else:
        tile_product(_WIDTH, _6, x, at, K, panels, start, K, out, offset, stride)


@njit(cache=True, **OPTIONS)  # type: ignore[untyped-decorator]
def part(
    x: Any, panels: Any, bias: Any, out: Any, room: Any, first_row: int, end_row: int, first_panel: int, end_panel: int
) -> None:
    """Some rows by some panels of ``product``, on this thread; ``room`` is one of ``scratch``. A panel stays in the
    cache while all rows use it."""
    W, K, N = constant(_WIDTH), x.shape[1], out.shape[1]  # noqa: N806
    flat, tile, wide = panels.reshape(-1), room[: ROWS * W], room[ROWS * W :]
    widens = len(wide) > 0 and end_row - first_row >= WIDEN_FROM
    for panel in range(first_panel, end_panel):
        start, column = panel * K * W, panel * W
        if widens:
            widen_run(flat, start, K * W, wide)
        width = min(W, N - column)
        for row in range(first_row, end_row, ROWS):
            rows = min(ROWS, end_row - row)
            if width == W and len(bias) == 0:
                if widens:
                    _tile(x, row, rows, wide, 0, out, row * N + column, N)
                else:
                    _tile(x, row, rows, flat, start, out, row * N + column, N)
                continue
            if widens:
                _tile(x, row, rows, wide, 0, tile, 0, W)
            else:
                _tile(x, row, rows, flat, start, tile, 0, W)
            for r in range(rows):
                for c in range(width):
                    added = bias[column + c] if len(bias) > 0 else _ZERO
                    out[row + r, column + c] = narrow(tile[r * W + c] + added, out)


@njit(cache=True, parallel=True, **OPTIONS)  # type: ignore[untyped-decorator]
def product(x: Any, panels: Any, bias: Any, out: Any, rooms: Any, num_threads: int) -> None:
    """out [T, N] = x [T, K] @ weight.T + bias, of panels from ``pack``; an empty ``bias`` means none."""
    num_rows, num_panels = x.shape[0], panels.shape[0]
    num_tiles = (num_rows + ROWS - 1) // ROWS
    by_rows = num_tiles >= 2 * num_threads and num_panels < 8 * num_threads
    none = num_rows - num_rows  # Numba would compile ``part`` once more for each place of a literal zero
    for index in prange(num_threads):
        t = np.int64(index)  # the index is unsigned: mixed with signed ones it would make floats
        if by_rows:
            first, end = num_tiles * t // num_threads * ROWS, num_tiles * (t + 1) // num_threads * ROWS
            part(x, panels, bias, out, rooms[t], first, min(end, num_rows), none, num_panels)
        else:
            first, end = num_panels * t // num_threads, num_panels * (t + 1) // num_threads
            part(x, panels, bias, out, rooms[t], none, num_rows, first, end)
