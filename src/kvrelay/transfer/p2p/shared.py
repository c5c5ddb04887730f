"""What initiator and responder of one worker share. It belongs to the control thread, but for pool and windows."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from kvrelay.transfer.p2p.communicators import Communicator, Communicators, Task
from kvrelay.transfer.p2p.control import ControlThread
from kvrelay.transfer.p2p.messages import Message, Rendezvous
from kvrelay.transfer.p2p.pool_view import PoolView, empty_bytes
from kvrelay.transfer.p2p.process_group import PairGroup
from kvrelay.transfer.p2p.room import Reservation, RoomQueue
from kvrelay.transfer.windows import WindowTable

EAGER_BYTES = 32 * 1024
"""A message of at most so many bytes travels on the control connection: one wake-up instead of four."""
CHUNK_BYTES = 8 << 20
"""A larger transfer is cut. Each message costs two wake-ups on either side, so few large ones are cheapest."""


class Shared(msgspec.Struct):
    """``timeout_s``: the deadline of every wait for a peer's data. ``room_wait_s``: how long a PUT waits for room."""

    worker_id: str
    pool: PoolView
    windows: WindowTable
    table: Communicators
    rooms: RoomQueue
    control: ControlThread
    timeout_s: float
    room_wait_s: float
    end_idle: Callable[[Communicator], None]
    """Closes a communicator that nothing needs, whoever made it."""
    num_busy: int = 0
    num_failed: int = 0
    clock: Callable[[], float] = time.monotonic

    def make_room(self, reserved: int = 0) -> bool:
        """End idle communicators until another one fits, beside ``reserved`` others. False if too many are in use."""
        evicted = self.table.make_room(reserved)
        for pair in evicted or ():
            self.table.num_evicted += 1
            self.end_idle(pair)
        self.num_busy += evicted is None
        return evicted is not None

    def open_pair(
        self,
        name: str,
        peer_id: str,
        rank: int,
        send: Callable[[str, Message], object],
        on_failed: Callable[[Communicator, str], None],
    ) -> Communicator:
        """A communicator, in the table. ``send`` carries its keys to the peer; both functions run on the control
        thread."""
        pair = Communicator(
            name,
            peer_id,
            rank,
            device=self.pool.device,
            timeout_s=self.timeout_s,
            send_key=lambda key, value: self.control.call(send, peer_id, Rendezvous(name, key, value)),
            on_failed=lambda failed, error: self.control.call(on_failed, failed, error),
        )
        pair.used_s = self.clock()
        self.table.add(pair)
        return pair

    def staging(self, pair: Communicator, direction: str, slot: int, num_bytes: int) -> Any:
        """Memory of a lane to gather into: made at first use, freed with the communicator."""
        if (direction, slot) not in pair.staging:
            pair.staging[direction, slot] = empty_bytes(CHUNK_BYTES, self.pool.device, is_host=False)
        return pair.staging[direction, slot][:num_bytes]

    def receive(
        self,
        pair: Communicator,
        number: int,
        reservation: Reservation,
        scatter: Callable[[Any], None],
        moved: Callable[[str | None], object],
    ) -> None:
        """Data arrives in the room that is reserved for it; then ``scatter`` puts it into blocks, on the lane's thread.
        ``moved`` runs on the control thread."""
        landing = reservation.tensor

        def begin(group: Callable[[], PairGroup], slot: int) -> Any:
            nonlocal landing
            if reservation.is_spilled and not self.pool.is_host:
                # NCCL cannot reach that room.
                landing = self.staging(pair, "receive", slot, reservation.num_bytes)
            return group().receive(landing, number)

        def finish() -> None:
            if landing is not reservation.tensor:
                reservation.tensor.copy_(landing)
            scatter(reservation.tensor)

        pair.run("receive", Task(begin, partial(self.control.call, moved), finish))

    def is_eager(self, num_bytes: int) -> bool:
        """Whether so many bytes travel on the control connection."""
        return num_bytes <= EAGER_BYTES and self.pool.is_host
