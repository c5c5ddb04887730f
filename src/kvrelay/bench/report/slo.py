"""Service level objectives, and the goodput under them: requests that meet every one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvrelay.bench.report.records import Outcome, RequestRecord
from kvrelay.errors import InvalidInputError

_UNITS = {"ms": 1e-3, "s": 1.0}


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits in seconds; None means no limit.

    ``itl_s`` bounds the 99th percentile of the request's waits between arrivals: a mean would hide the stalls that a
    reader sees, and ``tpot_s`` bounds the mean already.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    itl_s: float | None = None
    e2e_s: float | None = None

    def met_by(self, record: RequestRecord) -> bool:
        """Whether the request succeeded within every limit. A figure that a request does not have meets its limit."""
        if record.outcome is not Outcome.OK:
            return False
        gaps = record.gaps_s()
        itl = float(np.percentile(gaps, 99)) if gaps.size else None
        pairs = (
            (self.ttft_s, record.ttft_s),
            (self.tpot_s, record.tpot_s),
            (self.itl_s, itl),
            (self.e2e_s, record.e2e_s),
        )
        return all(limit is None or value is None or value <= limit for limit, value in pairs)


@dataclass(frozen=True, slots=True)
class Goodput:
    """``share`` of all requests that ended (0 to 1), and good requests per second."""

    share: float
    requests_per_s: float


def goodput(records: Sequence[RequestRecord], slo: Slo, duration_s: float) -> Goodput:
    """Count requests that meet the objectives; failed ones do not, cut-off ones do not count."""
    ended = [record for record in records if record.outcome is not Outcome.CUT_OFF]
    good = sum(slo.met_by(record) for record in ended)
    return Goodput(good / len(ended) if ended else 0.0, good / duration_s)


def parse_slo(text: str) -> Slo:
    """Read ``ttft=200,tpot=20ms,itl=0.1s``: milliseconds unless a unit is given. Raises InvalidInputError."""
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name not in ("ttft", "tpot", "itl", "e2e") or name in limits:
            raise InvalidInputError(f"--slo: {part!r} is not ttft=, tpot=, itl= or e2e=, each once", param="slo")
        unit = "ms" if value.endswith("ms") else "s" if value.endswith("s") else ""
        try:
            limits[name] = float(value.removesuffix(unit)) * _UNITS[unit or "ms"]
        except ValueError as exc:
            raise InvalidInputError(f"--slo: {value!r} is not a time", param="slo") from exc
        if not (limits[name] > 0 and math.isfinite(limits[name])):
            raise InvalidInputError(f"--slo: {part!r} must be above zero", param="slo")
    return Slo(limits.get("ttft"), limits.get("tpot"), limits.get("itl"), limits.get("e2e"))
