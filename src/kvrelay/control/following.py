"""A watch that no entry can end: the loop around ``Discovery.watch`` that every watcher runs.

The loop continues after an entry that is refused, after a callback that fails, and after an outage of the control
plane. It does not know what entries mean; callbacks decode them (``core.control_codec``).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from kvrelay.control.base import Discovery, WatchEvent, WatchKind
from kvrelay.errors import ConfigError, ControlUnavailableError, ProtocolError

_log = logging.getLogger(__name__)

RETRY_S = 1.0


async def follow(
    discovery: Discovery,
    prefix: str,
    on_change: Callable[[WatchEvent], None],
    on_synced: Callable[[], None] = lambda: None,
) -> None:
    """Runs without end: ``on_change`` for every PUT and DELETE, ``on_synced`` after the initial listing.

    A callback refuses an entry by ProtocolError or ConfigError; the earlier value stays known.
    """
    while True:
        try:
            async for event in discovery.watch(prefix):
                if event.kind is WatchKind.SYNCED:
                    on_synced()
                else:
                    tell(on_change, event)
        except ControlUnavailableError as exc:
            _log.warning("watching %s failed (%s); using the last known entries and retrying", prefix, exc)
        await asyncio.sleep(RETRY_S)


def tell(on_change: Callable[[WatchEvent], None], event: WatchEvent) -> None:
    """``on_change``, whose refusals and failures are logged."""
    try:
        on_change(event)
    except (ProtocolError, ConfigError) as exc:
        _log.warning("discovery entry %s refused: %s", event.key, exc)
    except Exception:  # noqa: BLE001 - the outermost frame of a watch: one entry must not end the watch of the rest
        _log.exception("discovery entry %s failed", event.key)
