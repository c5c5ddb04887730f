"""Lengths of prompts and answers: fixed, uniform or normal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from kvrelay.errors import InvalidInputError

MAX_LENGTH = 10_000_000


@dataclass(frozen=True, slots=True)
class Length:
    """A distribution of token counts.

    ``fixed`` (low), ``uniform`` (low to high, both included) or ``normal`` (mean low, deviation high, cut off at 1).
    """

    kind: Literal["fixed", "uniform", "normal"]
    low: float
    high: float = 0.0

    def sample(self, rng: np.random.Generator) -> int:
        if self.kind == "fixed":
            return int(self.low)
        if self.kind == "uniform":
            return int(rng.integers(int(self.low), int(self.high) + 1))
        return min(MAX_LENGTH, max(1, round(float(rng.normal(self.low, self.high)))))

    def mean(self) -> float:
        """The mean before cutting off."""
        return (self.low + self.high) / 2 if self.kind == "uniform" else self.low


def parse_length(text: str, name: str = "length") -> Length:
    """Read ``128``, ``uniform~64~256`` or ``normal~128~32``; raises InvalidInputError naming ``name``."""
    kind, *numbers = text.split("~")
    try:
        if not numbers:
            return _checked(Length("fixed", float(int(kind))), text, name)
        if kind in ("uniform", "normal") and len(numbers) == 2:
            low, high = (float(int(number)) for number in numbers)
            return _checked(Length("uniform" if kind == "uniform" else "normal", low, high), text, name)
    except ValueError:
        pass
    raise InvalidInputError(f"{name} {text!r} is not N, uniform~LOW~HIGH or normal~MEAN~DEVIATION", param=name)


def _checked(length: Length, text: str, name: str) -> Length:
    ordered = length.kind != "uniform" or length.low <= length.high
    if length.low < 1 or length.high < 0 or max(length.low, length.high) > MAX_LENGTH or not ordered:
        raise InvalidInputError(f"{name} {text!r} is out of range: at least 1, at most {MAX_LENGTH}", param=name)
    return length
