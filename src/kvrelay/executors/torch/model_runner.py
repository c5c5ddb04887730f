"""The engine's executor on one device: runs a step's batch through the model and samples the next tokens.

Owns the model, the KV pool's memory and the slots' state. ``execute`` is prepare -> forward -> logits -> sample ->
append. The scheduler decides what to compute and which blocks belong to which sequence. This module knows nothing of
hand-offs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvrelay.core.logprobs import PositionLogprobs
from kvrelay.core.sampling import SamplingParams
from kvrelay.engine.step import NO_TOKEN, NOT_NUMBERS, Int32Array, ModelOutput, NewSequence, SchedulerOutput
from kvrelay.executors.grammars import ComputingMasks, GrammarMasks
from kvrelay.executors.torch.attention.base import Attention
from kvrelay.executors.torch.config import ModelFacts
from kvrelay.executors.torch.kv_pool import KvPool
from kvrelay.executors.torch.models.decoder import Decoder
from kvrelay.executors.torch.prompt_logprobs import PromptLogprobs
from kvrelay.executors.torch.sampling.logprobs import logprobs_of
from kvrelay.executors.torch.sampling.sampler import Sampler
from kvrelay.executors.torch.slots import SlotStates, StepBatch

_NO_INTS = np.zeros(0, dtype=np.int32)
WARM_UP_TOKENS = 257
"""The longest sequence of the first steps, and its answer."""


class ModelRunner:
    """Implements ``kvrelay.engine.step.Executor``. Used from one thread at a time, except for ``prepare`` and
    ``checksum_blocks``."""

    def __init__(
        self,
        facts: ModelFacts,
        decoder: Decoder,
        attention: Attention,
        pool: KvPool,
        states: SlotStates,
        compiling: Callable[[Callable[[], None]], None] | None = None,
        *,
        grammars: GrammarMasks,
    ) -> None:
        """``compiling`` runs the first steps, perhaps twice."""
        self._grammars = grammars
        self.max_model_len, self.vocab_size = facts.max_model_len, facts.vocab_size
        self.eos_token_ids, self.weights_fingerprint = facts.eos_token_ids, facts.weights_fingerprint
        self._max_num_batched_tokens = facts.max_num_batched_tokens
        self._decoder = decoder
        self._attention = attention
        self._pool = pool
        self.kv_layout, self.num_blocks, self.kv_region = pool.layout, pool.num_blocks, pool.region
        self.num_holding_blocks, self.num_spill_blocks = pool.num_holding_blocks, pool.num_spill_blocks
        self._states = states
        self._compiling = compiling
        self._device = pool.tensor.device
        self._sampler = Sampler(facts.eos_token_ids)
        self._prompt_logprobs = PromptLogprobs(states)

    def __repr__(self) -> str:
        return f"ModelRunner({self._pool!r}, {self._states!r})"

    def execute(self, work: SchedulerOutput) -> ModelOutput:
        """Run one step; see ``SchedulerOutput`` for the order in which its parts apply."""
        states = self._states
        for slot in work.released_slots:
            self._prompt_logprobs.forget(slot)
            self._grammars.release(slot)
        for sequence in work.new_seqs:
            outputs = sequence.token_ids[sequence.num_prompt_tokens :]
            self._grammars.enter(sequence.slot, sequence.sampling, outputs)
        states.apply(work)
        if work.num_seqs == 0:
            return ModelOutput([])
        batch = states.batch(work)
        rows = np.flatnonzero(batch.samples)
        slots = batch.slots[rows]
        computing = self._grammars.begin(slots.tolist(), may_guess=True) if self._grammars else None
        with torch.inference_mode():
            prompt_tokens = self._prompt_logprobs.tokens(batch)
            hidden, num_samples = self._forward(batch, prompt_tokens)
            prompt_logprobs = self._prompt_logprobs.collect(batch, self._decoder, hidden[num_samples:])
            output = self._sample(rows, slots, hidden[:num_samples], prompt_logprobs, computing)
        for row, entries in prompt_logprobs.items():
            if not _are_finite(entries):
                output.failures[row] = NOT_NUMBERS
        states.advance(batch)
        return output

    def execute_dummy(self) -> None:
        """A step without a batch, for other ranks whose forward passes wait for this one's."""
        with torch.inference_mode():
            self._decoder.take_part()
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def prepare(self, sampling: SamplingParams) -> None:
        if sampling.grammar is not None:
            self._grammars.compiler.compile(sampling.grammar)

    def check(self) -> None:
        """There is no other process that could end."""

    def checksum_blocks(self, block_ids: Sequence[int]) -> tuple[int, ...]:
        return self._pool.checksums(block_ids)

    def copy_blocks(self, source_ids: Sequence[int], target_ids: Sequence[int]) -> None:
        self._pool.copy(source_ids, target_ids)

    def _forward(self, batch: StepBatch, prompt_tokens: npt.NDArray[np.int64]) -> tuple[torch.Tensor, int]:
        """Hidden states of the tokens whose rows sample, then of ``prompt_tokens``; and the number of the former."""
        last_tokens = batch.row_offsets[1:][batch.samples].astype(np.int64) - 1
        needed = np.concatenate((last_tokens, prompt_tokens)) if len(prompt_tokens) else last_tokens
        num_samples = len(last_tokens)
        self._attention.begin(batch)
        rows = None
        if num_samples < len(batch.token_ids) or len(prompt_tokens):
            # A step without results must still run its last layer's attention: use one row.
            rows = torch.from_numpy(needed if len(needed) else np.zeros(1, dtype=np.int64)).to(self._device)
        token_ids = torch.from_numpy(batch.token_ids).to(self._device)
        return self._decoder.forward(token_ids, self._attention, rows), num_samples

    def _sample(
        self,
        rows: npt.NDArray[np.intp],
        slots: Int32Array,
        hidden: torch.Tensor,
        prompt_logprobs: dict[int, list[PositionLogprobs]],
        computing: ComputingMasks | None,
    ) -> ModelOutput:
        if not len(hidden):
            if self._device.type == "cuda":
                # The step's blocks may be sent once this returns. (Sampling tokens also waits for the device.)
                torch.cuda.current_stream(self._device).synchronize()
            return ModelOutput([], {}, prompt_logprobs)
        logits = self._decoder.logits(hidden)
        failures: dict[int, str] = {}
        if computing is None:
            token_ids = self._sampler.sample(logits, slots, self._states)
        else:
            token_ids, failed = self._obey(computing, logits, slots)
            failures = {int(rows[row]): reason for row, reason in failed.items()}
        unsound = _unsound(logits, token_ids)
        if unsound is not None:
            failures |= dict.fromkeys(rows[unsound].tolist(), NOT_NUMBERS)
        self._states.append(slots, token_ids)
        chosen = token_ids.tolist()
        if computing is not None and not computing.is_settled:
            self._grammars.advance(slots.tolist(), chosen)
        logprobs = self._logprobs(logits, token_ids, rows, slots)
        failures |= {row: NOT_NUMBERS for row, entry in logprobs.items() if not _are_finite((entry,))}
        return ModelOutput(chosen, logprobs, prompt_logprobs, failures)

    def _obey(
        self, computing: ComputingMasks, logits: torch.Tensor, slots: Int32Array
    ) -> tuple[npt.NDArray[np.int64], dict[int, str]]:
        """The next token of each row, and why rows cannot continue. Rows whose guess is refused choose again."""
        failures: dict[int, str] = {}
        masks = computing.result()
        token_ids = self._sampler.sample(logits, slots, self._states, masks)
        if masks is not None:
            token_ids[masks.late] = NO_TOKEN
            failures |= masks.failures
        refused = computing.refused(token_ids)
        if refused is not None:
            again = logits[torch.tensor(refused.rows, device=logits.device)]
            token_ids[refused.rows] = self._sampler.sample(again, slots[refused.rows], self._states, refused)
            failures |= refused.failures
        return token_ids, failures

    def _logprobs(
        self, logits: torch.Tensor, token_ids: npt.NDArray[np.int64], rows: npt.NDArray[np.intp], slots: Int32Array
    ) -> dict[int, PositionLogprobs]:
        wanted = np.flatnonzero(self._states.sampling.wants_logprobs[slots] & (token_ids != NO_TOKEN))
        if not len(wanted):
            return {}
        counts = [self._states.sampling.params[int(slots[i])].logprobs or 0 for i in wanted]
        chosen = torch.from_numpy(token_ids[wanted]).to(self._device)
        entries = logprobs_of(logits[torch.from_numpy(wanted).to(self._device)], chosen, max(counts))
        return {
            int(rows[i]): PositionLogprobs(entry.chosen, entry.top[:count])
            for i, entry, count in zip(wanted, entries, counts)
        }

    def warm_up(self) -> None:
        """Compile and touch everything that the first request would wait for: small and large prefills and decodes."""
        largest = min(self._max_num_batched_tokens, self.max_model_len - 1)

        def first_steps() -> None:
            for num_tokens in dict.fromkeys((min(2, largest), min(128, largest))):
                self._warm_up_step([0], num_tokens, 0)
            for num_seqs in dict.fromkeys((1, min(64, len(self._states.known)))):
                self._warm_up_step(list(range(num_seqs)), 1, min(self.max_model_len, WARM_UP_TOKENS) - 2)

        if self._compiling is None:
            first_steps()
        else:
            self._compiling(first_steps)

    def _warm_up_step(self, slots: list[int], num_tokens: int, num_computed: int) -> None:
        self.execute(_warm_up_work(slots, num_tokens, num_computed))
        nothing, no_flags = _NO_INTS, np.zeros(0, dtype=np.bool_)
        self.execute(SchedulerOutput(0, (), tuple(slots), nothing, nothing, no_flags, nothing, nothing, nothing))

    def shutdown(self) -> None:
        """The pool's memory is freed with its last reference, because a transport may still hold the region."""
        self._grammars.close()
        self._grammars.compiler.close()


