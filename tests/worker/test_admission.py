"""What is too much is refused while a step runs, however long that takes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tests.worker.cluster import WAIT_S, Node, cluster, expected, prompt

from kvrelay.config import WorkerRole


@contextmanager
def endless_step(node: Node) -> Iterator[threading.Event]:
    """The next step begins, which the event tells, and does not end before the block does."""
    execute, begun, goes_on = node.core.executor.execute, threading.Event(), threading.Event()

    def stuck(work: object) -> object:
        begun.set()
        goes_on.wait(WAIT_S)
        return execute(work)

    node.core.executor.execute = stuck
    try:
        yield begun
    finally:
        node.core.executor.execute = execute
        goes_on.set()


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        ({"num_blocks": 32, "kv_watermark": 2}, "hold or wait for 60 KV blocks"),
        ({"max_num_seqs": 1, "max_num_waiting": 5}, "5 requests are waiting"),
    ],
)
async def test_a_burst_within_a_step_is_refused_within_it(engine: dict[str, float], reason: str) -> None:
    async with cluster() as shared:
        node = await shared.join(WorkerRole.BOTH, **engine)
        client = await shared.client(node)
        with endless_step(node) as begun:
            client.send("first", prompt(160))
            assert await asyncio.to_thread(begun.wait, WAIT_S)
            for number in range(5):
                client.send(str(number), prompt(160, number + 1))
            client.send("too much", prompt(160, 10))
            await client.until(lambda: "too much" in client.refused)
            assert client.tokens == {}
        refusal = client.refused.pop("too much")
        assert (refusal.status, refusal.retryable) == (429, True)
        assert refusal.retry_after_s >= 1
        assert reason in refusal.reason
        assert await client.answer("first") == expected(prompt(160), 8)
        for number in range(5):
            assert await client.answer(str(number)) == expected(prompt(160, number + 1), 8)
        client.send("later", prompt(160, 10))
        assert await client.answer("later") == expected(prompt(160, 10), 8)
