"""The clusters that this user runs on this machine: ``serve`` writes down how to reach each, and operators' commands
read it, so that nobody has to copy a control URL with its token.

A file per ``serve``, which only its user can read. What a killed ``serve`` has left is ignored and removed.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import psutil

from kvrelay.config.loading import state_directories
from kvrelay.core.decoding import UNREADABLE
from kvrelay.errors import ConfigError


class RunningCluster(msgspec.Struct, frozen=True):
    """``started_s`` is the start of process ``pid``, so that another process of this number is not taken for it."""

    machine: str
    pid: int
    started_s: float
    port: int
    url: str
    model: str
    shape: str
    control: str
    discovery: str
    namespace: str

    def __str__(self) -> str:
        return f"--cluster {self.port} ({self.model} {self.shape} at {self.url}, namespace {self.namespace})"


def this_process() -> tuple[str, int, float]:
    """The first three fields for our own process."""
    return socket.gethostname(), os.getpid(), psutil.Process().create_time()


@contextmanager
def announced(cluster: RunningCluster) -> Iterator[None]:
    """While this context is open, operator's commands of this user find the cluster. OSError is theirs to live with: a
    machine without a writable directory serves all the same."""
    written: Path | None = None
    with suppress(OSError, ConfigError):
        directory = state_directories()[0] / "clusters"
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = directory / f"{cluster.machine}-{cluster.pid}.json"
        path.unlink(missing_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            written = path
            file.write(msgspec.json.encode(cluster))
    try:
        yield
    finally:
        if written is not None:
            with suppress(OSError):
                written.unlink()


def running_clusters() -> list[RunningCluster]:
    """Those of this user on this machine, by port. Files of ended processes are removed."""
    found: dict[int, RunningCluster] = {}
    for directory in state_directories():
        for path in (directory / "clusters").glob("*.json"):
            with suppress(OSError, *UNREADABLE):
                if path.stat().st_uid != os.getuid():
                    continue
                cluster = msgspec.json.decode(path.read_bytes(), type=RunningCluster)
                if cluster.machine != socket.gethostname():
                    continue
                if _runs(cluster):
                    found[cluster.pid] = cluster
                else:
                    path.unlink()
    return sorted(found.values(), key=lambda cluster: (cluster.port, cluster.pid))


def choose_cluster(name: str | None, namespace: str | None = None) -> RunningCluster:
    """The one with this port or process id, or in this namespace; None: the only one. Raises ConfigError, which lists
    them."""
    clusters = [cluster for cluster in running_clusters() if namespace in (None, cluster.namespace)]
    chosen = [cluster for cluster in clusters if name in (None, str(cluster.port), str(cluster.pid))]
    if len(chosen) == 1:
        return chosen[0]
    if not clusters:
        raise ConfigError(
            "no cluster of yours runs on this machine: give its control server with --control, e.g. "
            "nats://127.0.0.1:4222",
            param="control",
        )
    listed = ", ".join(map(str, clusters))
    if name is None:
        raise ConfigError(f"{len(clusters)} clusters of yours run here, choose one: {listed}", param="cluster")
    raise ConfigError(f"no cluster of yours has port or process id {name}; there are {listed}", param="cluster")


def _runs(cluster: RunningCluster) -> bool:
    try:
        return abs(psutil.Process(cluster.pid).create_time() - cluster.started_s) < 1.0
    except psutil.Error:
        return False
