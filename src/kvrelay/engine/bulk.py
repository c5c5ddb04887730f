"""Operations on all blocks of a request at once, item by item in C: a long prompt has hundreds of blocks."""

from __future__ import annotations

import itertools
import operator
from collections import deque
from collections.abc import Iterable, MutableMapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, TypeVar

K = TypeVar("K")


def remove_keys(mapping: MutableMapping[K, Any], keys: Iterable[K]) -> None:
    """Raises KeyError if one is not there."""
    deque(map(mapping.pop, keys), maxlen=0)


def without(items: Sequence[K], excluded: AbstractSet[K]) -> Sequence[K]:
    """The items that are not ``excluded``, in order: often all of them."""
    if excluded.isdisjoint(items):
        return items
    return list(itertools.filterfalse(excluded.__contains__, items))


def are_all_in(items: Sequence[K], members: set[K]) -> bool:
    """Whether all items are members, and none is there twice."""
    return len(members.intersection(items)) == len(items)


def num_equal(left: Iterable[object], right: Iterable[object]) -> int:
    """How many items both begin with."""
    return sum(itertools.takewhile(bool, map(operator.eq, left, right)))
