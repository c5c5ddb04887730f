"""What every PrefillQueue does. A subclass brings the fixture ``open_server``; see ``QueueServer``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import pytest
from tests.contracts.waiting import holds
from tests.patience import PATIENCE_S

from kvrelay.control.base import PrefillDelivery, PrefillQueue
from kvrelay.core.handoff import HandoffId, RemotePrefillRequest
from kvrelay.core.sampling import SamplingParams
from kvrelay.errors import ControlUnavailableError

PARTITION = "0123456789abcdef"
SHORT_S = 1.0
CALM_S = 3.0
"""As the ack deadline: nothing is delivered again because a busy machine has held up its consumer."""
"""An acknowledgement may take so long even on a busy machine."""


class QueueServer(Protocol):
    """A server whose queue redelivers after ``ack_wait_s`` and gives up after two deliveries.

    ``ack_wait_s`` is longer than any test, which may set a shorter one before it connects."""

    ack_wait_s: float

    async def connect(self) -> PrefillQueue:
        """As another process."""

    async def push_raw(self, data: bytes) -> None:
        """Garbage into the partition PARTITION of the queue."""

    async def num_dead_letters(self) -> int: ...

    async def go_away(self) -> None: ...

    async def come_back(self, *, is_wiped: bool) -> None: ...


OpenServer = Callable[[], AbstractAsyncContextManager[QueueServer]]


def prefill(
    name: str, timeout_s: float = 0.0, partition: str = PARTITION, num_output_tokens: int = 0, priority: int = 0
) -> RemotePrefillRequest:
    return RemotePrefillRequest(
        handoff_id=HandoffId("decode-1", 1),
        decode_worker_id="decode-1",
        decode_address="tcp://127.0.0.1:1",
        model="m",
        request_id=name,
        token_ids=tuple(range(100)),
        num_output_tokens=num_output_tokens,
        sampling=SamplingParams(),
        block_ids=(3, 4, 5),
        num_cached_tokens=16,
        kv_compatibility=partition,
        timeout_s=timeout_s,
        priority=priority,
    )


async def pulled(queue: PrefillQueue, timeout_s: float = PATIENCE_S) -> PrefillDelivery:
    delivery = await queue.pull(PARTITION, timeout_s)
    assert delivery is not None
    return delivery


class PrefillQueueContract:
    """The suite."""

    def test_first_in_first_out_each_entry_once(self, open_server: OpenServer) -> None:
        async def scenario(server: QueueServer) -> None:
            server.ack_wait_s = CALM_S
            decode, one, two = await server.connect(), await server.connect(), await server.connect()
            for number in range(4):
                await decode.push(prefill(str(number)))
            deliveries = [await pulled(queue) for queue in (one, two, one, two)]
            assert [item.request for item in deliveries] == [prefill(str(number)) for number in range(4)]
            assert [item.num_deliveries for item in deliveries] == [1] * 4
            for delivery in deliveries:
                await delivery.ack()
            assert await one.pull(PARTITION, 1.2 * server.ack_wait_s) is None

        run(open_server, scenario)

    def test_those_that_were_begun_elsewhere_go_first(self, open_server: OpenServer) -> None:
        """A stream has stopped in the middle for each of them; whoever is new has not seen a token yet."""

        async def scenario(server: QueueServer) -> None:
            decode, one, two = await server.connect(), await server.connect(), await server.connect()
            for name in ("a", "b"):
                await decode.push(prefill(name))
            for name in ("x", "y"):
                await decode.push(prefill(name, num_output_tokens=5))
            await decode.push(prefill("c"))
            assert (await decode.size(PARTITION), await decode.size()) == (5, 5)
            deliveries = [await pulled(queue) for queue in (one, two, one, two, one)]
            assert [item.request.request_id for item in deliveries] == ["x", "y", "a", "b", "c"]
            assert [item.num_deliveries for item in deliveries] == [1] * 5
            for delivery in deliveries:
                await delivery.ack()
            waiting = asyncio.create_task(one.pull(PARTITION, PATIENCE_S))
            await asyncio.sleep(0.05)
            await decode.push(prefill("z", num_output_tokens=1))
            delivery = await waiting
            assert delivery is not None
            assert delivery.request.request_id == "z"
            await delivery.ack()
            assert await one.pull(PARTITION, 0.0) is None

        run(open_server, scenario)

    def test_priorities_come_in_order_and_begun_streams_before_them(self, open_server: OpenServer) -> None:
        async def scenario(server: QueueServer) -> None:
            decode, one = await server.connect(), await server.connect()
            await decode.push(prefill("first"))
            for name, priority in (("low", 5), ("normal", 0), ("high", -1), ("higher", -7)):
                await decode.push(prefill(name, priority=priority))
            await decode.push(prefill("begun", num_output_tokens=2, priority=9))
            assert await decode.size(PARTITION) == 6
            deliveries = [await pulled(one) for _ in range(6)]
            names = [item.request.request_id for item in deliveries]
            assert names == ["begun", "high", "higher", "first", "normal", "low"]
            for delivery in deliveries:
                await delivery.ack()
            assert await one.pull(PARTITION, 0.0) is None
            waiting = asyncio.create_task(one.pull(PARTITION, PATIENCE_S))
            await asyncio.sleep(0.05)
            await decode.push(prefill("alone", priority=3))
            delivery = await waiting
            assert delivery is not None
            await delivery.ack()

        run(open_server, scenario)

    def test_no_class_waits_for_all_of_a_better_one(self, open_server: OpenServer) -> None:
        async def scenario(server: QueueServer) -> None:
            decode, one = await server.connect(), await server.connect()
            await decode.push(prefill("normal"))
            await decode.push(prefill("low", priority=1))
            for number in range(30):
                await decode.push(prefill(f"high-{number}", priority=-1))
            names = []
            for _ in range(20):
                delivery = await pulled(one)
                names.append(delivery.request.request_id)
                await delivery.ack()
            assert {"normal", "low"} <= set(names)
            better = [name for name in names if name.startswith("high")]
            assert better == [f"high-{number}" for number in range(18)]

        run(open_server, scenario)

    def test_many_of_both_kinds_come_once_each(self, open_server: OpenServer) -> None:
        """Also when both kinds arrive at the same moment: what one pull cannot take goes to another."""

        async def scenario(server: QueueServer) -> None:
            decode = await server.connect()
            consumers = [await server.connect() for _ in range(3)]
            got: list[str] = []

            async def consume(queue: PrefillQueue) -> None:
                while len(got) < 40:
                    delivery = await queue.pull(PARTITION, 0.2)
                    if delivery is not None:
                        await delivery.ack()
                        got.append(delivery.request.request_id)

            consuming = [asyncio.create_task(consume(queue)) for queue in consumers]
            for number in range(20):
                resumed = prefill(f"resumed-{number}", num_output_tokens=3)
                await asyncio.gather(decode.push(prefill(f"new-{number}")), decode.push(resumed))
            await asyncio.gather(*consuming)
            assert sorted(got) == sorted(f"{kind}-{number}" for kind in ("new", "resumed") for number in range(20))
            assert await decode.size() == 0

        run(open_server, scenario)

    @pytest.mark.parametrize("other", ["fedcba9876543210", "", "a.b c/*>", "ü"])
    def test_workers_of_another_partition_do_not_get_the_entry(self, open_server: OpenServer, other: str) -> None:
        async def scenario(server: QueueServer) -> None:
            decode, one = await server.connect(), await server.connect()
            await decode.push(prefill("theirs", partition=other))
            await decode.push(prefill("ours"))
            assert (await decode.size(other), await decode.size(PARTITION), await decode.size()) == (1, 1, 2)
            delivery = await pulled(one)
            assert delivery.request.request_id == "ours"
            await delivery.ack()
            assert await one.pull(PARTITION, 0.0) is None
            delivery = await one.pull(other, PATIENCE_S)
            assert delivery is not None
            assert delivery.request == prefill("theirs", partition=other)
            await delivery.ack()
            assert await one.size() == 0

        run(open_server, scenario)

    @pytest.mark.parametrize("priority", [-1, 0, 1])
    def test_a_waiting_pull_gets_the_next_push(self, open_server: OpenServer, priority: int) -> None:
        async def scenario(server: QueueServer) -> None:
            decode, one = await server.connect(), await server.connect()
            assert await one.pull(PARTITION, 0.0) is None
            waiting = asyncio.create_task(one.pull(PARTITION, PATIENCE_S))
            await asyncio.sleep(0.05)
            await decode.push(prefill("a", priority=priority))
            delivery = await waiting
            assert delivery is not None
            await delivery.ack()

        run(open_server, scenario)

    def test_an_urgent_entry_goes_to_an_idle_consumer_at_once(self, open_server: OpenServer) -> None:
        """Also if the one before it has not yet reached another idle consumer."""

        async def scenario(server: QueueServer) -> None:
            decode, one, two = await server.connect(), await server.connect(), await server.connect()
            waiting = [asyncio.create_task(queue.pull(PARTITION, PATIENCE_S)) for queue in (one, two)]
            await asyncio.sleep(0.2)
            await decode.push(prefill("normal"))
            await decode.push(prefill("urgent", priority=-1))
            async with asyncio.timeout(server.ack_wait_s / 2):
                deliveries = await asyncio.gather(*waiting)
            assert {item.request.request_id for item in deliveries if item is not None} == {"normal", "urgent"}
            for delivery in deliveries:
                assert delivery is not None
                await delivery.ack()

        run(open_server, scenario)

    def test_size_counts_entries_not_yet_pulled(self, open_server: OpenServer) -> None:
        async def scenario(server: QueueServer) -> None:
            decode, one = await server.connect(), await server.connect()
            assert await decode.size() == 0
            for name in "abc":
                await decode.push(prefill(name))
            assert await decode.size() == 3
            delivery = await pulled(one)
            await asyncio.sleep(0.05)
            assert await decode.size() == 2
            assert await asyncio.gather(*(decode.size() for _ in range(20))) == [2] * 20
            await delivery.ack()

        run(open_server, scenario)

    def test_an_entry_given_back_goes_to_another(self, open_server: OpenServer) -> None:
        async def scenario(server: QueueServer) -> None:
            decode, one, two = await server.connect(), await server.connect(), await server.connect()
            await decode.push(prefill("a"))
            await (await pulled(one)).nak(1.5)
            assert await two.pull(PARTITION, 0.1) is None
            again = await pulled(two)
            assert (again.request.request_id, again.num_deliveries) == ("a", 2)
            await again.ack()

        run(open_server, scenario)

    def test_a_silent_consumer_loses_its_entry_and_one_that_sends_keepalives_keeps_it(
        self, open_server: OpenServer
    ) -> None:
        async def scenario(server: QueueServer) -> None:
            server.ack_wait_s = SHORT_S
            decode, one, two = await server.connect(), await server.connect(), await server.connect()

            async def attempt() -> bool:
                await decode.push(prefill("a"))
                kept = await pulled(one)
                for _ in range(6):
                    await asyncio.sleep(server.ack_wait_s / 3)
                    await kept.in_progress()
                early = await two.pull(PARTITION, 0.0)  # after a pause it is delivered again, but not for ever
                again = early or await pulled(two)
                assert (again.request.request_id, again.num_deliveries > 1) == ("a", True)
                await again.ack()
                return early is None and again.num_deliveries == 2

            await holds(attempt)

        run(open_server, scenario)

    def test_malformed_entries_are_dropped(self, open_server: OpenServer) -> None:
        async def scenario(server: QueueServer) -> None:
            server.ack_wait_s = SHORT_S
            decode, one = await server.connect(), await server.connect()
            for garbage in (b"", b"\xff\xff", b"{}", b"\x80"):
                await server.push_raw(garbage)
            await decode.push(prefill("in time", timeout_s=60.0))
            delivery = await pulled(one)
            assert delivery.request.request_id == "in time"
            await delivery.ack()
            assert await one.pull(PARTITION, 2 * server.ack_wait_s) is None

        run(open_server, scenario)

    def test_an_entry_that_waited_too_long_is_given_out_as_expired(self, open_server: OpenServer) -> None:
        """By the server's stamps: the clocks of who pushed and who pulls do not matter."""

        async def scenario(server: QueueServer) -> None:
            decode, one = await server.connect(), await server.connect()
            assert await one.pull(PARTITION, 0.0) is None
            await decode.push(prefill("late", timeout_s=0.05))
            await asyncio.sleep(0.2)
            await decode.push(prefill("in time", timeout_s=60.0))
            found = [await pulled(one), await pulled(one)]
            assert [(item.request.request_id, item.is_expired) for item in found] == [
                ("late", True),
                ("in time", False),
            ]
            for delivery in found:
                await delivery.ack()

        run(open_server, scenario)

    def test_clocks_that_disagree_expire_nothing(
        self, open_server: OpenServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """This process believes it is 45 s later than it is, and 45 s earlier."""
        now = time.time

        async def scenario(server: QueueServer) -> None:
            decode, one = await server.connect(), await server.connect()
            for skew_s in (45.0, -45.0):
                monkeypatch.setattr(time, "time", lambda skew_s=skew_s: now() + skew_s)
                await decode.push(prefill("a", timeout_s=30.0))
                delivery = await pulled(one)
                assert not delivery.is_expired
                await delivery.ack()

        run(open_server, scenario)

    def test_poison_ends_in_the_dead_letters(self, open_server: OpenServer) -> None:
        async def scenario(server: QueueServer) -> None:
            decode, one = await server.connect(), await server.connect()
            await decode.push(prefill("poison"))
            for _ in range(2):
                await (await pulled(one)).nak()
            assert await one.pull(PARTITION, 0.2) is None
            assert await server.num_dead_letters() == 1
            assert await decode.size() == 0

        run(open_server, scenario)

    def test_a_cancelled_pull_loses_nothing(self, open_server: OpenServer) -> None:
        async def scenario(server: QueueServer) -> None:
            decode, one, two = await server.connect(), await server.connect(), await server.connect()
            for delay_s in (0.0, 0.001, 0.002, 0.004):
                waiting = asyncio.create_task(one.pull(PARTITION, PATIENCE_S))
                await asyncio.sleep(0.02)
                await decode.push(prefill(f"after {delay_s}"))
                await asyncio.sleep(delay_s)
                waiting.cancel()
                await asyncio.wait([waiting])
                if not waiting.cancelled():
                    delivery = waiting.result()
                    assert delivery is not None
                else:
                    delivery = await pulled(two, server.ack_wait_s / 2)
                assert delivery.request.request_id == f"after {delay_s}"
                await delivery.ack()

        run(open_server, scenario)

    def test_entries_survive_a_restart(self, open_server: OpenServer) -> None:
        async def scenario(server: QueueServer) -> None:
            decode, one = await server.connect(), await server.connect()
            await decode.push(prefill("a"))
            await server.go_away()
            await asyncio.sleep(0.1)
            for call in (decode.push(prefill("b")), decode.size(), one.pull(PARTITION, 0.1)):
                with pytest.raises(ControlUnavailableError):
                    await asyncio.wait_for(call, PATIENCE_S)
            await server.come_back(is_wiped=False)
            delivery = await eventually_pulled(one)
            assert delivery.request.request_id == "a"
            await delivery.ack()

        run(open_server, scenario)

    def test_a_wiped_server_serves_again(self, open_server: OpenServer) -> None:
        async def scenario(server: QueueServer) -> None:
            decode, one = await server.connect(), await server.connect()
            await decode.push(prefill("lost"))
            await server.go_away()
            await server.come_back(is_wiped=True)
            async with asyncio.timeout(PATIENCE_S):
                while not await pushed(decode, prefill("new")):
                    await asyncio.sleep(0.05)
            delivery = await eventually_pulled(one)
            assert delivery.request.request_id == "new"
            await delivery.ack()
            assert await decode.size() == 0

        run(open_server, scenario)


async def pushed(queue: PrefillQueue, request: RemotePrefillRequest) -> bool:
    """Whether there is a server that takes it."""
    try:
        await queue.push(request)
        return True
    except ControlUnavailableError:
        return False


async def eventually_pulled(queue: PrefillQueue) -> PrefillDelivery:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                delivery = await queue.pull(PARTITION, 0.2)
                if delivery is not None:
                    return delivery
            except ControlUnavailableError:
                await asyncio.sleep(0.05)


def run(open_server: OpenServer, scenario: Callable[[QueueServer], Awaitable[None]]) -> None:
    """Play a scenario with a server of its own."""

    async def play() -> None:
        async with open_server() as server:
            await scenario(server)

    asyncio.run(play())
