"""Applies settings that change in discovery while the worker runs."""

from __future__ import annotations

import logging

from kvrelay.control.base import Discovery, Keys, WatchEvent, WatchKind
from kvrelay.control.following import follow
from kvrelay.core.control_codec import decode_setting
from kvrelay.placement.threshold import THRESHOLDS, TO_THRESHOLDS, DisaggPolicy

SECTION = "disagg."

_log = logging.getLogger(__name__)


def warn_of_settings_in_vain(policy: DisaggPolicy) -> None:
    """Log which settings of the start decide nothing."""
    if names := policy.given_in_vain:
        _log.warning("%s", _in_vain(policy, names))


def _in_vain(policy: DisaggPolicy, names: tuple[str, ...]) -> str:
    hint = f"; {TO_THRESHOLDS}" if set(names) <= set(THRESHOLDS) else ""
    return f"{', '.join(names)} has no effect here under --disagg-policy {policy.config.disagg_policy}{hint}"


async def follow_settings(discovery: Discovery, keys: Keys, policy: DisaggPolicy) -> None:
    """Runs for ever: changes by ``kvrelay config set`` and ``unset`` take effect at once."""
    prefix = keys.config_value(SECTION)

    def apply(event: WatchEvent) -> None:
        name = event.key.removeprefix(prefix)
        if event.kind is WatchKind.PUT:
            policy.set(name, decode_setting(name, event.value))
            if name in policy.unused:
                _log.warning("%s", _in_vain(policy, (name,)))
        else:
            policy.unset(name)

    await follow(discovery, prefix, apply)
