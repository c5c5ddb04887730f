"""A nats-server with a configuration file that a test wrote."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvrelay.control.nats_process import find_binary

PATIENCE_S = 20.0


@contextmanager
def configured_server(directory: Path, config: str) -> Iterator[str]:
    """Gives ``127.0.0.1:PORT``. ``config`` says nothing of address, port and store."""
    path, log_path = directory / "nats.conf", directory / "nats.log"
    path.write_text(config)
    command = [str(find_binary()), "-c", str(path), "-a", "127.0.0.1", "-p", "-1"]
    command += ["-js", "-sd", str(directory / "js"), "--ports_file_dir", str(directory)]
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield _address(directory / f"nats-server_{process.pid}.ports", process, log_path)
    finally:
        process.kill()
        process.wait()


def _address(ports: Path, process: subprocess.Popen[bytes], log_path: Path) -> str:
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s and process.poll() is None:
        try:
            url: str = json.loads(ports.read_text())["nats"][0]
            return url.rpartition("/")[2]
        except (OSError, ValueError):
            time.sleep(0.02)
    pytest.fail(f"no server: {log_path.read_text()}")
