"""``kvrelay bench transfer``: what the KV data plane moves between two processes."""

from __future__ import annotations

import json
from pathlib import Path

import click

from kvrelay.cli.options import SettingsSource, json_option, settings_options
from kvrelay.config import TransferConfig


@click.command("transfer")
@click.option("--total-mib", default=64, type=click.IntRange(8, 16384), help="MiB moved per round.")
@click.option("--rounds", default=7, type=click.IntRange(1, 1000), help="Rounds; the median is reported.")
@json_option
@settings_options(TransferConfig, exclude=("kv_checksums",))
def bench_transfer(total_mib: int, rounds: int, as_json: bool, config_file: Path | None, **flags: object) -> None:
    """Read and write a pool of another process on this machine, in pieces of several sizes, beside a plain memcpy.

    Example: kvrelay bench transfer --total-mib 256
    """
    import msgspec
    from rich.console import Console
    from rich.table import Table

    from kvrelay.bench.parts.transfer import run_transfer_benchmark

    config = SettingsSource((TransferConfig,), config_file, flags).build(TransferConfig)
    result = run_transfer_benchmark(config, total_bytes=total_mib * 2**20, num_rounds=rounds)
    if as_json:
        click.echo(json.dumps(msgspec.to_builtins(result)))
        return
    title = f"{result.transport} ({result.ucx_tls}); memcpy {result.memcpy_bytes_per_s / 1e9:.1f} GB/s"
    table = Table(title=title, title_justify="left")
    for column in ("op", "piece", "pieces", "GB/s"):
        table.add_column(column, justify="right")
    for row in result.rows:
        piece = f"{row.piece_bytes / 1024:g} KiB"
        table.add_row(row.op, piece, str(row.num_pieces), f"{row.bytes_per_s / 1e9:.2f}")
    Console().print(table)
    Console().print(f"an empty notification takes {result.notify_s * 1e6:.0f} us")
