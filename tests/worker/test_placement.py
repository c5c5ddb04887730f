"""A worker that places prefills by cost: both ways give the same answer, and the answer says which way it came."""

from __future__ import annotations

import asyncio

from tests.worker.cluster import cluster, expected, prompt

from kvrelay.placement.base import PrefillPlace
from kvrelay.placement.cost_model import RemoteCost


async def test_decisions_are_told_on_request_and_counted():
    async with cluster(disagg_policy="cost") as shared:
        prefill, decode, client = await shared.pair()
        lengths = {f"r{number}": 20 + 60 * number for number in range(12)}
        for name, length in lengths.items():
            client.send_message(name, prompt(length), explain=True, tenant="key", slo_ttft_ms=100.0)
        for name, length in lengths.items():
            assert await client.answer(name) == expected(prompt(length), 8)
            assert client.decisions[name].split(";")[0] in set(PrefillPlace)
        client.send("silent", prompt(20))
        await client.answer("silent")
        assert "silent" not in client.decisions
        await shared.check_idle()
        stats = decode.worker.stats().decode
        assert sum(stats.places.values()) == 13
        assert stats.places.get(PrefillPlace.REMOTE, 0) == prefill.worker.stats().prefill.num_prefills


async def test_by_threshold_the_decision_is_told_without_estimates():
    async with cluster() as shared:
        _, _, client = await shared.pair()
        client.send_message("long", prompt(300), explain=True)
        assert await client.answer("long") == expected(prompt(300), 8)
        assert client.decisions == {"long": "remote"}
        await shared.check_idle()


async def test_a_burst_by_cost_is_answered_whole_with_aborts_between():
    async with cluster(disagg_policy="cost") as shared:
        _, decode, client = await shared.pair()
        for number in range(40):
            client.send(f"r{number}", prompt(400, number))
            if number % 4 == 3:
                client.abort(f"r{number}")
        kept = [number for number in range(40) if number % 4 != 3]
        answers = await asyncio.gather(*(client.answer(f"r{number}") for number in kept))
        assert answers == [expected(prompt(400, number), 8) for number in kept]
        costs = decode.worker.decode.cost_stats()
        assert costs.num_samples > 0
        assert costs.cost.prefill_s != RemoteCost().prefill_s, "it learns the prefill worker's own part of the time"
        await shared.until(lambda: decode.worker.inspect().num_requests == 0)
        assert len(decode.worker.decode.arrivals) == 0
        await shared.check_idle()


async def test_a_threshold_without_effect_is_said_and_changes_no_policy(caplog):
    async with cluster(disagg_policy="auto") as shared:
        _, decode, client = await shared.pair()
        (said,) = [line for line in caplog.messages if "no effect" in line]
        assert said.startswith("max_local_prefill_length has no effect here under --disagg-policy auto")
        caplog.clear()
        key = "kvrelay/default/config/disagg.max_prefill_queue_size"
        await decode.control.discovery.put(key, b"512")
        await shared.until(lambda: decode.worker.inspect().disagg.max_prefill_queue_size == 512)
        assert decode.worker.inspect().disagg.disagg_policy == "auto"
        assert (await decode.worker.status())["disagg"]["unused"] == (
            "max_local_prefill_length",
            "max_prefill_queue_size",
        )
        assert "max_prefill_queue_size has no effect here" in caplog.text
        await decode.control.discovery.put(key.replace("max_prefill_queue_size", "disagg_policy"), b'"threshold"')
        await shared.until(lambda: decode.worker.inspect().disagg.disagg_policy == "threshold")
        caplog.clear()
        await decode.control.discovery.put(key, b"3")
        await shared.until(lambda: decode.worker.inspect().disagg.max_prefill_queue_size == 3)
        assert caplog.text == ""
        client.send_message("long", prompt(300), explain=True)
        assert await client.answer("long") == expected(prompt(300), 8)
        assert client.decisions == {"long": "remote"}
