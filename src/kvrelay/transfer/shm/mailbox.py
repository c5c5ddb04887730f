"""Notifications between processes of one host, through a pipe that every peer opens for writing.

    frame = magic | sender | message | total bytes | offset | bytes in this frame | payload       at most PIPE_BUF bytes

The kernel writes a frame whole or not at all, so that senders never mix, and one that is killed or stopped between two
frames blocks no one. A pipe whose reader is gone says so at once. Nobody waits: what does not fit is sent later.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import secrets
import select
import struct
from collections import deque
from collections.abc import Iterator

from kvrelay.core.latest import Latest

MAX_SENDERS = 256
"""Messages that are under way at once; of more the oldest is given up."""
PIPE_BYTES = 1 << 20
_HEADER = struct.Struct("<IQQIII")
_MAGIC = 0x4B565231
_FRAME_BYTES = select.PIPE_BUF
_CHUNK_BYTES = _FRAME_BYTES - _HEADER.size

_log = logging.getLogger(__name__)


class Mailbox:
    """The reader's end."""

    def __init__(self, max_message_bytes: int) -> None:
        self._max_bytes = max_message_bytes
        self.read_fd, self.write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        # Smaller is slower, not wrong: the user's share of pipe memory may be used up.
        with contextlib.suppress(OSError):
            fcntl.fcntl(self.read_fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self.inode = os.fstat(self.write_fd).st_ino
        self._rest = b""
        self._partial: Latest[int, tuple[int, bytearray]] = Latest(MAX_SENDERS)
        """Of each sender the message that is under way, and what has come of it."""

    def receive(self) -> list[bytes]:
        """Messages that are complete, in the order of their last frames."""
        if self.read_fd < 0:
            return []
        try:
            data = self._rest + os.read(self.read_fd, PIPE_BYTES)
        except BlockingIOError:
            return []
        return list(self._messages(data))

    def _messages(self, data: bytes) -> Iterator[bytes]:
        at = 0
        while len(data) - at >= _HEADER.size:
            magic, sender, number, total, offset, length = _HEADER.unpack_from(data, at)
            if magic != _MAGIC or length > _CHUNK_BYTES or total > self._max_bytes:
                _log.error("the notifications in the mailbox are damaged: %d bytes are dropped", len(data) - at)
                self._rest = b""
                return
            end = at + _HEADER.size + length
            if end > len(data):
                break
            message = self._assemble(sender, number, total, offset, data[at + _HEADER.size : end])
            at = end
            if message is not None:
                yield message
        self._rest = data[at:]

    def _assemble(self, sender: int, number: int, total: int, offset: int, chunk: bytes) -> bytes | None:
        known = self._partial.pop(sender, None)
        if offset == 0:
            known = (number, bytearray())
        if known is None or known[0] != number or len(known[1]) != offset:
            return None  # its beginning was dropped
        known[1].extend(chunk)
        if len(known[1]) >= total:
            return bytes(known[1])
        self._partial[sender] = known
        return None

    def close(self) -> None:
        """Senders are told that we are gone. Idempotent."""
        if self.read_fd >= 0:
            os.close(self.read_fd)
            os.close(self.write_fd)
            self.read_fd = self.write_fd = -1


class Sender:
    """A writer's end, over a descriptor that it then owns."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._id = secrets.randbits(64)
        self._number = 0
        self._queue: deque[tuple[int, Iterator[bytes], bytes]] = deque()
        """Handle, further frames, next frame."""
        self._poll = select.poll()
        self._poll.register(fd, 0)

    @property
    def has_reader(self) -> bool:
        """False once the other end is closed, or its process has ended."""
        return not self._poll.poll(0)

    @property
    def num_pending(self) -> int:
        return len(self._queue)

    def send(self, handle: int, message: bytes) -> None:
        """Queue it; ``flush`` gives the handle back when it is on its way."""
        frames = self._frames(self._number, message)
        self._number += 1
        self._queue.append((handle, frames, next(frames)))

    def flush(self) -> list[int]:
        """Handles of messages that the kernel has taken since. Raises BrokenPipeError when no one reads any more."""
        sent = []
        while self._queue:
            handle, frames, frame = self._queue[0]
            try:
                os.write(self._fd, frame)
            except OSError as exc:
                if exc.errno == errno.EAGAIN:
                    break
                raise
            following = next(frames, None)
            if following is None:
                self._queue.popleft()
                sent.append(handle)
            else:
                self._queue[0] = (handle, frames, following)
        return sent

    def drop(self) -> list[int]:
        """Send no more of what is queued; gives its handles."""
        unsent = [handle for handle, _, _ in self._queue]
        self._queue.clear()
        return unsent

    def close(self) -> list[int]:
        """The same, for good."""
        os.close(self._fd)
        return self.drop()

    def _frames(self, number: int, message: bytes) -> Iterator[bytes]:
        for offset in range(0, max(len(message), 1), _CHUNK_BYTES):
            chunk = message[offset : offset + _CHUNK_BYTES]
            yield _HEADER.pack(_MAGIC, self._id, number, len(message), offset, len(chunk)) + chunk
