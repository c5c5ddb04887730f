"""Which ranks of two workers exchange KV, from the pieces that are moved."""

from __future__ import annotations

from kvrelay.core.layout import BlockRun, KVLayout
from kvrelay.transfer.layout_mapping import LayoutMapping
from kvrelay.transfer.ranks.messages import RankMemory
from kvrelay.transfer.ranks.splitting import RankCut, split
from kvrelay.transfer.values import TransferOp


def exchanging_ranks(local: KVLayout, remote: KVLayout, op: TransferOp) -> set[tuple[int, int]]:
    """(local rank, remote rank). Equal ranks alone if TP and PP are equal."""
    cuts = [RankCut.of(each, [RankMemory(b"", 1, 1)] * each.num_ranks) for each in (local, remote)]
    pieces = LayoutMapping(local, remote).pieces(op, BlockRun(0, [0]), BlockRun(0, [0]))
    return {(part.local, part.remote) for part in split(pieces, *cuts)}
