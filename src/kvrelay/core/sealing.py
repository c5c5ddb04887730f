"""Seals on a worker's publications: a frontend can verify that a frame on the bus comes from that worker.

Every holder of control-plane credentials may publish under any subject. So a worker draws a secret at its start and
tells it to frontends over the request plane, where both ends have proved their identity. It puts a keyed hash (BLAKE2b,
RFC 7693) of subject and frame before each frame. Nothing is encrypted. A replayed old frame is recognised by its event
or sample number.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

from kvrelay.errors import ProtocolError

SECRET_BYTES = 32
SEAL_BYTES = 16


def new_secret() -> bytes:
    return secrets.token_bytes(SECRET_BYTES)


def seal(secret: bytes, subject: str, frame: bytes) -> bytes:
    """The frame with its seal; unchanged without a secret."""
    return _seal_of(secret, subject, frame) + frame if secret else frame


def unseal(secret: bytes, subject: str, data: bytes) -> bytes:
    """The frame without its seal. Raises ProtocolError if the seal is wrong."""
    if not secret:
        return data
    found, frame = data[:SEAL_BYTES], data[SEAL_BYTES:]
    if not hmac.compare_digest(found, _seal_of(secret, subject, frame)):
        raise ProtocolError("the seal of the frame does not match the worker's secret")
    return frame


def _seal_of(secret: bytes, subject: str, frame: bytes) -> bytes:
    hashed = hashlib.blake2b(subject.encode() + b"\0", key=secret, digest_size=SEAL_BYTES)
    hashed.update(frame)
    return hashed.digest()
