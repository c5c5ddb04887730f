"""SIGTERM and SIGINT: the first asks for a clean end, the second one insists."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable


def on_terminate(request_end: Callable[[], None]) -> None:
    """Call ``request_end`` at the first SIGTERM or SIGINT; end the process at the second."""
    loop = asyncio.get_running_loop()
    seen: list[int] = []

    def handle(number: int) -> None:
        seen.append(number)
        if len(seen) > 1:
            os._exit(128 + number)
        request_end()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, handle, number)
