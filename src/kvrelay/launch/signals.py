"""SIGTERM, SIGINT and SIGHUP: the first asks for a clean end, a second SIGTERM or SIGINT insists."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable


def on_terminate(request_end: Callable[[], None]) -> None:
    """Call ``request_end`` at the first SIGTERM, SIGINT or SIGHUP; end the process at the next SIGTERM or SIGINT.

    A SIGHUP that our parent ignores stays ignored (``nohup``). One never insists: when a terminal is closed, the kernel
    and the shell both send it.
    """
    loop = asyncio.get_running_loop()
    seen: list[int] = []

    def handle(number: int) -> None:
        seen.append(number)
        if len(seen) > 1:
            os._exit(128 + number)
        request_end()

    terminals = terminal_outputs()

    def hang_up() -> None:
        leave_closed_terminals(terminals)
        if not seen:
            handle(signal.SIGHUP)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, handle, number)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        loop.add_signal_handler(signal.SIGHUP, hang_up)


def terminal_outputs() -> list[int]:
    """Those of stdout and stderr that are a terminal."""
    return [number for number in (1, 2) if os.isatty(number)]


def leave_closed_terminals(terminals: list[int]) -> None:
    """Discard what is written to ``terminals`` that are closed now: each write would fail."""
    for number in list(terminals):
        if not os.isatty(number):
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, number)
            os.close(nothing)
            terminals.remove(number)
