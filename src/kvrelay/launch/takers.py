"""Whether anybody is left who takes requests: what ``serve`` asks after a worker was told to leave.

Roles change at run time, so discovery says who takes requests, not the command lines of the children; and workers that
somebody has started by hand count as well.
"""

from __future__ import annotations

import socket
from collections.abc import Collection, Sequence

from kvrelay.core.workers import WorkerInfo

LOOK_INTERVAL_S = 1.0


def is_child(worker: WorkerInfo, pids: Collection[int]) -> bool:
    """Whether that worker is one of these processes of this host."""
    return worker.pid in pids and worker.host == socket.gethostname()


def nobody_takes_requests(workers: Sequence[WorkerInfo], child_pids: Collection[int]) -> bool:
    """Judge by what is in discovery. A child that is not there may be starting, or started again: its role is not known
    yet, so the answer is no until it is."""
    listed = {worker.pid for worker in workers if is_child(worker, child_pids)}
    return not any(worker.role.takes_requests for worker in workers) and listed.issuperset(child_pids)
