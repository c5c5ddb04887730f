"""Whoever can write to discovery can write anything; a worker still hears what comes behind it."""

from __future__ import annotations

import pytest
from tests.worker.cluster import cluster, prompt

from kvrelay.core.workers import WorkerRole

MALFORMED = [b"", b"{", b'{"worker_id": 1}', b'"\xff"']


@pytest.mark.parametrize("value", MALFORMED)
async def test_malformed_entries_are_passed_over(value: bytes) -> None:
    async with cluster() as shared:
        decode = await shared.join(WorkerRole.DECODE)
        discovery = decode.control.discovery
        for key in ("workers/stranger", "kv_metadata/stranger/0", "config/disagg.max_local_prefill_length"):
            await discovery.put(f"kvrelay/default/{key}", value)
        await discovery.put("kvrelay/default/config/disagg.max_local_prefill_length", b"10")
        await shared.until(lambda: decode.worker._policy.config.max_local_prefill_length == 10)
        prefill = await shared.join(WorkerRole.PREFILL)
        await shared.until(lambda: decode.worker._fleet.num_prefill_workers == 1)
        client = await shared.client(decode)
        client.send("r", prompt(20))
        await client.answer("r")
        prefill.worker.request_drain()
        await shared.gone(prefill)
        await shared.until(lambda: decode.worker._fleet.has_ended(prefill.id))
