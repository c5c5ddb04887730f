"""A live copy of the bucket: it reads the bucket's messages and updates the lease table. One mirror of all, the lease
keeper, ends the leases of dead processes.

It owns one consumer on the server, which it creates again after every gap, and the background task that reads it.
Messages come in; WatchEvents go out. LeaseTable decides about visibility, and KeeperElection decides which mirror is
the lease keeper. The keeper has a second consumer, of the leases' keepalives.

The keeper times the leases by its own clock. It asks the server to end an overdue lease, by compare-and-swap on the
last keepalive that it has heard. If the holder has not sent one since, the lease has ended for every process, its
holder included. If it has, the keeper was merely slow. Nothing expires without a connection.

nats-server could time the leases instead: it announces expired keys (``Nats-TTL``, deletion markers). Tried on 2.15.1
with 200 leases of 2 s: each of 50 ends was announced once, 0.0 to 0.3 s late; a keepalive never raced its marker (720
of 720); 72 keepalives/s cost 2 % of a core with or without TTL. But time goes on while the server does not: after a
pause of two leases (SIGSTOP) it announced all 120 living holders as dead, after 3 s without it 130 of 130. A stream in
memory, which a full disk does not stop, lost its timers with the server: 0 of 10 ends were announced. Times are whole
seconds. Consumers filter by subject only, so to hear the markers, all watchers must hear all keepalives.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Awaitable, Callable
from uuid import uuid4

from kvrelay.control.base import WatchEvent
from kvrelay.control.lease_table import HEARD_SHARE, KvEntry, LeaseState, LeaseTable
from kvrelay.control.nats.bucket import Bucket, EntryRecord, LeaseRecord
from kvrelay.control.nats.connection import ControlDeniedError, NatsConnection, NatsMessage, NatsSubscription, ask_again
from kvrelay.control.nats.jetstream import ConsumerInfo, Delivery, JetStream, WrongSequenceError, parse_ack_subject
from kvrelay.control.nats.keeper_election import KeeperElection, KeeperState
from kvrelay.core.clock import MonotonicClock
from kvrelay.core.tasks import end_tasks
from kvrelay.errors import ControlUnavailableError

_log = logging.getLogger(__name__)

HEARTBEAT_S = 13.0
MAX_SILENCE_S = 20.0
"""Heartbeats prove that the server still has the consumer, and tell how much it has sent; each wakes up a process. One
may be as late as the connection outlives a silent server."""
LAST_DELIVERED = "Nats-Last-Consumer"
"""The header of a heartbeat with the number of the consumer's last message."""
RETRY_S = 0.25
SETTLE_S = 0.05
POSTPONE_S = 0.05
MAX_ID_BYTES = 64
MAX_ANSWER_SHARE = 0.1
"""Share of a lease's time to live. A server that takes longer to answer may not have served the holder either."""
MAX_SLOW_ANSWERS = 3
"""About a dead lease, a third of its time to live apart. A server that was asked once more, and still knows no newer
keepalive, has served the holder in all that time. Then it is not slow but far away."""


class Feed:
    """One consumer. ``server_offset_s``: the server's clock minus ours."""

    def __init__(self, stream: str) -> None:
        self.stream = stream
        self.name = f"mirror_{uuid4().hex}"
        self.subscription: NatsSubscription | None = None
        self.num_pending = 0
        self.server_offset_s = 0.0
        self.consumer_seq = 0
        self.stream_seq = 0
        self.heard_s = 0.0


_Open = Callable[[str, str, float], Awaitable[ConsumerInfo]]
_Item = tuple[Feed, NatsMessage] | None


