"""What came out: each request's times, each worker's work, and the figures that are reported of them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from kvrelay.core.tier_stats import TierStats
from kvrelay.placement.base import Objectives

PERCENTILES = (50, 90, 99)


class RequestResult(msgspec.Struct, eq=False):
    """One request. Virtual times in seconds; ``tokens_s``: when the client got each token. ``error``: why there is no
    whole answer; empty: there is one, or the simulation ended before. ``worker_id`` had it last."""

    index: int
    sent_s: float
    prompt_tokens: int
    tokens_s: array[float] = msgspec.field(default_factory=lambda: array("d"))
    is_done: bool = False
    error: str = ""
    worker_id: str = ""
    num_cached_tokens: int = 0
    num_migrations: int = 0

    @property
    def ttft_s(self) -> float:
        return self.tokens_s[0] - self.sent_s

    @property
    def e2e_s(self) -> float:
        return self.tokens_s[-1] - self.sent_s

    def gaps_s(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Seconds between its tokens [tokens - 1]."""
        return np.diff(np.frombuffer(self.tokens_s, dtype=np.float64))

    def meets(self, objectives: Objectives) -> bool:
        """Whether the first token is in time, and the 99th percentile of the gaps, too."""
        return self.is_done and self.ttft_s <= objectives.ttft_s and self.keeps_gaps(objectives)

    def keeps_gaps(self, objectives: Objectives) -> bool:
        """Whether the 99th percentile of the gaps is in time."""
        gaps = self.gaps_s()
        return not gaps.size or float(np.percentile(gaps, 99)) <= objectives.itl_s


class WorkerResult(msgspec.Struct):
    """What one worker did: steps, the seconds in them, tokens, and the bytes that its link has moved.
    ``session_tokens``: what turns have repeated, by the place where it was. ``kv_tiers``: as in a worker's status."""

    worker_id: str
    role: str
    num_steps: int = 0
    busy_s: float = 0.0
    num_prefill_tokens: int = 0
    num_generated_tokens: int = 0
    num_link_bytes: int = 0
    num_preemptions: int = 0
    session_tokens: dict[str, int] = {}
    kv_tiers: TierStats | None = None


class SimulationResult(msgspec.Struct, frozen=True):
    """``end_s``: the virtual time of the last event that counts. ``places``: prefills by place and reason."""

    requests: Sequence[RequestResult]
    workers: Sequence[WorkerResult]
    places: dict[str, int]
    end_s: float

    @property
    def done(self) -> list[RequestResult]:
        """Requests with a whole answer."""
        return [request for request in self.requests if request.is_done]

    @property
    def num_computed_tokens(self) -> int:
        """Prompt tokens that were not cached, by the usage of the answers."""
        return sum(request.prompt_tokens - request.num_cached_tokens for request in self.done)

    @property
    def first_error(self) -> str:
        """Why the first failed request has no answer; empty: none has failed."""
        return next((request.error for request in self.requests if request.error), "")

    def goodput(self, objectives: Objectives) -> float:
        """The share of all ended requests, failed ones included, that meet both objectives."""
        ended = [request for request in self.requests if request.is_done or request.error]
        return sum(request.meets(objectives) for request in ended) / len(ended) if ended else 0.0

    def latencies(self) -> dict[str, dict[str, float]]:
        """Seconds: ``ttft_s``, ``itl_s`` (of all gaps) and ``e2e_s``, each by mean, p50, p90, p99. Empty without an
        answer."""
        done = self.done
        if not done:
            return {}
        gaps = [request.gaps_s() for request in done]
        return {
            "ttft_s": summary([request.ttft_s for request in done]),
            "itl_s": summary(np.concatenate(gaps)),
            "e2e_s": summary([request.e2e_s for request in done]),
        }

    def report(self, objectives: Objectives) -> dict[str, Any]:
        """All figures, for JSON. The order of keys is fixed."""
        done = self.done
        num_tokens = sum(len(request.tokens_s) for request in done)
        return {
            "num_requests": len(self.requests),
            "num_done": len(done),
            "num_failed": sum(bool(request.error) for request in self.requests),
            "first_error": self.first_error,
            "end_s": self.end_s,
            "output_tokens_per_s": num_tokens / self.end_s if self.end_s else 0.0,
            "goodput": self.goodput(objectives),
            "latencies": self.latencies(),
            "places": dict(sorted(self.places.items())),
            "num_migrations": sum(request.num_migrations for request in self.requests),
            "num_prompt_tokens": sum(request.prompt_tokens for request in done),
            "num_computed_tokens": self.num_computed_tokens,
            "workers": [msgspec.to_builtins(worker) for worker in self.workers],
        }


def summary(values: Sequence[float] | np.ndarray[Any, np.dtype[np.float64]]) -> dict[str, float]:
    """Mean and percentiles; all 0 without values."""
    numbers = np.asarray(values, dtype=np.float64)
    if not numbers.size:
        return {"mean": 0.0, **{f"p{percent}": 0.0 for percent in PERCENTILES}}
    found = np.percentile(numbers, PERCENTILES)
    return {"mean": float(numbers.mean()), **{f"p{p}": float(value) for p, value in zip(PERCENTILES, found)}}
