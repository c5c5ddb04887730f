"""What a worker holds and knows at one moment, as a frozen value: for status, tests and a debugger.

It owns nothing and changes nothing. ``Worker.inspect`` builds it, without waiting for the engine or for a server; its
cost grows with the open hand-offs. Each side's hand-offs are from one moment, because their side's lock is held
meanwhile. The two sides, the engine and the peers may be microseconds apart.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import TypeVar

import msgspec

from kvrelay.config import DisaggConfig
from kvrelay.core.handoff import HandoffId
from kvrelay.handoff.decode import DecodeHandoff
from kvrelay.handoff.prefill import PrefillHandoff
from kvrelay.worker.reporting.metrics import WorkerStats

H = TypeVar("H", DecodeHandoff, PrefillHandoff)


class LeaseView(msgspec.Struct, frozen=True):
    """``term`` counts this worker's terms. Nothing is written past ``fence_s``, on the monotonic clock."""

    lease_id: str
    term: int
    is_listed: bool
    fence_s: float


class PeersView(msgspec.Struct, frozen=True):
    """Worker ids: ``prefill`` pull from the queue, ``serving`` take requests, ``leased`` have a lease. ``held_ends``:
    their leases have ended, but they are in the middle of a copy. ``addresses`` are those of listed
    workers of our model."""

    prefill: frozenset[str]
    serving: frozenset[str]
    leased: frozenset[str]
    held_ends: frozenset[str]
    addresses: Mapping[str, str]


class QueueView(msgspec.Struct, frozen=True):
    """``num_held``: entries that were pulled and are not acknowledged, or whose prefills hold blocks. ``push_error``:
    why our last push failed, ``push_error_age_s`` ago."""

    is_pulling: bool
    num_held: int
    push_error: str | None
    push_error_age_s: float


class Inspection(msgspec.Struct, frozen=True):
    """``stats`` are the counts, the engine's included.

    ``is_accepting``: requests of frontends. ``is_pairing``: prefills whose decode worker a frontend has chosen.
    ``incoming`` and ``outgoing``: copies of the hand-offs that bring KV here, and of those that take it elsewhere. They
    hold secrets of grants, so they stay in this process. ``loans``: the blocks that peers may write to, by hand-off and
    loan, as the engine knows them. ``num_requests``: of frontends, not ended. ``num_paired``: those whose first token
    is computed here for another worker. ``avoided``: prefill workers whose claims are refused, because they have failed
    hand-offs in a row.
    """

    stats: WorkerStats
    is_accepting: bool
    is_pairing: bool
    is_stalled: bool
    step_age_s: float
    lease: LeaseView
    peers: PeersView
    queue: QueueView
    incoming: tuple[DecodeHandoff, ...]
    outgoing: tuple[PrefillHandoff, ...]
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


def snapshot(handoffs: Iterable[H]) -> tuple[H, ...]:
    """Copies of state machines, whose fields are immutable values. Under the side's lock."""
    return tuple(map(copy.copy, handoffs))
