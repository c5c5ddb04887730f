"""The scalar pieces of the Numba kernels: bfloat16 in 16-bit integers, and a vectorisable exponential.

Numba has no bfloat16, so such arrays travel as uint16 and are widened to float32 in registers. All arithmetic is
float32. ``FAST`` lets LLVM reassociate and fuse, but keeps infinities and NaN meaningful.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import intrinsic, overload

from kvrelay.core.kernel_cache import place_kernel_cache

_ROOM = Path(__file__).resolve().parent
place_kernel_cache(_ROOM, _ROOM.parent / "attention")  # before any kernel: all of their modules import this one
FAST = {"reassoc", "contract", "arcp", "nsz"}
# The kernels allocate nothing. ``_nrt``: so they need not count references, atomically, at each slice of an array.
OPTIONS: dict[str, Any] = {"_nrt": False, "nogil": True, "fastmath": FAST, "error_model": "numpy", "boundscheck": False}

EXP_LOWEST = np.float32(-87.3)
LOG2_E = np.float32(1.44269504)
LN_2 = np.float32(0.69314718056)
_HALF = np.float32(0.5)
_ONE = np.float32(1.0)
# Minimax coefficients of e^x on [-ln2/2, ln2/2] (Cephes' expf).
EXP_TERMS = _C0, _C1, _C2, _C3, _C4, _C5 = tuple(
    np.float32(c)
    for c in (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
)


@intrinsic  # type: ignore[untyped-decorator]
def _bits(typing_context: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], context.get_value_type(types.uint32))

    return types.uint32(types.float32), generate


@intrinsic  # type: ignore[untyped-decorator]
def _from_bits(typing_context: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], context.get_value_type(types.float32))

    return types.float32(types.uint32), generate


def widen(value: Any) -> Any:
    """The float32 of an array element: itself, or what its 16 bits stand for as bfloat16."""
    raise AssertionError("only inside Numba")


def narrow(value: Any, like: Any) -> Any:
    """A float32 as an element of array ``like``: itself, or its nearest bfloat16 (ties to even, NaN stays NaN)."""
    raise AssertionError("only inside Numba")


@overload(widen, inline="always")  # type: ignore[untyped-decorator]
def _widen(value: Any) -> Any:
    if value == types.uint16:

        def from_bfloat16(value: Any) -> Any:
            return _from_bits(np.uint32(value) << np.uint32(16))

        return from_bfloat16

    def unchanged(value: Any) -> Any:
        return value

    return unchanged


@overload(narrow, inline="always")  # type: ignore[untyped-decorator]
def _narrow(value: Any, like: Any) -> Any:
    if like.dtype == types.uint16:

        def to_bfloat16(value: Any, like: Any) -> Any:
            bits = _bits(np.float32(value))
            rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
            nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
            return np.uint16(np.uint32(0x7FC0) if nan else rounded)

        return to_bfloat16

    def to_float32(value: Any, like: Any) -> Any:
        return np.float32(value)

    return to_float32


@njit(inline="always", **OPTIONS)  # type: ignore[untyped-decorator]
def exp_negative(x: Any) -> Any:
    """e**x for float32 x <= 0, to about 2 ulp; below -87.3 the smallest normal number rather than 0."""
    y = max(x, EXP_LOWEST)
    n = np.int32(y * LOG2_E - _HALF)
    f = y - np.float32(n) * LN_2
    p = ((((_C0 * f + _C1) * f + _C2) * f + _C3) * f + _C4) * f + _C5
    return (p * f * f + f + _ONE) * _from_bits(np.uint32(n + np.int32(127)) << np.uint32(23))


def constant_marker(value: int) -> Any:
    """An empty array whose *type* carries ``value``: kernels that take it see a compile-time constant.

    (Kernels made by a factory could close over the number, but Numba does not cache those that call each other. Of
    the types that hold a number, records are the ones that Numba's dispatch recognises quickly: by identity.)
    """
    return np.zeros(0, dtype=np.dtype({"names": ["x"], "formats": ["i1"], "offsets": [0], "itemsize": value}))


def constant(marker: Any) -> int:
    """The value of a ``constant_marker``."""
    raise AssertionError("only inside Numba")


@overload(constant, inline="always")  # type: ignore[untyped-decorator]
def _constant(marker: Any) -> Any:
    value = marker.dtype.size

    def read(marker: Any) -> Any:
        return value

    return read
