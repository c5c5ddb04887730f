"""Values that transports, layouts and windows share."""

from __future__ import annotations

import enum

import msgspec
import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]


def rank_id(worker_id: str, rank: int, num_ranks: int) -> str:
    """By which a transport knows a rank that moves its own part of a worker's KV; the worker's id if it is alone."""
    return worker_id if num_ranks == 1 else f"{worker_id}/{rank}"


def worker_of(rank_id: str) -> str:
    """The worker of a rank: leases, keys and windows are the worker's. No worker id has a slash."""
    return rank_id.partition("/")[0]


class TransferOp(enum.Enum):
    """The direction of a post, as seen from the side that posts."""

    READ = "read"
    WRITE = "write"


class Pieces(msgspec.Struct, frozen=True):
    """Pieces to move: byte offsets from the start of each side's pool, and lengths; int64 arrays of equal length."""

    local_offsets: Int64Array
    remote_offsets: Int64Array
    lengths: Int64Array

    @property
    def num_pieces(self) -> int:
        return len(self.lengths)

    @property
    def num_bytes(self) -> int:
        return int(self.lengths.sum())