def _unsound(logits: torch.Tensor, token_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_] | None:
    """Rows whose token has no finite score; None: all have. To each search a NaN is the best score, so it is seen."""
    if logits.device.type == "cpu":
        scores = logits.numpy()[range(len(token_ids)), token_ids]
    else:
        chosen = torch.from_numpy(token_ids.clip(0)).to(logits.device)
        scores = logits.gather(1, chosen[:, None])[:, 0].cpu().numpy()
    finite = np.isfinite(scores)
    return None if np.logical_and.reduce(finite) else ~finite & (token_ids != NO_TOKEN)


def _are_finite(entries: Iterable[PositionLogprobs]) -> bool:
    return all(math.isfinite(entry.chosen.logprob) for entry in entries)


def _warm_up_work(slots: list[int], num_tokens: int, num_computed: int) -> SchedulerOutput:
    """Sequences of token 0 that all use block 0: no sequence reads what they write there."""
    length = num_computed + num_tokens
    sequences = tuple(
        NewSequence(slot, "warm-up", [0] * length, length, num_computed, (0,), SamplingParams(temperature=0.0), 0)
        for slot in slots
    )
    return SchedulerOutput(
        step=0,
        new_seqs=sequences,
        released_slots=(),
        slots=np.array(slots, dtype=np.int32),
        num_tokens=np.full(len(slots), num_tokens, dtype=np.int32),
        samples=np.ones(len(slots), dtype=np.bool_),
        block_slots=_NO_INTS,
        block_indices=_NO_INTS,
        block_ids=_NO_INTS,
    )
