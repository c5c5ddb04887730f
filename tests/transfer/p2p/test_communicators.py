"""The threads of a communicator: whatever a task raises, every task ends."""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Any

import pytest
from tests.patience import PATIENCE_S

from kvrelay.transfer.p2p.communicators import Communicator, Task


def fail() -> None:
    raise RuntimeError("CUDA out of memory")


@pytest.mark.parametrize("fails_at", ["begin", "finish"])
def test_a_task_that_fails_ends_and_so_do_those_behind_it(fails_at: str) -> None:
    """Else its message would be under way for ever, and its room taken."""
    ended: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    failures: queue.SimpleQueue[str] = queue.SimpleQueue()
    pair = Communicator(
        "pair",
        "w",
        0,
        device="cpu",
        timeout_s=PATIENCE_S,
        send_key=lambda *_: None,
        on_failed=lambda _, error: failures.put(error),
    )

    def begin(group: Callable[[], Any], slot: int) -> None:
        if fails_at == "begin":
            fail()

    pair.run("send", Task(begin, ended.put, fail if fails_at == "finish" else lambda: None))
    assert "CUDA out of memory" in (ended.get(timeout=PATIENCE_S) or "")
    assert "CUDA out of memory" in failures.get(timeout=PATIENCE_S)
    pair.run("send", Task(begin, ended.put))
    assert ended.get(timeout=PATIENCE_S) == "the communicator is closed"
    assert pair.join(PATIENCE_S)
