"""Rows of the mock executor that sit out steps at random, as rows with late masks do."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from kvrelay.engine.step import NO_TOKEN, ModelOutput, SchedulerOutput
from kvrelay.executors.mock import MockExecutor


def sit_out(monkeypatch: pytest.MonkeyPatch, seed: int, probability: float = 0.4) -> list[str]:
    """From now on. Returns the rows that did, as a list that grows: "decode", or "chunk" for the last of a prompt."""
    rng, sat_out = Random(seed), list[str]()
    execute = MockExecutor.execute

    def late_execute(self: MockExecutor, work: SchedulerOutput) -> ModelOutput:
        output = execute(self, work)
        for number, row in enumerate(np.flatnonzero(work.samples).tolist()):
            sequence = self._sequences[int(work.slots[row])]
            if rng.random() < probability:
                sequence.num_computed -= 1
                sequence.keys.pop()
                output.token_ids[number] = NO_TOKEN
                output.logprobs.pop(row, None)
                is_first = sequence.num_computed < sequence.num_prompt
                sat_out.append("chunk" if is_first else "decode")
        return output

    monkeypatch.setattr(MockExecutor, "execute", late_execute)
    return sat_out
