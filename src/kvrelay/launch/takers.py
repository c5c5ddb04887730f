"""Whether any worker that takes requests is left: ``serve`` checks this after a worker was told to leave.

Roles change at run time, so discovery decides which workers take requests, not the command lines of the children.
Workers that were started by hand count as well.
"""

from __future__ import annotations

import socket
from collections.abc import Collection, Sequence

from kvrelay.core.workers import WorkerInfo

LOOK_INTERVAL_S = 1.0


def is_child(worker: WorkerInfo, pids: Collection[int]) -> bool:
    """Whether that worker is one of these processes on this host, or was started by one as a rank of its group."""
    return worker.host == socket.gethostname() and (worker.pid in pids or worker.dp_parent_pid in pids)


def no_worker_takes_requests(workers: Sequence[WorkerInfo], child_pids: Collection[int]) -> bool:
    """Decide from the entries in discovery. A child without an entry may be starting or restarting. Its role is unknown
    until it registers, so until then the answer is no."""
    children = [worker for worker in workers if is_child(worker, child_pids)]
    listed = {worker.pid if worker.pid in child_pids else worker.dp_parent_pid for worker in children}
    return not any(worker.role.takes_requests for worker in workers) and listed.issuperset(child_pids)
