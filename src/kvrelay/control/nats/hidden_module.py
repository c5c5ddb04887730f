"""Importing a library without an optional library that it would pull in."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast


@contextmanager
def hidden_module(name: str) -> Iterator[None]:
    """Inside the block, importing the module ``name`` raises ImportError, unless it was imported before.

    For start-up imports, before any other thread runs: the import fails for all threads.
    """
    if name in sys.modules:
        yield
        return
    modules = cast("dict[str, object]", sys.modules)
    modules[name] = None  # what the import system takes for "known to be missing"
    try:
        yield
    finally:
        del sys.modules[name]
