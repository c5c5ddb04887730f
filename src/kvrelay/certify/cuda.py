"""A pool on a GPU, by plain torch: side streams, pinned copies, events."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from kvrelay.certify.device import Device, Event
from kvrelay.certify.pattern import UInt8Array
from kvrelay.core.layout import MemoryRegion
from kvrelay.errors import FatalError


class _CudaEvent:
    def __init__(self, event: Any, staging: torch.Tensor) -> None:
        self._event = event
        self._staging: torch.Tensor | None = staging
        """The copy reads it until its event."""

    def wait(self) -> None:
        self._event.synchronize()
        self._staging = None


class CudaDevice(Device):
    """GPU ``index``."""

    name = "cuda"

    def __init__(self, index: int) -> None:
        if not torch.cuda.is_available() or index >= torch.cuda.device_count():
            raise FatalError(f"there is no CUDA device {index}: torch sees {torch.cuda.device_count()}")
        self._device = torch.device("cuda", index)
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._pool = torch.empty(0, dtype=torch.uint8)

    def allocate(self, num_bytes: int) -> MemoryRegion:
        self._pool = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
        torch.cuda.synchronize(self._device)
        return MemoryRegion(self._pool.data_ptr(), num_bytes, "cuda", self._device.index)

    def put(self, offsets: Sequence[int], rows: UInt8Array) -> Event:
        staging = torch.from_numpy(rows).pin_memory()
        with torch.cuda.stream(self._stream):
            for offset, row in zip(offsets, staging, strict=True):
                self._pool[offset : offset + len(row)].copy_(row, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return _CudaEvent(event, staging)

    def landed(self) -> None:
        torch.cuda.synchronize(self._device)

    def get(self, offsets: Sequence[int], num_bytes: int) -> UInt8Array:
        with torch.cuda.stream(self._stream):
            found: UInt8Array = torch.stack([self._pool[at : at + num_bytes] for at in offsets]).cpu().numpy()
        return found

    def raw_copy_s(self, num_bytes: int) -> float:
        """To the next GPU if there is one, else within this one."""
        other = torch.device("cuda", (self._device.index + 1) % torch.cuda.device_count())
        source = torch.ones(num_bytes, dtype=torch.uint8, device=self._device)
        target = torch.empty(num_bytes, dtype=torch.uint8, device=other)
        best_s = float("inf")
        for _ in range(4):
            torch.cuda.synchronize(self._device)
            began_s = time.perf_counter()
            target.copy_(source)
            torch.cuda.synchronize(self._device)
            torch.cuda.synchronize(other)
            best_s = min(best_s, time.perf_counter() - began_s)
        return best_s

    def close(self) -> None:
        self._pool = torch.empty(0, dtype=torch.uint8)
