"""The speed of the router's parts: hashing, index, events, decisions; in one scenario, and with growing clusters.

The scenario is fixed so that figures can be compared between machines and with a peer: ``num_workers`` workers hold
``blocks_per_worker`` blocks each, the first half of which is one prefix shared by all.
"""

from __future__ import annotations

import gc
import time
import tracemalloc
from array import array
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from benchmarks.trace_replay import simulated_load, simulated_worker_info
from kvrelay.config import RouterConfig
from kvrelay.core.clock import MonotonicClock
from kvrelay.core.event_codec import decode_events, encode_frame
from kvrelay.core.events import BlockRemoved, BlockStored, KvEvent, KvEventBatch
from kvrelay.core.hashing import compute_sequence_hashes
from kvrelay.router.base import RoutingRequest
from kvrelay.router.indexer import KvIndexer
from kvrelay.router.prefix_index import PrefixIndex
from kvrelay.router.router import Router

BLOCK_SIZE = 16
VOCABULARY = 128_000
MATCHED_BLOCKS = 512
CHAIN_BLOCKS = 512
_T = TypeVar("_T")
Latency = dict[str, float]
"""``p50_us`` and ``p99_us`` of many single calls, in microseconds."""


# -- one scenario -----------------------------------------------------------------------------------------------------


