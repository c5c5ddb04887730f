"""A worker's settings."""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from kvrelay.config import ControlConfig, DisaggConfig, EngineConfig, TransferConfig
from kvrelay.core.workers import WorkerRole


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """``worker_id`` is new at every start; ``public_key`` is the key of its request plane, empty if that is open."""

    model: str
    model_path: str
    role: WorkerRole
    engine_kind: str
    engine: EngineConfig
    transfer: TransferConfig
    control: ControlConfig
    disagg: DisaggConfig
    worker_id: str
    public_key: str = ""
    tokenizer_fingerprint: str = ""
    dp_group: str = ""
    """The data-parallel group that the engine belongs to, and its rank in it."""
    dp_rank: int = 0
    dp_size: int = 1


def new_worker_id(role: WorkerRole) -> str:
    """An id that no earlier incarnation of any worker had. It begins with the initial role, only for readability."""
    return f"{role}-{uuid.uuid4().hex[:10]}"
