"""Measures NVIDIA Dynamo's Python binding of its prefix index, for a comparison in the same run.

It runs as a script under an interpreter with ``ai-dynamo-runtime``, which need not have kvrelay. It reads a task as
JSON from standard input and writes the figures as JSON. Only the standard library is imported at the top.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple


class PeerTask(NamedTuple):
    """The scenario of ``benchmarks.router_speed``."""

    num_workers: int
    blocks_per_worker: int
    matched_blocks: int
    block_size: int
    repeats: int


def measure(task: PeerTask) -> dict[str, object]:
    """Hash, match, apply events, remove workers; medians in microseconds, rates per second."""
    peer = importlib.import_module("dynamo.llm")
    rng = random.Random(1)
    shared = max(task.blocks_per_worker // 2, task.matched_blocks)
    tokens = [rng.randrange(128_000) for _ in range(shared * task.block_size)]
    local = peer.compute_block_hash_for_seq(tokens, task.block_size)
    own = [[rng.getrandbits(63) for _ in range(shared)] for _ in range(task.num_workers)]
    query = local[: task.matched_blocks]
    prompt = tokens[: task.matched_blocks * task.block_size]
    tree, _ = _filled(peer, local, own, 512)
    if len(tree.find_matches(query).scores) != task.num_workers:
        raise SystemExit("the peer's index does not hold the stored blocks")
    return {
        "name": "Dynamo RadixTree (Python binding)",
        "version": importlib.metadata.version("ai-dynamo-runtime"),
        "hash_8192_us": _median_us(lambda: peer.compute_block_hash_for_seq(prompt, task.block_size), task.repeats),
        "find_512_us": _median_us(lambda: tree.find_matches(query), task.repeats),
        "events_8_per_s": _filled(peer, local, own, 8)[1],
        "events_512_per_s": _filled(peer, local, own, 512)[1],
        "remove_worker_us": statistics.median(_timed(tree.remove_worker, at) for at in range(task.num_workers)) * 1e6,
    }


def _filled(peer: Any, shared: list[int], own: list[list[int]], per_event: int) -> tuple[Any, float]:
    """A tree with every worker's blocks, and the events applied per second. The last look-up waits for all of them."""
    frames: list[tuple[int, bytes]] = []
    for worker, chain in enumerate(own):
        for blocks in (shared, chain):
            for at in range(0, len(blocks), per_event):
                part = blocks[at : at + per_event]
                frames.append((worker, _stored(len(frames), blocks[at - 1] if at else None, part)))
    tree = peer.RadixTree()
    begin = time.perf_counter()
    for worker, frame in frames:
        tree.apply_event(worker, frame)
    tree.find_matches(shared[:1])
    return tree, len(frames) / (time.perf_counter() - begin)


def _stored(event_id: int, parent: int | None, blocks: list[int]) -> bytes:
    stored = {"parent_hash": parent, "blocks": [{"block_hash": block, "tokens_hash": block} for block in blocks]}
    return json.dumps({"event_id": event_id, "data": {"stored": stored}}).encode()


def _timed(call: Callable[[int], object], argument: int) -> float:
    begin = time.perf_counter()
    call(argument)
    return time.perf_counter() - begin


def _median_us(call: Callable[[], object], repeats: int) -> float:
    return statistics.median(_timed(lambda _: call(), at) for at in range(repeats)) * 1e6


if __name__ == "__main__":
    json.dump(measure(PeerTask(**json.load(sys.stdin))), sys.stdout)
