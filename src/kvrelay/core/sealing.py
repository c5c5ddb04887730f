"""Seals on what a worker publishes: whoever reads the bus can check that the worker itself said it.

Every holder of the control plane's credentials may publish under any subject. So a worker draws a secret at its start,
tells it to frontends over the request plane, where both ends have proved who they are, and puts a keyed hash
(BLAKE2b, RFC 7693) of subject and frame before each frame. Nothing is encrypted; old frames are told by their numbers.
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
    """The frame with its seal; as it is without a secret."""
    return _seal_of(secret, subject, frame) + frame if secret else frame


def unseal(secret: bytes, subject: str, data: bytes) -> bytes:
    """The frame, whose seal was right. Raises ProtocolError."""
    if not secret:
        return data
    found, frame = data[:SEAL_BYTES], data[SEAL_BYTES:]
    if not hmac.compare_digest(found, _seal_of(secret, subject, frame)):
        raise ProtocolError("its seal is not the worker's")
    return frame


def _seal_of(secret: bytes, subject: str, frame: bytes) -> bytes:
    hashed = hashlib.blake2b(subject.encode() + b"\0", key=secret, digest_size=SEAL_BYTES)
    hashed.update(frame)
    return hashed.digest()
