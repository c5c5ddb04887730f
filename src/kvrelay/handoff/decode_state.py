"""What a hand-off at the decode worker is made of: its states, its grants, the settings and counts, one event's
context.

``decode`` draws the states.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from kvrelay.handoff.base import Connection, EndReason, HandoffRules, RefusalReason, Value
from kvrelay.handoff.conduct import Conduct
from kvrelay.handoff.decode_events import Claimed, SendToPrefill
from kvrelay.handoff.messages import HandoffDone, HandoffFetched, HandoffRefused


class DecodeState(enum.Enum):
    """States of a hand-off at the decode worker."""

    OPEN = "open"
    """No worker has claimed it."""
    GRANTED = "granted"
    """The holder of the current generation computes it."""
    RENEWING = "renewing"
    """A later claimant waits for other blocks."""
    OFFERED = "offered"
    """Pull: P is ready; we wait for blocks to read into."""
    READING = "reading"
    """Pull: we read P's blocks."""
    VERIFYING = "verifying"
    """Everything has arrived; checksums are compared."""
    CLOSED = "closed"
    """The request no longer waits for it. Grants and loans may still be out."""


_S = DecodeState
TRANSITIONS: dict[DecodeState, frozenset[DecodeState]] = {
    _S.OPEN: frozenset({_S.GRANTED, _S.CLOSED}),
    _S.GRANTED: frozenset({_S.RENEWING, _S.OFFERED, _S.READING, _S.VERIFYING, _S.CLOSED}),
    _S.RENEWING: frozenset({_S.GRANTED, _S.VERIFYING, _S.CLOSED}),
    _S.OFFERED: frozenset({_S.READING, _S.CLOSED}),
    _S.READING: frozenset({_S.VERIFYING, _S.CLOSED}),
    _S.VERIFYING: frozenset({_S.CLOSED}),
    _S.CLOSED: frozenset(),
}
WAITING_FOR_CLAIMANT = frozenset({_S.OPEN, _S.GRANTED, _S.RENEWING, _S.OFFERED})
"""States that a lost claimant or a deadline ends. In the other states nothing more is needed from the claimant."""


class GrantState(enum.Enum):
    """States of a grant."""

    PREPARING = "preparing"
    """Its hit blocks are being checksummed; it has not been sent to the claimant."""
    OUT = "out"
    ABANDONED = "abandoned"
    """The claimant was told to stop."""
    WITHDRAWN = "withdrawn"
    """It was being prepared and will not be sent."""


@dataclass(frozen=True, slots=True)
class Grant:
    """A claimant's permission to read the hits of ``loan`` and, with push, to write its other blocks."""

    worker_id: str
    connection: Connection
    generation: int
    loan: int
    state: GrantState
    block_size: int = 0
    """The claimant's tokens per block; 0: the same as ours."""
    abandoned_s: float = 0.0
    """When an abandon was last sent."""
    secret: int = field(default=0, repr=False)
    """Its holder's messages carry this number."""


class DecodeRules(HandoffRules, frozen=True, kw_only=True):
    """Settings of a decode ledger. Seconds."""

    remote_prefill_timeout_s: float = 30.0
    """If the hand-off is not claimed by then, the request is computed here."""
    grant_timeout_s: float = 120.0
    """If the hand-off is claimed and not done by then, the request is computed here."""
    silence_timeout_s: float = 10.0
    """The same for a claimant that has been silent for so long. It sends HandoffProgress several times as often."""
    max_attempts: int = 2
    """The limit of granted claims; then the request is computed here."""
    early_claim_timeout_s: float = 1.0
    """How long a claim waits for its request (prefill-first), or for its claimant's term to be known."""
    abandon_repeat_s: float = 2.0
    prefix_timeout_s: float = 20.0
    """A reader of a prefix that has not released it by then is told to."""
    held_s: float = 1.0
    """A claimant that holds a grant for longer and does not finish has failed. A quick release costs its request
    nothing, so it does not count: else a client whose requests no engine takes could have an honest worker avoided."""
    avoid_s: float = 30.0
    """For so long a claimant that has failed twice in a row gets no grant."""
    overtaken_s: float = 1.0
    """How long a hand-off waits for its claim once a later one of the same queue has been claimed."""
    can_replace_blocks: bool = True
    """Whether the engine can give a waiting request other blocks. If not, a later claimant is refused, and the request
    is computed here only when no peer can write to its blocks any more."""


class DecodeCounters(msgspec.Struct):
    """Counts since start. Stale: messages of a hand-off or generation that is not current. Refused: refused claims, in
    ``refusals`` by reason. ``ends``: hand-offs whose requests were computed here, by reason."""

    num_opened: int = 0
    num_granted: int = 0
    num_done: int = 0
    num_stale: int = 0
    num_refused: int = 0
    num_released: int = 0
    num_abandoned: int = 0
    num_expired: int = 0
    num_fenced: int = 0
    refusals: dict[RefusalReason, int] = msgspec.field(default_factory=lambda: dict.fromkeys(RefusalReason, 0))
    ends: dict[EndReason, int] = {}


class DecodeContext(msgspec.Struct):
    """The handling of one event: its time, the rules and counts, the resulting actions. ``connections``: by claimant.
    ``conduct``: of all claimants."""

    now_s: float
    rules: DecodeRules
    counters: DecodeCounters
    connections: dict[str, Connection]
    new_secret: Callable[[], int]
    conduct: Conduct
    out: list[Value] = []


def refuse(event: Claimed, reason: RefusalReason, context: DecodeContext) -> None:
    """Refuse a claim."""
    context.counters.num_refused += 1
    context.counters.refusals[reason] += 1
    context.out.append(SendToPrefill(event.connection, HandoffRefused(event.claim.handoff_id, reason)))


def acknowledge(message: HandoffDone, connection: Connection | None, context: DecodeContext) -> None:
    """Acknowledge HandoffDone, so that P stops repeating it."""
    if connection is not None:
        context.out.append(SendToPrefill(connection, HandoffFetched(message.handoff_id, message.generation)))
