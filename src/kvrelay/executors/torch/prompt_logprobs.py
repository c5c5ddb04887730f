"""Log-probabilities of prompt tokens, gathered chunk by chunk.

The logits at position p score the token at p + 1. So each chunk leaves one entry for the next chunk, which is kept by
slot.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from kvrelay.core.logprobs import PositionLogprobs
from kvrelay.executors.torch.models.decoder import Decoder
from kvrelay.executors.torch.sampling.logprobs import logprobs_of
from kvrelay.executors.torch.slots import SlotStates, StepBatch

# Rows of logits that are computed at a time: those of a whole prompt would be prompt x vocabulary floats.
_ROWS_AT_ONCE = 256
_NO_TOKENS = np.zeros(0, dtype=np.int64)


class PromptLogprobs:
    """``tokens`` returns which hidden states are needed, ``collect`` turns them into entries."""

    def __init__(self, states: SlotStates) -> None:
        self._states = states
        self._carried: dict[int, PositionLogprobs] = {}

    def forget(self, slot: int) -> None:
        self._carried.pop(slot, None)

    def tokens(self, batch: StepBatch) -> npt.NDArray[np.int64]:
        """Indices of those tokens of the step whose logits score a prompt token."""
        if not self._states.sampling.wants_prompt_logprobs[batch.slots].any():
            return _NO_TOKENS
        runs = [np.arange(first, first + count) for _, first, count in self._rows(batch)]
        return np.concatenate(runs).astype(np.int64) if runs else _NO_TOKENS

    def collect(self, batch: StepBatch, decoder: Decoder, hidden: torch.Tensor) -> dict[int, list[PositionLogprobs]]:
        """By row: the entries of the prompt positions computed in this step; ``hidden`` are those of ``tokens``."""
        result: dict[int, list[PositionLogprobs]] = {}
        if not self._states.sampling.wants_prompt_logprobs[batch.slots].any():
            return result
        at = 0
        for row, _, count in self._rows(batch):
            slot, start = int(batch.slots[row]), int(batch.starts[row])
            targets = self._states.tokens[slot, start + 1 : start + 1 + count]
            entries = self._rate(decoder, hidden[at : at + count], targets, slot)
            at += count
            carried = self._carried.pop(slot, None)
            if carried is not None:
                entries.insert(0, carried)
            if start + int(batch.num_tokens[row]) < int(self._states.num_prompt[slot]):
                self._carried[slot] = entries.pop()
            result[row] = entries
        return result

    def follow(self, batch: StepBatch, decoder: Decoder, hidden: torch.Tensor) -> None:
        """Take part in the matrix products of ``collect`` on ranks that do not sample, without using the result."""
        at = 0
        for _, _, count in self._rows(batch):
            for first in range(at, at + count, _ROWS_AT_ONCE):
                decoder.logits(hidden[first : min(first + _ROWS_AT_ONCE, at + count)])
            at += count

    def _rows(self, batch: StepBatch) -> list[tuple[int, int, int]]:
        """(row, first token in the step, number of tokens whose next one is of the prompt) of rows whose requests ask
        for prompt logprobs."""
        rows = []
        for row in np.flatnonzero(self._states.sampling.wants_prompt_logprobs[batch.slots]):
            left = int(self._states.num_prompt[batch.slots[row]]) - int(batch.starts[row])
            if left > 0:
                count = min(int(batch.num_tokens[row]), left - 1)
                rows.append((int(row), int(batch.row_offsets[row]), count))
        return rows

    def _rate(
        self, decoder: Decoder, hidden: torch.Tensor, targets: npt.NDArray[np.int32], slot: int
    ) -> list[PositionLogprobs]:
        num_top = self._states.sampling.params[slot].prompt_logprobs or 0
        token_ids = torch.from_numpy(targets.astype(np.int64)).to(hidden.device)
        entries: list[PositionLogprobs] = []
        for first in range(0, len(targets), _ROWS_AT_ONCE):
            piece = slice(first, first + _ROWS_AT_ONCE)
            entries += logprobs_of(decoder.logits(hidden[piece]), token_ids[piece], num_top)
        return entries
