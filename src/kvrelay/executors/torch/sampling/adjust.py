"""Changes logits before a token is drawn: penalties, logit bias, and the mask of a minimum length.

Each works only on rows that request it; most rows request nothing and are not touched. Repetition penalty as in
CTRL (Keskar et al. 2019), over prompt and output; presence and frequency as OpenAI defines them, over the output.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from kvrelay.core.sampling import SamplingParams

Int32Array = npt.NDArray[np.int32]


def adjust_row(
    logits: torch.Tensor, sampling: SamplingParams, tokens: Int32Array, num_prompt: int, eos_token_ids: tuple[int, ...]
) -> None:
    """Change one row of logits [vocab] (float32) in place; ``tokens`` are the prompt's and the output's."""
    if sampling.needs_penalties:
        _penalize(logits, sampling, tokens, num_prompt)
    if sampling.logit_bias:
        indices = torch.tensor(list(sampling.logit_bias), device=logits.device)
        logits[indices] += torch.tensor(list(sampling.logit_bias.values()), device=logits.device)
    if len(tokens) - num_prompt < sampling.min_tokens:
        forbidden = sampling.stop_token_ids if sampling.ignore_eos else (*eos_token_ids, *sampling.stop_token_ids)
        if forbidden:
            logits[torch.tensor(forbidden, device=logits.device)] = float("-inf")


def _penalize(logits: torch.Tensor, sampling: SamplingParams, tokens: Int32Array, num_prompt: int) -> None:
    if sampling.repetition_penalty != 1.0:
        seen = torch.from_numpy(np.unique(tokens).astype(np.int64)).to(logits.device)
        values = logits[seen]
        penalty = sampling.repetition_penalty
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if sampling.presence_penalty or sampling.frequency_penalty:
        outputs, counts = np.unique(tokens[num_prompt:], return_counts=True)
        change = sampling.presence_penalty + sampling.frequency_penalty * counts.astype(np.float32)
        rows = torch.from_numpy(outputs.astype(np.int64)).to(logits.device)
        logits[rows] -= torch.from_numpy(change.astype(np.float32)).to(logits.device)
