"""Communicators with the workers that we post to: made at first contact, bounded, closed, and made again.

Handlers run on the control thread. ``initiator`` decides what is offered on them.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable

import msgspec

from kvrelay.transfer.p2p.communicators import Communicator
from kvrelay.transfer.p2p.messages import Close, CommunicatorMade, CommunicatorRefused, Connect, Rendezvous
from kvrelay.transfer.p2p.posts import Part, PostPeer, State
from kvrelay.transfer.p2p.shared import Shared

RETRY_S = 0.05
"""Before a peer that had no communicator left is asked again."""

_log = logging.getLogger(__name__)


class Contacts(msgspec.Struct, eq=False):
    """``peers`` and ``parts`` are the initiator's. ``go_on(worker_id, peer)``: offer what waits. ``land(part, error)``:
    end a message."""

    _shared: Shared
    _peers: dict[str, PostPeer]
    _parts: dict[int, Part]
    _go_on: Callable[[str, PostPeer], None]
    _land: Callable[[Part, str], None]

    @property
    def num_connecting(self) -> int:
        return sum(bool(peer.connecting) for peer in self._peers.values())

    def handle(
        self, worker_id: str, peer: PostPeer, message: CommunicatorMade | CommunicatorRefused | Rendezvous | Close
    ) -> None:
        """What a peer says of a communicator. What makes no sense changes nothing."""
        match message:
            case CommunicatorMade() if message.pair == peer.connecting:
                self._connected(worker_id, peer, message.pair)
            case CommunicatorMade():
                self._shared.control.send(worker_id, Close(message.pair))
            case CommunicatorRefused() if message.pair == peer.connecting:
                peer.connecting = ""
                peer.retry_s = self._shared.clock() + RETRY_S
            case Rendezvous() if peer.pair is not None and peer.pair.name == message.pair:
                peer.pair.store.receive(message.key, message.value)
            case Close():
                self._closed_by_peer(worker_id, peer, message.pair)

    def connect(self, worker_id: str, peer: PostPeer) -> None:
        """Ask for a communicator, unless that is under way."""
        shared = self._shared
        if peer.connecting or (peer.retry_s is not None and shared.clock() < peer.retry_s):
            return
        if not shared.make_room(self.num_connecting):
            peer.retry_s = shared.clock() + RETRY_S
            return
        peer.connecting = secrets.token_hex(16)
        peer.retry_s = None
        shared.control.send(worker_id, Connect(peer.connecting))

    def end_idle(self, pair: Communicator) -> None:
        """Close a communicator of ours that nothing needs."""
        self._shared.control.send(pair.peer_id, Close(pair.name))
        self._close(pair)

    def _connected(self, worker_id: str, peer: PostPeer, name: str) -> None:
        shared = self._shared
        peer.connecting = ""
        peer.pair = shared.open_pair(name, worker_id, 0, shared.control.send, self._failed)
        self._go_on(worker_id, peer)

    def _failed(self, pair: Communicator, error: str) -> None:
        """Everything that needs it fails, at once: the peer may be dead."""
        self._shared.num_failed += 1
        _log.warning("the communicator with %s has failed: %s", pair.peer_id, error)
        self._shared.control.send(pair.peer_id, Close(pair.name))
        self._close(pair)
        for item in [item for item in self._parts.values() if item.pair is pair]:
            self._land(item, error)

    def _close(self, pair: Communicator) -> None:
        """No message is offered on it any more."""
        self._shared.table.remove(pair)
        pair.close()
        peer = self._peers.get(pair.peer_id)
        if peer is not None and peer.pair is pair:
            peer.pair = None

    def _closed_by_peer(self, worker_id: str, peer: PostPeer, name: str) -> None:
        pair = peer.pair
        if pair is None or pair.name != name:
            return
        self._close(pair)
        again = []
        for item in [item for item in self._parts.values() if item.pair is pair]:
            if item.state is State.OFFERED and not item.is_busy and not item.is_landed:
                again.append(self._back(peer, item))
            else:
                self._land(item, "the peer has closed the communicator")
        peer.waiting.extendleft(reversed(again))
        self._go_on(worker_id, peer)

    def _back(self, peer: PostPeer, item: Part) -> Part:
        """Offer it again; what it keeps stays."""
        item.state = State.WAITING
        item.pair = None
        peer.num_offered -= 1
        self._shared.rooms.cancel(item)
        return item

    # -- time ----------------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Ask again for communicators that were refused."""
        now_s = self._shared.clock()
        for worker_id, peer in list(self._peers.items()):
            if peer.retry_s is not None and peer.retry_s <= now_s:
                peer.retry_s = None
                self._go_on(worker_id, peer)

    @property
    def next_s(self) -> float | None:
        return min((peer.retry_s for peer in self._peers.values() if peer.retry_s is not None), default=None)
