"""What a hand-off at the prefill worker is made of: its states, the settings and counts, one event's context.

``prefill`` draws the states.
"""

from __future__ import annotations

import enum

import msgspec

from kvrelay.core.handoff import HandoffOrder
from kvrelay.handoff.base import EndReason, HandoffRules, Value


class PrefillState(enum.Enum):
    """States of a hand-off at the prefill worker."""

    CLAIMING = "claiming"
    """The engine computes; the claim is in flight."""
    SENDING = "sending"
    """Granted: D's hit blocks may be read, computed blocks may be written."""
    KEEPING = "keeping"
    """Pull: everything is computed; our engine moves it out of its pool."""
    HOLDING = "holding"
    """Pull: everything is computed and D may read it."""
    CONFIRMING = "confirming"
    """Push: everything is written; D has not acknowledged it yet."""
    STOPPING = "stopping"
    """Nothing more is submitted; transfers in flight still touch our blocks."""
    RELEASING = "releasing"
    """D has not acknowledged yet that we have stopped."""
    ENDED = "ended"


_S = PrefillState
TRANSITIONS: dict[PrefillState, frozenset[PrefillState]] = {
    _S.CLAIMING: frozenset({_S.SENDING, _S.STOPPING}),
    _S.SENDING: frozenset({_S.KEEPING, _S.HOLDING, _S.CONFIRMING, _S.STOPPING, _S.ENDED}),
    _S.KEEPING: frozenset({_S.HOLDING, _S.STOPPING}),
    _S.CONFIRMING: frozenset({_S.RELEASING, _S.ENDED}),
    _S.HOLDING: frozenset({_S.STOPPING, _S.ENDED}),
    _S.STOPPING: frozenset({_S.RELEASING, _S.ENDED}),
    _S.RELEASING: frozenset({_S.ENDED}),
    _S.ENDED: frozenset(),
}


class PrefillRules(HandoffRules, frozen=True, kw_only=True):
    """Settings of a prefill ledger. Seconds."""

    worker_id: str
    claim_timeout_s: float = 5.0
    paired_claim_timeout_s: float = 30.0
    """Prefill-first: the claim also waits for blocks of the decode worker."""
    progress_s: float = 2.0
    """The interval of HandoffProgress to a decode worker."""
    ready_repeat_s: float = 1.0
    """The interval at which HandoffReady, or an unanswered HandoffDone, is repeated."""
    release_repeat_s: float = 0.05
    """The first interval; doubled each time."""
    max_release_repeat_s: float = 2.0
    gone_for_s: float = 30.0
    """How long a decode worker without a lease is told of an end, counted from the end of its lease, or from the first
    time if discovery does not list it. A worker that was stopped comes back under its old id, and would wait for
    hand-offs that no worker computes. Later it is told when it asks (HandoffAbandon)."""
    late_s: float = 0.0
    """For how long bytes of a write that has failed may still land: the release waits."""
    can_keep: bool = False
    """Whether the engine may have room for computed KV beside its pool."""
    keep_after_s: float = 0.05
    """Computed KV that D does not want yet goes there after so long."""

    def claim_timeout_of(self, order: HandoffOrder) -> float:
        return self.paired_claim_timeout_s if order is HandoffOrder.PREFILL_FIRST else self.claim_timeout_s


class PrefillCounters(msgspec.Struct):
    """Counts since start. Returned: entries given back to the queue, since the decode worker could not be reached."""

    num_prefills: int = 0
    num_refused: int = 0
    num_failed: int = 0
    num_abandoned: int = 0
    num_returned: int = 0
    num_sent_bytes: int = 0
    """Counted by the side: of transfers submitted."""
    num_verified_blocks: int = 0
    """Hit blocks that were read, with correct checksums."""
    num_kv_checksum_mismatches: int = 0
    """Reads of hit blocks with a wrong block."""
    ends: dict[EndReason, int] = {}
    """Hand-offs that ended without success, by reason."""


class PrefillContext(msgspec.Struct):
    """The handling of one event: its time, the rules and counts, and the resulting actions."""

    now_s: float
    rules: PrefillRules
    counters: PrefillCounters
    free_since_s: float
    """When the engine has computed the last hand-off before this one."""
    out: list[Value] = []
