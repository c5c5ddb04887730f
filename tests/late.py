"""A plugin of pytest (``make test-late``): what one of a worker's threads tells another arrives late, a kind at a time.

A test that reads a count before it can have been told passes nearly always, and fails once on a busy machine. With
this it fails in every run. So does a worker that acts before it has heard what it should wait for.
"""

from __future__ import annotations

import threading
import time

import pytest

from kvrelay.transfer.thread import TransferThread
from kvrelay.worker.sides.side import Side

LATE_S = 0.1
"""Far longer than anything between two threads takes, far shorter than the time limits of the tests' clusters."""


KINDS = {
    # The end of a transfer, to who has submitted it.
    "ends": (TransferThread, "_finish", ""),
    # What a peer says with its last write, to us.
    "notifications": (TransferThread, "_notify", ""),
    # What a step has computed, to the hand-offs.
    "steps": (Side, "handle", "engine"),
}
"""Method that is late, and with which beginning of a thread's name."""


def _sleep_before(patch: pytest.MonkeyPatch, owner: type, name: str, of_thread: str) -> None:
    original = getattr(owner, name)

    def late(*arguments: object) -> object:
        if threading.current_thread().name.startswith(of_thread):
            time.sleep(LATE_S)
        return original(*arguments)

    patch.setattr(owner, name, late)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--late", choices=sorted(KINDS), help="what arrives late")


def pytest_configure(config: pytest.Config) -> None:
    if kind := config.getoption("--late"):
        patch = pytest.MonkeyPatch()
        _sleep_before(patch, *KINDS[kind])
        config.add_cleanup(patch.undo)
