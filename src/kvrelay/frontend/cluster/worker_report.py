"""What a worker has published last of its load, when, and what follows from the samples before. Pure."""

from __future__ import annotations

import msgspec

from kvrelay.core.events import LoadMetrics, TokenCounts

RATE_INTERVAL_S = 1.0
"""Rates are means over at least so long: a worker publishes up to 20 samples a second."""


class WorkerReport(msgspec.Struct):
    """Times are monotonic."""

    load: LoadMetrics | None = None
    heard_s: float | None = None
    waiting_since_s: float | None = None
    """Since when requests have waited there without a break; None: none waits."""
    prefilled_per_s: float | None = None
    """In tokens, as ``generated_per_s``; None: unknown."""
    generated_per_s: float | None = None
    cpu_cores: float | None = None
    """That its processes have used on average; None: unknown."""
    _counted: TokenCounts | None = None
    _cpu_s: float | None = None
    _counted_s: float = 0.0

    def heard(self, load: LoadMetrics, now_s: float) -> None:
        """Take in a sample."""
        self.load, self.heard_s = load, now_s
        if not load.num_waiting:
            self.waiting_since_s = None
        elif self.waiting_since_s is None:
            self.waiting_since_s = now_s
        if load.tokens is None:
            return
        elapsed_s = now_s - self._counted_s
        if self._counted is not None and elapsed_s < RATE_INTERVAL_S:
            return
        if self._counted is not None:
            prefilled = load.tokens.num_prefilled - self._counted.num_prefilled
            generated = load.tokens.num_generated - self._counted.num_generated
            # Counts of an engine that was rebuilt begin again.
            self.prefilled_per_s, self.generated_per_s = max(prefilled, 0) / elapsed_s, max(generated, 0) / elapsed_s
            if load.activity is not None and self._cpu_s is not None:
                self.cpu_cores = max(load.activity.cpu_s - self._cpu_s, 0.0) / elapsed_s
        self._counted, self._counted_s = load.tokens, now_s
        self._cpu_s = None if load.activity is None else load.activity.cpu_s
