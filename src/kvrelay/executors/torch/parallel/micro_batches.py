"""A step cut into micro-batches, so that the stages of a pipeline work at the same time.

    stage 0   | m0 | m1 | m2 |
    stage 1        | m0 | m1 | m2 |

A row may be cut anywhere: the second piece of a prefill chunk finds the KV of the first piece, because each stage
computes them in order. Every rank cuts the same step in the same way. Pure: no torch, no processes.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from kvrelay.engine.step import ModelOutput, SchedulerOutput

MIN_TOKENS = 64
"""A smaller micro-batch would take as long, because reading the weights dominates its time."""

_NO_INTS = np.zeros(0, dtype=np.int32)
_NOTHING_NEW: dict[str, Any] = {"new_seqs": (), "released_slots": ()}
_NOTHING_NEW |= dict.fromkeys(("block_slots", "block_indices", "block_ids"), _NO_INTS)


class MicroBatch(msgspec.Struct, frozen=True):
    """``work`` is a complete step; its row i belongs to row ``rows[i]`` of the whole step."""

    work: SchedulerOutput
    rows: npt.NDArray[np.intp]


def split(work: SchedulerOutput, num_parts: int, min_tokens: int = MIN_TOKENS) -> list[MicroBatch]:
    """At most ``num_parts`` parts of about equally many tokens, none below ``min_tokens`` unless it is the only one.

    The first part releases, enters and appends blocks for all.
    """
    total = int(work.num_tokens.sum())
    num_parts = max(1, min(num_parts, total // min_tokens))
    if num_parts == 1:
        return [MicroBatch(work, np.arange(work.num_seqs))]
    ends = np.cumsum(work.num_tokens, dtype=np.int64)
    starts = ends - work.num_tokens
    parts = []
    for number in range(num_parts):
        low, high = total * number // num_parts, total * (number + 1) // num_parts
        rows = np.flatnonzero((ends > low) & (starts < high))
        counts = np.minimum(ends[rows], high) - np.maximum(starts[rows], low)
        base = work if number == 0 else replace(work, **_NOTHING_NEW)
        samples = work.samples[rows] & (ends[rows] <= high)
        part = replace(base, slots=work.slots[rows], num_tokens=counts.astype(np.int32), samples=samples)
        parts.append(MicroBatch(part, rows))
    return parts


def merge(parts: list[MicroBatch], outputs: list[ModelOutput]) -> ModelOutput:
    """The whole step's output, merged from the outputs of its parts."""
    merged = ModelOutput([])
    for part, output in zip(parts, outputs, strict=True):
        merged.token_ids.extend(output.token_ids)
        for row, entry in output.logprobs.items():
            merged.logprobs[int(part.rows[row])] = entry
        for row, entries in output.prompt_logprobs.items():
            merged.prompt_logprobs.setdefault(int(part.rows[row]), []).extend(entries)
        for row, reason in output.failures.items():
            merged.failures[int(part.rows[row])] = reason
    return merged
