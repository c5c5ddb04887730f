"""A live copy of the bucket: reads its messages, keeps the lease table, ends the leases of the dead.

It owns one consumer on the server, which it makes anew after every gap, and the background task that reads it. Server
facts come in; WatchEvents go out. What they mean for visibility is LeaseTable's business.

Expiry of a key is not announced by the server, so every mirror times the leases by its own clock. One that finds a
lease overdue asks the server to end it, by compare-and-swap on the last refresh that it has seen: either nobody has
refreshed it since, then it is over for everybody, its holder included; or somebody has, then the mirror was merely
slow. While there is no connection nothing expires.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from uuid import uuid4

from kvrelay.control.base import WatchEvent
from kvrelay.control.lease_table import KvEntry, LeaseTable
from kvrelay.control.nats.bucket import Bucket, EntryRecord, LeaseRecord
from kvrelay.control.nats.connection import REQUEST_TIMEOUT_S, NatsConnection, NatsMessage
from kvrelay.control.nats.jetstream import JetStream, WrongSequenceError, parse_ack_subject
from kvrelay.core.clock import Clock
from kvrelay.errors import ControlUnavailableError

_log = logging.getLogger(__name__)

HEARTBEAT_S = 2.0
MAX_SILENCE_S = 5.0
RETRY_S = 0.25
SETTLE_S = 0.05
POSTPONE_S = 0.05
CANCEL_INTERVAL_S = 0.5
MAX_ANSWER_SHARE = 0.1
"""Of a lease's time to live: a server that takes longer to answer is not trusted to have served the holder."""


