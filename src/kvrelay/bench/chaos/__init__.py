"""Chaos: a real cluster under steady load with known answers, while its parts are killed, stopped and moved about.

The door is ``run_chaos``; what it found is a ``ChaosReport``. It knows the cluster as an operator does: by pid, by
signals, by ``kvrelay``'s own orders and over HTTP. Nothing here reaches into a worker.
"""

from __future__ import annotations

from kvrelay.bench.chaos.report import ChaosReport
from kvrelay.bench.chaos.run import ChaosOptions, run_chaos

__all__ = ["ChaosOptions", "ChaosReport", "run_chaos"]
