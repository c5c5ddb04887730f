"""When two states are the same: what can no longer decide anything is left out, and numbers that only grow count from
the newest.

Times are relative to now, terms to their worker's current one, connections to the newest between the two workers: the
ledgers only compare them. So a state that comes again after a fault has been survived is recognised.
"""

from __future__ import annotations

from dataclasses import fields
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec

from kvrelay.handoff.base import EndReason, RefusalReason
from kvrelay.handoff.decode import DecodeHandoff
from kvrelay.handoff.decode_ledger import DecodeLedger
from kvrelay.handoff.decode_state import WAITING_FOR_CLAIMANT, DecodeState, GrantState
from kvrelay.handoff.leases import PeerLeases
from kvrelay.handoff.messages import (
    HandoffClaim,
    HandoffDone,
    HandoffGrant,
    HandoffReady,
    HandoffRefused,
    HandoffReleased,
)
from kvrelay.handoff.prefill import PrefillHandoff
from kvrelay.handoff.prefill_ledger import PrefillLedger
from kvrelay.handoff.prefill_state import PrefillState

CONN_STEP = 10
"""Connections of the prefill worker ``n`` are ``n + CONN_STEP``, ``n + 2 * CONN_STEP``, ...; 0: none."""


class Frame(NamedTuple):
    """What a state's numbers are relative to. ``gone_for``: after how long the age of a lease's end matters no more."""

    now: int
    decode_term: int
    prefill_terms: tuple[int, ...]
    num_conns: tuple[int, ...]
    gone_for: int

    def term(self, worker_id: str, term: int) -> int:
        return term - (self.decode_term if worker_id == "d" else self.prefill_terms[int(worker_id[1:])])

    def conn(self, conn: int) -> tuple[int, int] | None:
        return (conn % CONN_STEP, self.num_conns[conn % CONN_STEP] - conn // CONN_STEP) if conn else None

    def since(self, at: float) -> float:
        return max(at - self.now, -self.gone_for)


def without_words(message: Any) -> Any:
    """States that differ in a duration, or in a reason that is only logged, are the same."""
    if isinstance(message, HandoffReleased):
        return msgspec.structs.replace(message, error=None)
    if isinstance(message, HandoffRefused):
        return msgspec.structs.replace(message, reason=RefusalReason.UNKNOWN)
    if isinstance(message, HandoffDone):
        return msgspec.structs.replace(message, prefill_s=0.0, num_transferred_bytes=0)
    return msgspec.structs.replace(message, prefill_s=0.0) if isinstance(message, HandoffReady) else message


def net_key(net: frozenset[Any], frame: Frame) -> frozenset[Any]:
    return frozenset(
        (source, target, frame.conn(conn), message_key(message, frame)) for source, target, conn, message in net
    )


def message_key(message: Any, frame: Frame) -> Any:
    if isinstance(message, HandoffClaim):
        return (_without_term(message), frame.term(message.prefill_worker_id, message.term))
    if isinstance(message, HandoffGrant):
        return (_without_term(message), frame.term("d", message.term))
    return message


def call_key(call: Any, frame: Frame) -> Any:
    """Of a call that is kept for later."""
    name, arguments = call
    if name == "_claim":
        return (name, message_key(arguments[0].message, frame))
    if name == "_prepared":
        job, term = arguments
        return (name, job, term - frame.prefill_terms[0])
    return call


def side_key(side: Any) -> Any:
    """What a side keeps beside its ledger, but for a record of the latest: which hand-offs, and numbers of them."""
    return tuple(
        tuple((key, value if isinstance(value, int) else None) for key, value in kept.items())
        for kept in side.__dict__.values()
        if type(kept) is dict
    )


_STRIPPED: dict[Any, Any] = {}


def _without_term(message: Any) -> Any:
    stripped = _STRIPPED.get(message)
    if stripped is None:
        stripped = _STRIPPED[message] = msgspec.structs.replace(message, term=0)
    return stripped


def leases_key(leases: PeerLeases, frame: Frame) -> tuple[Any, ...]:
    """How long ago a lease ended matters up to ``gone_for_s`` only."""
    ended = leases.ends.items()
    return (
        tuple(sorted((worker, frame.term(worker, term)) for worker, (term, _) in leases.live.items())),
        tuple(sorted((worker, frame.term(worker, term), frame.since(at)) for worker, (term, at) in ended)),
        tuple(sorted((worker, max(fence - frame.now, 0)) for worker, fence in leases.fences_s.items())),
    )


_DECODE_APART = {
    "deadline_s",
    "last_heard_s",
    "granted_s",
    "recall_s",
    "grants",
    "term",
    "waiting",
    "owed",
    "request_id",
}
_DECODE_FIELDS = [f.name for f in fields(DecodeHandoff) if f.name not in _DECODE_APART]
_LONG_OVER = ("is_recalled", "arrived", "given_up_by", "block_ids", "num_hit_blocks", "claimant")
"""Of a closed hand-off nothing reads these."""
_decode_values = attrgetter(*_DECODE_FIELDS)
_closed_values = attrgetter(*(name for name in _DECODE_FIELDS if name not in _LONG_OVER))


def decode_ledger_key(ledger: DecodeLedger, frame: Frame) -> tuple[Any, ...]:
    now = frame.now
    handoffs = []
    for handoff in ledger.handoffs.values():
        waits = handoff.state in WAITING_FOR_CLAIMANT or (handoff.is_prefix and handoff.holder is not None)
        is_closed = handoff.state is DecodeState.CLOSED
        grants = tuple(
            (
                grant.worker_id,
                frame.conn(grant.connection),  # type: ignore[arg-type]
                grant.generation,
                grant.loan,
                grant.state.value,
                max(grant.abandoned_s - now, -1) if grant.state is GrantState.ABANDONED else 0,
            )
            for grant in handoff.grants
        )
        deadline = max(handoff.deadline_s - now, 0) if waits else 0
        silent = max(handoff.last_heard_s + ledger.rules.silence_timeout_s - now, 0) if handoff.is_awaited else 0
        term = 0 if is_closed else frame.term("d", handoff.term)
        held = max(handoff.granted_s + ledger.rules.held_s - now, -1) if handoff.holder is not None else 0
        recall = max(handoff.recall_s - now, 0) if waits and handoff.recall_s is not None else None
        special = (
            recall,
            deadline,
            silent,
            held,
            grants,
            _claimed_key(handoff.waiting, frame),
            handoff.owed is None,
            term,
        )
        values = _closed_values if is_closed and not handoff.is_prefix else _decode_values
        handoffs.append(special + values(handoff))
    early = tuple(
        (handoff_id, _claimed_key(e.event, frame), max(e.until_s - now, 0)) for handoff_id, e in ledger.early.items()
    )
    paired = (tuple(ledger.expected.items()), tuple(ledger.declined.items()))
    conduct = tuple(
        (worker, failures, max(ledger.conduct.until_s.get(worker, now) - now, 0))
        for worker, failures in sorted(ledger.conduct.failures.items())
    )
    connections = tuple(sorted((worker, frame.conn(conn)) for worker, conn in ledger.connections.items()))  # type: ignore[arg-type]
    return (tuple(handoffs), leases_key(ledger.leases, frame), connections, early, paired, conduct)


def _claimed_key(event: Any, frame: Frame) -> Any:
    return None if event is None else (message_key(event.claim, frame), frame.conn(event.connection))


_PREFILL_APART = {"due_s", "started_s", "prefill_s", "ready", "done", "num_said", "over_s", "reason", "grant"}
_prefill_values = attrgetter(*(f.name for f in fields(PrefillHandoff) if f.name not in _PREFILL_APART))
_OVER = (PrefillState.CONFIRMING, PrefillState.RELEASING)
"""Only these two are left to be said."""


def prefill_ledger_key(ledger: PrefillLedger, frame: Frame) -> tuple[Any, ...]:
    handoffs = []
    for handoff in ledger.handoffs.values():
        due = 0 if handoff.next_s is None else max(handoff.due_s - frame.now, 0)
        generation = None if handoff.grant is None else handoff.grant.generation
        if handoff.state in _OVER:
            is_gone = handoff.decode_worker_id not in ledger.leases.live
            since = frame.since(handoff.over_s) if is_gone else 0
            handoffs.append((due, since, handoff.handoff_id, handoff.state, generation))
            continue
        grant = None if handoff.grant is None else message_key(handoff.grant, frame)
        end = handoff.reason if handoff.reason in (EndReason.REFUSED, EndReason.UNREACHABLE) else None
        handoffs.append((due, handoff.reason is None, end, grant, *_prefill_values(handoff)))
    return (tuple(handoffs), leases_key(ledger.leases, frame), tuple(ledger.seen))
