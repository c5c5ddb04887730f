"""Applies settings that change in discovery while the worker runs."""

from __future__ import annotations

from kvrelay.control.base import Discovery, Keys, WatchEvent, WatchKind
from kvrelay.control.following import follow
from kvrelay.core.control_codec import decode_setting
from kvrelay.placement.threshold import DisaggPolicy

SECTION = "disagg."


async def follow_thresholds(discovery: Discovery, keys: Keys, policy: DisaggPolicy) -> None:
    """Runs for ever: changes by ``kvrelay config set`` and ``unset`` take effect at once."""
    prefix = keys.config_value(SECTION)

    def apply(event: WatchEvent) -> None:
        name = event.key.removeprefix(prefix)
        if event.kind is WatchKind.PUT:
            policy.set(name, decode_setting(name, event.value))
        else:
            policy.unset(name)

    await follow(discovery, prefix, apply)
