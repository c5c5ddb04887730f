"""Steady demand asks the capacity model the same question at every tick: its answers are remembered."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import lru_cache

import pytest
from tests.planner import toy

from kvrelay.planner.capacity import assess


@pytest.fixture(autouse=True, scope="session")
def _remembered() -> Iterator[None]:
    remembering = lru_cache(20_000)(assess)
    with pytest.MonkeyPatch.context() as patch:
        # The package has a function of the same name as the module.
        patch.setattr(sys.modules["kvrelay.planner.plan"], "assess", remembering)
        patch.setattr(toy, "assess", remembering)
        yield
