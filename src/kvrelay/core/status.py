"""The states of a request inside an engine, and the moves between them.

    WAITING ──> RUNNING ──────────────> FINISHED_*        an aggregated request, or one with a local prefill
       │  ^        │ ^
       │  │        v │
       │  └── PREEMPTED                                   its blocks were taken; it is prefilled again
       │
       ├──> REMOTE_PREFILLING ──> RUNNING                 decode side: a prefill worker writes our blocks
       │            ├──> WAITING                          the KV was lost: prefill locally
       │            └──> KV_HELD ──> LOADING_KV, RUNNING  the KV came while the pool had no room: it is held until then
       │
       └──> LOADING_KV ──> RUNNING ──> PREFILL_SENDING    KV that is elsewhere is read first, after preemption too;
                └──> WAITING                  │           what did not come is computed. Prefill side: after the
                                              │           forward pass the blocks stay ours until the last write
                                              └──> FIN.   is done

REMOTE_PREFILLING and PREFILL_SENDING count as unfinished work: an engine with such requests is not idle.
"""

from __future__ import annotations

import enum

from kvrelay.errors import IllegalTransitionError


class RequestStatus(enum.IntEnum):
    """The state of a request. All states from FINISHED_STOPPED on are final."""

    WAITING = 0
    LOADING_KV = 1
    REMOTE_PREFILLING = 2
    KV_HELD = 3
    RUNNING = 4
    PREEMPTED = 5
    PREFILL_SENDING = 6
    FINISHED_STOPPED = 7
    FINISHED_LENGTH = 8
    FINISHED_ABORTED = 9
    FINISHED_ERROR = 10

    @property
    def is_finished(self) -> bool:
        return self >= RequestStatus.FINISHED_STOPPED


_S = RequestStatus
_FINISHED = frozenset({_S.FINISHED_STOPPED, _S.FINISHED_LENGTH, _S.FINISHED_ABORTED, _S.FINISHED_ERROR})

TRANSITIONS: dict[RequestStatus, frozenset[RequestStatus]] = {
    _S.WAITING: frozenset({_S.RUNNING, _S.REMOTE_PREFILLING, _S.LOADING_KV, _S.FINISHED_ABORTED, _S.FINISHED_ERROR}),
    _S.LOADING_KV: frozenset({_S.WAITING, _S.RUNNING, _S.FINISHED_ABORTED, _S.FINISHED_ERROR}),
    _S.REMOTE_PREFILLING: frozenset({_S.RUNNING, _S.KV_HELD, _S.WAITING}) | _FINISHED,
    _S.KV_HELD: frozenset({_S.LOADING_KV, _S.RUNNING}) | _FINISHED,
    _S.RUNNING: frozenset({_S.PREEMPTED, _S.PREFILL_SENDING}) | _FINISHED,
    _S.PREEMPTED: frozenset({_S.RUNNING, _S.LOADING_KV, _S.FINISHED_ABORTED, _S.FINISHED_ERROR}),
    _S.PREFILL_SENDING: _FINISHED,
    **{status: frozenset() for status in _FINISHED},
}


def check_transition(old: RequestStatus, new: RequestStatus) -> None:
    """Raise IllegalTransitionError unless the table has a move from ``old`` to ``new``."""
    if new not in TRANSITIONS[old]:
        raise IllegalTransitionError(f"a request cannot go from {old.name} to {new.name}")


class FinishReason(enum.StrEnum):
    """Why an answer ended, as clients see it. ``ABORT`` and ``ERROR`` do not occur in OpenAI's own API."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class RefusalKind(enum.StrEnum):
    """Why a worker did not take a request. Values are metric labels."""

    GONE = "gone"
    """The request is for another incarnation of this worker."""
    DRAINING = "draining"
    QUEUE_FULL = "queue_full"
    KV_FULL = "kv_full"
    """The KV blocks that requests hold or wait for are above the watermark."""
    OBJECTIVE = "objective"
    """The objective for the first token cannot be met any more."""
    INVALID = "invalid"
    UNAVAILABLE = "unavailable"
    """This worker, its engine or another worker that it needs cannot serve it now."""
    FAILED = "failed"
    """An internal error."""


class Outcome(enum.StrEnum):
    """What became of a request that generates, for its client. Values are metric labels."""

    ANSWERED = "answered"
    """The whole answer has gone out."""
    REFUSED = "refused"
    """429: too much is asked for at once, of all or by this API key."""
    FAILED = "failed"
    """5xx, or a stream that broke."""
    INVALID = "invalid"
    """Any other 4xx: the request is at fault."""
    DISCONNECTED = "disconnected"
    """The client left early."""


def outcome_of(status: str) -> Outcome:
    """``status`` is an HTTP status, ``disconnected``, or ``broken`` for a stream that ended with an error."""
    if status == "disconnected":
        return Outcome.DISCONNECTED
    if status == "broken" or status[0] == "5":
        return Outcome.FAILED
    if status == "429":
        return Outcome.REFUSED
    return Outcome.INVALID if status[0] == "4" else Outcome.ANSWERED


FINISH_STATUS: dict[FinishReason, RequestStatus] = {
    FinishReason.STOP: _S.FINISHED_STOPPED,
    FinishReason.LENGTH: _S.FINISHED_LENGTH,
    FinishReason.ABORT: _S.FINISHED_ABORTED,
    FinishReason.ERROR: _S.FINISHED_ERROR,
}