class Mirror:
    """Call ``start`` on the event loop; ``on_events`` then gets what changes, ``on_lease_ended`` the ids of leases that
    are over."""

    def __init__(
        self,
        connection: NatsConnection,
        jetstream: JetStream,
        bucket: Bucket,
        clock: Clock,
        *,
        on_events: Callable[[list[WatchEvent]], None],
        on_synced: Callable[[], None],
        on_lease_ended: Callable[[str], None],
    ) -> None:
        self.table = LeaseTable(clock)
        self._clock = clock
        self._connection = connection
        self._jetstream = jetstream
        self._bucket = bucket
        self._on_events = on_events
        self._on_synced = on_synced
        self._on_lease_ended = on_lease_ended
        self._inbox: asyncio.Queue[NatsMessage | None] = asyncio.Queue()
        self._consumer = ""
        self._consumer_seq = 0
        self._applied_seq = 0
        self._server_offset_s = 0.0
        self._is_live = False
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._task is None:
            self._connection.on_reconnected(lambda: self._inbox.put_nowait(None))
            self._task = asyncio.get_running_loop().create_task(self._run(), name="discovery mirror")

    async def close(self) -> None:
        # Again and again: asyncio.wait_for, in 3.11, swallows a cancellation that comes with the result.
        while self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task], timeout=CANCEL_INTERVAL_S)

    async def catch_up(self) -> None:
        """Return when everything that the server has stored by now is in the table. Raises ControlUnavailableError."""
        self._connection.check_connected()
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                await self._wait_for(lambda: self._is_live)
                target = await self._bucket.last_seq()
                while not await self._has_reached(target):
                    pass
        except TimeoutError as exc:
            self._connection.check_connected()
            raise ControlUnavailableError(f"no state from the control server {self._connection.url}") from exc

    async def _has_reached(self, target: int) -> bool:
        """Wait a little for message ``target``; if it never comes because it was deleted, ask the consumer."""
        try:
            async with asyncio.timeout(SETTLE_S):
                await self._wait_for(lambda: self._is_live and self._applied_seq >= target)
            return True
        except TimeoutError:
            consumer = await self._jetstream.consumer_info(self._bucket.stream, self._consumer)
            return consumer.num_pending == 0 and consumer.delivered.consumer_seq <= self._consumer_seq

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
        await self._bucket.ensure()
        inbox: asyncio.Queue[NatsMessage | None] = asyncio.Queue()
        self._inbox = inbox

        async def receive(message: NatsMessage) -> None:
            inbox.put_nowait(message)

        subject = self._connection.new_inbox()
        subscription = await self._connection.subscribe(subject, receive)
        try:
            self._consumer = f"mirror_{uuid4().hex}"
            consumer = await self._bucket.consume(self._consumer, subject, HEARTBEAT_S)
            self._consumer_seq = self._applied_seq = 0
            self._server_offset_s = consumer.created.timestamp() - self._clock.now()
            await self._list(inbox, consumer.num_pending)
            while await self._step(inbox):
                pass
        finally:
            await self._connection.unsubscribe(subscription)

    async def _list(self, inbox: asyncio.Queue[NatsMessage | None], num_messages: int) -> None:
        self.table.begin_resync()
        try:
            while self._consumer_seq < num_messages:
                async with asyncio.timeout(MAX_SILENCE_S):
                    message = await inbox.get()
                if message is None or not self._apply(message):
                    raise ControlUnavailableError("the listing was interrupted")
        except TimeoutError as exc:
            raise ControlUnavailableError("the listing did not come to its end") from exc
        self._on_events(self.table.end_resync())
        self._is_live = True
        self._changed.set()
        self._on_synced()
        await self._tidy(self.table.strays())

    async def _step(self, inbox: asyncio.Queue[NatsMessage | None]) -> bool:
        """Apply the next message, or look after overdue leases. False when there is a gap."""
        wait_s = MAX_SILENCE_S
        due_s = self.table.next_due_s()
        if due_s is not None:
            wait_s = min(wait_s, max(due_s - self._clock.now(), 0.0))
        try:
            async with asyncio.timeout(wait_s):
                message = await inbox.get()
        except TimeoutError:
            if wait_s == MAX_SILENCE_S or not self._connection.is_connected:
                return False
            for lease_id in self.table.due():
                await self._end_if_dead(lease_id)
            return True
        return message is not None and self._apply(message)

    def _apply(self, message: NatsMessage) -> bool:
        """One message into the table. False when messages before it are missing."""
        if message.headers is not None and message.headers.get("Status") is not None:
            return True
        try:
            delivery = parse_ack_subject(message.reply)
        except ValueError as exc:
            _log.warning("unexpected message in discovery: %s", exc)
            return True
        if delivery.consumer_seq != self._consumer_seq + 1:
            return False
        self._consumer_seq = delivery.consumer_seq
        record = self._bucket.parse(message, delivery.stream_seq, delivery.timestamp_s)
        events: list[WatchEvent] = []
        match record:
            case EntryRecord(key, None):
                events = self.table.delete(key)
            case EntryRecord(key, bytes() as value, lease_id, seq):
                events = self.table.put(key, value, lease_id, seq)
            case LeaseRecord(lease_id, None):
                events = self.table.end(lease_id)
                self._on_lease_ended(lease_id)
            case LeaseRecord(lease_id, float() as ttl_s, seq, stored_s):
                age_s = 0.0 if self._is_live else self._clock.now() + self._server_offset_s - stored_s
                events = self.table.refresh(lease_id, ttl_s, seq, age_s)
        self._applied_seq = delivery.stream_seq
        self._changed.set()
        self._on_events(events)
        return True

    # -- the dead -----------------------------------------------------------------------------------------------------

    async def _end_if_dead(self, lease_id: str) -> None:
        state = self.table.lease(lease_id)
        if state is None:
            return
        asked_s = self._clock.now()
        seq = await self._bucket.lease_seq(lease_id)
        if self._clock.now() - asked_s > state.ttl_s * MAX_ANSWER_SHARE:
            # The server was held up, and perhaps with it a refresh that we would now overtake.
            self.table.postpone(lease_id, state.ttl_s / 3)
            return
        if seq is not None and seq != state.seq:
            # Its holder lives; the refresh is on its way to us.
            self._on_events(self.table.refresh(lease_id, state.ttl_s, seq))
            return
        if seq is not None:
            try:
                await self._bucket.expire_lease(lease_id, expected_seq=seq)
            except WrongSequenceError:
                self.table.postpone(lease_id, POSTPONE_S)
                return
        _log.info("lease %s has ended: not refreshed for %g s", lease_id, state.ttl_s)
        entries = self.table.entries_of(lease_id)
        self._on_events(self.table.end(lease_id))
        self._on_lease_ended(lease_id)
        await self._tidy(entries)

    async def _tidy(self, entries: dict[str, KvEntry]) -> None:
        """Take what nobody holds out of the bucket."""
        for key, entry in entries.items():
            try:
                await self._bucket.delete(key, expected_seq=entry.seq)
            except WrongSequenceError:
                _log.debug("%s was written again, or somebody else has deleted it", key)
