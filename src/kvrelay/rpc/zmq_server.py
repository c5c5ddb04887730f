"""The serving end of the request plane: a ZMQ ROUTER on the running event loop.

It owns the bound socket and the set of peers that have sent something. ROUTER does not say which peer a broken
connection belonged to, so after each disconnection the server probes every peer with a one-byte frame. A peer to which
ZMQ can no longer route is gone. The server delivers all messages of a peer before ``on_peer_gone``.

Nor can ROUTER close one connection. To disconnect a peer, the server ignores it from then on and queues a farewell
after the messages for it; the client closes when it reads the farewell. If the queue has no room for that one byte, the
server tries again.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Callable

import zmq

from kvrelay.config.addresses import host_port
from kvrelay.core.zmq_keys import CurveKeys, bind_tcp
from kvrelay.errors import AddressInUseError, ConfigError, ProtocolError
from kvrelay.rpc.base import Admit, Peer
from kvrelay.rpc.heartbeat import DEFAULT_HEARTBEAT, Heartbeat
from kvrelay.rpc.wire import Message, decode_message, encode_message
from kvrelay.rpc.zap import IDENTITY, ZapHandler
from kvrelay.rpc.zmq_socket import FAREWELL_FRAME, NOBLOCK, PROBE_FRAME, SNDMORE, Endpoint

_log = logging.getLogger(__name__)

PROBE_DELAYS_S = (0.0, 0.02, 0.1, 0.5)
"""The monitor hears of a broken connection a little before the socket does, so one probe may be too early."""
FAREWELL_INTERVAL_S = 0.1


class ZmqRpcServer:
    """RpcServer over ZMQ.

    With ``curve_keys`` only clients that know the public key can connect, and all traffic is encrypted; ``admit_by``
    also checks the clients' own keys.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        heartbeat: Heartbeat = DEFAULT_HEARTBEAT,
        curve_keys: CurveKeys | None = None,
    ) -> None:
        self._host = host
        self._port = port
        self._heartbeat = heartbeat
        self._curve_keys = curve_keys
        self.endpoint: Endpoint | None = None
        """From ``start`` to ``close``."""
        self._address = ""
        self._admit: Admit | None = None
        self._zap: ZapHandler | None = None
        self._peers: dict[Peer, str] = {}
        """Clients that have sent something and are not gone, with their connections' identities."""
        self._parting: dict[Peer, bool] = {}
        """Disconnected peers whose connection still exists; True once the farewell is queued."""
        self._farewell: asyncio.Handle | None = None
        self.num_malformed = 0
        """Number of frames dropped because they did not decode."""
        self._on_message: Callable[[Peer, Message], None] | None = None
        self._on_peer_gone: Callable[[Peer], None] | None = None
        self._probes: dict[float, asyncio.Handle] = {}

    def __repr__(self) -> str:
        address = self._address or "not started"
        counts = f"peers={len(self._peers)}, parting={len(self._parting)}, malformed={self.num_malformed}"
        return f"ZmqRpcServer({address}, {counts})"

    @property
    def address(self) -> str:
        return self._address

    @property
    def peers(self) -> frozenset[Peer]:
        """Clients that have sent something and are not gone."""
        return frozenset(self._peers)

    def admit_by(self, admit: Admit) -> None:
        """Raises ConfigError without keys of our own: then no client can prove that it holds its key."""
        if self._curve_keys is None:
            raise ConfigError("a request plane without CURVE cannot tell its clients apart", param="curve_keys")
        self._admit = admit

    def identity(self, peer: Peer) -> str:
        return self._peers.get(peer, "")

    def on_message(self, handler: Callable[[Peer, Message], None]) -> None:
        self._on_message = handler

    def on_peer_gone(self, handler: Callable[[Peer], None]) -> None:
        self._on_peer_gone = handler

    async def start(self) -> None:
        """Bind. Raises AddressInUseError, or ConfigError for an address that this machine does not have."""
        endpoint = Endpoint(zmq.ROUTER, self._heartbeat, self._receive_one, zmq.Event.DISCONNECTED, self._on_event)
        try:
            self._bind(endpoint)
        except zmq.ZMQError as exc:
            self._close_zap()
            await endpoint.close()
            if exc.errno == errno.EADDRINUSE:
                raise AddressInUseError(f"port {self._port} of {self._host} is in use") from exc
            if exc.errno in (errno.ENODEV, errno.EADDRNOTAVAIL):
                raise ConfigError(
                    f"cannot listen on {self._host or 'an empty host'}: it is no name or address of this machine",
                    param="host",
                ) from exc
            raise ConfigError(f"cannot listen on {host_port(self._host, self._port)}: {exc}", param="host") from exc
        self.endpoint = endpoint

    def send(self, peer: Peer, message: Message) -> bool:
        """Queue a message; see ``base``."""
        frame = encode_message(message)
        if self.endpoint is None or peer not in self._peers:
            return False
        self.endpoint.reader.wake()
        error = _send_frame(self.endpoint.socket, peer, frame)
        if error == errno.EAGAIN:
            _log.warning("ending the connection of peer %.16s: its queue is full, because it does not read", peer.hex())
            self.disconnect(peer)
        # Any other error means that the peer is gone; the monitor reports that.
        return not error

    def disconnect(self, peer: Peer) -> None:
        if peer not in self._peers:
            return
        del self._peers[peer]
        self._parting[peer] = False
        if self._on_peer_gone is not None:
            asyncio.get_running_loop().call_soon(self._on_peer_gone, peer)
        if self._farewell is None:
            self._say_farewell()

    async def close(self) -> None:
        """Unbind. Queued messages have a quarter of a second to leave. No ``on_peer_gone`` follows. Idempotent."""
        endpoint, self.endpoint = self.endpoint, None
        if endpoint is None:
            return
        for probe in self._probes.values():
            probe.cancel()
        if self._farewell is not None:
            self._farewell.cancel()
        self._peers.clear()
        self._parting.clear()
        self._close_zap()
        await endpoint.close()

    def _close_zap(self) -> None:
        zap, self._zap = self._zap, None
        if zap is not None:
            zap.close()

    def _bind(self, endpoint: Endpoint) -> None:
        socket = endpoint.socket
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if self._curve_keys is not None:
            endpoint.use_curve(self._curve_keys)
        if self._admit is not None:
            self._zap = ZapHandler(endpoint.context, socket, self._admit)
        self._address = bind_tcp(socket, self._host, self._port)

    def _receive_one(self) -> int | None:
        frames = self.endpoint.receive() if self.endpoint is not None else None
        if frames is None:
            return None
        size = sum(map(len, frames))
        peer = Peer(frames[0].bytes)
        if peer in self._parting:
            return size
        self._heard(peer, str(frames[-1].get(IDENTITY)) if self._zap is not None else "")
        try:
            if len(frames) != 2:
                raise ProtocolError(f"a message of {len(frames) - 1} frames instead of one")
            message = decode_message(frames[1].buffer)
        except ProtocolError as exc:
            self.num_malformed += 1
            _log.warning("dropped a frame from peer %.16s: %s (%d so far)", peer.hex(), exc, self.num_malformed)
            return size
        if self._on_message is not None:
            self._on_message(peer, message)
        return size

    def _heard(self, peer: Peer, identity: str) -> None:
        """A client chooses its routing id, so it may take the id of another client that has just left."""
        known = self._peers.get(peer)
        if known is not None and known != identity:
            self._lost(peer)
        self._peers[peer] = identity

    def _lost(self, peer: Peer) -> None:
        del self._peers[peer]
        if self._on_peer_gone is not None:
            self._on_peer_gone(peer)

    def _say_farewell(self) -> None:
        """Send the farewell to the disconnected peers, now or when their queues have room."""
        self._farewell = None
        if self.endpoint is None:
            return
        for peer, is_told in list(self._parting.items()):
            error = 0 if is_told else _send_frame(self.endpoint.socket, peer, FAREWELL_FRAME)
            if error == errno.EHOSTUNREACH:
                del self._parting[peer]
            elif not error:
                self._parting[peer] = True
        self.endpoint.reader.wake()
        if not all(self._parting.values()):
            self._farewell = asyncio.get_running_loop().call_later(FAREWELL_INTERVAL_S, self._say_farewell)

    def _on_event(self, event: zmq.Event) -> None:
        for delay_s in PROBE_DELAYS_S:
            self._probe_later(delay_s)

    def _probe_later(self, delay_s: float) -> None:
        """Probe the peers after ``delay_s``; a pending probe of the same delay is postponed."""
        pending = self._probes.get(delay_s)
        if pending is not None:
            pending.cancel()
        self._probes[delay_s] = asyncio.get_running_loop().call_later(delay_s, self._probe)

    def _probe(self) -> None:
        endpoint = self.endpoint
        if endpoint is None:
            return
        reader = endpoint.reader
        for peer in [peer for peer in self._parting if not _can_reach(endpoint.socket, peer)]:
            del self._parting[peer]
        unreachable = [peer for peer in self._peers if not _can_reach(endpoint.socket, peer)]
        if not unreachable:
            reader.wake()
            return
        if not reader.drain():
            # Deliver the last messages of these peers first.
            reader.wake()
            self._probe_later(PROBE_DELAYS_S[1])
            return
        reader.wake()
        for peer in unreachable:
            if peer in self._peers:
                self._lost(peer)


def _can_reach(socket: zmq.Socket[bytes], peer: Peer) -> bool:
    return _send_frame(socket, peer, PROBE_FRAME) != errno.EHOSTUNREACH


def _send_frame(socket: zmq.Socket[bytes], peer: Peer, frame: bytes) -> int:
    """0, or the error: EAGAIN if the peer's queue is full, EHOSTUNREACH if the peer is gone."""
    try:
        socket.send(peer, NOBLOCK | SNDMORE)
        socket.send(frame, NOBLOCK)
    except zmq.ZMQError as exc:
        return exc.errno or errno.EIO
    return 0
