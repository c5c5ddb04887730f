"""What discovery costs: messages grow with the number of members, and what is stored does not grow with time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.contracts.control_servers import expire_lease
from tests.contracts.prefill_queue_contract import PARTITION, prefill
from tests.contracts.waiting import eventually, watching
from tests.patience import PATIENCE_S

from kvrelay.control.base import KEEPALIVES_PER_LEASE, Keys
from kvrelay.control.lease_table import HEARD_SHARE
from kvrelay.control.nats.bucket import Bucket
from kvrelay.control.nats.connection import NatsConnection, NatsMessage
from kvrelay.control.nats.discovery import NatsDiscovery
from kvrelay.control.nats.jetstream import JetStream, JetStreamError
from kvrelay.control.nats.keeper_election import KeeperState
from kvrelay.control.nats.lease import NatsLease
from kvrelay.control.nats.prefill_queue import NatsPrefillQueue
from kvrelay.control.nats_process import NatsServerProcess
from kvrelay.control.redelivery import MAX_ACK_WAIT_S
from kvrelay.core.clock import MonotonicClock, next_beat_s

Handler = Callable[[NatsMessage], Awaitable[None]]

TTL_S = 1.5
CALM_TTL_S = 4.0
"""Not lost in the moment in which ``refresh`` sends its keepalives; members elect their keeper by it."""
NUM_MEMBERS = 12


@pytest.fixture(scope="module")
def nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServerProcess]:
    process = NatsServerProcess(tmp_path_factory.mktemp("nats"))
    process.start()
    yield process
    process.stop()


class Member:
    """A worker's part in discovery: a lease, an entry, a watch."""

    def __init__(self, discovery: NatsDiscovery, connection: NatsConnection, lease: NatsLease) -> None:
        self.discovery = discovery
        self.connection = connection
        self.lease = lease
        self.mirror = discovery.mirror

    async def vanish(self) -> None:
        """As SIGKILL would have it."""
        await self.discovery.close()
        await self.connection.close()


@asynccontextmanager
async def members(url: str, namespace: str, count: int, ttl_s: float = TTL_S) -> AsyncIterator[list[Member]]:
    async with AsyncExitStack() as stack:
        found = []
        for number in range(count):
            connection = await NatsConnection.connect(url, 10.0)
            stack.push_async_callback(connection.close)
            discovery = NatsDiscovery(connection, namespace)
            await discovery.start()
            stack.push_async_callback(discovery.close)
            lease = await discovery.grant(ttl_s)
            assert isinstance(lease, NatsLease)
            await discovery.put(Keys(namespace).worker(f"w{number}"), b"{}", lease)
            await stack.enter_async_context(watching(discovery, Keys(namespace).workers))
            found.append(Member(discovery, connection, lease))
        await eventually(lambda: all(len(one.mirror.table.visible) == count for one in found))
        await eventually(lambda: [one.mirror.election.state for one in found].count(KeeperState.KEEPING) == 1)
        await eventually(lambda: sum(one.mirror.keepalives is not None for one in found) == 1)
        yield found


async def refresh(group: list[Member], count: int) -> None:
    """Each member sends so many keepalives now, without waiting for its beats."""
    for _ in range(count):
        sent = [one.lease.num_keepalives for one in group]
        for one in group:
            one.lease.wake()
        await eventually(lambda: all(one.lease.num_keepalives > before for one, before in zip(group, sent)))  # noqa: B023


def num_bytes(store: Path, namespace: str) -> int:
    """Of the bucket's message files."""
    files = store.glob(f"jetstream/**/KV_kvrelay_{namespace}/msgs/*.blk")
    return sum(file.stat().st_size for file in files)


def test_one_member_hears_the_refreshes_and_the_others_hear_nothing(nats: NatsServerProcess) -> None:
    """With every member hearing every refresh it would be NUM_MEMBERS times as many."""

    async def scenario() -> None:
        async with members(nats.url, "traffic", NUM_MEMBERS, ttl_s=CALM_TTL_S) as group:
            sent = [one.lease.num_keepalives for one in group]
            heard = [one.mirror.num_keepalives for one in group]
            entries = [one.mirror.entries.consumer_seq for one in group]
            await refresh(group, 4)
            num_keepalives = sum(one.lease.num_keepalives - before for one, before in zip(group, sent))
            num_heard = [one.mirror.num_keepalives - before for one, before in zip(group, heard)]
            # A change of keeper on a busy machine costs one listing more.
            assert sum(num_heard) <= num_keepalives + 2 * NUM_MEMBERS
            assert [one.mirror.entries.consumer_seq for one in group] == entries

    asyncio.run(scenario())


