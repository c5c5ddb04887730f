"""The disaggregated router: local or remote prefill?

A pure decision over given numbers; the policy and both thresholds can be changed while requests run. No value of a
threshold changes the policy.
"""

from __future__ import annotations

from dataclasses import asdict, replace

from kvrelay.config import DisaggConfig, load_settings
from kvrelay.core.step_cost import CostSource
from kvrelay.errors import ConfigError
from kvrelay.placement.base import PrefillLoad, PrefillPlace

THRESHOLDS = ("max_local_prefill_length", "max_prefill_queue_size")
OBJECTIVES = ("slo_ttft_ms", "slo_itl_ms", "early_reject")
"""Settings that count by cost only."""
SETTABLE = ("disagg_policy", *THRESHOLDS)
TO_THRESHOLDS = "`kvrelay config set disagg.disagg_policy threshold` puts the thresholds in charge"

_DEFAULTS = DisaggConfig()


class DisaggPolicy:
    """Holds the settings and decides per request. ``step_costs``: where the costs of steps come from, of this process's
    engine or of those that it routes to. Without any, ``auto`` and ``cost`` go by the thresholds; with estimates,
    ``auto`` does."""

    def __init__(self, config: DisaggConfig, *, step_costs: CostSource = CostSource.MEASURED) -> None:
        self.config = self._given = config
        self._by_cost = {CostSource.MEASURED: ("auto", "cost"), CostSource.ESTIMATED: ("cost",)}.get(step_costs, ())

    @property
    def is_by_cost(self) -> bool:
        """Whether ``placement.cost`` decides, and this policy only until costs have been measured."""
        return self.config.disagg_policy in self._by_cost

    @property
    def unused(self) -> tuple[str, ...]:
        """Settings that decide nothing under the present policy."""
        if self.is_by_cost:
            return THRESHOLDS
        return (*THRESHOLDS, *OBJECTIVES) if self.config.disagg_policy == "always" else OBJECTIVES

    @property
    def given_in_vain(self) -> tuple[str, ...]:
        """Unused settings that are not at their defaults."""
        return tuple(name for name in self.unused if getattr(self.config, name) != getattr(_DEFAULTS, name))

    def set(self, name: str, value: object) -> None:
        """Replace a setting at run time. Raises ConfigError for an unknown name or a value out of range."""
        self._check(name)
        self.config = load_settings(DisaggConfig, environ={}, flags={**asdict(self.config), name: value})

    def unset(self, name: str) -> None:
        """Restore the value of the start. Raises ConfigError for an unknown name."""
        self._check(name)
        self.config = replace(self.config, **{name: getattr(self._given, name)})

    def decide(
        self, *, prompt_length: int, num_cached_tokens: int, prefill_load: PrefillLoad, must_be_local: bool = False
    ) -> PrefillPlace:
        """``absolute_prefill_length > max_local_prefill_length and queue_size < max_prefill_queue_size``.

        ``num_cached_tokens`` is the true prefix hit on this worker, so prompt_length * (1 - hit_rate) is exact.
        ``must_be_local``: the request needs a local prefill (for prompt logprobs).
        """
        if must_be_local:
            return PrefillPlace.LOCAL_REQUIRED
        if self.config.disagg_policy == "always":
            return PrefillPlace.REMOTE if prefill_load.num_workers else PrefillPlace.LOCAL_NO_PREFILL_WORKER
        if prompt_length - num_cached_tokens <= self.config.max_local_prefill_length:
            return PrefillPlace.LOCAL_SHORT
        if prefill_load.num_workers == 0:
            return PrefillPlace.LOCAL_NO_PREFILL_WORKER
        if prefill_load.queue_size >= self.config.max_prefill_queue_size:
            return PrefillPlace.LOCAL_QUEUE_FULL
        return PrefillPlace.REMOTE

    @staticmethod
    def _check(name: str) -> None:
        if name not in SETTABLE:
            raise ConfigError(f"disagg.{name} cannot be changed at run time", param=name)
