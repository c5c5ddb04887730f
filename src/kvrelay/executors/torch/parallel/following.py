"""The runner of a rank that does not sample: it computes its part and receives the tokens with the next step."""

from __future__ import annotations

import numpy as np
import torch

from kvrelay.core.sampling import SamplingParams
from kvrelay.engine.step import Int32Array, ModelOutput, SchedulerOutput
from kvrelay.executors.torch.model_runner import ModelRunner


class FollowingRunner(ModelRunner):
    """Like ModelRunner, with an empty output. Only the sampling rank walks grammars."""

    def execute(self, work: SchedulerOutput) -> ModelOutput:
        states = self._states
        states.apply(work)
        if work.num_seqs == 0:
            return ModelOutput([])
        batch = states.batch(work)
        with torch.inference_mode():
            prompt_tokens = self._prompt_logprobs.tokens(batch)
            hidden, num_samples = self._forward(batch, prompt_tokens)
            if len(hidden):
                # On the last stage the vocabulary is cut over the ranks, so every rank contributes its columns.
                self._prompt_logprobs.follow(batch, self._decoder, hidden[num_samples:])
                if num_samples:
                    self._decoder.logits(hidden[:num_samples])
        states.advance(batch)
        return ModelOutput([])

    def append(self, slots: Int32Array, token_ids: Int32Array) -> None:
        """Append the tokens that the sampling rank drew in the step before, one per slot."""
        self._states.append(slots, token_ids.astype(np.int64))

    def prepare(self, sampling: SamplingParams) -> None:
        """This rank compiles no grammars: see the class."""
