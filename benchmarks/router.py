"""The speed of the router's parts and of a peer's, and the policies over request traces."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import msgspec

from benchmarks import peer_dynamo
from benchmarks.router_speed import BLOCK_SIZE, MATCHED_BLOCKS, measure_growth, measure_speed
from benchmarks.trace_replay import WorkerModel, infinite_hit_ratio, read_trace, replay_trace
from kvrelay import __version__
from kvrelay.bench.commands.options import FILE
from kvrelay.bench.formats import TraceRecord
from kvrelay.bench.report.files import print_result
from kvrelay.bench.report.machine import describe_machine
from kvrelay.bench.report.table import Row, results_table, table
from kvrelay.cli.options import json_option
from kvrelay.config import RouterConfig
from kvrelay.errors import InvalidInputError

POLICIES = ("round-robin", "random", "least-loaded", "power-of-two", "dynamo-v0", "kv-weights", "kv")
GROWTH_WORKERS = (8, 64, 256, 1024)
"""Measured at 100,000 blocks."""
GROWTH_BLOCKS = (10_000, 100_000, 1_000_000, 10_000_000)
"""Measured at 64 workers."""
PEER_TIMEOUT_S = 300.0
MEASURED_PACKAGES = ("numpy", "xxhash", "msgspec")
_LATENCIES = {
    "hash_8192_list": "hash 8,192 tokens, a list",
    "hash_8192_array": "hash 8,192 tokens, an array",
    "find_512": "find 512 blocks, all workers",
    "find_stairs": "find 512 blocks, each worker to its own depth",
    "find_nothing": "find nothing",
    "decision_8192": "decide, 8,192 tokens",
    "decision_128": "decide, 128 tokens",
    "remove_worker": "remove a worker",
}
_RATES = {
    "stored_per_s": "stored",
    "removed_per_s": "removed",
    "from_frames_per_s": "from frames",
    "stored_blocks_per_s": "blocks stored",
}
_REPLAYED = {
    "policy": "policy",
    "hit ratio": "hit_ratio:.3f",
    "token imbalance": "token_imbalance:.2f",
    "work imbalance": "work_imbalance:.2f",
    "TTFT mean, s": "mean_ttft_s:.2f",
    "p50": "p50_ttft_s:.2f",
    "p99": "p99_ttft_s:.2f",
}


@click.command()
@click.option("--num-workers", type=click.IntRange(1, 4096), default=64, help="Workers indexed.")
@click.option("--blocks-per-worker", type=click.IntRange(1024), default=2048, help="Blocks that each holds.")
@click.option("--repeats", type=click.IntRange(10), default=1000, help="Calls per figure.")
@click.option("--growth/--no-growth", default=True, help="Measure 8 to 1,024 workers and more blocks.")
@click.option("--max-blocks", type=click.IntRange(1), default=1_000_000, help="Most blocks of the growth table.")
@click.option("--trace", "traces", type=FILE, multiple=True, help="Replay this Mooncake trace under every policy.")
@click.option("--trace-workers", type=click.IntRange(1), default=16, help="Simulated workers.")
@click.option("--cache-blocks", type=click.IntRange(1), default=2500, help="Their caches, in 512-token blocks.")
@click.option("--trace-limit", type=click.IntRange(1), help="Replay only so many requests.")
@click.option("--time-scale", type=float, default=1.0, help="2: requests arrive twice as fast.")
@click.option("--peer-python", type=FILE, help="An interpreter with ai-dynamo-runtime: measure its index too.")
@json_option
def router(as_json: bool, **given: Any) -> None:
    """How fast the router hashes, looks up, decides and takes in events, and how well its policies place a trace.

    Example: python -m benchmarks router --trace conversation.jsonl --max-blocks 10000000
    """
    report = measure_router(**given)
    print_result(report, router_text(report), as_json)


def measure_router(
    *,
    num_workers: int,
    blocks_per_worker: int,
    repeats: int,
    growth: bool,
    max_blocks: int,
    traces: Sequence[Path],
    trace_workers: int,
    cache_blocks: int,
    trace_limit: int | None,
    time_scale: float,
    peer_python: Path | None,
) -> Row:
    """All requested measurements, in turn, and their conditions. Raises InvalidInputError for an invalid trace or
    peer."""
    if not 0 < time_scale < float("inf"):
        raise InvalidInputError(f"--time-scale must be above 0, got {time_scale:g}", param="time_scale")
    read = [(path.stem, read_trace(path, trace_limit)) for path in traces]
    sizes = [(workers, 100_000) for workers in GROWTH_WORKERS]
    sizes += [(64, blocks) for blocks in GROWTH_BLOCKS if blocks <= max_blocks]
    scenario = num_workers, blocks_per_worker, repeats
    return {
        "machine": describe_machine(),
        "versions": {"kvrelay": __version__} | {name: version(name) for name in MEASURED_PACKAGES},
        "repeats": repeats,
        "speed": measure_speed(*scenario),
        "growth": [measure_growth(*size, repeats) for size in dict.fromkeys(sizes) if growth],
        "replays": [replay_policies(name, trace, trace_workers, cache_blocks, time_scale) for name, trace in read],
        "peer": None if peer_python is None else measure_peer(peer_python, *scenario),
    }


def replay_policies(
    name: str, requests: Sequence[TraceRecord], num_workers: int, cache_blocks: int, time_scale: float
) -> Row:
    """The trace under every policy, over workers with ``cache_blocks`` blocks of 512 tokens each, with the ratio of one
    infinite cache as the bound."""
    cluster: Row = {"num_workers": num_workers, "time_scale": time_scale}
    model = WorkerModel(cache_blocks=cache_blocks)
    results = [
        replay_trace(requests, RouterConfig(router=policy), model=model, **cluster)  # type: ignore[arg-type]
        for policy in POLICIES
    ]
    bound = infinite_hit_ratio(requests)
    return {"trace": name, **cluster, "cache_blocks": cache_blocks, "infinite_hit_ratio": bound, "results": results}


def measure_peer(python: Path, num_workers: int, blocks_per_worker: int, repeats: int) -> Row:
    """Measure Dynamo's index in a process of ``python``, an interpreter that has it installed. Names and meaning as in
    ``measure_speed``, medians in microseconds."""
    task = peer_dynamo.PeerTask(num_workers, blocks_per_worker, MATCHED_BLOCKS, BLOCK_SIZE, repeats)
    try:
        done = subprocess.run(
            [str(python), peer_dynamo.__file__],
            input=msgspec.json.encode(task._asdict()),
            capture_output=True,
            timeout=PEER_TIMEOUT_S,
            check=True,
        )
        return msgspec.json.decode(done.stdout, type=Row)
    except subprocess.CalledProcessError as exc:
        reason = exc.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise InvalidInputError(f"the peer in {python} cannot be measured: {reason}") from exc
    except (OSError, subprocess.TimeoutExpired, msgspec.DecodeError) as exc:
        raise InvalidInputError(f"the peer in {python} cannot be measured: {exc}") from exc


def router_text(report: Row) -> str:
    """The figures as tables; a peer's stand beside ours."""
    versions = ", ".join(f"{name} {each}" for name, each in report["versions"].items())
    texts = [f"{report['machine']}; {versions}; {report['repeats']:,} calls a figure"]
    speed, peer = report["speed"], report["peer"]
    scenario = f"{speed['num_workers']} workers with {speed['blocks_per_worker']:,} blocks each, half of them shared"
    columns = (scenario, "p50", "p99", *([] if peer is None else [f"{peer['name']} {peer['version']}"]))
    theirs = {} if peer is None else _peer_cells(peer)
    texts.append(table(columns, ((*row, theirs.get(row[0], ""))[: len(columns)] for row in _speed_rows(speed))))
    if peer is not None:
        texts.append("* local hashes; ours are the sequence hashes that a decision needs")
    if report["growth"]:
        columns = ("growth (medians): workers", "blocks", "find 512", "decide 8,192", "store 8", "remove worker", "MiB")
        texts.append(table(columns, map(_growth_row, report["growth"]), left=0))
    for replay in report["replays"]:
        workers = f"{replay['num_workers']} workers with {replay['cache_blocks']:,} blocks"
        texts.append(f"{replay['trace']}: {workers}; one infinite cache hits {replay['infinite_hit_ratio']:.3f}")
        texts.append(results_table([msgspec.structs.asdict(each) for each in replay["results"]], _REPLAYED))
    return "\n\n".join(texts)


