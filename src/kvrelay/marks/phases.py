"""The phases of a request. A mark says that its process reached one; its number says what else there is to say."""

from __future__ import annotations

import enum


class Role(enum.StrEnum):
    """What a process did for a request."""

    FRONTEND = "frontend"
    PREFILL = "prefill"
    DECODE = "decode"


class Phase(enum.IntEnum):
    """F: at the frontend, D: at the decode worker, P: at the prefill worker. Numbers travel, so none is reused."""

    RECEIVED = 1
    """F: the request's head and body are here. D, and P of a pair: the message is here."""
    TOKENISED = 2
    """F: all prompts are token ids."""
    ROUTED = 3
    """F: sent to a worker. Number: of the attempt, from 0."""
    HEARD = 4
    """F: a worker's marks have come, with its first or last output. Number: of the attempt."""
    FIRST_TOKEN = 5
    """F: the first token is here."""
    LATE_TOKEN = 6
    """F: a token came later than ``LATE_S`` after the one before it. Number: seconds between them."""
    MIGRATED = 7
    """F: the worker was lost or gave up. Number: tokens until then."""
    FINISHED = 8
    """F: the answer is complete."""
    FAILED = 9
    """F: the client got an error, or has gone."""
    REFUSED = 10
    """F: the worker does not take it."""

    ADMITTED = 16
    """D: taken in by the engine's thread; it waits for a step."""
    LOCAL_ESTIMATE = 18
    """D: placed, by cost. Number: the estimate of a local prefill, in seconds to the first token."""
    REMOTE_ESTIMATE = 19
    """D: the same, of a remote one."""
    PREFILL_QUEUED = 20
    """D: placed remotely: a hand-off is opened, and its entry goes to the prefill queue, if the frontend has not chosen
    the pair."""
    CLAIM_HEARD = 21
    """D: a prefill worker's claim is here."""
    GRANTED = 22
    """D: the grant is sent."""
    TRANSFER_ENDED = 23
    """D: the last byte is here. Number: bytes, if D knows them."""
    ATTACHED = 24
    """D: the request continues with the KV that has come."""
    SENT = 25
    """D: its first or last output, with these marks, goes to the frontend."""
    PREEMPTED = 26
    """The request's blocks were taken; it is prefilled again. Of an engine that schedules by itself only the tokens
    around it are known: this is the time of the one before, and ``RESUMED`` that of the next."""
    RECOMPUTED = 27
    """D: no KV will come; the request waits again. P: reading hit blocks has ended."""

    HELD = 28
    """D: the KV that has come waits in the holding area until the pool has room."""
    RESUMED = 29
    """D: the request goes on with it."""

    PULLED = 32
    """P: the entry has come from the queue."""
    CLAIMED = 33
    """P: the claim is sent."""
    GRANT_HEARD = 34
    """P: the grant is here."""
    LOADING = 35
    """P or D: begins to read KV: P blocks that D has, either blocks of a tier."""
    PREFILL_STARTED = 36
    """P or D: in the batch. D: placed locally."""
    PREFILL_ENDED = 37
    """P: the whole prompt is computed."""
    TRANSFER_POSTED = 38
    """P, or with pull D: a transfer is submitted. Number: bytes."""
    DESCRIPTORS = 39
    """Of that transfer. Number: descriptors."""
    FIRST_BYTES = 40
    """P: the first of several transfers has ended."""

    TAKEN_IN = 41
    """P or D: an engine that schedules by itself has the request in its own queue."""
    SAMPLED = 42
    """D: such an engine has computed the first token."""
    LOADED = 43
    """D: what ``LOADING`` began has ended. Number: bytes."""
    SAVED = 44
    """P: the KV of another chunk is where a transfer may read it. Number: bytes."""
    FETCHING = 45
    """D: its engine gets the KV from the other engine by itself, and then computes."""

    DRAFTED = 46
    """D: the answer has ended. Number: tokens that were drafted for it, by speculative decoding."""
    ACCEPTED = 47
    """D: of these. Number: tokens that the model accepted."""

    RUN_QUEUE = 48
    """How long the process's threads have been ready to run without a core, since they began. Number: seconds."""


LATE_S = 0.2
"""A token that comes later after the one before it is marked."""
