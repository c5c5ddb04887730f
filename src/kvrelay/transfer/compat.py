"""May two workers exchange KV? (design, section 4, rule 4)

What it owns: the comparison of what two workers advertise about their KV pools. What it does not know: what the
compatibility hash covers (``core.layout.Compatibility``).
"""

from __future__ import annotations

from kvrelay.core.workers import KvMetadata
from kvrelay.errors import IncompatiblePeerError


def check_compatible(local: KvMetadata, remote: KvMetadata) -> None:
    """Raise IncompatiblePeerError unless blocks can be moved between the two pools as they are."""
    for field, ours, theirs in (
        ("protocol version", local.version, remote.version),
        ("transport", local.transport, remote.transport),
        ("KV compatibility", local.kv_compatibility, remote.kv_compatibility),
        ("bytes per block", local.block_bytes, remote.block_bytes),
    ):
        if ours != theirs:
            raise IncompatiblePeerError(
                f"worker {remote.worker_id} cannot exchange KV with us: its {field} is {theirs}, ours is {ours}"
            )
    check_pool(remote)


def check_pool(metadata: KvMetadata) -> None:
    """Raise IncompatiblePeerError when the advertised pool cannot exist."""
    if metadata.address <= 0 or metadata.num_bytes <= 0 or metadata.block_bytes <= 0:
        raise IncompatiblePeerError(f"worker {metadata.worker_id} advertises a KV pool without memory")
    if metadata.address + metadata.num_bytes >= 2**64 or metadata.num_bytes % metadata.block_bytes:
        raise IncompatiblePeerError(f"worker {metadata.worker_id} advertises a KV pool that is not a row of blocks")
    if metadata.device not in ("cpu", "cuda") or metadata.device_id < 0:
        raise IncompatiblePeerError(f"worker {metadata.worker_id} advertises a pool on {metadata.device!r}")
