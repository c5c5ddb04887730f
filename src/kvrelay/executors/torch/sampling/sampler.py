"""One draw for the whole batch.

Greedy rows take the argmax; random rows invert their cumulative distribution at a number that depends on seed and
output index alone. A row's token never depends on the other rows: rows are grouped by sampling method, and each group
is computed row by row. The engine decides when an answer ends.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from kvrelay.engine.step import Int32Array
from kvrelay.executors.grammars import StepMasks
from kvrelay.executors.torch.sampling.adjust import adjust_row
from kvrelay.executors.torch.sampling.uniform import uniform
from kvrelay.executors.torch.slots import SlotStates

# Rows whose top_k is at most this are sampled from that many best tokens; other rows with filters need a full sort.
_SMALL_TOP_K = 64


class Sampler:
    def __init__(self, eos_token_ids: tuple[int, ...]) -> None:
        self._eos_token_ids = eos_token_ids

    def sample(
        self, logits: torch.Tensor, slots: Int32Array, states: SlotStates, masks: StepMasks | None = None
    ) -> npt.NDArray[np.int64]:
        """The next token of each row of ``logits`` [R, vocab], left as they are, for the sequences in ``slots`` [R].

        ``masks`` name rows of ``logits`` and their forbidden tokens.
        """
        adjusts = states.sampling.adjusts[slots] | (_num_outputs(slots, states) < states.sampling.min_tokens[slots])
        if masks is None and not adjusts.any():
            return _choose(logits, slots, states)
        if masks is not None and len(masks.rows) == len(slots):
            return _choose(self._changed(logits, slots, states, adjusts, masks), slots, states)
        changes = adjusts.copy()
        if masks is not None:
            changes[masks.rows] = True
        token_ids = np.zeros(len(slots), dtype=np.int64)
        rows, others = np.flatnonzero(changes), np.flatnonzero(~changes)
        if len(others):
            token_ids[others] = _choose(_take(logits, others), slots[others], states)
        if len(rows):
            masked = None if masks is None else np.searchsorted(rows, masks.rows)
            scores = self._changed(_take(logits, rows), slots[rows], states, adjusts[rows], masks, masked)
            token_ids[rows] = _choose(scores, slots[rows], states)
        return token_ids

    def _changed(
        self,
        logits: torch.Tensor,
        slots: Int32Array,
        states: SlotStates,
        adjusts: npt.NDArray[np.bool_],
        masks: StepMasks | None,
        masked: npt.NDArray[np.intp] | None = None,
    ) -> torch.Tensor:
        """Scores of rows that are adjusted or masked, in a new tensor. ``masked``: the rows of the masks; None: all."""
        scores = logits.float()
        may_be_stuck = bool(adjusts.any())
        if may_be_stuck:
            scores = scores.clone() if scores is logits else scores
            for row in np.flatnonzero(adjusts):
                slot = int(slots[row])
                tokens = states.tokens[slot, : states.known[slot]]
                params, num_prompt = states.sampling.params[slot], int(states.num_prompt[slot])
                adjust_row(scores[row], params, tokens, num_prompt, self._eos_token_ids)
        if masks is None:
            return scores
        if masked is None or len(masked) == len(slots):
            return _masked(scores, masks, may_be_stuck)
        rows = torch.from_numpy(masked).to(scores.device)
        scores = scores.clone() if scores is logits else scores
        scores[rows] = _masked(scores[rows], masks, may_be_stuck)
        return scores


def _num_outputs(slots: Int32Array, states: SlotStates) -> Int32Array:
    return states.known[slots] - states.num_prompt[slots]


def _choose(scores: torch.Tensor, slots: Int32Array, states: SlotStates) -> npt.NDArray[np.int64]:
    """The best token of greedy rows, a drawn one of random rows."""
    table = states.sampling
    random = table.is_random[slots]
    token_ids = _argmax(scores) if not random.all() else np.zeros(len(slots), dtype=np.int64)
    if not random.any():
        return token_ids
    scores = scores.float()
    filters, small = table.filters[slots], (table.top_k[slots] > 0) & (table.top_k[slots] <= _SMALL_TOP_K)
    numbers = uniform(table.seeds[slots], _num_outputs(slots, states).astype(np.int64))
    for chosen, draw in (
        (random & ~filters, _draw_plain),
        (random & filters & small, _draw_filtered),
        (random & filters & ~small, _draw_filtered),
    ):
        rows = np.flatnonzero(chosen)
        if len(rows):
            token_ids[rows] = draw(_take(scores, rows), states, slots[rows], numbers[rows])
    return token_ids


def _masked(scores: torch.Tensor, masks: StepMasks, may_be_stuck: bool) -> torch.Tensor:
    """``scores`` without the tokens that the masks forbid, in a new tensor.

    If no token is left, because ``min_tokens`` forbids the end that the grammar demands, the grammar wins. Only rows
    that were adjusted can be stuck so.
    """
    if scores.device.type == "cpu":
        penalties = torch.from_numpy(masks.penalties())
        masked = torch.from_numpy(scores.numpy() + penalties.numpy())  # a few rows: half of torch's time
    else:
        forbidden = torch.from_numpy(masks.forbidden()).to(scores.device)
        penalties = torch.zeros(forbidden.shape, device=scores.device).masked_fill_(forbidden, float("-inf"))
        masked = scores + penalties
    if not may_be_stuck:
        return masked
    return torch.where(torch.isneginf(masked.amax(dim=-1, keepdim=True)), penalties, masked)


def _argmax(logits: torch.Tensor) -> npt.NDArray[np.int64]:
    """The first maximum of each row."""
    if logits.device.type != "cpu":
        token_ids: npt.NDArray[np.int64] = logits.argmax(dim=-1).cpu().numpy()
    else:
        token_ids = logits.numpy().argmax(axis=-1)  # 15 times as fast as torch's
    return token_ids


def _take(scores: torch.Tensor, rows: npt.NDArray[np.intp]) -> torch.Tensor:
    return scores if len(rows) == len(scores) else scores[torch.from_numpy(rows).to(scores.device)]


def _column(values: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(values).to(device)[:, None]


def _draw_plain(
    scores: torch.Tensor, states: SlotStates, slots: Int32Array, numbers: npt.NDArray[np.float64]
) -> npt.NDArray[np.int64]:
    probabilities = torch.softmax(scores / _column(states.sampling.temperature[slots], scores.device), dim=-1)
    token_ids: npt.NDArray[np.int64] = _invert(probabilities, numbers).cpu().numpy()
    # One score that is no number, or infinite, makes all probabilities NaN: show that one.
    lost = probabilities[:, 0].isnan().cpu().numpy()
    if lost.any():
        token_ids[lost] = _argmax(scores)[lost]
    return token_ids


def _draw_filtered(
    scores: torch.Tensor, states: SlotStates, slots: Int32Array, numbers: npt.NDArray[np.float64]
) -> npt.NDArray[np.int64]:
    """min-p, then top-k, then top-p of the remaining tokens, in vLLM's order."""
    table, device = states.sampling, scores.device
    if ((table.top_k[slots] > 0) & (table.top_k[slots] <= _SMALL_TOP_K)).all():
        values, indices = scores.topk(min(_SMALL_TOP_K, scores.shape[-1]), dim=-1)
    else:
        values, indices = torch.sort(scores, dim=-1, descending=True, stable=True)
    values = values / _column(table.temperature[slots], device)
    top_k = np.where(table.top_k[slots] > 0, table.top_k[slots], values.shape[-1])
    ranks = torch.arange(values.shape[-1], device=device)
    dropped = ranks >= _column(top_k, device)
    relative = torch.exp(values - values[:, :1])
    dropped |= relative < _column(table.min_p[slots], device)
    probabilities = torch.softmax(values.masked_fill(dropped, float("-inf")), dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    # The best token always stays: rounding must not leave a row without a token.
    outside = (before >= _column(table.top_p[slots], device)) & (ranks > 0)
    places = _invert(probabilities.masked_fill(outside, 0.0), numbers)
    return indices.gather(1, places[:, None])[:, 0].cpu().numpy()


def _invert(probabilities: torch.Tensor, numbers: npt.NDArray[np.float64]) -> torch.Tensor:
    """The first place in each row where the running sum exceeds number * sum: an index of positive probability."""
    sums = probabilities.double().cumsum(dim=-1)
    targets = _column(numbers, probabilities.device) * sums[:, -1:]
    places = (sums <= targets).sum(dim=-1)
    return places.clamp_(max=probabilities.shape[-1] - 1)
