"""Transport between workers of one host: each maps the other's pool and copies, without a call of the kernel per piece.

What it owns: the mapped pools of its peers, and the mailbox for notifications. What it does not know: how the pool was
allocated (``memory``), threads, retries, deadlines.

    P                                                  D
    add_peer: /proc/D/fd/pool ───────────────────────> memfd       both have it mapped
              /proc/D/fd/mailbox ────────────────────> pipe
    post: lock of P's byte in D's pool, copy, unlock;  poll: read the mailbox
          then the notification into the pipe

A post copies within the call, so it is complete when it returns, but for a notification that does not fit into the pipe
yet. What ``bar`` promises rests on the lock (``locks``): the kernel, not a clock, tells that a copier has stopped.
"""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Callable

import msgspec

from kvrelay.core.layout import MemoryRegion
from kvrelay.core.workers import KvMetadata
from kvrelay.errors import FatalError, TransferError
from kvrelay.transfer.base import Agent, Post, PostEnd, Transport
from kvrelay.transfer.pieces import MAX_NOTIFY_BYTES
from kvrelay.transfer.shm.host import Host, this_host
from kvrelay.transfer.shm.locks import WorkerLock
from kvrelay.transfer.shm.mailbox import Mailbox, Sender
from kvrelay.transfer.shm.memory import SharedPoolMemory, address_of
from kvrelay.transfer.values import Int64Array, TransferOp

CopyPieces = Callable[[int, Int64Array, int, Int64Array, Int64Array], None]
"""(address to write at, offsets there, address to read at, offsets there, lengths), all in bytes: ``shm.copying``."""


class ShmAgent(Agent, frozen=True):
    """What a peer has to know: ``KvMetadata.agent`` as msgpack. Descriptors are those of process ``pid``."""

    host: Host
    pid: int
    pool_fd: int
    pool_name: str
    pool_bytes: int
    offset: int
    mailbox_fd: int
    mailbox_inode: int


class _Peer:
    """A peer's pool and mailbox, open in this process."""

    def __init__(self, agent: ShmAgent, own_id: str) -> None:
        """Raises OSError or ValueError if they are not what ``agent`` says."""
        opened: list[int] = []
        try:
            opened.append(_open(agent.pid, agent.mailbox_fd, os.O_WRONLY | os.O_NONBLOCK, "pipe:"))
            if os.fstat(opened[0]).st_ino != agent.mailbox_inode:
                raise ValueError("its mailbox is another one")
            opened.append(_open(agent.pid, agent.pool_fd, os.O_RDWR, f"/memfd:{agent.pool_name} "))
            info = os.fstat(opened[1])
            if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid() or info.st_size != agent.pool_bytes:
                raise ValueError("its pool is another one")
            if not 0 <= agent.offset <= agent.pool_bytes - agent.num_bytes:
                raise ValueError("its pool does not lie within its memory")
            self._memory = mmap.mmap(opened[1], agent.pool_bytes)
        except BaseException:
            for fd in opened:
                os.close(fd)
            raise
        self._pool_fd = opened[1]
        self.sender = Sender(opened[0])
        self.lock = WorkerLock(opened[1], own_id)
        self.address = address_of(self._memory) + agent.offset
        self.num_bytes = agent.num_bytes

    def close(self) -> list[int]:
        """Unmap and close everything; handles of notifications that were not sent."""
        unsent = self.sender.close()
        self._memory.close()
        os.close(self._pool_fd)
        return unsent


