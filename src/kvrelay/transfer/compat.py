"""May two workers exchange KV? Only if protocol version, transport, bytes per block and compatibility hash are equal.

This module compares what two workers advertise about their KV pools. It does not know what the compatibility hash
covers (``core.layout.Compatibility``).
"""

from __future__ import annotations

from kvrelay.core.workers import KvMetadata
from kvrelay.errors import IncompatiblePeerError

VERSION = 1
"""The version of KvMetadata."""


def check_compatible(peer: KvMetadata, *, transport: str, block_bytes: int = 0, kv_compatibility: str = "") -> None:
    """Raise IncompatiblePeerError unless blocks can be moved between our pool and the peer's without conversion.

    The named arguments are our own values; ``block_bytes`` 0 and ``kv_compatibility`` "" are not compared.
    """
    for field, ours, theirs in (
        ("protocol version", VERSION, peer.version),
        ("transport", transport, peer.transport),
        ("KV compatibility", kv_compatibility or peer.kv_compatibility, peer.kv_compatibility),
        ("number of bytes per block", block_bytes or peer.block_bytes, peer.block_bytes),
    ):
        if ours != theirs:
            raise IncompatiblePeerError(
                f"worker {peer.worker_id} cannot exchange KV with us: its {field} is {theirs}, ours is {ours}"
            )
    check_pool(peer)


def check_pool(metadata: KvMetadata) -> None:
    """Raise IncompatiblePeerError if the advertised pool cannot exist."""
    if metadata.address <= 0 or metadata.num_bytes <= 0 or metadata.block_bytes <= 0:
        raise IncompatiblePeerError(f"worker {metadata.worker_id} advertises a KV pool without memory")
    if metadata.address + metadata.num_bytes >= 2**64 or metadata.num_bytes % metadata.block_bytes:
        raise IncompatiblePeerError(
            f"worker {metadata.worker_id} advertises a KV pool that is too large or has an incomplete block"
        )
    if metadata.device not in ("cpu", "cuda") or metadata.device_id < 0:
        raise IncompatiblePeerError(f"worker {metadata.worker_id} advertises a pool on {metadata.device!r}")