class TimedLoop(asyncio.SelectorEventLoop):
    """Counts the timers that have fired, by what they call, and by when those of timeouts were due."""

    def __init__(self) -> None:
        super().__init__()
        self.fired: Counter[str] = Counter()
        self.timed_out: Counter[float] = Counter()

    def call_at(self, when: float, callback: Callable[..., Any], *args: Any, **options: Any) -> asyncio.TimerHandle:
        def fire(*given: Any) -> None:
            self.fired[callback.__qualname__] += 1
            self.timed_out[when] += callback.__qualname__ == "Timeout._on_timeout"
            callback(*given)

        return super().call_at(when, fire, *args, **options)


def test_no_timer_wakes_an_idle_member_but_those_of_keepalives_and_of_the_keeper(nats: NatsServerProcess) -> None:
    async def scenario(loop: TimedLoop) -> None:
        async with members(nats.url, "timers", 4) as group:
            (keeper,) = [one for one in group if one.mirror.election.state is KeeperState.KEEPING]
            announced: list[bytes] = []

            async def hear(message: NatsMessage) -> None:
                announced.append(message.data)

            await keeper.connection.subscribe(Keys("timers").lease_keeper, hear)
            sent = [one.lease.num_keepalives for one in group]
            loop.fired.clear()
            await eventually(lambda: all(one.lease.num_keepalives >= before + 8 for one, before in zip(group, sent)))
            num_keepalives = sum(one.lease.num_keepalives - before for one, before in zip(group, sent))
            assert loop.fired["HeldLease._time_out"] == 0
            assert loop.fired["Timeout._on_timeout"] <= num_keepalives + len(announced) + len(group)

    with asyncio.Runner(loop_factory=TimedLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, TimedLoop)
        runner.run(scenario(loop))


def test_idle_members_wake_up_together(nats: NatsServerProcess) -> None:
    """Of one host, which is at rest in between."""

    async def scenario(loop: TimedLoop) -> None:
        async with members(nats.url, "beats", 4) as group:
            sent = [one.lease.num_keepalives for one in group]
            loop.timed_out.clear()
            await eventually(lambda: all(one.lease.num_keepalives >= before + 6 for one, before in zip(group, sent)))
            num_keepalives = sum(one.lease.num_keepalives - before for one, before in zip(group, sent))
            interval_s = TTL_S / KEEPALIVES_PER_LEASE
            beats = {
                due_s: count
                for due_s, count in loop.timed_out.items()
                if due_s == next_beat_s(due_s - interval_s / 2, interval_s)
            }
            num_begun_before = 2 * len(group)  # at most: one in flight, and one that is to follow at once
            assert sum(beats.values()) >= num_keepalives - num_begun_before
            assert len(beats) <= num_keepalives / len(group) + 2

    with asyncio.Runner(loop_factory=TimedLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, TimedLoop)
        runner.run(scenario(loop))


