"""The step's description, in memory that the driver and all ranks share.

    step memory (memfd)      [ progress table | fence | StepMessage ......... free ]
    one socket per rank      "step 17: 412 bytes are there"  ->        <-  "done"

The description is written once for all ranks. A rank waits in ``recv`` and copies the description before it computes.
The driver writes the next one once all ranks have answered. The memory grows if a step needs more.
"""

from __future__ import annotations

import mmap
import os

import numpy as np

from kvrelay.executors.torch.parallel.messages import RunStep
from kvrelay.executors.torch.parallel.rank_progress import Int64Array, progress_table
from kvrelay.transfer.ranks.messages import Fence

HEADER_BYTES = mmap.PAGESIZE
FIRST_CAPACITY = 1 << 20
_FENCE_AT = HEADER_BYTES - 8


class StepMemory:
    """The step memory as the driver or a rank has mapped it."""

    def __init__(self, fd: int, num_ranks: int) -> None:
        self.fd = fd
        self._header = mmap.mmap(fd, HEADER_BYTES)
        self.progress: Int64Array = progress_table(memoryview(self._header), num_ranks)
        self.fence: Fence = np.frombuffer(self._header, dtype=np.float64, count=1, offset=_FENCE_AT)
        self._body = mmap.mmap(fd, os.fstat(fd).st_size - HEADER_BYTES, offset=HEADER_BYTES)

    @classmethod
    def create(cls, num_ranks: int) -> StepMemory:
        fd = os.memfd_create("kvrelay-step")
        os.ftruncate(fd, HEADER_BYTES + FIRST_CAPACITY)
        return cls(fd, num_ranks)

    def write(self, frame: bytes) -> RunStep:
        """Write a description; returns the command for the ranks."""
        if len(frame) > len(self._body):
            capacity = 1 << len(frame).bit_length()
            os.ftruncate(self.fd, HEADER_BYTES + capacity)
            self._map(capacity)
        self._body[: len(frame)] = frame
        return RunStep(len(frame), len(self._body))

    def read(self, step: RunStep) -> bytes:
        """A copy of the description."""
        if step.capacity != len(self._body):
            self._map(step.capacity)
        return self._body[: step.num_bytes]

    def close(self) -> None:
        """Close the driver's mapping. Progress table and fence are freed with their last references."""
        self._body.close()
        os.close(self.fd)

    def _map(self, capacity: int) -> None:
        self._body.close()
        self._body = mmap.mmap(self.fd, capacity, offset=HEADER_BYTES)
