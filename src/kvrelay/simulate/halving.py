"""Successive halving (Jamieson and Talwalkar, AISTATS 2016): many candidates on a little of the load, few on all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

C = TypeVar("C")


S = TypeVar("S", bound=tuple[float, ...])
"""A score; greater is better."""


def num_kept(num_candidates: int) -> int:
    """How many of a round's candidates are in the next one by their score alone."""
    return max(2, num_candidates // 4)


def rounds(num_candidates: int, budgets: Sequence[int], num_kinds: int) -> int:
    """The most that all rounds may cost, in units of the budgets."""
    total = 0
    for budget in budgets:
        total += budget * num_candidates
        num_candidates = min(num_candidates, num_kept(num_candidates) + num_kinds - 1)
    return total


def successive_halving(
    candidates: Sequence[C],
    score: Callable[[Sequence[C], int, int], Sequence[S]],
    budgets: Sequence[int],
    *,
    kind: Callable[[C], object] = lambda candidate: None,
) -> list[tuple[C, S]]:
    """The candidates of the last round with their scores, the best first; of equal ones the earlier candidate.

    ``score(candidates, budget, num_kept)``: of round i with ``budgets[i]``. The round keeps the best ``num_kept``, and
    the best of each ``kind``, too, so that the answer can compare kinds. The order of the others does not matter. In
    the last round all count.
    """
    if not candidates or not budgets:
        raise ValueError("a search needs a candidate and a budget")
    left = list(candidates)
    ranked: list[tuple[C, S]] = []
    for number, budget in enumerate(budgets):
        is_last = number + 1 == len(budgets)
        kept = len(left) if is_last else num_kept(len(left))
        ranked = sorted(zip(left, score(left, budget, kept)), key=lambda pair: pair[1], reverse=True)
        if not is_last:
            first_of_kind: dict[object, C] = {}
            for candidate, _ in ranked:
                first_of_kind.setdefault(kind(candidate), candidate)
            firsts = list(first_of_kind.values())
            left = [one for at, (one, _) in enumerate(ranked) if at < kept or one in firsts]
    return ranked
