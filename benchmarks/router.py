"""``kvrelay bench router``: the speed of the router's parts and of a peer's, and the policies over request traces."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
from benchmarks.router_speed import BLOCK_SIZE, MATCHED_BLOCKS, GrowthRow, SpeedReport, measure_growth, measure_speed
from benchmarks.trace_replay import ReplayResult, WorkerModel, infinite_hit_ratio, read_trace, replay_trace

from benchmarks import peer_dynamo
from kvrelay import __version__
from kvrelay.bench.formats import TraceRecord
from kvrelay.bench.report.files import describe_machine
from kvrelay.config import RouterConfig
from kvrelay.errors import InvalidInputError

POLICIES = ("round-robin", "random", "least-loaded", "power-of-two", "dynamo-v0", "kv-weights", "kv")
GROWTH_WORKERS = (8, 64, 256, 1024)
"""Measured at 100,000 blocks."""
GROWTH_BLOCKS = (10_000, 100_000, 1_000_000, 10_000_000)
"""Measured at 64 workers."""
PEER_TIMEOUT_S = 300.0
MEASURED_PACKAGES = ("numpy", "xxhash", "msgspec")


class PolicyReplay(msgspec.Struct, frozen=True):
    """One trace under every policy, with the ratio of one infinite cache as the bound."""

    trace: str
    num_workers: int
    cache_blocks: int
    time_scale: float
    infinite_hit_ratio: float
    results: tuple[ReplayResult, ...]


class PeerSpeed(msgspec.Struct, frozen=True):
    """The figures of ``peer_dynamo``; names and meaning as in SpeedReport, medians in microseconds."""

    name: str
    version: str
    hash_8192_us: float
    find_512_us: float
    events_8_per_s: float
    events_512_per_s: float
    remove_worker_us: float


class RouterBenchmark(msgspec.Struct, frozen=True):
    """All figures and their conditions: the machine, the versions of the packages on the hot path, and the number of
    calls behind each p50 and p99."""

    machine: str
    versions: dict[str, str]
    repeats: int
    speed: SpeedReport
    growth: tuple[GrowthRow, ...]
    replays: tuple[PolicyReplay, ...]
    peer: PeerSpeed | None


def measure_router(given: dict[str, Any]) -> RouterBenchmark:
    """All requested measurements, in turn. Raises InvalidInputError for an invalid trace or peer."""
    if not 0 < given["time_scale"] < float("inf"):
        raise InvalidInputError(f"--time-scale must be above 0, got {given['time_scale']:g}", param="time_scale")
    traces = [(path.stem, read_trace(path, given["trace_limit"])) for path in given["traces"]]
    scenario = given["num_workers"], given["blocks_per_worker"], given["repeats"]
    sizes = [(workers, 100_000) for workers in GROWTH_WORKERS]
    sizes += [(64, blocks) for blocks in GROWTH_BLOCKS if blocks <= given["max_blocks"]]
    replayed = given["trace_workers"], given["cache_blocks"], given["time_scale"]
    return RouterBenchmark(
        machine=describe_machine(),
        versions={"kvrelay": __version__} | {name: version(name) for name in MEASURED_PACKAGES},
        repeats=given["repeats"],
        speed=measure_speed(*scenario),
        growth=tuple(measure_growth(*size, given["repeats"]) for size in dict.fromkeys(sizes) if given["growth"]),
        replays=tuple(replay_policies(name, requests, *replayed) for name, requests in traces),
        peer=None if given["peer_python"] is None else measure_peer(given["peer_python"], *scenario),
    )


def replay_policies(
    name: str, requests: Sequence[TraceRecord], num_workers: int, cache_blocks: int, time_scale: float
) -> PolicyReplay:
    """The trace under every policy, over workers with ``cache_blocks`` blocks of 512 tokens each."""
    model = WorkerModel(cache_blocks=cache_blocks)
    return PolicyReplay(
        trace=name,
        num_workers=num_workers,
        cache_blocks=cache_blocks,
        time_scale=time_scale,
        infinite_hit_ratio=infinite_hit_ratio(requests),
        results=tuple(
            replay_trace(
                requests,
                RouterConfig(router=policy),  # type: ignore[arg-type]
                num_workers=num_workers,
                model=model,
                time_scale=time_scale,
            )
            for policy in POLICIES
        ),
    )


def measure_peer(python: Path, num_workers: int, blocks_per_worker: int, repeats: int) -> PeerSpeed:
    """Measure Dynamo's index in a process of ``python``, an interpreter that has it installed."""
    task = peer_dynamo.PeerTask(num_workers, blocks_per_worker, MATCHED_BLOCKS, BLOCK_SIZE, repeats)
    try:
        done = subprocess.run(
            [str(python), peer_dynamo.__file__],
            input=msgspec.json.encode(task._asdict()),
            capture_output=True,
            timeout=PEER_TIMEOUT_S,
            check=True,
        )
        return msgspec.json.decode(done.stdout, type=PeerSpeed)
    except subprocess.CalledProcessError as exc:
        reason = exc.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise InvalidInputError(f"the peer in {python} cannot be measured: {reason}") from exc
    except (OSError, subprocess.TimeoutExpired, msgspec.DecodeError) as exc:
        raise InvalidInputError(f"the peer in {python} cannot be measured: {exc}") from exc
