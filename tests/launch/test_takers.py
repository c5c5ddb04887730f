"""When ``serve`` has nothing left to serve."""

from __future__ import annotations

import socket

import pytest

from kvrelay.config import WorkerRole
from kvrelay.core.workers import WorkerInfo
from kvrelay.launch.serve import is_child, no_worker_takes_requests

HERE = socket.gethostname()


def worker(role: str, pid: int, host: str = HERE) -> WorkerInfo:
    return WorkerInfo(f"{role}-{pid}", 0, WorkerRole(role), "m", "m", "tcp://x:1", 512, 16, 100, 400, "x", host, pid)


@pytest.mark.parametrize(
    ("workers", "child_pids", "nobody"),
    [
        ([], set(), True),
        ([worker("prefill", 1)], {1}, True),
        ([worker("prefill", 1), worker("decode", 2)], {1, 2}, False),
        ([worker("prefill", 1), worker("both", 2)], {1}, False),  # started by hand
        ([worker("both", 1)], {1}, False),  # it prefilled before
        ([], {1}, False),  # it is starting
        ([worker("prefill", 1)], {1, 2}, False),
        ([worker("prefill", 1, "elsewhere")], {1}, False),
        ([worker("decode", 1, "elsewhere")], {1}, False),
    ],
)
def test_no_worker_takes_requests(workers: list[WorkerInfo], child_pids: set[int], nobody: bool) -> None:
    assert no_worker_takes_requests(workers, child_pids) is nobody


def test_a_process_id_counts_on_its_own_host() -> None:
    assert is_child(worker("both", 1), {1})
    assert not is_child(worker("both", 1, "elsewhere"), {1})
    assert not is_child(worker("both", 2), {1})
