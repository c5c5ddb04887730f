"""The disaggregated router: local or remote prefill?

A pure decision over given numbers; both thresholds can be changed while requests run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvrelay.config import DisaggConfig
from kvrelay.errors import ConfigError
from kvrelay.placement.base import PrefillPlace, PrefillSide

SETTABLE = ("max_local_prefill_length", "max_prefill_queue_size")


_DEFAULTS = DisaggConfig()


class DisaggPolicy:
    """Holds the thresholds and decides per request."""

    def __init__(self, config: DisaggConfig) -> None:
        self._given = config
        self._use(config)

    def _use(self, config: DisaggConfig) -> None:
        self.config = config
        self.is_by_cost = config.disagg_policy == "cost" or (
            config.disagg_policy == "auto"
            and all(getattr(config, name) == getattr(_DEFAULTS, name) for name in SETTABLE)
        )
        """Whether ``placement.cost`` decides, and this policy only where costs are not known."""

    def set(self, name: str, value: object) -> None:
        """Replace one threshold at run time. Raises ConfigError for an unknown name or a value out of range."""
        self._check(name)
        try:
            number = int(str(value))
        except ValueError as exc:
            raise ConfigError(f"disagg.{name} must be a whole number, got {value!r}", param=name) from exc
        change: dict[str, Any] = {name: number}
        self._use(replace(self.config, **change))

    def unset(self, name: str) -> None:
        """Restore the threshold of the start. Raises ConfigError for an unknown name."""
        self._check(name)
        self._use(replace(self.config, **{name: getattr(self._given, name)}))

    def decide(
        self, *, prompt_length: int, num_cached_tokens: int, prefill_fleet: PrefillSide, must_be_local: bool = False
    ) -> PrefillPlace:
        """``absolute_prefill_length > max_local_prefill_length and queue_size < max_prefill_queue_size``.

        ``num_cached_tokens`` is the true prefix hit on this worker, so prompt_length * (1 - hit_rate) is exact.
        ``must_be_local``: the request needs a local prefill (for prompt logprobs).
        """
        if must_be_local:
            return PrefillPlace.LOCAL_REQUIRED
        if self.config.disagg_policy == "always":
            return PrefillPlace.REMOTE if prefill_fleet.num_workers else PrefillPlace.LOCAL_NO_PREFILL_WORKER
        if prompt_length - num_cached_tokens <= self.config.max_local_prefill_length:
            return PrefillPlace.LOCAL_SHORT
        if prefill_fleet.num_workers == 0:
            return PrefillPlace.LOCAL_NO_PREFILL_WORKER
        if prefill_fleet.queue_size >= self.config.max_prefill_queue_size:
            return PrefillPlace.LOCAL_QUEUE_FULL
        return PrefillPlace.REMOTE

    @staticmethod
    def _check(name: str) -> None:
        if name not in SETTABLE:
            raise ConfigError(f"disagg.{name} cannot be changed at run time", param=name)
