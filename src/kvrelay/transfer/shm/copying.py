"""All pieces of one post copied in one call, without the interpreter's lock. A piece costs tens of nanoseconds.

Posts larger than the caches are written past them, as the C library does for one long copy: otherwise each line of the
target would be read first, which is a third more traffic. Addresses are not checked here: ``check_bounds`` does that.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from kvrelay.core.kernel_cache import place_kernel_cache
from kvrelay.transfer.values import Int64Array

STREAM_FROM_BYTES = 4 << 20
"""A post of so many bytes leaves nothing of itself in the caches anyway."""
_LINE = 64
_MIN_STREAMED_PIECE = 1024


place_kernel_cache(Path(__file__))


@intrinsic  # type: ignore[untyped-decorator]
def _memcpy(typing_context: Any, target: Any, source: Any, num_bytes: Any) -> Any:
    """The C library's memcpy."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = ir.IntType(8).as_pointer()
        write_at, read_at = (builder.inttoptr(address, pointer) for address in arguments[:2])
        cgutils.raw_memcpy(builder, write_at, read_at, arguments[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _stream_line(typing_context: Any, target: Any, source: Any) -> Any:
    """64 bytes to a target that is a multiple of 64, past the caches."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        line = ir.VectorType(ir.IntType(64), _LINE // 8)
        write_at, read_at = (builder.inttoptr(address, line.as_pointer()) for address in arguments)
        store = builder.store(builder.load(read_at, align=1), write_at, align=_LINE)
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _fence(typing_context: Any) -> Any:
    """What was written past the caches is visible before anything that follows."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@njit(  # type: ignore[untyped-decorator]
    "void(int64, int64[::1], int64, int64[::1], int64[::1])", nogil=True, cache=True, boundscheck=False
)
def copy_pieces(
    write_at: int, write_offsets: Int64Array, read_at: int, read_offsets: Int64Array, lengths: Int64Array
) -> None:
    """Contract: ``shm.transport.CopyPieces``. Pieces must not overlap."""
    streams = lengths.sum() >= STREAM_FROM_BYTES
    for piece in range(len(lengths)):
        target, source, length = write_at + write_offsets[piece], read_at + read_offsets[piece], lengths[piece]
        if streams and _MIN_STREAMED_PIECE <= length < STREAM_FROM_BYTES:
            head = -target % _LINE
            _memcpy(target, source, head)
            lines = (length - head) // _LINE
            for line in range(lines):
                _stream_line(target + head + line * _LINE, source + head + line * _LINE)
            done = head + lines * _LINE
            _memcpy(target + done, source + done, length - done)
        else:
            _memcpy(target, source, length)
    _fence()
