"""What is known of a worker only when it runs; everything else is in its WorkerConfig."""

from __future__ import annotations

import uuid

import msgspec

from kvrelay.config import WorkerRole


class WorkerIdentity(msgspec.Struct, frozen=True):
    """``worker_id`` is new at every start; ``public_key`` is the key of its request plane, empty if that is open;
    ``dp_group`` is the data-parallel group that its engine has joined."""

    worker_id: str
    public_key: str = ""
    tokenizer_fingerprint: str = ""
    dp_group: str = ""


def new_worker_id(role: WorkerRole) -> str:
    """An id that no earlier incarnation of any worker had. It begins with the initial role, only for readability."""
    return f"{role}-{uuid.uuid4().hex[:10]}"
