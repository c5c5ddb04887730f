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
        table = states.sampling
        num_outputs = states.known[slots] - states.num_prompt[slots]
        adjusts = table.adjusts[slots] | (num_outputs < table.min_tokens[slots])
        random = table.is_random[slots]
        if not adjusts.any() and not random.any() and masks is None:
            return _argmax(logits)
        scores = logits.float()
        if adjusts.any() or masks is not None:
            scores = scores.clone() if scores is logits else scores
            for row in np.flatnonzero(adjusts):
                slot = int(slots[row])
                tokens = states.tokens[slot, : states.known[slot]]
                adjust_row(scores[row], table.params[slot], tokens, int(states.num_prompt[slot]), self._eos_token_ids)
        if masks is not None:
            _forbid(scores, masks)
        token_ids = _argmax(scores) if not random.all() else np.zeros(len(slots), dtype=np.int64)
        filters, small = table.filters[slots], (table.top_k[slots] > 0) & (table.top_k[slots] <= _SMALL_TOP_K)
        numbers = uniform(table.seeds[slots], num_outputs.astype(np.int64))
        for chosen, draw in (
            (random & ~filters, _draw_plain),
            (random & filters & small, _draw_filtered),
            (random & filters & ~small, _draw_filtered),
        ):
            rows = np.flatnonzero(chosen)
            if len(rows):
                token_ids[rows] = draw(_take(scores, rows), states, slots[rows], numbers[rows])
        return token_ids


def _forbid(scores: torch.Tensor, masks: StepMasks) -> None:
    """Exclude the tokens that the masks forbid, in place.

    If no token is left, because ``min_tokens`` forbids the end that the grammar demands, the grammar wins.
    """
    if scores.device.type == "cpu":
        array, excluded = scores.numpy(), masks.forbidden()
        allowed = np.where(excluded, -np.inf, array[masks.rows])
        array[masks.rows] = allowed
        for number in np.flatnonzero(np.isneginf(allowed.max(axis=-1))):
            array[masks.rows[number]] = np.where(excluded[number], -np.inf, 0.0)
        return
    rows = torch.tensor(masks.rows, dtype=torch.int64, device=scores.device)
    forbidden = torch.from_numpy(masks.forbidden()).to(scores.device)
    masked = scores[rows].masked_fill_(forbidden, float("-inf"))
    stuck = torch.isneginf(masked).all(dim=-1, keepdim=True)
    scores[rows] = torch.where(stuck, torch.zeros_like(masked).masked_fill_(forbidden, float("-inf")), masked)


def _argmax(logits: torch.Tensor) -> npt.NDArray[np.int64]:
    """The first maximum of each row."""
    if logits.device.type != "cpu":
        token_ids: npt.NDArray[np.int64] = logits.argmax(dim=-1).cpu().numpy()
    else:
        token_ids = logits.float().numpy().argmax(axis=-1)  # 15 times as fast as torch's
    return token_ids


def _take(scores: torch.Tensor, rows: npt.NDArray[np.intp]) -> torch.Tensor:
    return scores if len(rows) == len(scores) else scores[torch.from_numpy(rows).to(scores.device)]


def _column(values: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(values).to(device)[:, None]


def _draw_plain(
    scores: torch.Tensor, states: SlotStates, slots: Int32Array, numbers: npt.NDArray[np.float64]
) -> npt.NDArray[np.int64]:
    probabilities = torch.softmax(scores / _column(states.sampling.temperature[slots], scores.device), dim=-1)
    return _invert(probabilities, numbers).cpu().numpy()


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
