"""The peer-to-peer transport beside the others and beside raw gloo, in one run.

Every contender has a peer process of its own, all alive at once, and they take turns within each round, so that what
else the machine does hits all of them alike. It owns the turns; ``transfer`` moves bytes, ``raw_gloo`` sends messages.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any

import click

from benchmarks.loads import print_rows
from benchmarks.raw_gloo import raw_gloo
from kvrelay.bench.report.table import Row
from kvrelay.bench.transfer import move as move_plan
from kvrelay.bench.transfer import moving, spaced_pieces
from kvrelay.cli.options import SettingsSource, field_options, json_option
from kvrelay.config import TransferConfig, load_settings
from kvrelay.transfer.values import TransferOp

RAW = "raw gloo"
SIZES = (16384, 65536, 262144, 1048576, 8388608)
CONTENDERS = ("PUT", "PUT_ASYNC", "GET", "nixl", "shm", RAW)

Move = Callable[[int, int], float]
"""(bytes of a piece, bytes in all) to seconds."""


COLUMNS = {
    "transport": "contender",
    "piece, KiB": "piece_kib:g",
    "GB/s": "gb_per_s:.2f",
    "of raw gloo": "of_raw:.0%",
    "us alone": "alone_us:.0f",
}


@click.command()
@click.option("--total-mib", default=64, type=click.IntRange(8, 16384), help="MiB moved per round.")
@click.option("--rounds", default=7, type=click.IntRange(1, 1000), help="Rounds; the median is reported.")
@field_options(TransferConfig, exclude=("transport", "send_type", "kv_checksums"))
@json_option
def p2p(total_mib: int, rounds: int, as_json: bool, **flags: Any) -> None:
    """The send types of transport p2p beside nixl, shm and raw gloo, in turns.

    Example: python -m benchmarks p2p --total-mib 64 --rounds 5
    """
    config = SettingsSource((TransferConfig,), None, flags).build(TransferConfig)
    found = run_p2p_benchmark(config, total_bytes=total_mib * 2**20, num_rounds=rounds)
    title = f"writes of {total_mib} MiB in pieces, {rounds} rounds in turns"
    print_rows(found, COLUMNS, as_json, title=title, total_bytes=total_mib * 2**20, num_rounds=rounds)


def run_p2p_benchmark(
    config: TransferConfig,
    *,
    contenders: Sequence[str] = CONTENDERS,
    sizes: Sequence[int] = SIZES,
    total_bytes: int = 32 * 1024 * 1024,
    num_rounds: int = 7,
) -> list[Row]:
    """Medians: many pieces in one transfer (raw gloo: messages of that size), and one piece alone. ``of_raw``: the
    speed over raw gloo's, by rounds. Raises TransferError.

    Takes 8 * ``total_bytes`` of memory per contender that is no raw gloo.
    """
    with ExitStack() as stack:
        moves = {name: stack.enter_context(_contender(name, config, max(sizes), total_bytes)) for name in contenders}
        rows: list[Row] = []
        for size in sizes:
            rows += _measure(moves, size, total_bytes, num_rounds)
    return rows


@contextmanager
def _contender(name: str, config: TransferConfig, max_size: int, total_bytes: int) -> Iterator[Move]:
    if name == RAW:
        with raw_gloo(max_size) as gloo:
            yield gloo.move
        return
    is_p2p = name in ("PUT", "PUT_ASYNC", "GET")
    changes = {"transport": "p2p", "send_type": name} if is_p2p else {"transport": name}
    own = load_settings(TransferConfig, environ={}, flags={**asdict(config), **changes})
    with moving(own, f"benchmark-{own.transport}-{own.send_type}", 2 * total_bytes) as (_, thread):
        yield lambda size, num_bytes: move_plan(thread, TransferOp.WRITE, spaced_pieces(num_bytes, size), None)


def _measure(moves: dict[str, Move], size: int, total_bytes: int, num_rounds: int) -> list[Row]:
    many: dict[str, list[float]] = {name: [] for name in moves}
    alone: dict[str, list[float]] = {name: [] for name in moves}
    for number in range(num_rounds + 1):
        for name, move in moves.items():
            seconds, single = move(size, total_bytes), move(size, size)
            if number:  # the first round warms up
                many[name].append(seconds)
                alone[name].append(single)
    num_bytes = total_bytes // size * size
    raw = many.get(RAW)
    return [
        {
            "contender": name,
            "piece_bytes": size,
            "piece_kib": size / 1024,
            "gb_per_s": num_bytes / statistics.median(seconds) / 1e9,
            "of_raw": statistics.median(r / s for r, s in zip(raw, seconds, strict=True)) if raw else 0.0,
            "alone_us": statistics.median(alone[name]) * 1e6,
        }
        for name, seconds in many.items()
    ]
