"""Shared memory to peers on this host, NIXL to the others.

It owns the choice, made anew at each ``add_peer``. Both transports are registered if both can be; a worker that has
only one says so in its log, and its peers use that one.
"""

from __future__ import annotations

import logging

import msgspec

from kvrelay.core.decoding import UNREADABLE
from kvrelay.core.layout import MemoryRegion
from kvrelay.core.workers import KvMetadata
from kvrelay.errors import FatalError, TransferError
from kvrelay.transfer.base import Post, PostEnd, Transport

_log = logging.getLogger(__name__)


class _Route(msgspec.Struct, frozen=True):
    """The transport that reaches a peer, and the peer's pool."""

    name: str
    num_bytes: int


class AutoTransport(Transport):
    """One worker's end. Contract: ``transfer.base.Transport``. ``choices``: by name, the best first."""

    name = "auto"
    has_bar = True

    def __init__(self, worker_id: str, choices: dict[str, Transport]) -> None:
        super().__init__(worker_id)
        self.late_s = max(transport.late_s for transport in choices.values())
        self._choices = choices
        self._usable: dict[str, Transport] = {}
        self._handles: dict[tuple[str, int], int] = {}
        """Our handles, by transport and its own handle."""
        self._peers: dict[str, _Route] = {}

    def route(self, worker_id: str) -> str | None:
        """Name of the transport that reaches the peer."""
        route = self._peers.get(worker_id)
        return None if route is None else route.name

    def poll(self) -> tuple[list[PostEnd], list[bytes]]:
        completions, notifications = [], []
        for name, transport in self._usable.items():
            ended, arrived = transport.poll()
            completions += [
                msgspec.structs.replace(each, handle=self._handles.pop((name, each.handle), each.handle))
                for each in ended
            ]
            notifications += arrived
        return completions, notifications

    @property
    def num_pending(self) -> int:
        return sum(transport.num_pending for transport in self._usable.values())

    def bar(self, worker_id: str) -> bool:
        # Every one of them is told, whatever the first says.
        return all([transport.bar(worker_id) for transport in self._usable.values()])

    def admit(self, worker_id: str) -> None:
        for transport in self._usable.values():
            transport.admit(worker_id)

    def close(self) -> None:
        for transport in self._choices.values():
            transport.close()
        self._peers.clear()

    def _open(self, region: MemoryRegion) -> bytes:
        """Raises FatalError if no transport can be used; of the others the log tells why not."""
        agents = {}
        refusals = []
        for name, transport in self._choices.items():
            try:
                agents[name] = transport.register(region)
            except FatalError as exc:
                _log.warning("transport %s is not used: %s", name, exc.message)
                refusals.append(exc.message)
            else:
                self._usable[name] = transport
        if not agents:
            raise FatalError(f"no transport can be used: {'; '.join(refusals)}")
        wake_fds = [transport.wake_fds for transport in self._usable.values()]
        self.wake_fds = sum(wake_fds, ()) if all(wake_fds) else ()
        return msgspec.msgpack.encode(agents)

    def _connect(self, metadata: KvMetadata) -> _Route:
        worker_id = metadata.worker_id
        try:
            agents = msgspec.msgpack.decode(metadata.agent, type=dict[str, bytes])
        except UNREADABLE as exc:
            raise TransferError(f"the metadata of worker {worker_id} is damaged: {exc}", peer=worker_id) from exc
        refusal = f"worker {worker_id} has no transport in common with us"
        for name, transport in self._usable.items():
            if name not in agents:
                continue
            try:
                transport.add_peer(msgspec.structs.replace(metadata, transport=name, agent=agents[name]))
            except TransferError as exc:
                _log.debug("worker %s is not reached by %s: %s", worker_id, name, exc.message)
                refusal = exc.message
                continue
            return _Route(name, metadata.num_bytes)
        raise TransferError(refusal, peer=worker_id)

    def _disconnect(self, worker_id: str, peer: _Route) -> None:
        self._usable[peer.name].remove_peer(worker_id)

    def _begin(self, post: Post, peer: _Route) -> None:
        handle = self._usable[peer.name].forward(post)
        self._handles[peer.name, handle] = post.handle
