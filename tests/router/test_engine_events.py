"""The router's index against the engine's own prefix cache: what one says of a prompt is what the other finds."""

from __future__ import annotations

import random

import pytest
from tests.router.radix_tree import scores_of

from kvrelay.core.clock import ManualClock
from kvrelay.core.event_codec import decode_events, encode_frame
from kvrelay.core.event_log import KvEventLog
from kvrelay.core.hashing import compute_sequence_hashes
from kvrelay.engine.block_pool import BlockPool
from kvrelay.router.indexer import KvIndexer

BLOCK_SIZE = 4


def prompt(rng: random.Random) -> list[int]:
    """Complete blocks and one token, along a narrow tree of prefixes."""
    blocks = [[rng.randrange(2) if rng.random() < 0.3 else 0] * BLOCK_SIZE for _ in range(rng.randrange(1, 14))]
    return [*(token for block in blocks for token in block), 7]


def test_the_index_is_the_pools_cache(caplog: pytest.LogCaptureFixture) -> None:
    rng = random.Random(11)
    indexer = KvIndexer(BLOCK_SIZE, ManualClock())
    pools = {name: BlockPool(60, BLOCK_SIZE) for name in ("a", "b", "c")}
    logs = {name: KvEventLog(name, 0) for name in pools}
    running: list[tuple[str, list[int]]] = []
    for name in pools:
        indexer.add_worker(name)
    hits = 0
    for step in range(3000):
        name = rng.choice("abc")
        pool, tokens = pools[name], prompt(rng)
        hashes = compute_sequence_hashes(tokens, BLOCK_SIZE)
        found = pool.find_prefix(tokens, hashes)
        pool.acquire(found)
        fresh = pool.allocate(len(hashes) - len(found))
        if fresh is None:
            pool.release(found)
        else:
            table, start = found + fresh, len(found)
            parent = hashes[start - 1] if start else None
            pool.cache_blocks(table[start:], parent, hashes[start:], tokens[start * BLOCK_SIZE :])
            running.append((name, table))
        while len(running) > 6:
            owner, table = running.pop(rng.randrange(len(running)))
            pools[owner].release(table)
        if rng.random() < 0.003:
            pool.clear_cache()
        for owner, each in pools.items():
            if each.has_events:
                indexer.apply(decode_events(encode_frame(logs[owner].append(each.drain_events()))))
        query = prompt(rng)
        wanted = compute_sequence_hashes(query, BLOCK_SIZE)
        true = {owner: len(each.find_prefix(query, wanted)) for owner, each in pools.items()}
        assert scores_of(indexer, wanted) == {owner: count for owner, count in true.items() if count}, step
        hits += sum(true.values())
    assert hits > 3000
    assert not caplog.records, "no event lacked its parent"
    assert all(logs[owner].num_blocks == each.num_cached for owner, each in pools.items())
    indexer.index.compact()
    indexer.index.check_integrity()
