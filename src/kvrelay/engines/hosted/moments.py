"""What a backend tells of a request's way through its own scheduler, as marks. Pure."""

from __future__ import annotations

import msgspec

from kvrelay.marks.phases import Phase

Marks = tuple[tuple[Phase, float, float], ...]
"""Each with its time and its number."""


class Moments(msgspec.Struct, frozen=True):
    """When a request reached its phases at the backend, by this host's monotonic clock; 0: not known, or not yet. In
    order: in its queue, loads its KV (``loaded_bytes``), has it, in a batch, has its first token. ``num_preemptions``
    so far. With an answer's end the tokens that speculative decoding drafted for it, and that the model accepted."""

    taken_in_s: float = 0.0
    loading_s: float = 0.0
    loaded_s: float = 0.0
    scheduled_s: float = 0.0
    sampled_s: float = 0.0
    loaded_bytes: int = 0
    num_preemptions: int = 0
    num_drafted: int = 0
    num_accepted: int = 0


def prefill_marks(moments: Moments) -> Marks:
    """Of a prefill for another backend."""
    return _known(
        (Phase.TAKEN_IN, moments.taken_in_s, 0.0),
        (Phase.PREFILL_STARTED, moments.scheduled_s, 0.0),
        (Phase.PREFILL_ENDED, moments.sampled_s, 0.0),
    )


def answer_marks(moments: Moments, *, has_first: bool) -> Marks:
    """Of an answer. ``has_first``: its first token has come with its KV, and the backend goes on from there."""
    return _known(
        (Phase.TAKEN_IN, moments.taken_in_s, 0.0),
        (Phase.LOADING, moments.loading_s, 0.0),
        (Phase.LOADED, moments.loaded_s, moments.loaded_bytes),
        (Phase.PREFILL_STARTED, moments.scheduled_s, 0.0),
        (Phase.RESUMED if has_first else Phase.SAMPLED, moments.sampled_s, 0.0),
    )


def fetch_marks(moments: Moments, attached_s: float) -> Marks:
    """Of an answer whose KV the backend gets by itself, as it was told to at ``attached_s``."""
    return _known(
        (Phase.ATTACHED, attached_s, 0.0),
        (Phase.FETCHING, moments.taken_in_s, 0.0),
        (Phase.PREFILL_STARTED, moments.scheduled_s, 0.0),
        (Phase.SAMPLED, moments.sampled_s, 0.0),
    )


def preemption_marks(before_s: float, after_s: float) -> Marks:
    """``before_s`` and ``after_s``: the tokens around it."""
    return ((Phase.PREEMPTED, before_s, 0.0), (Phase.RESUMED, after_s, 0.0))


def draft_marks(moments: Moments, now_s: float) -> Marks:
    """Of an answer's end, if tokens were drafted for it."""
    if not moments.num_drafted:
        return ()
    return ((Phase.DRAFTED, now_s, moments.num_drafted), (Phase.ACCEPTED, now_s, moments.num_accepted))


def _known(*marks: tuple[Phase, float, float]) -> Marks:
    return tuple(mark for mark in marks if mark[1] > 0)
