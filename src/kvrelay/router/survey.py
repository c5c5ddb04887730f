"""Who competes for a request, and everything that the decision between them looks at."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from kvrelay.core.workers import WorkerInfo, WorkerRole
from kvrelay.placement.seconds import Candidates, FloatColumn


class RouterStage(enum.Enum):
    """Which workers compete. REQUEST: workers to which frontends send requests (decode-first order, and the decode half
    of a pair). PREFILL: workers that prefill (the prefill half of a pair in prefill-first order)."""

    REQUEST = "request"
    PREFILL = "prefill"

    def admits(self, info: WorkerInfo) -> bool:
        if self is RouterStage.PREFILL:
            return info.role is not WorkerRole.DECODE
        return info.role.takes_requests


@dataclass(frozen=True, slots=True)
class Survey:
    """Everything that a decision looks at, in row order: the competing workers, their numbers, the policy's scores."""

    worker_ids: list[str]
    workers: Mapping[str, WorkerInfo]
    candidates: Candidates
    scores: FloatColumn
    sequence: tuple[int, ...]
    """The prompt's sequence hashes."""

    @property
    def infos(self) -> list[WorkerInfo]:
        return [self.workers[worker_id] for worker_id in self.worker_ids]
