"""The state of running sequences: one row per slot, kept between steps, from which a step's batch is cut.

Owns tokens, block tables and counts as numpy arrays, so that preparing a step costs no Python per token. Tokens that
the runner samples are appended here. Knows nothing of tensors or models.

    tokens[slot]       = prompt | generated | (free)        known[slot]    = how many are filled
    block_table[slot]  = block ids, in order                computed[slot] = how many have their KV in the pool
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from kvrelay.engine.step import NO_TOKEN, BoolArray, Int32Array, NewSequence, SchedulerOutput
from kvrelay.executors.torch.sampling.table import SamplingTable

Int64Array = npt.NDArray[np.int64]


class StepBatch(msgspec.Struct, frozen=True):
    """One forward pass: B rows, T tokens; the first ``num_decodes`` rows have one token each.

    ``slots``, ``starts`` (tokens computed before), ``num_tokens`` [B]; ``row_offsets`` [B + 1] into the tokens;
    ``token_ids``, ``positions`` [T] int64; ``samples`` [B]: rows whose last token's logits choose the next token.
    ``block_table`` [max_num_seqs, max_blocks] is that of all slots, indexed by slot.
    """

    slots: Int32Array
    starts: Int32Array
    num_tokens: Int32Array
    row_offsets: Int32Array
    token_ids: Int64Array
    positions: Int64Array
    samples: BoolArray
    num_decodes: int
    block_table: Int32Array

    @property
    def num_rows(self) -> int:
        return len(self.slots)


class SlotStates:
    """The rows of all slots. Rows occupy no memory until they are used."""

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        self.tokens = np.zeros((max_num_seqs, max_model_len + 1), dtype=np.int32)
        self.block_table = np.zeros((max_num_seqs, -(-max_model_len // block_size)), dtype=np.int32)
        self.known = np.zeros(max_num_seqs, dtype=np.int32)
        self.num_prompt = np.zeros(max_num_seqs, dtype=np.int32)
        self.computed = np.zeros(max_num_seqs, dtype=np.int32)
        self.sampling = SamplingTable(max_num_seqs)

    def __repr__(self) -> str:
        return f"SlotStates({len(self.sampling.params)} of {len(self.known)} slots, {int(self.known.sum())} tokens)"

    def apply(self, work: SchedulerOutput) -> None:
        """Release, enter and append blocks, in this order."""
        for slot in work.released_slots:
            self.sampling.release(slot)
            self.known[slot] = 0
        for sequence in work.new_seqs:
            self._enter(sequence)
        if len(work.block_slots):
            self.block_table[work.block_slots, work.block_indices] = work.block_ids

    def batch(self, work: SchedulerOutput) -> StepBatch:
        """The step's tokens and positions, cut from the rows."""
        slots, num_tokens = work.slots, work.num_tokens
        starts = self.computed[slots]
        row_offsets = np.zeros(len(slots) + 1, dtype=np.int32)
        np.cumsum(num_tokens, out=row_offsets[1:])
        num_decodes = len(slots) if row_offsets[-1] == len(slots) else int(np.argmax(num_tokens != 1))
        if num_decodes == len(slots):
            positions = starts.astype(np.int64)
            token_ids = self.tokens[slots, starts]
        else:
            shift = np.repeat(starts - row_offsets[:-1], num_tokens)
            positions = np.arange(row_offsets[-1], dtype=np.int64) + shift
            token_ids = self.tokens[np.repeat(slots, num_tokens), positions]
        return StepBatch(
            slots=slots,
            starts=starts,
            num_tokens=num_tokens,
            row_offsets=row_offsets,
            token_ids=token_ids.astype(np.int64),
            positions=positions,
            samples=work.samples,
            num_decodes=num_decodes,
            block_table=self.block_table,
        )

    def advance(self, batch: StepBatch) -> None:
        """Mark the step's tokens as computed."""
        self.computed[batch.slots] += batch.num_tokens

    def append(self, slots: Int32Array, token_ids: Int64Array) -> None:
        """Append one sampled token per slot. With NO_TOKEN the slot's last token does not count as computed."""
        sits_out = token_ids == NO_TOKEN
        if sits_out.any():
            self.computed[slots[sits_out]] -= 1
            slots, token_ids = slots[~sits_out], token_ids[~sits_out]
        self.tokens[slots, self.known[slots]] = token_ids
        self.known[slots] += 1

    def _enter(self, sequence: NewSequence) -> None:
        slot, count = sequence.slot, len(sequence.token_ids)
        self.tokens[slot, :count] = sequence.token_ids
        self.block_table[slot, : len(sequence.block_ids)] = sequence.block_ids
        self.known[slot] = count
        self.num_prompt[slot] = sequence.num_prompt_tokens
        self.computed[slot] = sequence.num_computed_tokens
        self.sampling.enter(slot, sequence.sampling, sequence.seed)
