"""``kvrelay bench router``: the speed of the router's parts, a peer's beside it, and the policies over request traces.

What it does not know: how figures are printed.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import msgspec

from kvrelay.bench.parts import peer_dynamo
from kvrelay.bench.parts.router_speed import (
    BLOCK_SIZE,
    MATCHED_BLOCKS,
    GrowthRow,
    SpeedReport,
    measure_growth,
    measure_speed,
)
from kvrelay.bench.parts.trace_replay import ReplayResult, TraceRequest, WorkerModel, infinite_hit_ratio, replay_trace
from kvrelay.config import RouterConfig
from kvrelay.errors import InvalidInputError
from kvrelay.version import __version__

PEER_TIMEOUT_S = 300.0
MEASURED_PACKAGES = ("numpy", "xxhash", "msgspec")

POLICIES = ("round-robin", "random", "least-loaded", "power-of-two", "dynamo-v0", "kv")


class PolicyReplay(msgspec.Struct, frozen=True):
    """One trace under every policy, with the ratio of one infinite cache as the bound."""

    trace: str
    num_workers: int
    cache_blocks: int
    time_scale: float
    infinite_hit_ratio: float
    results: tuple[ReplayResult, ...]


class PeerSpeed(msgspec.Struct, frozen=True):
    """What ``peer_dynamo`` measured; names and meaning as in SpeedReport, medians in microseconds."""

    name: str
    version: str
    hash_8192_us: float
    find_512_us: float
    events_8_per_s: float
    events_512_per_s: float
    remove_worker_us: float


class RouterBenchmark(msgspec.Struct, frozen=True):
    """All figures, and what they depend on: the machine, the versions of what the hot path is made of, and how many
    calls each p50 and p99 is of."""

    machine: str
    versions: dict[str, str]
    repeats: int
    speed: SpeedReport
    growth: tuple[GrowthRow, ...]
    replays: tuple[PolicyReplay, ...]
    peer: PeerSpeed | None


def run_router_benchmark(
    *,
    machine: str,
    num_workers: int = 64,
    blocks_per_worker: int = 2048,
    repeats: int = 1000,
    growth_workers: Sequence[int] = (8, 64, 256, 1024),
    growth_blocks: Sequence[int] = (10_000, 100_000, 1_000_000),
    traces: Sequence[tuple[str, Sequence[TraceRequest]]] = (),
    trace_workers: int = 16,
    cache_blocks: int = 2500,
    time_scale: float = 1.0,
    peer_python: Path | None = None,
) -> RouterBenchmark:
    """Everything, one after the other. ``machine`` is only reported. ``growth_workers`` are measured at 100,000 blocks,
    ``growth_blocks`` at 64 workers; leave both empty to skip that part. Raises InvalidInputError when the peer
    cannot be measured.
    """
    growth = [(workers, 100_000) for workers in growth_workers] + [(64, blocks) for blocks in growth_blocks]
    return RouterBenchmark(
        machine=machine,
        versions={"kvrelay": __version__} | {name: version(name) for name in MEASURED_PACKAGES},
        repeats=repeats,
        speed=measure_speed(num_workers, blocks_per_worker, repeats),
        growth=tuple(measure_growth(workers, blocks, repeats) for workers, blocks in dict.fromkeys(growth)),
        replays=tuple(
            replay_policies(name, requests, trace_workers, cache_blocks, time_scale) for name, requests in traces
        ),
        peer=None if peer_python is None else measure_peer(peer_python, num_workers, blocks_per_worker, repeats),
    )


def replay_policies(
    name: str, requests: Sequence[TraceRequest], num_workers: int, cache_blocks: int, time_scale: float
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
