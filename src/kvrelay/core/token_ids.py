"""Token ids as a packed array: checked, and ready to be hashed and sent. One C call looks at all of them; Python's min
and max take four times as long."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np

ID_BYTES = 4
"""Of an id in a message."""
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2 ** (8 * ID_BYTES))]
"""One that can be hashed."""
FEW = 128
"""Of so many, Python finds the largest faster than NumPy."""


def packed_below(token_ids: list[int], vocab_size: int) -> array[int] | None:
    """The ids as unsigned 32-bit integers; None unless every item is an int from 0 to ``vocab_size - 1``."""
    words = array("I")
    try:
        words.fromlist(token_ids)
    except (OverflowError, TypeError):
        return None
    return words if are_below(words, vocab_size) else None


def are_below(words: array[int], vocab_size: int) -> bool:
    """Whether every id is below ``vocab_size``; True for none."""
    if len(words) <= FEW:
        return max(words, default=-1) < vocab_size
    return int(np.maximum.reduce(np.frombuffer(words, dtype=f"u{words.itemsize}"))) < vocab_size


def outside(token_ids: Sequence[object], vocab_size: int) -> str:
    """The first item that is no id below ``vocab_size``, for an error message; there is one."""
    item = next(item for item in token_ids if not (isinstance(item, int) and 0 <= item < vocab_size))
    return str(item) if isinstance(item, int) and abs(item) < 2**64 else f"a value of type {type(item).__name__}"


def to_bytes(token_ids: Sequence[int]) -> bytes:
    """The ids as little-endian u32; an array is only copied. Raises OverflowError."""
    return np.asarray(token_ids, "<u4").tobytes()


def words_of(packed: bytes) -> array[int]:
    """What ``to_bytes`` got, without an object for each id."""
    words = array("I", packed)
    if sys.byteorder == "big":
        words.byteswap()
    return words


def from_bytes(packed: bytes) -> list[int]:
    """What ``to_bytes`` got."""
    return np.frombuffer(packed, "<u4").tolist()  # type: ignore[no-any-return]
