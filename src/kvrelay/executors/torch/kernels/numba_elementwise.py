"""Numba kernels for norms, SiLU and embedding, on contiguous rows; bfloat16 as uint16.

Each comes as a body over a run of rows, which is quicker to call where one thread is enough, and as one that gives each
of ``num_threads`` threads a run. A row's result does not depend on the other rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange

from kvrelay.executors.torch.kernels.numba_math import OPTIONS, exp_negative, narrow, widen

_ZERO, _ONE = np.float32(0.0), np.float32(1.0)


@njit(cache=True, **OPTIONS)  # type: ignore[untyped-decorator]
def norm_rows(residual: Any, weight: Any, eps: Any, out: Any, first: int, last: int) -> None:
    width = residual.shape[1]
    for row in range(first, last):
        source, target = residual[row], out[row]
        total = _ZERO
        for i in range(width):
            total += source[i] * source[i]
        scale = _ONE / np.sqrt(total / np.float32(width) + eps)
        for i in range(width):
            target[i] = narrow(source[i] * scale * weight[i], out)


@njit(cache=True, **OPTIONS)  # type: ignore[untyped-decorator]
def add_norm_rows(residual: Any, delta: Any, weight: Any, eps: Any, out: Any, first: int, last: int) -> None:
    width = residual.shape[1]
    for row in range(first, last):
        source, change, target = residual[row], delta[row], out[row]
        total = _ZERO
        for i in range(width):
            value = source[i] + widen(change[i])
            source[i] = value
            total += value * value
        scale = _ONE / np.sqrt(total / np.float32(width) + eps)
        for i in range(width):
            target[i] = narrow(source[i] * scale * weight[i], out)


@njit(cache=True, **OPTIONS)  # type: ignore[untyped-decorator]
def silu_mul_rows(gate_up: Any, out: Any, first: int, last: int) -> None:
    width = out.shape[1]
    for row in range(first, last):
        gates, ups, target = gate_up[row, :width], gate_up[row, width:], out[row]
        for i in range(width):
            gate = widen(gates[i])
            e = exp_negative(-abs(gate))
            top = _ONE if gate >= _ZERO else e
            target[i] = narrow(gate * top / (_ONE + e) * widen(ups[i]), out)


@njit(cache=True, **OPTIONS)  # type: ignore[untyped-decorator]
def embed(table: Any, token_ids: Any, out: Any) -> None:
    width = out.shape[1]
    for row in range(len(token_ids)):
        source, target = table[token_ids[row]], out[row]
        for i in range(width):
            target[i] = widen(source[i])


@njit(cache=True, parallel=True, **OPTIONS)  # type: ignore[untyped-decorator]
def norm(residual: Any, weight: Any, eps: Any, out: Any, num_threads: int) -> None:
    rows = residual.shape[0]
    for index in prange(num_threads):
        t = np.int64(index)  # the index is unsigned: mixed with signed ones it would make floats
        norm_rows(residual, weight, eps, out, rows * t // num_threads, rows * (t + 1) // num_threads)


@njit(cache=True, parallel=True, **OPTIONS)  # type: ignore[untyped-decorator]
def add_norm(residual: Any, delta: Any, weight: Any, eps: Any, out: Any, num_threads: int) -> None:
    rows = residual.shape[0]
    for index in prange(num_threads):
        t = np.int64(index)  # the index is unsigned: mixed with signed ones it would make floats
        add_norm_rows(residual, delta, weight, eps, out, rows * t // num_threads, rows * (t + 1) // num_threads)


@njit(cache=True, parallel=True, **OPTIONS)  # type: ignore[untyped-decorator]
def silu_mul(gate_up: Any, out: Any, num_threads: int) -> None:
    rows = out.shape[0]
    for index in prange(num_threads):
        t = np.int64(index)  # the index is unsigned: mixed with signed ones it would make floats
        silu_mul_rows(gate_up, out, rows * t // num_threads, rows * (t + 1) // num_threads)
