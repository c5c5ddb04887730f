"""Starts real ``kvrelay`` processes for a test and makes sure that none outlives it."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Any

READY_TIMEOUT_S = 90.0


def kvrelay(*arguments: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    """Run one command to its end."""
    command = [sys.executable, "-m", "kvrelay", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)


@dataclass
class Serve:
    """A running ``kvrelay serve``; a context manager."""

    arguments: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    url: str = ""
    control: str = ""
    model: str = ""
    output: str = ""

    def __enter__(self) -> Serve:
        command = [sys.executable, "-m", "kvrelay", "serve", "--port", "0", *self.arguments]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **self.env}
        )
        os.set_blocking(self.process.stdout.fileno(), False)
        deadline = time.monotonic() + READY_TIMEOUT_S
        while "curl" not in self.output:
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.__exit__()
                raise AssertionError(f"serve did not become ready:\n{self.output}")
            select.select([self.process.stdout], [], [], 0.2)
            self.output += self.process.stdout.read() or ""
        found = re.search(r"ready: (\S+) .* at (\S+)/v1 \(control (\S+)\)", self.output)
        assert found, self.output
        self.model, self.url, self.control = found.groups()
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(40)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        os.set_blocking(self.process.stdout.fileno(), True)
        self.output += self.process.stdout.read()
        self.process.stdout.close()

    def status(self) -> dict[str, Any]:
        """``kvrelay status --json``."""
        done = kvrelay("status", "--json", "--control", self.control)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def workers(self, role: str) -> list[dict[str, Any]]:
        return [worker for worker in self.status()["workers"] if worker["role"] == role]
