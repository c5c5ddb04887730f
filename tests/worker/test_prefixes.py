"""A prefix that another worker has: read from it under a grant, or computed, and nothing is lost or leaks."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest
from tests.patience import PATIENCE_S
from tests.worker.cluster import LOOPBACK, Client, Cluster, Node, cluster, expected, prompt

from kvrelay.config import WorkerRole
from kvrelay.core.handoff import PrefixHolder
from kvrelay.core.tier_stats import PEER, TierStats
from kvrelay.transfer.base import Post
from kvrelay.transfer.values import TransferOp

HOT = prompt(1600, 7)
"""Worth fetching by the costs that an engine assumes before it has measured its own."""


async def two(shared: Cluster, **engine: int) -> tuple[Node, Node, Client, Client]:
    """A worker that has computed HOT, and another one, each with its client."""
    holder = await shared.join(WorkerRole.BOTH)
    reader = await shared.join(WorkerRole.BOTH, **engine)
    await shared.until(lambda: all(len(node.worker.inspect().peers.addresses) == 2 for node in (holder, reader)))
    await shared.until(lambda: all(len(node.worker.inspect().peers.leased) == 2 for node in (holder, reader)))
    clients = await shared.client(holder), await shared.client(reader)
    clients[0].send("warm", HOT)
    assert await clients[0].answer("warm") == expected(HOT, 8)
    return holder, reader, *clients


async def ask(client: Client, name: str, tokens: tuple[int, ...], holder: str, num_tokens: int = 1600) -> int:
    """The answer is right; how many tokens of the prompt need not be computed."""
    client.send_message(name, tokens, holder=PrefixHolder(holder, num_tokens))
    assert await client.answer(name) == expected(tokens, 8)
    return client.cached[name]


def fetched(node: Node) -> TierStats:
    stats = node.worker.stats().prefixes
    assert stats is not None
    return stats


@pytest.mark.parametrize("checksums", [False, True], ids=["plain", "checksums"])
@pytest.mark.parametrize("transport", ["loopback", "shm", "p2p"])
async def test_a_prefix_is_read_from_the_worker_that_has_it(transport: str, checksums: bool) -> None:
    async with cluster(transfer=replace(LOOPBACK, transport=transport, kv_checksums=checksums)) as shared:
        holder, reader, _, client = await two(shared)
        assert await ask(client, "r", HOT + prompt(100, 3), holder.id) == 1600
        assert fetched(reader).counts.num_hits == 1
        assert fetched(reader).stores[PEER].num_loaded == 100
        await shared.until(lambda: holder.worker.stats().num_grants == 0)
        assert await ask(client, "again", HOT + prompt(90, 4), holder.id) == 1600
        assert fetched(reader).counts.num_hits == 1, "it is its own now"
