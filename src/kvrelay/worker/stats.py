"""What a worker counts of its two sides, since start, for metrics and status. It does not know who reads them."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class DecodeStats:
    """Counters of the decode side. ``places`` counts prefills by where they ran and why; ``num_verified_blocks`` are
    those whose checksums were right, ``num_kv_checksum_mismatches`` the hand-offs with a block that was not."""

    num_requests: int = 0
    num_refused: int = 0
    num_aborted: int = 0
    num_remote_done: int = 0
    num_stale: int = 0
    num_received_bytes: int = 0
    num_verified_blocks: int = 0
    num_kv_checksum_mismatches: int = 0
    places: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class PrefillStats:
    """Counters of the prefill side; the two of checksums are about the hit blocks that it reads."""

    num_prefills: int = 0
    num_refused: int = 0
    num_failed: int = 0
    num_abandoned: int = 0
    num_sent_bytes: int = 0
    num_verified_blocks: int = 0
    num_kv_checksum_mismatches: int = 0
