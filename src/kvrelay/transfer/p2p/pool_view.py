"""The bytes that the peer-to-peer transport moves, as torch tensors: pools, gathers and scatters.

Torch lives here and in ``process_group``.

One code path for host and device: a pool is a uint8 tensor over memory that somebody else owns. On the host a gather or
scatter is one call without the interpreter's lock; on a device it is one copy per piece on the current stream.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from kvrelay.core.layout import MemoryRegion
from kvrelay.transfer.shm.copying import copy_pieces
from kvrelay.transfer.values import Int64Array


def empty_bytes(num_bytes: int, device: str, *, is_host: bool) -> torch.Tensor:
    """Memory that is touched only as it is used. ``is_host``: in host memory, pinned if ``device`` is a GPU."""
    if is_host or device == "cpu":
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device != "cpu")
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


class _DevicePointer:
    """Memory of a GPU for ``torch.as_tensor``."""

    def __init__(self, region: MemoryRegion) -> None:
        self.__cuda_array_interface__ = {
            "shape": (region.num_bytes,),
            "typestr": "|u1",
            "data": (region.address, False),
            "version": 3,
        }


class PoolView:
    """A registered KV pool. Offsets are from its start; they have been checked."""

    def __init__(self, region: MemoryRegion) -> None:
        self.num_bytes = region.num_bytes
        self.is_host = region.device == "cpu"
        self.device = "cpu" if self.is_host else f"{region.device}:{region.device_id}"
        self._address = region.address
        if self.is_host:
            owner = (ctypes.c_ubyte * region.num_bytes).from_address(region.address)
            self._tensor = torch.frombuffer(owner, dtype=torch.uint8)
        else:
            self._tensor = torch.as_tensor(_DevicePointer(region), device=self.device)

    def run(self, offsets: Int64Array, lengths: Int64Array) -> torch.Tensor | None:
        """The bytes themselves, if they are one run."""
        if len(offsets) != 1:
            return None
        return self._tensor[int(offsets[0]) : int(offsets[0]) + int(lengths[0])]

    def gather(self, offsets: Int64Array, lengths: Int64Array, target: torch.Tensor) -> None:
        """Pieces of the pool into ``target``, packed in order."""
        packed = _packed(lengths)
        if self.is_host:
            copy_pieces(target.data_ptr(), packed, self._address, offsets, lengths)
            return
        for offset, at, length in zip(offsets.tolist(), packed.tolist(), lengths.tolist(), strict=True):
            target[at : at + length].copy_(self._tensor[offset : offset + length], non_blocking=True)
        torch.cuda.current_stream(self.device).synchronize()

    def scatter(self, source: torch.Tensor, offsets: Int64Array, lengths: Int64Array) -> None:
        """The reverse."""
        packed = _packed(lengths)
        if self.is_host:
            copy_pieces(self._address, offsets, source.data_ptr(), packed, lengths)
            return
        for offset, at, length in zip(offsets.tolist(), packed.tolist(), lengths.tolist(), strict=True):
            self._tensor[offset : offset + length].copy_(source[at : at + length], non_blocking=True)
        torch.cuda.current_stream(self.device).synchronize()

    def gather_bytes(self, offsets: Int64Array, lengths: Int64Array) -> bytes:
        """For messages that carry their bytes: host memory only."""
        data = np.empty(int(lengths.sum()), np.uint8)
        copy_pieces(data.ctypes.data, _packed(lengths), self._address, offsets, lengths)
        return data.tobytes()

    def scatter_bytes(self, data: bytes | memoryview, offsets: Int64Array, lengths: Int64Array) -> None:
        """For the same messages; ``data`` is as long as the pieces."""
        source = np.frombuffer(data, np.uint8)
        copy_pieces(self._address, offsets, source.ctypes.data, _packed(lengths), lengths)


def _packed(lengths: Int64Array) -> Int64Array:
    """Offsets of pieces that lie side by side."""
    offsets: Int64Array = np.zeros(len(lengths), np.int64)
    np.cumsum(lengths[:-1], out=offsets[1:])
    return offsets
