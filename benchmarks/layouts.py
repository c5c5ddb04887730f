"""What unlike layouts cost a transport: descriptors, and the same bytes moved strided and staged, beside each other.

A case is a pair of layouts, a model's shape and a direction. Its bytes move between this process's pool and the peer's
as in a hand-off. It owns the cases; processes and moves are ``kvrelay.bench.transfer``'s.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import click
import numpy as np

from kvrelay.bench.report.files import print_result
from kvrelay.bench.report.table import Row, results_table
from kvrelay.bench.transfer import move, moving
from kvrelay.cli.options import SettingsSource, field_options, json_option
from kvrelay.config import TransferConfig
from kvrelay.core.layout import BlockRun, KVLayout, paged_kv
from kvrelay.transfer.base import Transport
from kvrelay.transfer.layout_mapping import LayoutMapping
from kvrelay.transfer.nixl import NixlTransport
from kvrelay.transfer.packing import ALWAYS, NEVER, NIXL_RULE, PackingRule, stage
from kvrelay.transfer.thread import TransferThread
from kvrelay.transfer.values import Pieces, TransferOp

LOAD_WAIT_ROUNDS = 1000
MODELS = {"8 heads of 128": (8, 8, 128), "2 heads of 64": (4, 2, 64)}
"""Layers, KV heads and their size, of bfloat16 values; few layers, as one stage of many has them."""
TIE = 1.05
_COLUMNS = {
    "op": "op",
    "case": "case",
    "model": "model",
    "descriptors": "num_descriptors",
    "us each": "us_per_descriptor:.2f",
    "strided GB/s": "strided_gb_per_s:.2f",
    "staged": "num_staged_descriptors",
    "staged GB/s": "staged_gb_per_s:.2f",
    "rule picks": "picks",
    "right": "right",
}


@click.command()
@click.option("--total-mib", default=16, type=click.IntRange(1, 16384), help="MiB of KV between two layouts.")
@click.option("--rounds", default=7, type=click.IntRange(1, 1000), help="Rounds; medians are reported.")
@field_options(TransferConfig, exclude=("kv_checksums",))
@json_option
def layouts(total_mib: int, rounds: int, as_json: bool, **flags: Any) -> None:
    """KV between pairs of layouts: descriptors, strided beside staged, and what the transport's rule picks.

    Example: python -m benchmarks layouts --total-mib 16 --rounds 15
    """
    config = SettingsSource((TransferConfig,), None, flags).build(TransferConfig)
    rows = run_layouts_benchmark(config, total_mib * 2**20, rounds)
    right = sum(row["is_rule_right"] for row in rows)
    text = f"{results_table(rows, _COLUMNS, left=3)}\n\nthe rule is right in {right} of {len(rows)} cases"
    print_result(rows, text, as_json)


def run_layouts_benchmark(config: TransferConfig, total_bytes: int, num_rounds: int) -> list[Row]:
    """Every case in both directions; medians over the rounds. Staged figures are None if the transport has no buffer,
    or if it saves no descriptor. ``is_rule_right``: whether the rule picks the faster way; both count as right within
    5 % of each other. Raises TransferError."""
    with moving(config, "benchmark-parent", 2 * total_bytes) as (transport, thread):
        return [
            {"op": op.value, "case": case, "model": model, **_measure(transport, thread, op, pieces, num_rounds)}
            for model, shape in MODELS.items()
            for op in TransferOp
            for case, pieces in _cases(shape, op, 2 * total_bytes, total_bytes)
        ]


def _cases(
    shape: tuple[int, int, int], op: TransferOp, pool_bytes: int, total_bytes: int
) -> Iterator[tuple[str, Pieces]]:
    def layout(tp: int = 1, pp: int = 1, block: int = 16) -> KVLayout:
        return paged_kv(shape[0], shape[1], block, shape[2], "bfloat16", tp, pp)

    pairs = {
        "contiguous": (layout(), layout()),
        "scattered": (layout(), layout()),
        "TP 2->1": (layout(tp=2), layout()),
        "TP 1->2": (layout(), layout(tp=2)),
        "PP 2->1": (layout(pp=2), layout()),
        "block 16->32": (layout(), layout(block=32)),
    }
    draw = np.random.default_rng(0)
    for case, pair in pairs.items():
        runs = []
        for each in pair:
            count = total_bytes // each.block_bytes
            ids = np.arange(count)
            if case == "scattered":
                ids = draw.permutation(pool_bytes // each.block_bytes)[:count]
            runs.append(BlockRun(0, tuple(ids.tolist())))
        yield case, LayoutMapping(*pair).pieces(op, runs[0], runs[1])


def _measure(transport: Transport, thread: TransferThread, op: TransferOp, pieces: Pieces, num_rounds: int) -> Row:
    num_staged = stage(pieces).wire.num_pieces

    def timed(rule: PackingRule) -> float:
        if isinstance(transport, NixlTransport):
            transport.rule = rule
        return move(thread, op, pieces, None)

    strided, staged = [], []
    saves = isinstance(transport, NixlTransport) and num_staged < pieces.num_pieces
    if isinstance(transport, NixlTransport) and saves:
        assert transport.staging is not None
        # Until the transport has compiled what it packs with, and has touched the buffer.
        for _ in range(LOAD_WAIT_ROUNDS):
            was_loaded = transport.staging.is_loaded
            timed(ALWAYS)
            if was_loaded:
                break
    for _ in range(num_rounds):
        strided.append(timed(NEVER))
        if saves:
            staged.append(timed(ALWAYS))
    strided_s, staged_s = statistics.median(strided), statistics.median(staged) if staged else None
    picks_staged = saves and NIXL_RULE.pays(pieces, num_staged)
    chosen_s, other_s = (staged_s, strided_s) if picks_staged else (strided_s, staged_s)
    is_right = other_s is None or chosen_s is None or chosen_s <= other_s * TIE
    return {
        "num_descriptors": pieces.num_pieces,
        "num_staged_descriptors": num_staged,
        "us_per_descriptor": strided_s / pieces.num_pieces * 1e6,
        "strided_gb_per_s": pieces.num_bytes / strided_s / 1e9,
        "staged_gb_per_s": None if staged_s is None else pieces.num_bytes / staged_s / 1e9,
        "picks": "staged" if picks_staged else "strided",
        "is_rule_right": is_right,
        "right": "yes" if is_right else "no",
    }
