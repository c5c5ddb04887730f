"""The class of an entry in the prefill queue."""

from __future__ import annotations

import pytest

from kvrelay.core.handoff import HandoffId, QueueClass, RemotePrefillRequest
from kvrelay.core.sampling import SamplingParams


@pytest.mark.parametrize(
    ("priority", "tenant", "num_output_tokens", "expected"),
    [
        (0, "", 0, QueueClass.NORMAL),
        (-1, "", 0, QueueClass.HIGH),
        (1, "", 0, QueueClass.LOW),
        (-1, "a key", 0, QueueClass.NORMAL),
        (1, "a key", 0, QueueClass.NORMAL),
        (9, "a key", 2, QueueClass.RESUMED),
    ],
)
def test_a_priority_orders_no_requests_of_different_keys(
    priority: int, tenant: str, num_output_tokens: int, expected: QueueClass
) -> None:
    sampling = SamplingParams()
    entry = RemotePrefillRequest(
        HandoffId("d", 1), "d", "r", (1, 2, 3), num_output_tokens, sampling, (), 0, priority, tenant=tenant
    )
    assert entry.queue_class is expected
