"""May two workers exchange KV? Only if protocol version, transport and compatibility hash are equal, and their
layouts can be joined.

This module compares what two workers advertise about their KV pools. It does not know what the compatibility hash
covers (``core.layout.Compatibility``).
"""

from __future__ import annotations

from kvrelay.core.layout import KVLayout
from kvrelay.core.workers import KvMetadata
from kvrelay.errors import IncompatiblePeerError
from kvrelay.transfer.layout_mapping import LayoutMapping

VERSION = 1
"""The version of KvMetadata."""


def check_compatible(peer: KvMetadata, *, transport: str, kv_compatibility: str = "") -> None:
    """Raise IncompatiblePeerError unless the peer's values are ours; ``kv_compatibility`` "" is not compared."""
    for field, ours, theirs in (
        ("protocol version", VERSION, peer.version),
        ("transport", transport, peer.transport),
        ("KV compatibility", kv_compatibility or peer.kv_compatibility, peer.kv_compatibility),
    ):
        if ours != theirs:
            raise IncompatiblePeerError(
                f"worker {peer.worker_id} cannot exchange KV with us: its {field} is {theirs}, ours is {ours}"
            )
    check_pool(peer)


def mapping_for(layout: KVLayout, peer: KvMetadata) -> LayoutMapping:
    """How our blocks and the peer's map onto each other.

    Raises IncompatiblePeerError if the peer's entry does not say how its KV lies, or contradicts itself, or if the
    two layouts cannot be joined.
    """
    if peer.layout is None:
        raise IncompatiblePeerError(f"worker {peer.worker_id} does not say how its KV lies in its memory")
    mapping = LayoutMapping(layout, peer.layout)
    if peer.layout.block_bytes != peer.block_bytes:
        raise IncompatiblePeerError(
            f"worker {peer.worker_id} advertises blocks of {peer.block_bytes} bytes, and its layout has "
            f"{peer.layout.block_bytes}"
        )
    return mapping


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
