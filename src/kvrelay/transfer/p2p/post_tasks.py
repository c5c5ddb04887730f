"""The tasks of the posting end: copy bytes out of blocks, send them, or receive those of a read.

They run on a lane's thread (``pairs``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

from kvrelay.transfer.p2p.groups import PairGroup
from kvrelay.transfer.p2p.posts import Part
from kvrelay.transfer.p2p.tasks import Mover, MoveTask, ReceiveTask, staging


class Poster(Mover, Protocol):
    """The initiator, as its tasks see it."""

    @property
    def post_lock(self) -> threading.Lock: ...

    def kept(self, item: Part, error: str | None) -> None: ...


class KeepTask(MoveTask[Poster, Part]):
    """GET: copy the bytes out of the blocks."""

    def begin(self, group: Callable[[], PairGroup], slot: int) -> None:
        item = self._item
        assert item.reservation is not None
        self._owner.shared.pool.gather(item.plan.local_offsets, item.plan.lengths, item.reservation.tensor)

    def ended(self, error: str | None) -> None:
        self._owner.shared.control.call(self._owner.kept, self._item, error)


class SendTask(MoveTask[Poster, Part]):
    """Data of a Put: from the copy, from the one run of bytes that it is, or gathered."""

    def begin(self, group: Callable[[], PairGroup], slot: int) -> Any:
        item, shared = self._item, self._owner.shared
        assert item.pair is not None
        offsets, lengths = item.plan.local_offsets, item.plan.lengths
        if item.reservation is not None:
            tensor = item.reservation.tensor
            if item.reservation.is_spilled and not shared.pool.is_host:
                tensor = staging(item.pair, "send", slot, shared)[: item.num_bytes].copy_(tensor)
        else:
            tensor = shared.pool.run(offsets, lengths)
            if tensor is None:
                tensor = staging(item.pair, "send", slot, shared)[: item.num_bytes]
                shared.pool.gather(offsets, lengths, tensor)
        return group().send(tensor, item.number)


class ReadTask(ReceiveTask[Poster, Part]):
    """Data of a Get: into room of ours, then into our blocks unless the post was given up."""

    def scatter(self, tensor: Any) -> None:
        item = self._item
        with self._owner.post_lock:
            if not item.post.is_over:
                self._owner.shared.pool.scatter(tensor, item.plan.local_offsets, item.plan.lengths)
