"""What a frontend tells of sessions reaches the engine, and what is learned shows in the metrics."""

from __future__ import annotations

from tests.worker.cluster import cluster, expected, prompt

from kvrelay.config import WorkerRole
from kvrelay.core.messages import SessionPaused


async def test_a_tool_is_learned_and_a_session_is_seen_by_its_prefix() -> None:
    async with cluster() as c:
        node = await c.join(WorkerRole.BOTH)
        client = await c.client(node)
        pauses = node.core.pauses
        assert pauses is not None
        first = prompt(32)
        client.send("r1", first)
        answer = await client.answer("r1")
        assert answer == expected(first, 8)
        client.connection.send(SessionPaused("r1", "bash", within_s=2.0))
        client.connection.send(SessionPaused("unknown", "bash"))
        second = (*first, *answer, 7, 8)
        client.send("r2", second)
        assert await client.answer("r2") == expected(second, 8)
        assert ("", "bash within 2 s") in pauses.fits
        counts = pauses.counts
        assert (counts.num_begun, counts.num_returned, counts.num_missed) == (2, 1, 0)
        client.connection.send(SessionPaused("r2", is_over=True))
        client.send("r3", prompt(20, start=300))
        await client.answer("r3")
        assert len(pauses) == 2, "a session that is over is seen if it continues all the same"
