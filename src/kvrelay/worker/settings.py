"""What a worker is told at start."""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from kvrelay.config import ControlConfig, DisaggConfig, EngineConfig, TransferConfig
from kvrelay.core.workers import WorkerRole


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """``worker_id`` is drawn anew at every start; ``public_key`` is what its request plane asks for, empty when it is
    open."""

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


def new_worker_id(role: WorkerRole) -> str:
    """An id that no earlier incarnation of any worker had; it begins with the role at birth, for the eye only."""
    return f"{role}-{uuid.uuid4().hex[:10]}"
