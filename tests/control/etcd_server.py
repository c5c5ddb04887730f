"""A real etcd server on loopback for tests, in a directory of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.patience import PATIENCE_S
from tests.ports import free_ports


class EtcdServer:
    """A real server on loopback, with a short election timeout, which lets leases be as short as one second.

    With ``tls``, a certificate and its key, it speaks TLS only and takes only clients that have the same certificate.
    """

    def __init__(self, directory: Path, tls: tuple[Path, Path] | None = None, flags: Sequence[str] = ()) -> None:
        self.directory = directory
        self.tls = tls
        self.flags = flags
        self.client_port, self.peer_port = free_ports(2)
        self.process: subprocess.Popen[bytes] | None = None
        self._has_run = False

    @property
    def url(self) -> str:
        return f"etcd{'s' if self.tls else ''}://127.0.0.1:{self.client_port}"

    def start(self) -> None:
        """Start it and wait until it answers. Its ports stay what they are once it has run."""
        end = time.monotonic() + PATIENCE_S
        self._spawn()
        while self.ctl("endpoint", "health").returncode != 0:
            assert time.monotonic() < end, (self.directory / "log").read_text()
            if self.process is not None and self.process.poll() is not None:
                # Somebody else was given our port in between.
                if not self._has_run:
                    self.client_port, self.peer_port = free_ports(2)
                    self.wipe()
                self._spawn()
            time.sleep(0.05)
        self._has_run = True

    def _spawn(self) -> None:
        client, peer = (
            f"http{'s' if self.tls else ''}://127.0.0.1:{self.client_port}",
            f"http://127.0.0.1:{self.peer_port}",
        )
        with (self.directory / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    "etcd",
                    "--name=test",
                    "--log-level=error",
                    f"--data-dir={self.directory / 'data'}",
                    f"--listen-client-urls={client}",
                    f"--advertise-client-urls={client}",
                    f"--listen-peer-urls={peer}",
                    f"--initial-advertise-peer-urls={peer}",
                    f"--initial-cluster=test={peer}",
                    "--heartbeat-interval=10",
                    "--election-timeout=100",
                    *self._tls_flags("--cert-file", "--key-file", "--trusted-ca-file"),
                    *(["--client-cert-auth"] if self.tls else []),
                    *self.flags,
                ],
                stdout=log,
                stderr=log,
            )

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def wipe(self) -> None:
        shutil.rmtree(self.directory / "data", ignore_errors=not self._has_run)

    def ctl(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [
                "etcdctl",
                f"--endpoints=127.0.0.1:{self.client_port}",
                *self._tls_flags("--cert", "--key", "--cacert"),
                *words,
            ],
            env={**os.environ, "ETCDCTL_API": "3"},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    def _tls_flags(self, cert: str, key: str, ca: str) -> list[str]:
        """The certificate is its own authority."""
        return [f"{cert}={self.tls[0]}", f"{key}={self.tls[1]}", f"{ca}={self.tls[0]}"] if self.tls else []


@contextmanager
def running_etcd(directory: Path) -> Iterator[EtcdServer]:
    """A server for as long as it is needed; skips where there is none to start."""
    require_etcd()
    server = EtcdServer(directory)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def require_etcd() -> None:
    if shutil.which("etcd") and shutil.which("etcdctl"):
        return
    if os.environ.get("CI") == "true":
        pytest.fail("etcd and etcdctl are not installed (Debian: etcd-server, etcd-client)")
    pytest.skip("etcd and etcdctl are not installed (Debian: etcd-server, etcd-client)")
