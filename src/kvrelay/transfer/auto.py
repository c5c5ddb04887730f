"""Shared memory to peers on this host, NIXL to the others.

It owns the choice, made anew at each ``add_peer``. Both transports are registered if both can be; a worker that has
only one says so in its log, and its peers use that one.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import msgspec

from kvrelay.core.decoding import UNREADABLE
from kvrelay.core.layout import MemoryRegion
from kvrelay.core.workers import KvMetadata
from kvrelay.errors import FatalError, TransferError
from kvrelay.transfer.base import Notification, OneSided, PostEnd, Transport
from kvrelay.transfer.values import GrantRef, Pieces, TransferOp

_log = logging.getLogger(__name__)


class AutoTransport(OneSided):
    """One worker's end. Contract: ``transfer.base.Transport``. ``choices``: by name, the best first."""

    name = "auto"
    has_bar = True

    def __init__(self, worker_id: str, choices: dict[str, Transport]) -> None:
        self._worker_id = worker_id
        self._choices = choices
        self._usable: dict[str, Transport] = {}
        self._peers: dict[str, str] = {}
        """Name of the transport that reaches each."""

    def __repr__(self) -> str:
        return f"<AutoTransport {self._worker_id}: {self._peers}>"

    def route(self, worker_id: str) -> str | None:
        """Name of the transport that reaches the peer."""
        return self._peers.get(worker_id)

    def register(self, region: MemoryRegion) -> bytes:
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
        return msgspec.msgpack.encode(agents)

    def add_peer(self, metadata: KvMetadata) -> None:
        worker_id = metadata.worker_id
        try:
            agents = msgspec.msgpack.decode(metadata.agent, type=dict[str, bytes])
        except UNREADABLE as exc:
            raise TransferError(f"the metadata of worker {worker_id} is damaged: {exc}", peer=worker_id) from exc
        self.remove_peer(worker_id)
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
            self._peers[worker_id] = name
            return
        raise TransferError(refusal, peer=worker_id)

    def remove_peer(self, worker_id: str) -> None:
        name = self._peers.pop(worker_id, None)
        if name is not None:
            self._usable[name].remove_peer(worker_id)

    def has_peer(self, worker_id: str) -> bool:
        name = self._peers.get(worker_id)
        return name is not None and self._usable[name].has_peer(worker_id)

    def post(
        self,
        op: TransferOp,
        worker_id: str,
        pieces: Pieces,
        notify: bytes | None = None,
        grant: GrantRef | None = None,
    ) -> int:
        name = self._peers.get(worker_id)
        if name is None:
            raise TransferError(f"worker {worker_id} is not connected", peer=worker_id)
        return self._own_handle(name, self._usable[name].post(op, worker_id, pieces, notify, grant))

    def poll(self) -> tuple[list[PostEnd], list[Notification]]:
        completions, notifications = [], []
        for name, transport in self._usable.items():
            ended, arrived = transport.poll()
            completions += [replace(each, handle=self._own_handle(name, each.handle)) for each in ended]
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

    def _own_handle(self, name: str, handle: int) -> int:
        """Handles of several transports without a clash."""
        return handle * len(self._choices) + list(self._choices).index(name)
