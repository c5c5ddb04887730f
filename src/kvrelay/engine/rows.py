"""Which sequences compute in a step, and how many tokens each: every decode, then prefill chunks under a token budget.

It owns the turns of exclusive prefills and all others. It changes no request and does not know blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.engine.batch import Batch
from kvrelay.engine.request import PrefillMode, Request, service_order


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a step in their order: a token for each decode, then chunks of prompts with their lengths."""

    decodes: list[Request]
    chunks: list[tuple[Request, int]]

    @property
    def num_prefill_tokens(self) -> int:
        return sum(count for _, count in self.chunks)

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + self.num_prefill_tokens


class RowPlanner:
    """Chooses rows from ``batch``, of ``max_num_tokens`` tokens at most; the batch never has more decodes than that.

    ``exclusive_prefill``: a HANDOFF prefill runs in steps of its own. All others take every second
    step then, so that what a change of role left behind still ends.
    """

    def __init__(self, batch: Batch, max_num_tokens: int, *, exclusive_prefill: bool) -> None:
        self.exclusive_prefill = exclusive_prefill
        self._batch = batch
        self._max_num_tokens = max_num_tokens
        self._is_others_turn = False

    def plan(self) -> Rows:
        """The next step's rows; the most urgent prefills first."""
        prefilling = sorted(self._batch.prefilling, key=service_order)
        is_others_turn, self._is_others_turn = self._is_others_turn, False
        if not self.exclusive_prefill:
            return self._together(prefilling)
        handoffs = [request for request in prefilling if request.mode is PrefillMode.HANDOFF]
        others = [request for request in prefilling if request.mode is not PrefillMode.HANDOFF]
        if not handoffs or is_others_turn:
            return self._together(others)
        self._is_others_turn = bool(others) or self._batch.num_decoding > 0
        return Rows([], _chunks(handoffs[:1], self._max_num_tokens))

    def _together(self, prefilling: list[Request]) -> Rows:
        decodes = self._batch.decode_rows()
        return Rows(decodes, _chunks(prefilling, self._max_num_tokens - len(decodes)))


def _chunks(prefilling: list[Request], budget: int) -> list[tuple[Request, int]]:
    """Of each as much as the budget leaves."""
    chunks = []
    for request in prefilling:
        if budget == 0:
            break
        count = min(budget, request.num_missing_tokens)
        chunks.append((request, count))
        budget -= count
    return chunks