class ShmTransport(Transport):
    """One worker's end. Contract: ``transfer.base.Transport``. ``copy``: for tests that stop in the middle."""

    name = "shm"
    has_bar = True

    def __init__(self, memory: SharedPoolMemory, worker_id: str, copy: CopyPieces | None = None) -> None:
        super().__init__(worker_id)
        self._memory = memory
        self.copy = copy
        self._host = this_host()
        self._mailbox: Mailbox | None = None
        self._peers: dict[str, _Peer] = {}

    def _open(self, region: MemoryRegion) -> bytes:
        """Open the mailbox, compile the copy."""
        if self._host is None:
            raise FatalError("transport shm: the kernel does not tell which host this is (/proc)")
        offset = self._memory.offset_of(region)
        try:
            lock = WorkerLock(self._memory.fd, self._worker_id)
            if lock.take():
                lock.release()
            self._mailbox = Mailbox(MAX_NOTIFY_BYTES)
            self.wake_fds = (self._mailbox.read_fd,)
        except OSError as exc:
            raise FatalError(f"transport shm: this kernel has no locks or pipes for us: {exc}") from exc
        if self.copy is None:
            from kvrelay.transfer.shm.copying import copy_pieces

            self.copy = copy_pieces
        return msgspec.msgpack.encode(
            ShmAgent(
                worker_id=self._worker_id,
                host=self._host,
                pid=os.getpid(),
                pool_fd=self._memory.fd,
                pool_name=self._memory.name,
                pool_bytes=self._memory.num_bytes,
                offset=offset,
                num_bytes=region.num_bytes,
                mailbox_fd=self._mailbox.write_fd,
                mailbox_inode=self._mailbox.inode,
            )
        )

    def _connect(self, metadata: KvMetadata) -> _Peer:
        worker_id = metadata.worker_id
        agent = ShmAgent.of(metadata)
        if agent.host != self._host:
            raise TransferError(f"worker {worker_id} is on another host ({agent.host})", peer=worker_id)
        try:
            return _Peer(agent, self._worker_id)
        except (OSError, ValueError) as exc:
            raise TransferError(f"cannot map the memory of worker {worker_id}: {exc}", peer=worker_id) from exc

    def _disconnect(self, worker_id: str, peer: _Peer) -> None:
        self._fail(peer.close(), f"worker {worker_id} was disconnected")

    def _begin(self, post: Post, peer: _Peer) -> None:
        error = self._move(post, peer)
        if error is not None:
            self._fail([post.handle], f"worker {post.worker_id} {error}")
        elif post.notify is None:
            self._ended.append(PostEnd(post.handle, None))
        else:
            peer.sender.send(post.handle, post.notify)
            self._flush(post.worker_id, peer)

    def poll(self) -> tuple[list[PostEnd], list[bytes]]:
        for worker_id, peer in self._peers.items():
            if peer.sender.num_pending:
                self._flush(worker_id, peer)
        received = self._mailbox.receive() if self._mailbox is not None else []
        return self._take_ended(), received

    @property
    def num_pending(self) -> int:
        return len(self._ended) + sum(peer.sender.num_pending for peer in self._peers.values())

    def bar(self, worker_id: str) -> bool:
        return self._region is None or WorkerLock(self._memory.fd, worker_id).take()

    def admit(self, worker_id: str) -> None:
        if self._region is not None:
            WorkerLock(self._memory.fd, worker_id).release()

    def close(self) -> None:
        """Unmap the peers' pools, close the mailbox. The own pool stays: its memory has other owners. Idempotent."""
        super().close()
        if self._mailbox is not None:
            self._mailbox.close()
        self._mailbox = self._region = None
        self.wake_fds = ()

    def _move(self, post: Post, peer: _Peer) -> str | None:
        """Copy all pieces under the lock; why not, if not."""
        region, pieces = self._region, post.pieces
        assert self.copy is not None
        assert region is not None
        if not peer.sender.has_reader:
            return "is gone"
        if not peer.lock.share():
            return "keeps its memory from us: our lease has ended, as far as it knows"
        try:
            if post.op is TransferOp.WRITE:
                sides = (peer.address, pieces.remote_offsets, region.address, pieces.local_offsets)
            else:
                sides = (region.address, pieces.local_offsets, peer.address, pieces.remote_offsets)
            self.copy(*sides, pieces.lengths)
        finally:
            peer.lock.release()
        return None

    def _flush(self, worker_id: str, peer: _Peer) -> None:
        try:
            self._ended += [PostEnd(handle, None) for handle in peer.sender.flush()]
        except OSError as exc:
            self._fail(peer.sender.drop(), f"worker {worker_id} is gone: {exc}")


def _open(pid: int, fd: int, flags: int, kind: str) -> int:
    """Another process's descriptor as an open file of our own. Raises OSError, or ValueError if it is not ``kind``.

    A number may belong to another process by now; what does not look right is not even opened, and what was opened is
    looked at again.
    """
    path = f"/proc/{pid}/fd/{fd}"
    if not os.readlink(path).startswith(kind):
        raise ValueError(f"{path} is not {kind.strip()}")
    opened = os.open(path, flags | os.O_CLOEXEC)
    if not os.readlink(f"/proc/self/fd/{opened}").startswith(kind):
        os.close(opened)
        raise ValueError(f"{path} is not {kind.strip()}")
    return opened
