"""The steps of a backend's scheduler on their way to the worker, and the pace that comes back: one small file that the
backend's engine process and the worker both map. It knows neither.

    | state: recording, or why not | pace | step 1 | step 2 | ... | step NUM_STEPS |

Each part has one writer and a checksum, so that what is read in the middle of a write does not count. Steps are a ring:
a reader that falls behind by more than NUM_STEPS misses some, and the writer never waits.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
import zlib
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvrelay.core.step_cost import StepCost, StepPace, StepWork

NUM_STEPS = 4096
STATE = struct.Struct("<I252s")
PACE = struct.Struct("<10d")
STEP = struct.Struct("<QdQQQQQ")
"""Its number from 1 on, its seconds, then the counts of a StepWork."""
CHECKSUM = struct.Struct("<I")
STATE_AT = 0
PACE_AT = 512
STEPS_AT = 1024
STEP_BYTES = STEP.size + CHECKSUM.size
FILE_BYTES = STEPS_AT + NUM_STEPS * STEP_BYTES


class RecorderState(msgspec.Struct, frozen=True):
    """``is_on``: every step is written. ``reason``: why not, or what is left out; empty if nothing is."""

    is_on: bool
    reason: str = ""


class Steps(NamedTuple):
    """Those that were written since the last look, oldest first, each with its seconds; and how many were missed."""

    taken: list[tuple[StepWork, float]]
    num_missed: int


class _Part:
    """Bytes of the file that one side writes, and the other reads whole or not at all."""

    def __init__(self, memory: mmap.mmap, offset: int, form: struct.Struct) -> None:
        self._memory, self._offset, self._form = memory, offset, form
        self._end = offset + form.size

    def write(self, *values: object) -> None:
        body = self._form.pack(*values)
        self._memory[self._offset : self._end + CHECKSUM.size] = body + CHECKSUM.pack(zlib.crc32(body))

    def read(self) -> bytes | None:
        """None: nothing was written, or a write is under way."""
        body = self._memory[self._offset : self._end]
        (checksum,) = CHECKSUM.unpack_from(self._memory, self._end)
        return body if checksum == zlib.crc32(body) else None


class StepLog:
    """One side's view of the file. Raises OSError for one that cannot be mapped, ValueError for one that is no step
    log."""

    def __init__(self, path: str) -> None:
        self.path = path
        with Path(path).open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), FILE_BYTES)
        self._state = _Part(self._memory, STATE_AT, STATE)
        self._pace = _Part(self._memory, PACE_AT, PACE)
        self._steps = [_Part(self._memory, STEPS_AT + at * STEP_BYTES, STEP) for at in range(NUM_STEPS)]
        self._number = 0
        """Of the last step that was written, or read, here."""
        self._pace_bytes = b""
        self._known_pace = StepPace()

    @classmethod
    def create(cls) -> StepLog:
        """A new one, in memory, which child processes of this one open by its ``path``."""
        # The descriptor stays open until this process ends.
        fd = os.memfd_create("kvrelay-steps", os.MFD_CLOEXEC)
        os.ftruncate(fd, FILE_BYTES)
        return cls(f"/proc/{os.getpid()}/fd/{fd}")

    # -- the engine process -------------------------------------------------------------------------------------------

    def write_state(self, *, is_on: bool, reason: str = "") -> None:
        self._state.write(int(is_on), reason.encode()[:252])

    def write_step(
        self, seconds: float, tokens: int, pairs: int, decodes: int, context: int, accepted: int = 0
    ) -> None:
        """The next step; the counts are those of a StepWork."""
        self._number += 1
        self._steps[self._number % NUM_STEPS].write(self._number, seconds, tokens, pairs, decodes, context, accepted)

    def read_pace(self) -> StepPace:
        """The latest; at the start one that limits nothing."""
        body = self._pace.read()
        if body is not None and body != self._pace_bytes:
            *cost, limit_s, most_s, ttft_s = PACE.unpack(body)
            self._pace_bytes, self._known_pace = body, StepPace(StepCost(*cost), limit_s, most_s, ttft_s)
        return self._known_pace

    # -- the worker ---------------------------------------------------------------------------------------------------

    def read_state(self) -> RecorderState | None:
        """None: the recorder has not begun."""
        body = self._state.read()
        if body is None:
            return None
        is_on, reason = STATE.unpack(body)
        return RecorderState(bool(is_on), reason.rstrip(b"\0").decode(errors="replace"))

    def read_steps(self) -> Steps:
        """What is new."""
        taken: list[tuple[StepWork, float]] = []
        num_missed = 0
        while (body := self._steps[(self._number + 1) % NUM_STEPS].read()) is not None:
            number, seconds, *counts = STEP.unpack(body)
            if number > self._number + 1:
                # The writer is a round ahead. Half of what is left may be overwritten before it is read.
                behind = number - NUM_STEPS // 2
                num_missed += behind - self._number
                self._number = behind
                continue
            if number <= self._number:
                break
            self._number = number
            if math.isfinite(seconds):
                taken.append((StepWork(*counts), seconds))
        return Steps(taken, num_missed)

    def write_pace(self, pace: StepPace) -> None:
        self._pace.write(*msgspec.structs.astuple(pace.cost), pace.limit_s, pace.most_s, pace.ttft_s)
