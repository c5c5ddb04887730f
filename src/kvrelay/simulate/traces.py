"""Loads from trace files that ``bench`` reads: Mooncake's JSON lines and Azure's CSV."""

from __future__ import annotations

import itertools
from pathlib import Path

from kvrelay.bench.formats import TraceRecord, read_azure, read_mooncake
from kvrelay.errors import InvalidInputError
from kvrelay.simulate.arrival import Arrival


def read_trace(path: Path, limit: int | None = None, time_scale: float = 1.0) -> list[Arrival]:
    """The first ``limit`` requests in order of time, from 0 s on; ``time_scale`` 2 lets them come twice as fast.

    Requests without an answer get one of one token. Raises InvalidInputError that names file and line.
    """
    reader = read_azure if path.suffix == ".csv" else read_mooncake
    records = sorted(itertools.islice(reader(path), limit), key=lambda record: record.timestamp_s)
    if not records:
        raise InvalidInputError(f"trace {path} has no requests")
    return [_arrival(record, (record.timestamp_s - records[0].timestamp_s) / time_scale) for record in records]


def _arrival(record: TraceRecord, time_s: float) -> Arrival:
    return Arrival(
        time_s=time_s,
        prompt_tokens=max(record.input_len, 1),
        answer_tokens=max(record.output_len, 1),
        hash_ids=record.hash_ids or None,
    )