def _speed_rows(speed: Row) -> Iterator[tuple[str, str, str]]:
    for name, label in _LATENCIES.items():
        yield label, _us(speed[name]["p50_us"]), _us(speed[name]["p99_us"])
    for rates in speed["events"]:
        for name, label in _RATES.items():
            yield f"events of {rates['blocks_per_event']} blocks, a second: {label}", f"{rates[name]:,.0f}", ""
    yield "bytes per block", f"{speed['bytes_per_block']:.0f}", ""
    yield "bytes per block and worker", f"{speed['bytes_per_block_and_worker']:.0f}", ""


def _peer_cells(peer: Row) -> dict[str, str]:
    return {
        _LATENCIES["hash_8192_list"]: f"{_us(peer['hash_8192_us'])} *",
        _LATENCIES["find_512"]: _us(peer["find_512_us"]),
        _LATENCIES["remove_worker"]: _us(peer["remove_worker_us"]),
        "events of 8 blocks, a second: stored": f"{peer['events_8_per_s']:,.0f}",
        "events of 512 blocks, a second: stored": f"{peer['events_512_per_s']:,.0f}",
    }


def _growth_row(row: Row) -> tuple[str, ...]:
    medians = (*(row[name]["p50_us"] for name in ("find_512", "decision_8192", "store_8")), row["remove_worker_us"])
    return (f"{row['num_workers']:,}", f"{row['num_blocks']:,}", *map(_us, medians), f"{row['memory_mib']:,.0f}")


def _us(microseconds: float) -> str:
    return f"{microseconds:.1f} µs"
