"""The parts of one worker's peer-to-peer transport, wired: control thread, initiator, responder, room, communicators.

This module loads torch. It owns the order of starting and closing, the timer, and the check that nothing is lost.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvrelay.config import TransferConfig
from kvrelay.core.control_groups import map_memory
from kvrelay.core.layout import MemoryRegion
from kvrelay.errors import IntegrityError
from kvrelay.transfer.p2p.address import P2pAddress
from kvrelay.transfer.p2p.communicators import Communicator, Communicators
from kvrelay.transfer.p2p.control import ControlThread
from kvrelay.transfer.p2p.initiator import Initiator
from kvrelay.transfer.p2p.messages import Message
from kvrelay.transfer.p2p.pool_view import PoolView
from kvrelay.transfer.p2p.posts import Arrival
from kvrelay.transfer.p2p.responder import Responder
from kvrelay.transfer.p2p.room import Room, RoomQueue
from kvrelay.transfer.p2p.shared import Shared
from kvrelay.transfer.stats import P2pCounters
from kvrelay.transfer.windows import WindowTable

TICK_S = 0.5
"""How often idle communicators and integrity are looked at while there is a communicator."""
JOIN_S = 2.0

_log = logging.getLogger(__name__)


class Node:
    """From construction, which listens and raises FatalError, to ``close``. The callbacks run on the control thread."""

    def __init__(
        self,
        config: TransferConfig,
        worker_id: str,
        region: MemoryRegion,
        address: P2pAddress,
        windows: WindowTable,
        *,
        on_arrived: Callable[[Arrival], None],
        on_lost: Callable[[str], object],
    ) -> None:
        for param, device in (("kv_buffer_size", region.device), ("p2p_pool_bytes", "cpu")):
            num_bytes = getattr(config, param)
            if num_bytes and device == "cpu":  # it is mapped for good with the first message, too late to say so
                map_memory(num_bytes, param, "messages").close()
        self._idle_s = config.p2p_idle_s
        self._on_arrived = on_arrived
        self._on_lost = on_lost
        self._is_checked = True
        self._tick_s: float | None = None
        self.control = ControlThread(
            worker_id,
            address.host,
            config.kv_port,
            address.keys,
            on_request=self._request,
            on_reply=self._reply,
            on_lost=self._lost,
            on_timer=self._tick,
            next_timer_s=self._next_s,
        )
        pool = PoolView(region)
        self.shared = Shared(
            worker_id=worker_id,
            pool=pool,
            windows=windows,
            table=Communicators(config.p2p_max_connections),
            rooms=RoomQueue(Room(config.kv_buffer_size, config.p2p_pool_bytes, pool.device)),
            control=self.control,
            timeout_s=config.transfer_timeout_s,
            room_wait_s=min(config.p2p_room_wait_s, config.transfer_timeout_s / 2),
            end_idle=self._end_idle,
        )
        self.responder = Responder(self.shared, on_arrived)
        self.initiator = Initiator(self.shared, keeps=config.send_type == "GET", on_ended=on_arrived)
        self.control.start()

    def __repr__(self) -> str:
        return f"{self.initiator!r}, {self.responder!r}, {self.shared.table!r}, {self.shared.rooms!r}"

    def counters(self) -> P2pCounters:
        """Single numbers, read across threads."""
        shared, table, rooms = self.shared, self.shared.table, self.shared.rooms
        return P2pCounters(
            num_connections=table.num_made,
            num_evicted=table.num_evicted,
            num_busy=shared.num_busy,
            num_failed=shared.num_failed,
            num_spilled=rooms.room.num_spilled,
            num_spilled_bytes=rooms.room.num_spilled_bytes,
            num_waited=rooms.num_waited,
            num_lost=rooms.num_lost,
            num_refused=shared.windows.num_refused,
            num_dropped_frames=self.control.num_dropped,
            pairs=len(table.pairs),
            buffer_used_bytes=rooms.room.buffer.buddy.used_bytes,
            pool_used_bytes=rooms.room.pool.buddy.used_bytes,
        )

    def check_integrity(self) -> None:
        """On the control thread. Raises IntegrityError."""
        rooms, table = self.shared.rooms, self.shared.table
        rooms.room.check_integrity()
        if self._is_idle and (rooms.room.num_reserved or rooms.num_waiting):
            raise IntegrityError(f"nothing is under way, but room is taken: {rooms!r}")
        for pair in table.pairs.values():
            if pair.num_open < 0 or (self._is_idle and pair.num_open):
                raise IntegrityError(f"nothing is under way, but a communicator is in use: {pair!r}")

    def close(self) -> None:
        """Nothing of ours touches memory any more when this returns, unless a wait in native code cannot be ended."""
        for pair in self.control.ask(self._close_pairs):
            if not pair.join(JOIN_S):
                _log.warning("a thread of the communicator with %s waits for its deadline", pair.peer_id)
        self.control.close()

    # -- on the control thread ----------------------------------------------------------------------------------------

    @property
    def _is_idle(self) -> bool:
        return not self.responder.num_open and not self.initiator.num_open

    def _close_pairs(self) -> list[Communicator]:
        for pair in list(self.shared.table.pairs.values()):
            self._end_idle(pair)
        return self.shared.table.ending

    def _request(self, worker_id: str, message: Message, payload: memoryview) -> None:
        self._is_checked = False
        self.responder.handle(worker_id, message, payload)

    def _reply(self, worker_id: str, message: Message, payload: memoryview) -> None:
        self._is_checked = False
        self.initiator.handle(worker_id, message, payload)

    def _lost(self, worker_id: str) -> None:
        self._on_lost(worker_id)
        self.initiator.drop_peer(worker_id, f"worker {worker_id} is gone")

    def _end_idle(self, pair: Communicator) -> None:
        (self.responder if pair.rank else self.initiator.contacts).end_idle(pair)

    def _tick(self) -> None:
        now_s = self.shared.clock()
        self.shared.rooms.expire(now_s)
        self.initiator.contacts.tick()
        if self._tick_s is None or now_s < self._tick_s:
            return
        self._tick_s = None
        self.shared.table.forget_ended()
        for pair in self.shared.table.idle_since(now_s - self._idle_s):
            self._end_idle(pair)
        if self._is_idle and not self._is_checked:
            self._is_checked = True
            try:
                self.check_integrity()
            except IntegrityError as exc:
                self._on_arrived(exc)
                raise

    def _next_s(self) -> float | None:
        """When something is due."""
        if self._tick_s is None and (self.shared.table.num_alive or not self._is_checked):
            self._tick_s = self.shared.clock() + TICK_S
        times = (self.shared.rooms.next_deadline_s, self.initiator.contacts.next_s, self._tick_s)
        return min((at_s for at_s in times if at_s is not None), default=None)
