"""``kvrelay bench router``: the router's speed, its growth, and policies over request traces.

What it owns: the command's options and tables. Measuring is in ``kvrelay.bench.parts.router``, which is loaded only
when the command runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvrelay.cli.options import json_option

if TYPE_CHECKING:
    from rich.console import Console

    from kvrelay.bench.parts.router import PeerSpeed, PolicyReplay, RouterBenchmark
    from kvrelay.bench.parts.router_speed import GrowthRow, Latency, SpeedReport

_FILE = click.Path(path_type=Path)
_GROWTH_WORKERS = (8, 64, 256, 1024)
_GROWTH_BLOCKS = (10_000, 100_000, 1_000_000, 10_000_000)


@click.command("router")
@click.option("--num-workers", type=click.IntRange(1, 4096), default=64, show_default=True, help="Workers indexed.")
@click.option(
    "--blocks-per-worker", type=click.IntRange(1024), default=2048, show_default=True, help="Blocks that each holds."
)
@click.option("--repeats", type=click.IntRange(10), default=1000, show_default=True, help="Calls per figure.")
@click.option(
    "--growth/--no-growth", default=True, show_default=True, help="Measure 8 to 1,024 workers and more blocks."
)
@click.option(
    "--max-blocks",
    type=click.IntRange(1),
    default=1_000_000,
    show_default=True,
    help="Most blocks of the growth table.",
)
@click.option("--trace", "traces", type=_FILE, multiple=True, help="Replay this Mooncake trace under every policy.")
@click.option("--trace-workers", type=click.IntRange(1), default=16, show_default=True, help="Simulated workers.")
@click.option(
    "--cache-blocks", type=click.IntRange(1), default=2500, show_default=True, help="Their caches, in 512-token blocks."
)
@click.option("--trace-limit", type=click.IntRange(1), help="Replay only so many requests.")
@click.option("--time-scale", type=float, default=1.0, show_default=True, help="2: requests arrive twice as fast.")
@click.option("--peer-python", type=_FILE, help="An interpreter with ai-dynamo-runtime: measure its index too.")
@json_option
def bench_router(
    num_workers: int,
    blocks_per_worker: int,
    repeats: int,
    growth: bool,
    max_blocks: int,
    traces: tuple[Path, ...],
    trace_workers: int,
    cache_blocks: int,
    trace_limit: int | None,
    time_scale: float,
    peer_python: Path | None,
    as_json: bool,
) -> None:
    """How fast the router hashes, looks up, decides and takes in events, and how well its policies place a trace.

    \b
    Example: kvrelay bench router --trace conversation.jsonl --max-blocks 10000000
    """
    import msgspec

    from kvrelay.bench.parts.router import run_router_benchmark
    from kvrelay.bench.parts.trace_replay import read_trace
    from kvrelay.bench.report.files import describe_machine
    from kvrelay.errors import InvalidInputError

    if not 0 < time_scale < float("inf"):
        raise InvalidInputError(f"--time-scale must be above 0, got {time_scale:g}", param="time_scale")
    benchmark = run_router_benchmark(
        machine=describe_machine(),
        num_workers=num_workers,
        blocks_per_worker=blocks_per_worker,
        repeats=repeats,
        growth_workers=_GROWTH_WORKERS if growth else (),
        growth_blocks=tuple(size for size in _GROWTH_BLOCKS if size <= max_blocks) if growth else (),
        traces=[(path.stem, read_trace(path, trace_limit)) for path in traces],
        trace_workers=trace_workers,
        cache_blocks=cache_blocks,
        time_scale=time_scale,
        peer_python=peer_python,
    )
    if as_json:
        click.echo(msgspec.json.encode(benchmark))
    else:
        print_benchmark(benchmark)


def print_benchmark(benchmark: RouterBenchmark) -> None:
    """Tables to standard output."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=140)
    versions = ", ".join(f"{name} {version}" for name, version in benchmark.versions.items())
    console.print(f"{benchmark.machine}; {versions}; {benchmark.repeats:,} calls a figure", highlight=False)
    _print_speed(console, benchmark.speed, benchmark.peer)
    if benchmark.growth:
        _print_growth(console, benchmark.growth)
    for replay in benchmark.replays:
        _print_replay(console, replay)