class _Scenario:
    """Tokens and blocks of the workers: one shared prefix, and a chain of each worker's own, equally long."""

    def __init__(self, num_workers: int, blocks_per_worker: int) -> None:
        rng = np.random.default_rng(1)
        shared = max(blocks_per_worker // 2, MATCHED_BLOCKS)
        self.names = [f"w{number:04d}" for number in range(num_workers)]
        self.shared_tokens: list[int] = rng.integers(0, VOCABULARY, shared * BLOCK_SIZE).tolist()
        self.shared = compute_sequence_hashes(self.shared_tokens, BLOCK_SIZE)
        own = max(blocks_per_worker - shared, CHAIN_BLOCKS)
        self.own = [_random_blocks(rng, own) for _ in self.names]

    def stored(self, blocks_per_event: int) -> list[tuple[str, BlockStored]]:
        """All that the workers store, cut into events."""
        events = []
        for name, own in zip(self.names, self.own):
            for chain in (self.shared, own):
                for at in range(0, len(chain), blocks_per_event):
                    blocks = chain[at : at + blocks_per_event]
                    events.append((name, BlockStored(chain[at - 1] if at else None, blocks, BLOCK_SIZE)))
        return events

    def fill(self, index: PrefixIndex) -> None:
        for name, event in self.stored(CHAIN_BLOCKS):
            index.apply_event(name, event)


def measure_speed(num_workers: int, blocks_per_worker: int, repeats: int) -> dict[str, Any]:
    """The figures of the scenario. ``find_stairs``: the worst case, every worker's prefix ends at a different depth."""
    scenario = _Scenario(num_workers, blocks_per_worker)
    tokens = scenario.shared_tokens[: MATCHED_BLOCKS * BLOCK_SIZE]
    packed = array("I", tokens)
    query, nothing = scenario.shared[:MATCHED_BLOCKS], tuple(range(MATCHED_BLOCKS))
    router = _router(scenario.names)
    index = _index(router)
    scenario.fill(index)
    stairs, removals = PrefixIndex(), PrefixIndex()
    scenario.fill(removals)
    for number, name in enumerate(scenario.names):
        stairs.store(name, None, query[: MATCHED_BLOCKS - number * (MATCHED_BLOCKS // 2) // num_workers])
    per_block, per_pair = _memory(scenario, blocks_per_worker)
    return {
        "num_workers": num_workers,
        "blocks_per_worker": blocks_per_worker,
        "hash_8192_list": _latency(lambda: compute_sequence_hashes(tokens, BLOCK_SIZE), repeats),
        "hash_8192_array": _latency(lambda: compute_sequence_hashes(packed, BLOCK_SIZE), repeats),
        "find_512": _latency(lambda: index.find_holders(query), repeats),
        "find_stairs": _latency(lambda: stairs.find_holders(query), repeats),
        "find_nothing": _latency(lambda: index.find_holders(nothing), repeats),
        "decision_8192": _decisions(router, tokens, repeats),
        "decision_128": _decisions(router, tokens[:128], repeats),
        "events": tuple(_event_rates(scenario, size) for size in (8, 512)),
        "remove_worker": _each(removals.clear_worker, scenario.names),
        "bytes_per_block": per_block,
        "bytes_per_block_and_worker": per_pair,
    }


def _decisions(router: Router, tokens: list[int], repeats: int) -> Latency:
    """Place a prompt; it finishes outside the measured time."""
    for name in router.worker_ids:
        router.apply_metrics(simulated_load(name))
    samples = []
    for number in range(repeats):
        request = RoutingRequest(f"r{number}", tokens)
        begin = time.perf_counter()
        router.choose(request)
        samples.append(time.perf_counter() - begin)
        router.finished(request.request_id, 0)
    return _summary(samples)


def _event_rates(scenario: _Scenario, blocks_per_event: int) -> dict[str, float]:
    """Events a second. Every worker stores all of its blocks, then removes them from the end; all workers in turn.
    ``from_frames``: decoding and ordering too."""
    stored = scenario.stored(blocks_per_event)
    removed = [(name, BlockRemoved(event.block_hashes[::-1])) for name, event in reversed(stored)]
    index = PrefixIndex()
    store_s = _apply_all(index, stored)
    remove_s = _apply_all(index, removed)
    num_blocks = sum(len(event.block_hashes) for _, event in stored)
    return {
        "blocks_per_event": blocks_per_event,
        "stored_per_s": len(stored) / store_s,
        "removed_per_s": len(removed) / remove_s,
        "from_frames_per_s": len(stored) / _apply_frames(scenario.names, stored),
        "stored_blocks_per_s": num_blocks / store_s,
    }


def _apply_all(index: PrefixIndex, events: Sequence[tuple[str, KvEvent]]) -> float:
    begin = time.perf_counter()
    for name, event in events:
        index.apply_event(name, event)
    return time.perf_counter() - begin


def _apply_frames(names: Sequence[str], events: Sequence[tuple[str, KvEvent]]) -> float:
    """Seconds from the bus's bytes to the index, one frame an event."""
    indexer = KvIndexer(BLOCK_SIZE, MonotonicClock())
    seqs = dict.fromkeys(names, 0)
    for name in names:
        indexer.add_worker(name)
    frames = []
    for name, event in events:
        frames.append(encode_frame(KvEventBatch(name, 0, seqs[name], (event,))))
        seqs[name] += 1
    begin = time.perf_counter()
    for frame in frames:
        indexer.apply(decode_events(frame))
    return time.perf_counter() - begin


def _memory(scenario: _Scenario, blocks_per_worker: int) -> tuple[float, float]:
    """Bytes per distinct block, and per pair of block and worker, with the hashes as they come off the wire."""
    frames = [encode_frame(KvEventBatch(name, 0, 0, (event,))) for name, event in scenario.stored(CHAIN_BLOCKS)]
    gc.collect()
    tracemalloc.start()
    try:
        index = PrefixIndex()
        for frame in frames:
            batch = decode_events(frame)
            index.apply_event(batch.worker_id, batch.events[0])
        del batch
        used = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    return used / index.num_blocks, used / (blocks_per_worker * len(scenario.names))


# -- growth -----------------------------------------------------------------------------------------------------------


def measure_growth(num_workers: int, num_blocks: int, repeats: int) -> dict[str, Any]:
    """``num_blocks`` distinct blocks: 512 that all workers share, the rest spread over them in chains of 512."""
    rng = np.random.default_rng(2)
    names = [f"w{number:04d}" for number in range(num_workers)]
    router = _router(names)
    index = _index(router)
    tokens = rng.integers(0, VOCABULARY, MATCHED_BLOCKS * BLOCK_SIZE).tolist()
    query = compute_sequence_hashes(tokens, BLOCK_SIZE)
    for name in names:
        index.store(name, None, query)
    for number in range(max(0, num_blocks - len(query)) // CHAIN_BLOCKS):
        index.store(names[number % num_workers], None, _random_blocks(rng, CHAIN_BLOCKS))
    memory = index.memory_bytes()
    fresh = [_random_blocks(rng, 8) for _ in range(repeats)]
    return {
        "num_workers": num_workers,
        "num_blocks": index.num_blocks,
        "find_512": _latency(lambda: index.find_holders(query), repeats),
        "decision_8192": _decisions(router, tokens, repeats),
        "store_8": _each(lambda blocks: index.store(names[0], None, blocks), fresh),
        "remove_worker_us": _each(index.clear_worker, names[-1:])["p50_us"],
        "memory_mib": memory / 2**20,
    }


# -- tools ------------------------------------------------------------------------------------------------------------


def _router(names: Sequence[str]) -> Router:
    router = Router(RouterConfig(router="kv"), BLOCK_SIZE, MonotonicClock())
    for name in names:
        router.add_worker(simulated_worker_info(name, BLOCK_SIZE))
    return router


def _index(router: Router) -> PrefixIndex:
    indexer = router.indexer
    assert isinstance(indexer, KvIndexer)
    return indexer.index


def _random_blocks(rng: np.random.Generator, count: int) -> tuple[int, ...]:
    """Random numbers in place of sequence hashes."""
    return tuple(rng.integers(0, 2**64, count, dtype=np.uint64).tolist())


def _latency(call: Callable[[], object], repeats: int) -> Latency:
    return _each(lambda _: call(), range(repeats))


def _each(call: Callable[[_T], object], arguments: Sequence[_T]) -> Latency:
    samples = []
    for argument in arguments:
        begin = time.perf_counter()
        call(argument)
        samples.append(time.perf_counter() - begin)
    return _summary(samples)


def _summary(samples: list[float]) -> Latency:
    low, high = np.percentile(samples, [50, 99])
    return {"p50_us": float(low) * 1e6, "p99_us": float(high) * 1e6}
