"""What is known of a worker only when it runs; everything else is in its WorkerConfig."""

from __future__ import annotations

import uuid

import msgspec


class WorkerIdentity(msgspec.Struct, frozen=True):
    """``worker_id`` is new at every start; ``public_key`` is the key of its request plane, empty if that is open;
    ``dp_group`` is the data-parallel group that its engine has joined; ``after_crash`` as in its entry."""

    worker_id: str
    public_key: str = ""
    tokenizer_fingerprint: str = ""
    dp_group: str = ""
    after_crash: str = ""


def new_worker_id() -> str:
    """An id that no earlier incarnation of any worker had. A role is not part of it: that may change."""
    return f"worker-{uuid.uuid4().hex[:10]}"
