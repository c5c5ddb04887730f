"""Keeps what tests of faults measure with their results."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from tests.system import recovery


@pytest.fixture(autouse=True)
def _recovery_figures(record_property: Callable[[str, object], None]) -> Iterator[None]:
    recovery.clear()
    yield
    for name, value in recovery.properties().items():
        record_property(name, value)
