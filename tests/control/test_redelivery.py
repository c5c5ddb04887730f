"""When an entry of the prefill queue goes to somebody else, by the leases of those who share it."""

from __future__ import annotations

import asyncio

import pytest
from tests.contracts.prefill_queue_contract import PARTITION, prefill, pulled
from tests.contracts.waiting import holds

from kvrelay.config import ControlConfig
from kvrelay.control import connect_control
from kvrelay.control.nats_process import NatsServerProcess
from kvrelay.control.redelivery import (
    KEEPALIVE_INTERVAL_S,
    MAX_ACK_WAIT_S,
    MAX_DELIVERIES,
    MIN_ACK_WAIT_S,
    ack_wait_for_lease,
    return_delay_s,
)


@pytest.mark.parametrize(
    ("ttl_s", "ack_wait_s"), [(0.5, MIN_ACK_WAIT_S), (2.0, 2.0), (10.0, MAX_ACK_WAIT_S), (60.0, MAX_ACK_WAIT_S)]
)
def test_the_wait_follows_the_lease_within_bounds(ttl_s, ack_wait_s):
    assert ack_wait_for_lease(ttl_s) == ack_wait_s


def test_an_entry_is_given_back_later_each_time_and_never_becomes_a_dead_letter():
    delays = [return_delay_s(number) for number in range(1, MAX_DELIVERIES + 1)]
    assert delays[-1] is None
    given_back = [delay for delay in delays if delay is not None]
    assert len(given_back) == MAX_DELIVERIES - 1, "only the consumer of the last delivery keeps it"
    assert given_back == sorted(given_back)
    assert given_back[0] > 0


async def test_a_worker_with_a_short_lease_takes_nothing_from_one_that_works_on():
    server = NatsServerProcess()
    url = server.start()
    patient = await connect_control(ControlConfig(control=url, lease_ttl_s=60.0))
    hasty = await connect_control(ControlConfig(control=url, lease_ttl_s=0.5))
    try:
        assert await patient.prefill_queue.pull(PARTITION, 0.0) is None
        # With this the line has the short wait, for all.
        assert await hasty.prefill_queue.pull(PARTITION, 0.0) is None

        async def attempt() -> bool:
            await patient.prefill_queue.push(prefill("a"))
            working = await pulled(patient.prefill_queue)
            for _ in range(round(2 * MIN_ACK_WAIT_S / KEEPALIVE_INTERVAL_S)):
                await asyncio.sleep(KEEPALIVE_INTERVAL_S)
                await working.in_progress()
            again = None
            took = await hasty.prefill_queue.pull(PARTITION, 0.0)
            if took is None:
                # It has fallen silent.
                again = await hasty.prefill_queue.pull(PARTITION, MAX_ACK_WAIT_S - MIN_ACK_WAIT_S)
            await (took or again or working).ack()
            return took is None and again is not None and again.num_deliveries == 2

        await holds(attempt)
    finally:
        await patient.close()
        await hasty.close()
        await asyncio.to_thread(server.stop)
