"""Transport over NIXL and UCX: cross-memory attach on one host, TCP between hosts; RDMA by ``ucx_tls``, or by
UCX's own choice for pools on GPUs.

It owns one NIXL agent, its registered pool and its connections. It does not know threads (its caller has one), retries
or deadlines.

Experience that this module encodes (measured on a 2-core machine):
  - NIXL's progress thread spins, so it is off; ``poll`` makes the progress, on both sides. A write behind a
    notification completes only when the peer's UCX has taken the notification, so the peer must poll soon.
  - Between processes the bytes go by cross-memory attach and all else by TCP, also on one host: UCX does not let shared
    memory carry messages that must fail with their peer. What arrives by TCP makes UCX's own epolls readable, by which
    the transfer thread is woken.
  - On one host ``post`` copies within the call (10 GB/s, with the GIL released), so the post is complete on return.
  - UCX's default transports are 2 to 3 times slower for memory of the host than ``CPU_TRANSPORTS``. TCP stays in the
    list on one host too: only it notices that a peer died.
  - To learn when memory is unmapped UCX rewrites the C library's functions while it starts, 5 ms each in which it and
    every thread that calls one spin: 0.4 s in all. ``CPU_TRANSPORTS`` remember no memory, so they have it off.
  - Descriptors are address, length, device in an array of integers: 100 us per 1,000, so none are prepared in advance.
  - An agent that lost a peer may abort the process when it is destroyed. Such an agent stays until the process ends.
A limit of one-sided transfers: ``remove_peer`` closes connections, but nothing on this side can stop a copy that the
peer's kernel has begun. Such a copy lasts milliseconds (``thread.MAX_POST_BYTES``), and the peer begins none past its
deadline. Reuse of memory after the end of a peer's lease relies on that. By TCP, bytes that lie in sockets when a
connection is torn down land when the peer polls next; who may reuse the memory waits for ``LATE_S``.
Only the low-level binding is used; it needs no torch, and nothing is pickled.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import time
from typing import Any

import numpy as np
import xxhash

from kvrelay.config import TransferConfig
from kvrelay.core.layout import MemoryRegion
from kvrelay.core.workers import KvMetadata
from kvrelay.errors import FatalError, TransferError
from kvrelay.transfer.base import Post, PostEnd, Transport
from kvrelay.transfer.packing import NIXL_RULE, PackingBuffer
from kvrelay.transfer.values import Int64Array, TransferOp

CPU_TRANSPORTS = "cma,self,tcp"
"""Only TCP brings work for ``poll``."""
LATE_S = 1.0
"""Far longer than a peer that runs takes to read its sockets. One that stands still for longer may find bytes there."""
_EAGER_POLLS = 16
_SETTLE_POLLS = 50
_SETTLE_PAUSE_S = 0.001
_SEAL = b"kvrelay-nixl-1:"


class NixlTransport(Transport):
    """One worker's end. Contract: ``transfer.base.Transport``. The agent is made by ``register``."""

    name = "nixl"
    late_s = LATE_S

    def __init__(self, config: TransferConfig, worker_id: str) -> None:
        super().__init__(worker_id)
        self._ucx_tls = config.ucx_tls
        self._ucx_net_devices = config.ucx_net_devices
        self._poll_interval_s = config.poll_interval_s
        self._nixl: Any = None
        self._agent: Any = None
        self._backend: list[int] = []
        self._errors: tuple[type[Exception], ...] = ()
        self._registered: Any = None
        self._buffers: list[Any] = []
        self._in_flight: dict[int, tuple[str, int]] = {}
        self._arrivals = select.poll()
        """For ``wake_fds``, which are UCX's epolls."""
        self._num_in_vain = 0
        """Polls that left something to be read."""
        self._lost_a_peer = False
        self.rule = NIXL_RULE
        """When small pieces go by way of a buffer; changed by measurements only."""
        self.staging: PackingBuffer | None = None
        """For memory of the host, once the pool is registered."""

    def _open(self, region: MemoryRegion) -> bytes:
        """Make the agent and pin the pool; returns the blob with which peers connect."""
        self._load(region.device)
        try:
            settings = self._nixl.nixlAgentConfig()
            settings.useProgThread = False
            settings.useListenThread = False
            settings.syncMode = self._nixl.NIXL_THREAD_SYNC_NONE
            settings.captureTelemetry = False
            self._agent = self._nixl.nixlAgent(self._worker_id, settings)
            others = epoll_fds()
            self._backend = [self._agent.createBackend("UCX", {})]
            if set(os.environ.get("UCX_TLS", "all").split(",")) <= set(CPU_TRANSPORTS.split(",")):
                # Should another thread open an epoll just now, it wakes us up in vain.
                self.wake_fds = tuple(epoll_fds() - others)
            for fd in self.wake_fds:
                self._arrivals.register(fd, select.POLLIN)
            row = (region.address, region.num_bytes, region.device_id, "")
            self._registered = self._nixl.nixlRegDList(self._segment(region.device), [row])
            self._agent.registerMem(self._registered, self._backend)
            blob = seal(bytes(self._agent.getLocalMD()))
            if region.device == "cpu":
                self.staging = PackingBuffer(self._register_buffer)
            return blob
        except self._errors as exc:
            names = ("UCX_TLS", "UCX_NET_DEVICES")
            asked = ", ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ)
            raise FatalError(
                f"NIXL cannot register the KV pool ({region.num_bytes} bytes on {region.device}): {exc}; it was asked "
                f"for {asked or 'any transport'} (--ucx-tls, --ucx-net-devices)"
            ) from exc

    def _connect(self, metadata: KvMetadata) -> KvMetadata:
        worker_id = metadata.worker_id
        blob = unseal(metadata.agent)
        if blob is None:
            raise TransferError(f"the metadata of worker {worker_id} is damaged", peer=worker_id)
        try:
            loaded = self._agent.loadRemoteMD(blob)
        except self._errors as exc:
            self._invalidate(worker_id)
            raise TransferError(f"cannot connect to worker {worker_id}: {exc}", peer=worker_id) from exc
        if loaded != worker_id.encode():
            self._invalidate(loaded.decode("utf-8", "replace"))
            raise TransferError(f"the metadata of worker {worker_id} is another worker's", peer=worker_id)
        return metadata

    def _disconnect(self, worker_id: str, peer: KvMetadata) -> None:
        for handle, (name, request) in list(self._in_flight.items()):
            if name == worker_id:
                self._lost_a_peer = True
                self._end(handle, request, f"worker {worker_id} was disconnected")
        self._invalidate(worker_id)

    def _begin(self, post: Post, peer: KvMetadata) -> None:
        try:
            if post.pieces.num_pieces:
                self._start(post, peer)
            else:
                if post.notify is not None:
                    self._agent.genNotif(post.worker_id, post.notify, self._backend)
                self._ended.append(PostEnd(post.handle, None))
        except self._errors as exc:
            self._lost_a_peer = True
            if self.staging is not None:
                self.staging.give_back(post.handle, is_complete=False)
            self._ended.append(PostEnd(post.handle, f"worker {post.worker_id}: {exc}"))

    def poll(self) -> tuple[list[PostEnd], list[bytes]]:
        if self._agent is None:
            return [], []
        for handle, (worker_id, request) in list(self._in_flight.items()):
            try:
                state = self._agent.getXferStatus(request)
            except self._errors as exc:
                self._lost_a_peer = True
                self._end(handle, request, f"worker {worker_id}: {exc}")
                continue
            if state == self._nixl.NIXL_SUCCESS:
                self._end(handle, request, None)
            elif state != self._nixl.NIXL_IN_PROG:
                self._lost_a_peer = True
                self._end(handle, request, f"worker {worker_id}: {state}")
        notifications = self._collect_notifications()
        self._num_in_vain = self._num_in_vain + 1 if self._arrivals.poll(0) else 0
        if self._num_in_vain > _EAGER_POLLS:
            # A thread of UCX has to run first, as at a device's first connection.
            time.sleep(self._poll_interval_s)
        return self._take_ended(), notifications

    @property
    def num_pending(self) -> int:
        return len(self._in_flight) + len(self._ended)

    def close(self) -> None:
        """Disconnect, unpin the pool, end the agent. Idempotent."""
        if self._agent is None:
            return
        super().close()
        # Disconnecting is asynchronous; UCX requires its end before its memory and its worker are destroyed.
        for _ in range(_SETTLE_POLLS if self._lost_a_peer else 2):
            self._collect_notifications()
            time.sleep(_SETTLE_PAUSE_S)
        if self._region is not None:
            try:
                for registered in (self._registered, *self._buffers):
                    self._agent.deregisterMem(registered, self._backend)
            except self._errors:
                self._lost_a_peer = True
        if self._lost_a_peer:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._agent))
        if self.staging is not None:
            self.staging.close()
        self._agent = None
        self._region = None
        self.wake_fds = ()

    def _register_buffer(self, address: int, num_bytes: int) -> None:
        """Not in the blob that peers get, so that they cannot reach it. Raises FatalError."""
        try:
            row = self._nixl.nixlRegDList(self._nixl.DRAM_SEG, [(address, num_bytes, 0, "")])
            self._agent.registerMem(row, self._backend)
        except self._errors as exc:
            raise FatalError(f"NIXL cannot register a buffer of {num_bytes} bytes: {exc}") from exc
        self._buffers.append(row)

    def _load(self, device: str) -> None:
        """Import NIXL. UCX and NIXL read the variables when they are loaded and when an agent is made."""
        if self._ucx_tls != "auto":
            os.environ["UCX_TLS"] = self._ucx_tls
        elif device == "cpu":
            os.environ["UCX_TLS"] = CPU_TRANSPORTS
            os.environ.setdefault("UCX_MEM_EVENTS", "n")
        if self._ucx_net_devices != "auto":
            os.environ["UCX_NET_DEVICES"] = self._ucx_net_devices
        # Every failure reaches us as a status or an exception; the libraries' lines on stderr would repeat it.
        os.environ["UCX_LOG_LEVEL"] = "fatal"
        os.environ["NIXL_LOG_LEVEL"] = "FATAL"
        # Else SIGHUP, which ends a worker, would be UCX's: from then on it logs at level debug.
        os.environ.setdefault("UCX_DEBUG_SIGNO", "0")
        try:
            from nixl_cu13 import _bindings
        except ImportError as exc:
            raise FatalError(f"transport nixl needs the package nixl-cu13: {exc}") from exc
        self._nixl = _bindings
        named = [getattr(_bindings, name) for name in dir(_bindings) if name.endswith("Error")]
        self._errors = (*(cls for cls in named if issubclass(cls, Exception)), RuntimeError)

    def _segment(self, device: str) -> Any:
        return self._nixl.DRAM_SEG if device == "cpu" else self._nixl.VRAM_SEG

    def _start(self, post: Post, peer: KvMetadata) -> None:
        region, pieces = self._region, post.pieces
        assert region is not None
        address = region.address
        staged = None if self.staging is None else self.staging.take(post.handle, post.op, address, pieces, self.rule)
        if staged is not None:
            pieces, address = staged
        request = self._agent.createXferReq(
            self._nixl.NIXL_WRITE if post.op is TransferOp.WRITE else self._nixl.NIXL_READ,
            self._descriptors(region.device, address, region.device_id, pieces.local_offsets, pieces.lengths),
            self._descriptors(peer.device, peer.address, peer.device_id, pieces.remote_offsets, pieces.lengths),
            peer.worker_id,
            post.notify or b"",
            self._backend,
        )
        try:
            state = self._agent.postXferReq(request)
        except self._errors:
            self._release(request)
            raise
        if state == self._nixl.NIXL_SUCCESS:
            self._end(post.handle, request, None)
        else:
            self._in_flight[post.handle] = (peer.worker_id, request)

    def _descriptors(self, device: str, address: int, device_id: int, offsets: Int64Array, lengths: Int64Array) -> Any:
        rows = np.empty((len(offsets), 3), dtype=np.uint64)
        rows[:, 0] = offsets
        rows[:, 0] += np.uint64(address)
        rows[:, 1] = lengths
        rows[:, 2] = device_id
        return self._nixl.nixlXferDList(self._segment(device), rows)

    def _end(self, handle: int, request: int, error: str | None) -> None:
        self._in_flight.pop(handle, None)
        self._release(request)
        if self.staging is not None:
            self.staging.give_back(handle, is_complete=error is None)
        self._ended.append(PostEnd(handle, error))

    def _release(self, request: int) -> None:
        try:
            self._agent.releaseXferReq(request)
        except self._errors:
            # NIXL cannot cancel the request and keeps it. The peer is being removed.
            self._lost_a_peer = True

    def _invalidate(self, name: str) -> None:
        """Make NIXL forget a peer, if NIXL knows it."""
        with contextlib.suppress(*self._errors):
            self._agent.invalidateRemoteMD(name)

    def _collect_notifications(self) -> list[bytes]:
        try:
            by_peer = self._agent.getNotifs({})
        except self._errors:
            return []
        return [bytes(payload) for payloads in by_peer.values() for payload in payloads]


def epoll_fds() -> set[int]:
    """The open epolls of this process. Other threads may open and close files meanwhile."""
    found = set()
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.readlink(f"/proc/self/fd/{name}") == "anon_inode:[eventpoll]":
                found.add(int(name))
    return found


def seal(blob: bytes) -> bytes:
    """NIXL's blob with a checksum: a damaged blob would leave half a peer in the agent, which nothing can remove."""
    return _SEAL + xxhash.xxh3_64_digest(blob) + blob


def unseal(sealed: bytes) -> bytes | None:
    """The sealed blob, or None if it is damaged."""
    digest, blob = sealed[len(_SEAL) : len(_SEAL) + 8], sealed[len(_SEAL) + 8 :]
    return blob if sealed.startswith(_SEAL) and digest == xxhash.xxh3_64_digest(blob) else None