def _print_speed(console: Console, speed: SpeedReport, peer: PeerSpeed | None) -> None:
    from rich.table import Table

    table = Table(
        title=f"{speed.num_workers} workers with {speed.blocks_per_worker:,} blocks each, half of them shared",
        title_justify="left",
    )
    for heading in ("", "p50", "p99") if peer is None else ("", "p50", "p99", f"{peer.name} {peer.version}"):
        table.add_column(heading, justify="right" if heading else "left")

    def row(name: str, *cells: str, theirs: str = "") -> None:
        padded = (*cells, "")[:2]
        table.add_row(name, *(padded if peer is None else (*padded, theirs)))

    hashed, found = ("", "") if peer is None else (f"{peer.hash_8192_us:.1f} µs *", f"{peer.find_512_us:.1f} µs")
    row("hash 8,192 tokens, a list", *_cells(speed.hash_8192_list), theirs=hashed)
    row("hash 8,192 tokens, an array", *_cells(speed.hash_8192_array))
    row("find 512 blocks, all workers", *_cells(speed.find_512), theirs=found)
    row("find 512 blocks, each worker to its own depth", *_cells(speed.find_stairs))
    row("find nothing", *_cells(speed.find_nothing))
    row("decide, 8,192 tokens", *_cells(speed.decision_8192))
    row("decide, 128 tokens", *_cells(speed.decision_128))
    removed = "" if peer is None else f"{peer.remove_worker_us:.1f} µs"
    row("remove a worker", *_cells(speed.remove_worker), theirs=removed)
    theirs_by_size = {} if peer is None else {8: peer.events_8_per_s, 512: peer.events_512_per_s}
    for rates in speed.events:
        theirs = theirs_by_size.get(rates.blocks_per_event)
        name = f"events of {rates.blocks_per_event} blocks, a second: "
        row(f"{name}stored", f"{rates.stored_per_s:,.0f}", theirs="" if theirs is None else f"{theirs:,.0f}")
        row(f"{name}removed", f"{rates.removed_per_s:,.0f}")
        row(f"{name}from frames", f"{rates.from_frames_per_s:,.0f}")
        row(f"{name}blocks stored", f"{rates.stored_blocks_per_s:,.0f}")
    row("bytes per block", f"{speed.bytes_per_block:.0f}")
    row("bytes per block and worker", f"{speed.bytes_per_block_and_worker:.0f}")
    console.print(table)
    if peer is not None:
        console.print("* local hashes; ours are the sequence hashes that a decision needs")


def _print_growth(console: Console, rows: tuple[GrowthRow, ...]) -> None:
    from rich.table import Table

    table = Table(title="growth (medians)", title_justify="left")
    for heading in ("workers", "blocks", "find 512", "decide 8,192", "store 8", "remove worker", "MiB"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            f"{row.num_workers:,}",
            f"{row.num_blocks:,}",
            _cells(row.find_512)[0],
            _cells(row.decision_8192)[0],
            _cells(row.store_8)[0],
            f"{row.remove_worker_us:.1f} µs",
            f"{row.memory_mib:,.0f}",
        )
    console.print(table)


def _print_replay(console: Console, replay: PolicyReplay) -> None:
    from rich.table import Table

    table = Table(
        title=(
            f"{replay.trace}: {replay.num_workers} workers with {replay.cache_blocks:,} blocks; "
            f"one infinite cache hits {replay.infinite_hit_ratio:.3f}"
        ),
        title_justify="left",
    )
    for heading in ("policy", "hit ratio", "token imbalance", "work imbalance", "TTFT mean", "p50", "p99"):
        table.add_column(heading, justify="left" if heading == "policy" else "right")
    for result in replay.results:
        table.add_row(
            result.policy,
            f"{result.hit_ratio:.3f}",
            f"{result.token_imbalance:.2f}",
            f"{result.work_imbalance:.2f}",
            f"{result.mean_ttft_s:.2f} s",
            f"{result.p50_ttft_s:.2f} s",
            f"{result.p99_ttft_s:.2f} s",
        )
    console.print(table)


def _cells(latency: Latency) -> tuple[str, str]:
    return f"{latency.p50_us:.1f} µs", f"{latency.p99_us:.1f} µs"
