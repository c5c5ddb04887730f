"""Keys and addresses of ZMQ's sockets, as the request plane and transport p2p use them."""

from __future__ import annotations

from dataclasses import dataclass, field

import zmq

from kvrelay.config.addresses import host_port, zmq_hosts


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """A CURVE key pair in Z85 text. The public half is what others need to connect."""

    public: bytes
    secret: bytes = field(repr=False)


def new_curve_keys() -> CurveKeys:
    """A fresh key pair."""
    return CurveKeys(*zmq.curve_keypair())


def use_curve(socket: zmq.Socket[bytes], keys: CurveKeys, server_key: bytes | None = None) -> None:
    """Encrypt: as a client of the server with that public key, or as a server. Raises ZMQError, ValueError or TypeError
    for an impossible key."""
    if server_key is None:
        socket.curve_server = True
    else:
        socket.curve_serverkey = server_key
    socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret


def bind_tcp(socket: zmq.Socket[bytes], host: str, port: int) -> str:
    """Listen on ``host``, port 0: an ephemeral one. The address at which others reach it. Raises ZMQError."""
    host, advertised = zmq_hosts(host)
    socket.setsockopt(zmq.IPV6, int(":" in host))
    socket.bind(f"tcp://{host_port(host, port or '*')}")
    bound = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(bound, bytes)
    _, _, bound_port = bound.decode().rstrip("\0").rpartition(":")
    return f"tcp://{host_port(advertised, bound_port)}"
