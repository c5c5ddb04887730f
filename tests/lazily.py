"""Packages whose import takes a second of CPU or more, and that few files need.

Every process of the suite collects all files, so what a file imports when it is collected is paid once for each lane.
"""

from __future__ import annotations

import importlib
from typing import Any


class Lazy:
    """Stands for a module, which is imported when one of its names is first used. It has no private names,
    by which pytest would ask what it is."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(importlib.import_module(self._name), name)


anthropic: Any = Lazy("anthropic")
openai: Any = Lazy("openai")
schemathesis: Any = Lazy("schemathesis")
transformers: Any = Lazy("transformers")
