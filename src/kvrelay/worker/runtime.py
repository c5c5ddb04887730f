"""Settings that are changed while the worker runs, as discovery tells them."""

from __future__ import annotations

import logging

import msgspec

from kvrelay.control.base import Discovery, Keys, WatchKind
from kvrelay.errors import ConfigError
from kvrelay.worker.disagg import DisaggPolicy

_log = logging.getLogger(__name__)

SECTION = "disagg."


async def follow_thresholds(discovery: Discovery, keys: Keys, policy: DisaggPolicy) -> None:
    """Without end: what ``kvrelay config set`` and ``unset`` change is effective at once."""
    prefix = keys.config_value(SECTION)
    async for event in discovery.watch(prefix):
        name = event.key.removeprefix(prefix)
        try:
            if event.kind is WatchKind.PUT:
                policy.set(name, msgspec.json.decode(event.value))
            elif event.kind is WatchKind.DELETE:
                policy.unset(name)
        except (ConfigError, msgspec.DecodeError, UnicodeDecodeError) as exc:
            _log.warning("%s refused: %s", event.key, exc)
