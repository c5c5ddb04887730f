"""How often chance is asked: a few times in the suite, the whole number of times in the matrix."""

from __future__ import annotations

from typing import Any

import pytest


def seeds(num_in_suite: int, num: int) -> list[Any]:
    """Parameters 0, 1, ...; those from ``num_in_suite`` on are the matrix's."""
    return [pytest.param(seed, marks=[pytest.mark.matrix] * (seed >= num_in_suite)) for seed in range(num)]


def examples(num_in_suite: int, num: int) -> pytest.MarkDecorator:
    """Parametrizes ``num_examples`` with what hypothesis draws: so many in the suite, ``num`` in the matrix."""
    return pytest.mark.parametrize("num_examples", [num_in_suite, pytest.param(num, marks=pytest.mark.matrix)])
