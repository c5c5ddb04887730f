"""Starts real ``kvrelay`` processes for a test and makes sure that none outlives it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
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
        self._log = tempfile.NamedTemporaryFile(mode="w+", encoding="utf-8")
        self.process = subprocess.Popen(
            command, stdout=self._log, stderr=subprocess.STDOUT, env={**os.environ, **self.env}
        )
        deadline = time.monotonic() + READY_TIMEOUT_S
        while "curl" not in self.output:
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.__exit__()
                raise AssertionError(f"serve did not become ready:\n{self.output}")
            time.sleep(0.05)
            self.read()
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
        self.read()
        self._log.close()

    def read(self) -> str:
        """What it and its children have written so far."""
        self.output = Path(self._log.name).read_text(encoding="utf-8")
        return self.output

    def status(self) -> dict[str, Any]:
        """``kvrelay status --json``."""
        done = kvrelay("status", "--json", "--control", self.control)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def workers(self, role: str) -> list[dict[str, Any]]:
        return [worker for worker in self.status()["workers"] if worker["role"] == role]
