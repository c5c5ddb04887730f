"""Moving many small pieces by way of a buffer: packed here, moved in few large pieces. Pure, and a rule when it pays.

    write   pool pieces ──copied──> buffer ──few descriptors──> the peer's blocks, in its own order
    read    the peer's blocks ──few descriptors──> buffer ──copied──> pool pieces

The side that posts rearranges, so the peer has nothing to do: it copies after reads and before writes. Between unequal
layouts a descriptor may be a few KiB, and costs a transport as much time as the bytes themselves. The copy costs
another pass over the bytes. Shared memory has no use for this: its pieces cost tens of nanoseconds each.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvrelay.transfer.values import Pieces


@dataclass(frozen=True, slots=True)
class PackedPieces:
    """``packed``: pieces between the pool (local) and the buffer (remote). ``wire``: pieces between the buffer (local)
    and the peer (remote)."""

    packed: Pieces
    wire: Pieces


def stage(pieces: Pieces) -> PackedPieces:
    """The same bytes by way of a buffer of ``pieces.num_bytes``. Pieces that are adjacent at the peer become one."""
    order = np.argsort(pieces.remote_offsets, kind="stable")
    local, remote, lengths = pieces.local_offsets[order], pieces.remote_offsets[order], pieces.lengths[order]
    ends = np.cumsum(lengths)
    at = ends - lengths
    starts = np.flatnonzero(np.concatenate(([True], remote[1:] != remote[:-1] + lengths[:-1])))
    wire = Pieces(at[starts], remote[starts], np.add.reduceat(lengths, starts))
    return PackedPieces(Pieces(local, at, lengths), wire)


@dataclass(frozen=True, slots=True)
class PackingRule:
    """What a transport's descriptor, a copied piece and a copied byte cost, in seconds."""

    descriptor_s: float
    piece_s: float
    byte_s: float

    def may_pay(self, pieces: Pieces) -> bool:
        """Whether it would pay if one descriptor were left: few large pieces need not be looked at."""
        return self.pays(pieces, 1)

    def pays(self, pieces: Pieces, num_wire_pieces: int) -> bool:
        """Whether the descriptors that are saved cost more than the copy."""
        saved_s = (pieces.num_pieces - num_wire_pieces) * self.descriptor_s
        return saved_s > pieces.num_pieces * self.piece_s + pieces.num_bytes * self.byte_s


NEVER = PackingRule(0.0, 0.0, 0.0)
ALWAYS = PackingRule(1.0, 0.0, 0.0)
"""For measurements: wherever it saves a descriptor."""
NIXL_RULE = PackingRule(descriptor_s=3.0e-6, piece_s=0.03e-6, byte_s=0.2e-9)
"""Fitted to ``python -m benchmarks layouts``, between two processes of a machine with a memcpy of 10 GB/s."""
