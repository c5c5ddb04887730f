"""What a worker holds and knows at one moment, as a frozen value: for status, tests and a debugger.

It owns nothing and changes nothing. ``Worker.inspect`` builds it, without waiting for the engine or for a server; its
cost grows with the open hand-offs. Each side's hand-offs are from one moment, because their driver's lock is held
meanwhile. The two sides, the engine and the peers may be microseconds apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvrelay.config import DisaggConfig
from kvrelay.core.handoff import HandoffId
from kvrelay.handoff.decode_ledger import DecodeLedger
from kvrelay.handoff.decode_state import DecodeState, GrantState
from kvrelay.handoff.prefill_ledger import PrefillLedger
from kvrelay.handoff.prefill_state import PrefillState
from kvrelay.worker.reporting.metrics import WorkerStats


@dataclass(frozen=True, slots=True)
class GrantView:
    """A peer's permission to touch the blocks of ``loan``, without its secret."""

    worker_id: str
    generation: int
    loan: int
    state: GrantState


@dataclass(frozen=True, slots=True)
class IncomingView:
    """A hand-off that brings KV here. ``loans``: those that the engine has not got back."""

    handoff_id: HandoffId
    request_id: str
    state: DecodeState
    grants: tuple[GrantView, ...]
    loans: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OutgoingView:
    """A hand-off that takes KV to ``decode_worker_id``. ``has_blocks``: it holds blocks of our pool."""

    handoff_id: HandoffId
    decode_worker_id: str
    state: PrefillState
    has_blocks: bool


@dataclass(frozen=True, slots=True)
class LeaseView:
    """``term`` counts this worker's terms. Nothing is written past ``fence_s``, on the monotonic clock."""

    lease_id: str
    term: int
    is_listed: bool
    fence_s: float


@dataclass(frozen=True, slots=True)
class PeersView:
    """Worker ids: ``prefill`` pull from the queue, ``serving`` take requests, ``leased`` have a lease. ``held_ends``:
    their leases have ended, but they are in the middle of a copy. ``addresses`` are those of listed
    workers of our model."""

    prefill: frozenset[str]
    serving: frozenset[str]
    leased: frozenset[str]
    held_ends: frozenset[str]
    addresses: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class QueueView:
    """``num_held``: entries that were pulled and are not acknowledged, or whose prefills hold blocks. ``push_error``:
    why our last push failed."""

    is_pulling: bool
    num_held: int
    push_error: str | None


@dataclass(frozen=True, slots=True)
class Inspection:
    """``stats`` are the counts, the engine's included.

    ``is_accepting``: requests of frontends. ``is_pairing``: prefills whose decode worker a frontend has chosen.
    ``loans``: the blocks that peers may write to, by hand-off and loan, as the engine knows them. ``num_requests``: of
    frontends, not ended. ``num_paired``: those whose first token is computed here for another worker.
    ``avoided``: prefill workers whose claims are refused, because they have failed hand-offs in a row.
    """

    stats: WorkerStats
    is_accepting: bool
    is_pairing: bool
    is_stalled: bool
    step_age_s: float
    lease: LeaseView
    peers: PeersView
    queue: QueueView
    incoming: tuple[IncomingView, ...]
    outgoing: tuple[OutgoingView, ...]
    loans: Mapping[tuple[HandoffId, int], tuple[int, ...]]
    num_requests: int
    num_paired: int
    disagg: DisaggConfig
    kv_compatibility: str
    avoided: frozenset[str]

    @property
    def num_grants(self) -> int:
        """While it is not zero, peers may touch our memory."""
        return sum(len(handoff.grants) for handoff in self.incoming)

    @property
    def writable_blocks(self) -> frozenset[int]:
        """Our blocks that some prefill worker may write now."""
        granted = {(handoff.handoff_id, grant.loan) for handoff in self.incoming for grant in handoff.grants}
        return frozenset(block for loan in granted for block in self.loans.get(loan, ()))


def view_incoming(ledger: DecodeLedger) -> tuple[IncomingView, ...]:
    """Under the driver's lock."""
    return tuple(
        IncomingView(
            handoff.handoff_id,
            handoff.request_id,
            handoff.state,
            tuple(GrantView(grant.worker_id, grant.generation, grant.loan, grant.state) for grant in handoff.grants),
            handoff.loans,
        )
        for handoff in ledger.handoffs.values()
    )


def view_outgoing(ledger: PrefillLedger) -> tuple[OutgoingView, ...]:
    """Under the driver's lock."""
    return tuple(
        OutgoingView(handoff.handoff_id, handoff.decode_worker_id, handoff.state, handoff.has_blocks)
        for handoff in ledger.handoffs.values()
    )