class Mirror:
    """Call ``start`` on the event loop. ``on_events`` then gets the changes, ``on_lease_ended`` the ids of leases that
    have ended. ``num_keepalives`` counts the keepalives that this mirror has received."""

    def __init__(
        self,
        connection: NatsConnection,
        jetstream: JetStream,
        bucket: Bucket,
        keeper_subject: str,
        *,
        on_events: Callable[[list[WatchEvent]], None],
        on_synced: Callable[[], None],
        on_lease_ended: Callable[[str], None],
    ) -> None:
        clock = MonotonicClock()
        self.table = LeaseTable(clock)
        self.election = KeeperElection(clock, uuid4().hex, random.random())
        self.num_keepalives = 0
        self._clock = clock
        self._connection = connection
        self._jetstream = jetstream
        self._bucket = bucket
        self._keeper_subject = keeper_subject
        self._on_events = on_events
        self._on_synced = on_synced
        self._on_lease_ended = on_lease_ended
        self._inbox: asyncio.Queue[_Item] = asyncio.Queue()
        self.entries = Feed(bucket.stream)
        self.keepalives: Feed | None = None
        """Of the lease keeper, and of a newcomer."""
        self._is_listing = False
        self._is_live = False
        self._waiting: asyncio.Timeout | None = None
        """For the next message, until something is due."""
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def is_live(self) -> bool:
        """Whether this mirror hears every change at once."""
        return self._is_live and self._connection.is_connected

    def start(self) -> None:
        if self._task is None:
            self._connection.on_reconnected(lambda: self._inbox.put_nowait(None))
            self._task = asyncio.get_running_loop().create_task(self._run(), name="discovery mirror")

    async def close(self) -> None:
        if self._task is not None:
            await end_tasks([self._task])

    async def catch_up(self, within_s: float) -> None:
        """Return once everything that the server has stored by now is in the table. Raises ControlUnavailableError."""
        self._connection.check_connected()
        try:
            async with asyncio.timeout(within_s):
                await self._wait_for(lambda: self._is_live)
                target = await ask_again(self._bucket.last_seq, within_s)
                while not await self._has_reached(target):
                    pass
        except TimeoutError as exc:
            self._connection.check_connected()
            raise ControlUnavailableError(f"no state from the control server {self._connection.url}") from exc

    async def _has_reached(self, target: int) -> bool:
        """Wait briefly for message ``target``. It never comes if it was deleted; then ask the consumer."""
        try:
            async with asyncio.timeout(SETTLE_S):
                await self._wait_for(lambda: self._is_live and self.entries.stream_seq >= target)
            return True
        except TimeoutError:
            feed = self.entries
            try:
                consumer = await self._jetstream.consumer_info(feed.stream, feed.name)
            except ControlDeniedError:
                raise
            except ControlUnavailableError:
                # The server pauses, or has lost the consumer. Then the mirror lists again.
                self._connection.check_connected()
                return False
            return consumer.num_pending == 0 and consumer.delivered.consumer_seq <= feed.consumer_seq

    async def _wait_for(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    # -- reading ------------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            if self._connection.is_connected:
                try:
                    await self._follow()
                except ControlUnavailableError as exc:
                    _log.debug("discovery has to list again: %s", exc)
                self._is_live = False
            await asyncio.sleep(RETRY_S)

    async def _follow(self) -> None:
        """List, then follow until there is a gap."""
        self.election.may_keep = True  # the server's permissions may have changed
        await self._bucket.ensure()
        self._inbox = asyncio.Queue()

        async def hear_keeper(message: NatsMessage) -> None:
            self.election.heard(message.data[:MAX_ID_BYTES].decode("ascii", "replace"))
            self._rest_longer()

        keeper = await self._connection.subscribe(self._keeper_subject, hear_keeper)
        try:
            await self._list()
            while await self._step():
                pass
        finally:
            await self._connection.unsubscribe(keeper)
            await self._close_keepalives()
            if self.entries.subscription is not None:
                await self._connection.unsubscribe(self.entries.subscription)

    async def _open(self, stream: str, consume: _Open) -> Feed:
        feed, inbox = Feed(stream), self._inbox

        async def receive(message: NatsMessage) -> None:
            feed.heard_s = self._clock.now()
            if message.headers is not None and "Status" in message.headers:
                self._rest_longer()  # a heartbeat
                last_seq = message.headers.get(LAST_DELIVERED, "")
                is_current = feed in (self.entries, self.keepalives) and inbox.empty()
                if is_current and last_seq.isdigit() and int(last_seq) > feed.consumer_seq:
                    inbox.put_nowait(None)  # no message may come whose number would show the gap
            else:
                inbox.put_nowait((feed, message))

        subject = self._connection.new_inbox()
        feed.subscription = await self._connection.subscribe(subject, receive)
        try:
            consumer = await consume(feed.name, subject, HEARTBEAT_S)
        except ControlUnavailableError:
            await self._connection.unsubscribe(feed.subscription)
            raise
        feed.num_pending = consumer.num_pending
        feed.heard_s = self._clock.now()
        feed.server_offset_s = consumer.created.timestamp() - feed.heard_s
        return feed

    async def _close_keepalives(self) -> None:
        feed, self.keepalives = self.keepalives, None
        if feed is not None and feed.subscription is not None:
            await self._connection.unsubscribe(feed.subscription)

    async def _list(self) -> None:
        self.table.begin_resync()
        self._is_listing = True
        try:
            self.entries = await self._open(self._bucket.stream, self._bucket.consume)
            await self._read(self.entries)
            # After the keys, so that the keepalives of all leases that were found are read.
            self.keepalives = await self._open(self._bucket.keepalive_stream, self._bucket.consume_keepalives)
            await self._read(self.keepalives)
        except TimeoutError as exc:
            raise ControlUnavailableError("the listing did not come to its end") from exc
        finally:
            self._is_listing = False
        self._on_events(self.table.end_resync())
        self._is_live = True
        self._changed.set()
        self._on_synced()
        await self._tidy(self.table.strays())

    async def _read(self, feed: Feed) -> None:
        """Read the messages that were pending when the consumer was created."""
        while feed.consumer_seq < feed.num_pending:
            async with asyncio.timeout(MAX_SILENCE_S):
                item = await self._inbox.get()
            if item is None or not self._apply(*item):
                raise ControlUnavailableError("the listing was interrupted")

    async def _step(self) -> bool:
        """Apply the next message, or handle the leases that are due. False after a gap."""
        await self._keep_or_rest()
        try:
            item = await self._next_item()
        except TimeoutError:
            if self._clock.now() >= self._silent_s() or not self._connection.is_connected:
                return False
            for lease_id in self.table.due(only_missing=not self._ends_leases):
                await self._look_after(lease_id)
            return True
        if item is None:
            return False
        feed, message = item
        return feed not in (self.entries, self.keepalives) or self._apply(feed, message)

    async def _next_item(self) -> _Item:
        """Raises TimeoutError when something is due."""
        try:
            async with asyncio.timeout_at(self._wake_s()) as self._waiting:
                return await self._inbox.get()
        finally:
            self._waiting = None

    def _wake_s(self) -> float:
        """When something is due, by the event loop's clock."""
        lease_s = self.table.next_due_s(only_missing=not self._ends_leases)
        due_s = min(self.election.due_s(), self._silent_s(), math.inf if lease_s is None else lease_s)
        return asyncio.get_running_loop().time() + max(due_s - self._clock.now(), 0.0)

    def _rest_longer(self) -> None:
        """The keeper or the server lives, so there is less to wake up for."""
        if self._waiting is not None and not self._waiting.expired():
            self._waiting.reschedule(self._wake_s())

    def _silent_s(self) -> float:
        """When the server's heartbeats will have been missing for too long on one of the feeds."""
        return min(feed.heard_s for feed in (self.entries, self.keepalives) if feed is not None) + MAX_SILENCE_S

    async def _keep_or_rest(self) -> None:
        """As the lease keeper: announce it and consume the keepalives. Otherwise leave both to the keeper."""
        self._heed_refusal()
        self.election.pace(self.table.shortest_ttl_s)
        if self.election.tick():
            await self._connection.publish(self._keeper_subject, self.election.own_id.encode())
        if self.election.state is KeeperState.RESTING:
            if not self.table.has_unproven:
                await self._close_keepalives()
        elif self.keepalives is None:
            _log.info("the lease keeper is gone; taking over")
            self.table.trust_all()
            self.keepalives = await self._open(self._bucket.keepalive_stream, self._bucket.consume_keepalives)

    def _apply(self, feed: Feed, message: NatsMessage) -> bool:
        """Apply one message to the table. False if messages before it are missing."""
        try:
            delivery = parse_ack_subject(message.reply)
        except ValueError as exc:
            _log.warning("ignored an unexpected message in discovery: %s", exc)
            return True
        if delivery.consumer_seq != feed.consumer_seq + 1:
            return False
        feed.consumer_seq = delivery.consumer_seq
        if feed is self.entries:
            self._on_events(self._entry(message, delivery))
        else:
            self._on_events(self._keepalive(feed, message, delivery))
        feed.stream_seq = delivery.stream_seq
        self._changed.set()
        return True

    def _entry(self, message: NatsMessage, delivery: Delivery) -> list[WatchEvent]:
        match self._bucket.parse(message, delivery.stream_seq):
            case EntryRecord(key, None):
                return self.table.delete(key)
            case EntryRecord(key, bytes() as value, lease_id, seq):
                return self.table.put(key, value, lease_id, seq)
            case LeaseRecord(lease_id, None):
                events = self.table.end(lease_id)
                self._on_lease_ended(lease_id)
                return events
            case LeaseRecord(lease_id, float() as ttl_s, seq):
                return self.table.refresh(lease_id, ttl_s, seq)
        return []

    def _keepalive(self, feed: Feed, message: NatsMessage, delivery: Delivery) -> list[WatchEvent]:
        self.num_keepalives += 1
        keepalive = self._bucket.parse_keepalive(message, delivery.stream_seq, delivery.timestamp_s)
        state = self.table.lease(keepalive.lease_id)
        if state is None:
            return []  # the lease's key has not arrived yet, or is gone
        age_s = 0.0
        if keepalive.is_end:
            age_s = state.ttl_s  # its expiry was interrupted, so it is due at once
        elif self._is_listing:
            age_s = self._clock.now() + feed.server_offset_s - keepalive.stored_s
        elif delivery.consumer_seq <= feed.num_pending:
            age_s = state.ttl_s * (1.0 - HEARD_SHARE)  # stored before we took over
        return self.table.refresh(keepalive.lease_id, state.ttl_s, keepalive.seq, age_s)

    # -- the dead -----------------------------------------------------------------------------------------------------

    @property
    def _ends_leases(self) -> bool:
        """Only who has announced that it does: a newcomer has heard too little, and may have no right to."""
        return self.election.state is KeeperState.KEEPING

    async def _look_after(self, lease_id: str) -> None:
        """Handle a lease that is due: end it if its holder is dead and our credentials allow it."""
        state = self.table.lease(lease_id)
        if state is None:
            return
        try:
            await self._end_if_dead(lease_id, state)
        except ControlDeniedError as exc:
            self._leave_it_to_others(exc)
            self.table.postpone(lease_id, state.ttl_s)

    def _heed_refusal(self) -> None:
        """Stop keeping leases if the server has refused our announcement."""
        if self.election.may_keep and self._connection.is_denied(self._keeper_subject):
            self._leave_it_to_others("these credentials may not keep leases")

    def _leave_it_to_others(self, reason: object) -> None:
        _log.info("other watchers will end leases: %s", reason)
        self.election.forbid()

    async def _end_if_dead(self, lease_id: str, state: LeaseState) -> None:
        asked_s = self._clock.now()
        is_there = await self._bucket.has_lease(lease_id)
        keepalive = await self._bucket.last_keepalive(lease_id) if is_there else None
        if keepalive is not None and not keepalive.is_end and keepalive.seq != state.seq:
            # The holder lives; its keepalive is on its way to us.
            self._on_events(self.table.refresh(lease_id, state.ttl_s, keepalive.seq))
            return
        is_slow = self._clock.now() - asked_s > state.ttl_s * MAX_ANSWER_SHARE
        if is_slow and state.num_slow_answers < MAX_SLOW_ANSWERS:
            # The server may delay a keepalive too. Do not overtake that keepalive.
            state.num_slow_answers += 1
            self.table.postpone(lease_id, state.ttl_s / 3)
            return
        self._heed_refusal()  # the server sends it before these answers, so it is here by now
        if is_there and not self._ends_leases:
            self.table.postpone(lease_id, state.ttl_s)
            return
        if is_there:
            try:
                if keepalive is not None and keepalive.is_end:
                    await self._bucket.finish_expiry(lease_id)
                else:
                    await self._bucket.expire_lease(lease_id, expected_seq=0 if keepalive is None else keepalive.seq)
            except WrongSequenceError:
                self.table.postpone(lease_id, POSTPONE_S)
                return
        _log.info("lease %s has ended: not refreshed for %g s", lease_id, state.ttl_s)
        entries = self.table.entries_of(lease_id)
        self._on_events(self.table.end(lease_id))
        self._on_lease_ended(lease_id)
        await self._tidy(entries)

    async def _tidy(self, entries: dict[str, KvEntry]) -> None:
        """Delete entries without a lease from the bucket."""
        for key, entry in entries.items():
            try:
                await self._bucket.delete(key, expected_seq=entry.seq)
            except ControlDeniedError as exc:
                _log.debug("leaving the removal of %s to other watchers: %s", key, exc)
            except WrongSequenceError:
                _log.debug("%s was written again, or another watcher has deleted it", key)
