"""What unlike layouts cost a transport: descriptors, and the same bytes moved strided and staged, beside each other.

A case is a pair of layouts, a model's shape and a direction. Its bytes move between this process's pool and the peer's
as in a hand-off. It owns the cases; processes and timed rounds are ``bench.transfer``'s.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec
import numpy as np

from kvrelay.bench.report.table import table
from kvrelay.core.layout import BlockRun, KVLayout
from kvrelay.transfer.base import Transport
from kvrelay.transfer.layout_mapping import LayoutMapping
from kvrelay.transfer.nixl import NixlTransport
from kvrelay.transfer.packing import ALWAYS, NEVER, NIXL_RULE, PackingRule, stage
from kvrelay.transfer.values import Pieces, TransferOp

LOAD_WAIT_ROUNDS = 1000

Move = Callable[[TransferOp, Pieces], float]
"""Seconds from submission to completion."""


class LayoutRow(msgspec.Struct, frozen=True):
    """Medians over the rounds. ``staged_s`` is None if the transport has no buffer, or if it saves no descriptor.
    ``is_rule_right``: whether the rule picks the faster way; both count as right within 5 % of each other."""

    op: str
    case: str
    model: str
    total_bytes: int
    num_descriptors: int
    num_staged_descriptors: int
    strided_s: float
    staged_s: float | None
    us_per_descriptor: float
    bytes_per_s: float
    picks_staged: bool
    is_rule_right: bool


@dataclass(frozen=True, slots=True)
class _Model:
    """``num_kv_heads`` heads of bfloat16 values; few layers, as one stage of many has them."""

    name: str
    num_layers: int
    num_kv_heads: int
    head_dim: int

    def layout(self, *, tp: int = 1, pp: int = 1, block: int = 16) -> KVLayout:
        return KVLayout(self.num_layers, self.num_kv_heads, block, self.head_dim, "bfloat16", tp, pp)


MODELS = (_Model("8 heads of 128", 8, 8, 128), _Model("2 heads of 64", 4, 2, 64))
TIE = 1.05


def layout_rows(transport: Transport, move: Move, pool_bytes: int, total_bytes: int, rounds: int) -> list[LayoutRow]:
    """Every case in both directions, in pools of ``pool_bytes``."""
    rows = []
    for model in MODELS:
        for op in TransferOp:
            for case, pieces in _cases(model, op, pool_bytes, total_bytes):
                rows.append(_measure(transport, move, op, case, model.name, pieces, rounds))
    return rows


def layouts_text(rows: tuple[LayoutRow, ...]) -> str:
    """The figures as a table."""
    cells = (
        (
            row.op,
            row.case,
            row.model,
            str(row.num_descriptors),
            f"{row.us_per_descriptor:.2f}",
            f"{row.total_bytes / row.strided_s / 1e9:.2f}",
            str(row.num_staged_descriptors),
            "-" if row.staged_s is None else f"{row.total_bytes / row.staged_s / 1e9:.2f}",
            "staged" if row.picks_staged else "strided",
            "yes" if row.is_rule_right else "no",
        )
        for row in rows
    )
    names = ("op", "case", "model", "descriptors", "us each", "GB/s", "staged", "GB/s", "rule picks", "right")
    right = sum(row.is_rule_right for row in rows)
    return f"{table(names, cells)}\n\nthe rule is right in {right} of {len(rows)} cases"


def _cases(model: _Model, op: TransferOp, pool_bytes: int, total_bytes: int) -> Iterator[tuple[str, Pieces]]:
    plain = model.layout()
    pairs = {
        "contiguous": (plain, plain),
        "scattered": (plain, plain),
        "TP 2->1": (model.layout(tp=2), plain),
        "TP 1->2": (plain, model.layout(tp=2)),
        "PP 2->1": (model.layout(pp=2), plain),
        "block 16->32": (plain, model.layout(block=32)),
    }
    draw = np.random.default_rng(0)
    for case, (local, remote) in pairs.items():
        runs = []
        for layout in (local, remote):
            count = total_bytes // layout.block_bytes
            ids = np.arange(count)
            if case == "scattered":
                ids = draw.permutation(pool_bytes // layout.block_bytes)[:count]
            runs.append(BlockRun(0, ids.tolist()))
        yield case, LayoutMapping(local, remote).pieces(op, runs[0], runs[1])


def _measure(
    transport: Transport, move: Move, op: TransferOp, case: str, model: str, pieces: Pieces, rounds: int
) -> LayoutRow:
    wire = stage(pieces).wire
    strided, staged = [], []
    saves = isinstance(transport, NixlTransport) and wire.num_pieces < pieces.num_pieces
    if saves:
        _load_copy(transport, move, op, pieces)
    for _ in range(rounds):
        strided.append(_timed(transport, NEVER, move, op, pieces))
        if saves:
            staged.append(_timed(transport, ALWAYS, move, op, pieces))
    strided_s = statistics.median(strided)
    staged_s = statistics.median(staged) if staged else None
    picks = saves and NIXL_RULE.pays(pieces, wire.num_pieces)
    chosen_s, other_s = (staged_s, strided_s) if picks else (strided_s, staged_s)
    return LayoutRow(
        op=op.value,
        case=case,
        model=model,
        total_bytes=pieces.num_bytes,
        num_descriptors=pieces.num_pieces,
        num_staged_descriptors=wire.num_pieces,
        strided_s=strided_s,
        staged_s=staged_s,
        us_per_descriptor=strided_s / pieces.num_pieces * 1e6,
        bytes_per_s=pieces.num_bytes / (chosen_s or strided_s),
        picks_staged=picks,
        is_rule_right=other_s is None or (chosen_s or strided_s) <= other_s * TIE,
    )


def _timed(transport: Transport, rule: PackingRule, move: Move, op: TransferOp, pieces: Pieces) -> float:
    if isinstance(transport, NixlTransport):
        transport.rule = rule
    return move(op, pieces)


def _load_copy(transport: Transport, move: Move, op: TransferOp, pieces: Pieces) -> None:
    """Until the transport has compiled what it packs with."""
    assert isinstance(transport, NixlTransport)
    assert transport.staging is not None
    for _ in range(LOAD_WAIT_ROUNDS):
        _timed(transport, ALWAYS, move, op, pieces)
        if transport.staging.is_loaded:
            _timed(transport, ALWAYS, move, op, pieces)  # touches the buffer
            return
