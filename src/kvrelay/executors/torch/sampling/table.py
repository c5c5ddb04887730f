"""Sampling settings by slot, as arrays, so that a step with plain settings costs no Python per row."""

from __future__ import annotations

import numpy as np

from kvrelay.core.sampling import SamplingParams


class SamplingTable:
    """``params`` by slot, and the settings that a step reads for many rows at once.

    ``adjusts``: the row's logits are changed before sampling. Rows with ``min_tokens`` are adjusted until they have
    that many.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self.params: dict[int, SamplingParams] = {}
        self.seeds = np.zeros(max_num_seqs, dtype=np.uint64)
        self.temperature = np.zeros(max_num_seqs, dtype=np.float32)
        self.top_k = np.zeros(max_num_seqs, dtype=np.int64)
        self.top_p = np.ones(max_num_seqs, dtype=np.float32)
        self.min_p = np.zeros(max_num_seqs, dtype=np.float32)
        self.is_random = np.zeros(max_num_seqs, dtype=np.bool_)
        self.filters = np.zeros(max_num_seqs, dtype=np.bool_)
        self.adjusts = np.zeros(max_num_seqs, dtype=np.bool_)
        self.min_tokens = np.zeros(max_num_seqs, dtype=np.int32)
        self.wants_logprobs = np.zeros(max_num_seqs, dtype=np.bool_)
        self.wants_prompt_logprobs = np.zeros(max_num_seqs, dtype=np.bool_)

    def enter(self, slot: int, sampling: SamplingParams, seed: int) -> None:
        self.params[slot] = sampling
        self.seeds[slot] = np.uint64(seed)
        self.is_random[slot] = not sampling.is_greedy
        self.temperature[slot] = 1.0 if sampling.is_greedy else sampling.temperature
        self.top_k[slot] = max(sampling.top_k, 0)
        self.top_p[slot] = sampling.top_p
        self.min_p[slot] = sampling.min_p
        self.filters[slot] = sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0
        self.adjusts[slot] = sampling.needs_penalties or bool(sampling.logit_bias)
        self.min_tokens[slot] = sampling.min_tokens
        self.wants_logprobs[slot] = sampling.logprobs is not None
        self.wants_prompt_logprobs[slot] = sampling.prompt_logprobs is not None

    def release(self, slot: int) -> None:
        self.params.pop(slot, None)
