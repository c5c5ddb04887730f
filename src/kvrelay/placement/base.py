"""What a placement is decided from, and the decision. Values."""

from __future__ import annotations

import enum
from typing import NamedTuple

import msgspec

from kvrelay.core.step_cost import StepCost


class Objectives(msgspec.Struct, frozen=True):
    """Seconds to the first token, and between tokens. With ``has_default_itl`` nobody has set the second."""

    ttft_s: float
    itl_s: float
    has_default_itl: bool = False


class Situation(msgspec.Struct, frozen=True):
    """The engine's state when a prefill is placed. Token counts are of tokens still to compute.

    ``num_tokens`` of this request; ``num_here`` will be computed here before it; ``num_remote_tokens`` were sent away
    by this worker and have not come back, in ``num_remote_prefills`` prefills. ``num_line`` of the other waiting
    requests. ``chunk``: prefill tokens of a step beside ``num_decodes`` answers with ``num_context`` tokens.
    ``is_here_open``: the step's budget has room.
    """

    num_tokens: int
    waited_s: float
    num_here: int
    num_remote_tokens: int
    num_remote_prefills: int
    chunk: int
    num_decodes: int
    num_context: int
    is_here_open: bool
    cost: StepCost
    objectives: Objectives
    num_line: int = 0
    spread: float = 0.0
    num_stored: int = 0
    """Tokens besides ``num_tokens`` that a tier here has: to load them takes ``load_s``, to compute them longer."""
    load_s: float = 0.0
    num_cached: int = 0
    """Tokens before these that the pool here has: they are context, which takes time."""


TRIAL = "trial"
"""Ends the explanation of a decision against the costs: why a dearer way was taken."""


class Decision(msgspec.Struct, frozen=True):
    """Estimates in seconds, from now to the first token. ``place`` None: the request continues to wait."""

    place: PrefillPlace | None
    local_s: float = 0.0
    remote_s: float = 0.0
    local_cost: float = 0.0
    remote_cost: float = 0.0
    is_trial: bool = False
    """Against the costs, so that they are measured."""
    load_s: float = 0.0
    """Of ``local_s``: until a tier's blocks are here. 0: none has any that are worth it."""

    def __str__(self) -> str:
        place = "waiting" if self.place is None else self.place.value
        load = f";load={self.load_s:.4f}s" if self.load_s else ""
        if not (self.local_s or self.remote_s):
            return place + load
        trial = f";{TRIAL}" if self.is_trial else ""
        return f"{place};local={self.local_s:.4f}s;remote={self.remote_s:.4f}s{load}{trial}"


class PrefillPlace(enum.StrEnum):
    """Where a prefill runs, and the reason for a local one. Values are metric labels."""

    REMOTE = "remote"
    LOCAL_SHORT = "local_short"
    LOCAL_CHEAPER = "local_cheaper"
    LOCAL_QUEUE_FULL = "local_queue_full"
    LOCAL_NO_PREFILL_WORKER = "local_no_prefill_worker"
    LOCAL_REQUIRED = "local_required"
    LOCAL_UNPAIRED = "local_unpaired"
    """Prefill-first: the frontend has chosen no prefill worker."""
    QUEUE = "queue"
    """Order auto: the frontend expects that the decode worker queues it."""
    UNDECIDED = "undecided"
    """Order auto, and the frontend does not know the costs: the decode worker decides."""


class PrefillLoad(NamedTuple):
    """A decode worker's knowledge of the prefill side."""

    num_workers: int
    queue_size: int