async def test_a_mirror_that_hears_no_heartbeats_lists_again(
    nats: NatsServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvrelay.control.nats.mirror.HEARTBEAT_S", 0.2)
    monkeypatch.setattr("kvrelay.control.nats.mirror.MAX_SILENCE_S", 2.0)
    async with members(nats.url, "heartbeats", 1, ttl_s=CALM_TTL_S) as (member,):
        heard_s = member.mirror.entries.heard_s
        await eventually(lambda: member.mirror.entries.heard_s > heard_s + 0.5)
        feed = member.mirror.entries
        await member.connection.request(f"$JS.API.CONSUMER.DELETE.{feed.stream}.{feed.name}", b"")
        await eventually(lambda: member.mirror.entries is not feed and member.mirror.is_live)


async def test_a_lost_message_is_missed_at_the_next_heartbeat(
    nats: NatsServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if no other one follows it."""
    monkeypatch.setattr("kvrelay.control.nats.mirror.HEARTBEAT_S", 0.2)
    lost: list[NatsMessage] = []
    subscribe = NatsConnection.subscribe

    async def lossy(connection: NatsConnection, subject: str, handler: Handler, *, queue: str = "") -> object:
        async def handle(message: NatsMessage) -> None:
            if message.data == b"lost" and not lost:
                lost.append(message)
            else:
                await handler(message)

        return await subscribe(connection, subject, handle, queue=queue)

    monkeypatch.setattr(NatsConnection, "subscribe", lossy)
    async with (
        members(nats.url, "lossy", 1, ttl_s=CALM_TTL_S) as (member,),
        watching(member.discovery, "kvrelay/lossy/config/") as watch,
    ):
        await member.discovery.put("kvrelay/lossy/config/x", b"lost")
        await eventually(lambda: watch.state == {"kvrelay/lossy/config/x": b"lost"})
    assert len(lost) == 1


def test_another_keeper_ends_the_lease_of_one_that_died(nats: NatsServerProcess) -> None:
    async def scenario() -> None:
        async with members(nats.url, "takeover", 4) as group:
            (keeper,) = [one for one in group if one.mirror.election.state is KeeperState.KEEPING]
            others = [one for one in group if one is not keeper]
            victim = others.pop()
            await keeper.vanish()
            await victim.vanish()
            await eventually(lambda: all(len(one.mirror.table.visible) == 2 for one in others))
            await eventually(lambda: [one.mirror.election.state for one in others].count(KeeperState.KEEPING) == 1)
            assert all(one.lease.lease_id for one in others)

    asyncio.run(scenario())


def test_a_new_keeper_gives_a_dead_member_no_whole_lease_more(nats: NatsServerProcess) -> None:
    """Its last keepalive is stored, and is the first thing that the new keeper hears of it."""

    async def scenario() -> None:
        async with members(nats.url, "shared", 3, ttl_s=4.0) as group:
            (keeper,) = [one for one in group if one.mirror.election.state is KeeperState.KEEPING]
            heir, victim = [one for one in group if one is not keeper]
            await victim.vanish()
            await keeper.vanish()
            await eventually(lambda: heir.mirror.keepalives is not None)
            feed = heir.mirror.keepalives
            assert feed is not None
            await eventually(lambda: feed.consumer_seq >= feed.num_pending > 0)
            state, now_s = heir.mirror.table.lease(victim.lease.lease_id), MonotonicClock().now()
            assert state is not None
            assert state.refreshed_s + state.ttl_s <= now_s + HEARD_SHARE * state.ttl_s

    asyncio.run(scenario())


class HalfWayBucket(Bucket):
    """Of a keeper that dies between the two writes."""

    async def finish_expiry(self, lease_id: str) -> None:
        pass


def test_an_expiry_that_was_left_half_way_is_finished(nats: NatsServerProcess) -> None:
    """Who ends a lease may end between its two writes; the lease's holder is alive, and begins anew."""

    async def scenario() -> None:
        async with members(nats.url, "halfway", 2) as group:
            lease = group[0].lease
            old, told = lease.lease_id, []
            lease.on_lost(lambda: told.append("lost"))
            lease.on_revoked(lambda: told.append("revoked"))
            bucket = HalfWayBucket(JetStream(group[1].connection), "halfway")
            await expire_lease(bucket, old)
            await eventually(lambda: lease.lease_id not in ("", old))
            await eventually(lambda: all(len(one.mirror.table.visible) == 2 for one in group))
            assert told == ["lost"]
            assert not await bucket.has_lease(old)

    asyncio.run(scenario())


@asynccontextmanager
async def counted_queue(
    url: str, namespace: str, ack_wait_s: float = MAX_ACK_WAIT_S
) -> AsyncIterator[tuple[NatsPrefillQueue, Counter[str]]]:
    """A queue whose partition is ready, and the kinds of the messages that it sends to JetStream from now on."""
    connection = await NatsConnection.connect(url, 10.0)
    queue = NatsPrefillQueue(connection, namespace, ack_wait_s=ack_wait_s)
    assert await queue.pull(PARTITION, 0.0) is None
    sent: Counter[str] = Counter()
    publish, request = connection.publish, connection.request

    async def counting_publish(subject: str, data: bytes, **options: str) -> None:
        sent[kind_of(subject)] += 1
        await publish(subject, data, **options)

    async def counting_request(subject: str, data: bytes, **options: Any) -> NatsMessage:
        sent[kind_of(subject)] += 1
        return await request(subject, data, **options)

    connection.publish, connection.request = counting_publish, counting_request  # type: ignore[method-assign]
    yield queue, sent
    await queue.close()
    await connection.close()


@pytest.fixture
def patient_pulls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is slow to answer is waited for, not asked again."""
    monkeypatch.setattr("kvrelay.control.nats.pulls.ANSWER_MARGIN_S", PATIENCE_S)


def kind_of(subject: str) -> str:
    """The API call, or the first word of another subject."""
    words = subject.split(".")
    return ".".join(words[2:-2] if "NEXT" in words else words[2:4]) if words[:2] == ["$JS", "API"] else words[0]


@pytest.mark.usefixtures("patient_pulls")
def test_an_idle_prefill_worker_waits_at_the_server_between_two_looks(nats: NatsServerProcess) -> None:
    async def scenario() -> None:
        async with counted_queue(nats.url, "idle") as (queue, sent):
            assert await queue.pull(PARTITION, 0.5) is None
            assert sent == {"STREAM.INFO": 2, "CONSUMER.MSG.NEXT": 1}

    asyncio.run(scenario())


@pytest.mark.usefixtures("patient_pulls")
def test_it_looks_again_once_after_the_ack_deadline_and_then_rarely(nats: NatsServerProcess) -> None:
    async def scenario() -> None:
        async with counted_queue(nats.url, "rare", ack_wait_s=0.1) as (queue, sent):
            assert await queue.pull(PARTITION, 1.0) is None
            assert sent["STREAM.INFO"] <= 3
            assert sent["CONSUMER.MSG.NEXT"] <= 2

    asyncio.run(scenario())


@pytest.mark.usefixtures("patient_pulls")
def test_entries_of_one_class_are_pulled_and_counted_without_a_look_at_the_others(nats: NatsServerProcess) -> None:
    async def scenario() -> None:
        async with counted_queue(nats.url, "busy") as (queue, sent):
            for name in ("a", "b"):
                await queue.push(prefill(name))
            sent.clear()
            assert await queue.size(PARTITION) == 2
            assert sent == {"STREAM.INFO": 1, "CONSUMER.INFO": 1}
            sent.clear()
            delivery = await queue.pull(PARTITION, 0.0)
            assert delivery is not None
            assert sent["CONSUMER.MSG.NEXT"] == 1
            assert sent.total() <= 2, "the look at the stream may be the one before"
            # Delivered and not acknowledged: it does not wait, and hides nobody.
            assert await queue.size(PARTITION) == 1
            await queue.push(prefill("urgent", priority=-1))
            urgent = await queue.pull(PARTITION, 0.0)
            assert urgent is not None
            assert urgent.request.request_id == "urgent"
            await delivery.ack()
            await urgent.ack()

    asyncio.run(scenario())


def test_an_urgent_entry_goes_where_idle_workers_wait_whatever_else_waits(nats: NatsServerProcess) -> None:
    """An entry of another class that no worker has seen yet is one of fewer entries than workers."""

    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            connection = await NatsConnection.connect(nats.url, 10.0)
            stack.push_async_callback(connection.close)
            queue, stream = NatsPrefillQueue(connection, "rush", ack_wait_s=2 * PATIENCE_S), JetStream(connection)
            waiting = [asyncio.create_task(queue.pull(PARTITION, 2 * PATIENCE_S)) for _ in range(2)]
            consumer = "kvrelay_rush_prefill", f"prefill_{PARTITION}"
            while await num_waiting(stream, *consumer) < 2:
                await asyncio.sleep(0.02)
            await stream.publish(f"kvrelay.rush.prefill.queue.{PARTITION}=high", b"not seen yet")
            await queue.push(prefill("urgent", priority=-1))
            done, left = await asyncio.wait(waiting, timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
            delivery = done.pop().result()
            assert delivery is not None
            assert delivery.request.request_id == "urgent"
            await delivery.ack()
            left.pop().cancel()
            await queue.close()

    asyncio.run(scenario())


async def num_waiting(stream: JetStream, name: str, consumer: str) -> int:
    try:
        return (await stream.consumer_info(name, consumer)).num_waiting
    except JetStreamError:
        return 0


def test_what_is_stored_does_not_grow_while_nothing_changes(nats: NatsServerProcess) -> None:
    async def scenario() -> None:
        async with members(nats.url, "still", 3, ttl_s=CALM_TTL_S) as group:
            store = nats.store_dir
            assert store is not None
            before = await stored(group[0], store, "still")
            await refresh(group, 6)
            assert await stored(group[0], store, "still") == before

    async def stored(one: Member, store: Path, namespace: str) -> tuple[int, int]:
        """Messages ever written to the bucket, and the bytes of its message files."""
        info = await JetStream(one.connection).stream_info(f"KV_kvrelay_{namespace}")
        return info.state.last_seq, num_bytes(store, namespace)

    asyncio.run(scenario())


def test_what_is_stored_is_bounded_while_members_come_and_go(
    nats: NatsServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the last value of a key is kept, and the server drops the others' space as it goes."""
    monkeypatch.setattr("kvrelay.control.nats.connection.REQUEST_TIMEOUT_S", PATIENCE_S)  # a busy disk is slow

    async def scenario() -> None:
        connection = await NatsConnection.connect(nats.url, 10.0)
        discovery = NatsDiscovery(connection, "churn")
        await discovery.start()
        value = b"x" * 16_384
        sizes = []
        for _ in range(4):
            for start in range(0, 1_000, 50):
                await asyncio.gather(
                    *(
                        discovery.put(f"kvrelay/churn/workers/w{number % 20}", value)
                        for number in range(start, start + 50)
                    )
                )
            info = await JetStream(connection).stream_info("KV_kvrelay_churn")
            assert info.state.messages == 20
            store = nats.store_dir
            assert store is not None
            sizes.append(num_bytes(store, "churn"))
        await discovery.close()
        await connection.close()
        # 4,000 writes of 16 KiB are 64 MiB; what is kept is 320 KiB, and at most a few of the server's blocks with it.
        assert max(sizes) < 32 * 1024 * 1024, sizes

    asyncio.run(scenario())
