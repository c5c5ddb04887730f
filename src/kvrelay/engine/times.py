"""An engine's durations as histograms, written by its thread. It knows no requests."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvrelay.core.histogram import TOKEN_BUCKETS_S, Histogram


def _of_steps() -> Histogram:
    return Histogram(TOKEN_BUCKETS_S)


@dataclass(frozen=True, slots=True)
class EngineTimes:
    """``queue``: each wait for admission. ``prefill``: from a slot to the first token, or to the end of a hand-off's
    prefill. ``handoff``: decode side, from sending a prefill away to its KV. ``step``: with a forward pass.

    A HostedEngine sees neither queue nor steps: there ``prefill`` and ``handoff`` begin at arrival.
    """

    queue: Histogram = field(default_factory=Histogram)
    prefill: Histogram = field(default_factory=Histogram)
    handoff: Histogram = field(default_factory=Histogram)
    step: Histogram = field(default_factory=_of_steps)
