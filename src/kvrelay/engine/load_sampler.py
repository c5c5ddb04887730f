"""When to sample the load: not after every step, because the publisher sends at most 20 samples a second.

It runs on the engine's thread. It does not know the receivers of the samples.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from kvrelay.core.clock import Clock
from kvrelay.core.events import LoadMetrics


class Loaded(Protocol):
    """The part of an EngineCore that is used here."""

    def has_work(self) -> bool: ...

    def metrics(self) -> LoadMetrics: ...


class LoadSampler:
    """Samples ``core`` at most once per ``interval_s`` while it works, and always when its work ends, so that the last
    published load is the current one. Called on the engine's thread, after each step."""

    def __init__(self, core: Loaded, interval_s: float, clock: Clock) -> None:
        self._core = core
        self._interval_s = interval_s
        self._clock = clock
        self._due_s = clock.now()
        self._last: LoadMetrics | None = None

    def sample(self) -> LoadMetrics | None:
        """The load now; None if no sample is due, or if nothing has changed since the last one."""
        now_s = self._clock.now()
        if now_s < self._due_s and self._core.has_work():
            return None
        self._due_s = now_s + self._interval_s
        load = self._core.metrics()
        # Callbacks also change the load, for example when a release frees blocks.
        if self._last is not None and load == msgspec.structs.replace(self._last, seq=load.seq):
            return None
        self._last = load
        return load
