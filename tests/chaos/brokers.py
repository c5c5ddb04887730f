"""The broker of host KV memory under chaos: one of its own, so that no other is harmed."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

from kvrelay.config.loading import state_directories

PLACES = ("XDG_RUNTIME_DIR", "XDG_STATE_HOME")


@contextmanager
def own_state_directory() -> Iterator[None]:
    """Processes that start meanwhile share nothing with the user's other clusters. At the end its broker ends."""
    before = {name: os.environ.get(name) for name in PLACES}
    with tempfile.TemporaryDirectory(prefix="kvrelay-chaos-") as directory:
        os.environ |= dict.fromkeys(PLACES, directory)
        try:
            yield
        finally:
            for pid in brokers_here():
                with suppress(psutil.NoSuchProcess):
                    process = psutil.Process(pid)
                    process.kill()
                    process.wait(10.0)
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value


def brokers_here() -> list[int]:
    """Process ids of the brokers of this state directory."""
    place = str(state_directories()[0])
    found = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if "kvrelay.tiers.broker" in command and place in command and process.status() != psutil.STATUS_ZOMBIE:
            found.append(process.pid)
    return found
