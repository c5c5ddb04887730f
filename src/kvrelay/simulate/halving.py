"""Successive halving (Jamieson and Talwalkar, AISTATS 2016): many candidates on a little of the load, few on all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

C = TypeVar("C")


S = TypeVar("S", bound=tuple[float, ...])
"""A score; greater is better."""


def successive_halving(
    candidates: Sequence[C],
    score: Callable[[C, int], S],
    budgets: Sequence[int],
    *,
    keep: float = 1 / 3,
    least: int = 2,
    kind: Callable[[C], object] = lambda candidate: None,
) -> list[tuple[C, S]]:
    """The candidates of the last round with their scores, the best first; of equal ones the earlier candidate.

    Round i scores all that are left with ``budgets[i]``, and keeps the best share ``keep``, but at least ``least``. The
    best of each ``kind`` stays, too, so that the answer can compare kinds.
    """
    if not candidates or not budgets:
        raise ValueError("a search needs a candidate and a budget")
    left = list(candidates)
    ranked: list[tuple[C, S]] = []
    for number, budget in enumerate(budgets):
        scored = [(candidate, score(candidate, budget)) for candidate in left]
        ranked = sorted(scored, key=lambda pair: pair[1], reverse=True)
        if number + 1 < len(budgets):
            num_kept = max(least, int(len(ranked) * keep))
            first_of_kind: dict[object, C] = {}
            for candidate, _ in ranked:
                first_of_kind.setdefault(kind(candidate), candidate)
            firsts = list(first_of_kind.values())
            left = [one for at, (one, _) in enumerate(ranked) if at < num_kept or one in firsts]
    return ranked
