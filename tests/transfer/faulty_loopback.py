"""The loopback transport with faults on request: posts that are late, lost, damaged, failed or out of order."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from dataclasses import dataclass

from kvrelay.transfer.base import Post
from kvrelay.transfer.loopback import LoopbackFabric, LoopbackTransport
from kvrelay.transfer.values import TransferOp


@dataclass(slots=True)
class LoopbackFaults:
    """The faults of one fabric; may be changed at any time.

    ``delay_polls``: number of the poster's polls before a post ends. ``fail_next``: number of next posts that fail
    without moving a byte. ``drop_next``: number of next posts that never end. ``corrupt_next``: number of next posts
    with bytes that end well, but with a flipped bit. ``reorder``: posts end in random order.
    """

    delay_polls: int = 0
    fail_next: int = 0
    drop_next: int = 0
    corrupt_next: int = 0
    reorder: bool = False


class FaultyFabric(LoopbackFabric):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.faults = LoopbackFaults()
        self.random = random.Random(seed)

    def transport(self, worker_id: str) -> FaultyTransport:
        return FaultyTransport(self, worker_id)


class FaultyTransport(LoopbackTransport):
    def __init__(self, fabric: FaultyFabric, worker_id: str) -> None:
        super().__init__(fabric, worker_id)
        self.fabric = fabric
        self.before: list[Callable[[Post], object]] = []
        """Called with each post before it moves its bytes."""
        self._polls_left: dict[int, int] = {}
        self._fails: set[int] = set()
        self._dropped: set[int] = set()

    def _begin(self, post: Post, peer: object) -> None:
        super()._begin(post, peer)
        faults, handle = self.fabric.faults, post.handle
        self._polls_left[handle] = faults.delay_polls
        if faults.fail_next:
            faults.fail_next -= 1
            self._fails.add(handle)
        elif faults.drop_next:
            faults.drop_next -= 1
            self._dropped.add(handle)

    def _take_due(self) -> list[Post]:
        for handle in self._polls_left:
            self._polls_left[handle] -= 1
        due = [post for post in self.posts if self._polls_left[post.handle] < 0 and post.handle not in self._dropped]
        self.posts = [post for post in self.posts if post not in due]
        if self.fabric.faults.reorder:
            self.fabric.random.shuffle(due)
        return due

    def _perform(self, post: Post) -> str | None:
        for hook in self.before:
            hook(post)
        if post.handle in self._fails:
            return "injected failure"
        error = super()._perform(post)
        if error is None and self.fabric.faults.corrupt_next and post.pieces.num_pieces:
            self.fabric.faults.corrupt_next -= 1
            self._flip_bit(post)
        return error

    def _flip_bit(self, post: Post) -> None:
        """Damage one of the pieces that have arrived."""
        is_write, pieces, draw = post.op is TransferOp.WRITE, post.pieces, self.fabric.random.randrange
        region = self.fabric.ends[post.worker_id if is_write else self._worker_id].region
        piece = draw(len(pieces.lengths))
        offset = (pieces.remote_offsets if is_write else pieces.local_offsets)[piece]
        at = region.address + int(offset) + draw(int(pieces.lengths[piece]))
        ctypes.c_ubyte.from_address(at).value ^= 1 << draw(8)
