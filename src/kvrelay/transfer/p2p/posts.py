"""What the posting end has open: posts, the messages that they are cut into, and the peers that they go to.

Values and marks only; ``initiator`` moves them.
"""

from __future__ import annotations

import enum
import threading
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from kvrelay.errors import IntegrityError
from kvrelay.transfer.base import Post
from kvrelay.transfer.values import Pieces, TransferOp

if TYPE_CHECKING:
    from kvrelay.transfer.p2p.communicators import Communicator
    from kvrelay.transfer.p2p.room import Reservation


class SentPost(Post, eq=False):
    """``is_over``: completed, or given up (under ``Initiator.post_lock``). ``is_refused``: all its errors are refusals
    of the peer, and the connection is good."""

    num_parts: int = 0
    num_left: int = 0
    error: str | None = None
    is_refused: bool = True
    is_over: bool = False
    ended: threading.Event = msgspec.field(default_factory=threading.Event)


Arrival = SentPost | bytes | IntegrityError
"""A post that has ended, a notification, or the news that bytes of buffer or pool are lost or used twice: nothing can
be trusted any more."""


class State(enum.Enum):
    """Of a message."""

    WAITING = "waiting"
    """For a communicator, the window, or room of our own."""
    OFFERED = "offered"
    ACCEPTED = "accepted"


class Part(msgspec.Struct, eq=False):
    """One message of a post. ``is_busy``: a task of it is queued or runs. ``is_kept`` (GET): the bytes are copied."""

    number: int
    post: SentPost
    peer: PostPeer
    pieces: Pieces
    num_bytes: int
    state: State = State.WAITING
    pair: Communicator | None = None
    reservation: Reservation | None = None
    is_busy: bool = False
    is_kept: bool = False
    is_landed: bool = False
    error: str | None = None
    is_refused: bool = False


class PostPeer(msgspec.Struct, eq=False):
    """A worker that we post to. ``connecting``: the communicator that it was asked for. ``retry_s``: when to ask
    again."""

    max_message_bytes: int
    pair: Communicator | None = None
    connecting: str = ""
    retry_s: float | None = None
    waiting: deque[Part] = msgspec.field(default_factory=deque)
    num_offered: int = 0
    is_pumping: bool = False


def rides(post: SentPost) -> bytes | None:
    """The notification, if the post's only message carries it."""
    return post.notify if post.num_parts == 1 and post.op is TransferOp.WRITE else None
