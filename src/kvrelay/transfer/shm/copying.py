"""All pieces of one post copied in one call, without the interpreter's lock. A piece costs tens of nanoseconds.

The addresses are not checked here: ``check_bounds`` has done that.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from kvrelay.transfer.base import Int64Array


@intrinsic  # type: ignore[untyped-decorator]
def _memcpy(typing_context: Any, target: Any, source: Any, num_bytes: Any) -> Any:
    """The C library's memcpy."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = ir.IntType(8).as_pointer()
        write_at, read_at = (builder.inttoptr(address, pointer) for address in arguments[:2])
        cgutils.raw_memcpy(builder, write_at, read_at, arguments[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@njit(  # type: ignore[untyped-decorator]
    "void(int64, int64[::1], int64, int64[::1], int64[::1])", nogil=True, cache=True, boundscheck=False
)
def copy_pieces(
    write_at: int, write_offsets: Int64Array, read_at: int, read_offsets: Int64Array, lengths: Int64Array
) -> None:
    """Contract: ``shm.transport.CopyPieces``. Pieces must not overlap."""
    for piece in range(len(lengths)):
        _memcpy(write_at + write_offsets[piece], read_at + read_offsets[piece], lengths[piece])
