"""What is left of a grant below the hand-off's protocol: a memory window, and the key by which posts name it.

    decode worker   MemoryWindow ── open ──> the table of a transport that puts peers' bytes into place (``transfer``)
    prefill worker  RemoteKey ── with each post ──> is its window open, and does it have these bytes?

Both are made from a grant by the sides of a worker, and read by that table. Everything between passes them on.
"""

from __future__ import annotations

import msgspec


class RemoteKey(msgspec.Struct, frozen=True, array_like=True):
    """The hand-off's id as text, and the generation of the grant."""

    handoff: str
    generation: int


class MemoryWindow(msgspec.Struct, frozen=True, tag=True):
    """``worker_id`` may read and write these blocks of ours, under ``key``, until ``loan`` ends.

    Block b lies ``begin + b * stride`` bytes from the start of the memory, and has ``block_bytes``.
    """

    key: RemoteKey
    loan: int
    worker_id: str
    readable: tuple[int, ...]
    writable: tuple[int, ...]
    block_bytes: int
    stride: int
    begin: int = 0
