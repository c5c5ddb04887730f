"""The router's figures as tables; a peer's stand beside ours."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.router import PeerSpeed, RouterBenchmark
from benchmarks.router_speed import GrowthRow, SpeedReport
from benchmarks.trace_replay import ReplayResult

from kvrelay.bench.report.table import table


def router_text(benchmark: RouterBenchmark) -> str:
    """The figures as tables; a peer's stand beside ours."""
    versions = ", ".join(f"{name} {version}" for name, version in benchmark.versions.items())
    texts = [f"{benchmark.machine}; {versions}; {benchmark.repeats:,} calls a figure"]
    speed, peer = benchmark.speed, benchmark.peer
    scenario = f"{speed.num_workers} workers with {speed.blocks_per_worker:,} blocks each, half of them shared"
    columns = (scenario, "p50", "p99", *([] if peer is None else [f"{peer.name} {peer.version}"]))
    theirs = {} if peer is None else _peer_cells(peer)
    texts.append(table(columns, ((*row, theirs.get(row[0], ""))[: len(columns)] for row in _speed_rows(speed))))
    if peer is not None:
        texts.append("* local hashes; ours are the sequence hashes that a decision needs")
    if benchmark.growth:
        columns = ("growth (medians): workers", "blocks", "find 512", "decide 8,192", "store 8", "remove worker", "MiB")
        texts.append(table(columns, map(_growth_row, benchmark.growth), left=0))
    for replay in benchmark.replays:
        workers = f"{replay.num_workers} workers with {replay.cache_blocks:,} blocks"
        texts.append(f"{replay.trace}: {workers}; one infinite cache hits {replay.infinite_hit_ratio:.3f}")
        columns = ("policy", "hit ratio", "token imbalance", "work imbalance", "TTFT mean", "p50", "p99")
        texts.append(table(columns, map(_replay_row, replay.results)))
    return "\n\n".join(texts)


def _speed_rows(speed: SpeedReport) -> Iterator[tuple[str, str, str]]:
    for label, latency in (
        ("hash 8,192 tokens, a list", speed.hash_8192_list),
        ("hash 8,192 tokens, an array", speed.hash_8192_array),
        ("find 512 blocks, all workers", speed.find_512),
        ("find 512 blocks, each worker to its own depth", speed.find_stairs),
        ("find nothing", speed.find_nothing),
        ("decide, 8,192 tokens", speed.decision_8192),
        ("decide, 128 tokens", speed.decision_128),
        ("remove a worker", speed.remove_worker),
    ):
        yield label, _us(latency.p50_us), _us(latency.p99_us)
    for rates in speed.events:
        name = f"events of {rates.blocks_per_event} blocks, a second:"
        yield f"{name} stored", f"{rates.stored_per_s:,.0f}", ""
        yield f"{name} removed", f"{rates.removed_per_s:,.0f}", ""
        yield f"{name} from frames", f"{rates.from_frames_per_s:,.0f}", ""
        yield f"{name} blocks stored", f"{rates.stored_blocks_per_s:,.0f}", ""
    yield "bytes per block", f"{speed.bytes_per_block:.0f}", ""
    yield "bytes per block and worker", f"{speed.bytes_per_block_and_worker:.0f}", ""


def _peer_cells(peer: PeerSpeed) -> dict[str, str]:
    return {
        "hash 8,192 tokens, a list": f"{_us(peer.hash_8192_us)} *",
        "find 512 blocks, all workers": _us(peer.find_512_us),
        "remove a worker": _us(peer.remove_worker_us),
        "events of 8 blocks, a second: stored": f"{peer.events_8_per_s:,.0f}",
        "events of 512 blocks, a second: stored": f"{peer.events_512_per_s:,.0f}",
    }


def _growth_row(row: GrowthRow) -> tuple[str, ...]:
    medians = (row.find_512.p50_us, row.decision_8192.p50_us, row.store_8.p50_us, row.remove_worker_us)
    return (f"{row.num_workers:,}", f"{row.num_blocks:,}", *map(_us, medians), f"{row.memory_mib:,.0f}")


def _replay_row(result: ReplayResult) -> tuple[str, ...]:
    ratios = (f"{result.hit_ratio:.3f}", f"{result.token_imbalance:.2f}", f"{result.work_imbalance:.2f}")
    times = (result.mean_ttft_s, result.p50_ttft_s, result.p99_ttft_s)
    return (result.policy, *ratios, *(f"{seconds:.2f} s" for seconds in times))


def _us(microseconds: float) -> str:
    return f"{microseconds:.1f} µs"
