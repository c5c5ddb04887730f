"""Explorations make sides refuse, lose and give up thousands of times: they log none of it."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _quiet_sides() -> Iterator[None]:
    log = logging.getLogger("kvrelay.worker.sides")
    before = log.level
    log.setLevel(logging.CRITICAL)
    yield
    log.setLevel(before)
