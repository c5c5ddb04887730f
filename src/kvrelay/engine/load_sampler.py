"""When the load is worth a sample: not after every step, for the publisher sends at most 20 a second.

It lives on the engine's thread. It does not know who gets the samples.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from kvrelay.core.clock import Clock
from kvrelay.core.events import LoadMetrics


class Loaded(Protocol):
    """Of an EngineCore what matters here."""

    def has_work(self) -> bool: ...

    def metrics(self) -> LoadMetrics: ...


class LoadSampler:
    """Samples ``core`` at most once in ``interval_s`` while it works, and always when it has nothing more to do: the
    last word is the true one. For the engine's thread, after each step."""

    def __init__(self, core: Loaded, interval_s: float, clock: Clock) -> None:
        self._core = core
        self._interval_s = interval_s
        self._clock = clock
        self._due_s = clock.now()
        self._last: LoadMetrics | None = None

    def sample(self) -> LoadMetrics | None:
        """The load now. None while no sample is due, or when nothing has changed since the last one."""
        now_s = self._clock.now()
        if now_s < self._due_s and self._core.has_work():
            return None
        self._due_s = now_s + self._interval_s
        load = self._core.metrics()
        # Orders change the load as well as steps do: what a release frees, for instance.
        if self._last is not None and load == msgspec.structs.replace(self._last, seq=load.seq):
            return None
        self._last = load
        return load
