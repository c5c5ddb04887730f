"""Starts real ``kvrelay`` processes for a test and makes sure that none outlives it."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from tests import nursery
from tests.lazily import openai
from tests.patience import PATIENCE_S, until

from kvrelay.cli.main import run
from kvrelay.config import ControlConfig
from kvrelay.errors import KvrelayError
from kvrelay.launch.admin import cluster_status, require_idle

READY_TIMEOUT_S = 280.0


def kvrelay(
    *arguments: str, module: str = "kvrelay", timeout_s: float = 2 * PATIENCE_S, is_real: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run one command to its end. ``is_real``: as of ``Serve``."""
    return run_to_its_end([sys.executable, "-m", module, *arguments], timeout_s, is_real=is_real)


def run_to_its_end(
    command: list[str], timeout_s: float, *, is_real: bool = False, **options: Any
) -> subprocess.CompletedProcess[str]:
    """``options``: as of ``subprocess.Popen``."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = (subprocess.Popen if is_real else nursery.popen)(command, stdout=out, stderr=err, **options)
        try:
            code = process.wait(timeout_s)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(command, code, out.read(), err.read())


def kvrelay_here(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The same without the cost of a process, for a command that ends at once; not within an event loop."""
    out, err = io.StringIO(), io.StringIO()
    with mock.patch.dict(os.environ), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(list(arguments))
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def by_threshold(num_tokens: int) -> tuple[str, ...]:
    """Flags: longer prefills go to a prefill worker, whatever they cost."""
    return ("--disagg-policy", "threshold", "--max-local-prefill-length", str(num_tokens))


@dataclass
class Serve:
    """A running ``kvrelay serve``; a context manager. Without a planner, which is a process more, unless ``arguments``
    name one."""

    arguments: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    prefix: tuple[str, ...] = ()
    """Of the command, to run it within something else."""
    is_real: bool = False
    """Each process starts Python; else all are forked from one (``tests/nursery.py``)."""
    url: str = ""
    control: str = ""
    model: str = ""
    output: str = ""

    def __enter__(self) -> Serve:
        serve = [sys.executable, "-m", "kvrelay", "serve", "--port", "0", "--planner", "off"]
        command = [*self.prefix, *serve, *self.arguments]
        self._log = tempfile.NamedTemporaryFile(mode="w+", encoding="utf-8")
        start = subprocess.Popen if self.is_real else nursery.popen
        self.process = start(command, stdout=self._log, stderr=self._log, env={**os.environ, **self.env})
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
                self.process.wait(2 * PATIENCE_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.read()
        self._log.close()

    def read(self) -> str:
        """What it and its children have written so far."""
        self.output = Path(self._log.name).read_text(encoding="utf-8")
        return self.output

    def status(self, *, check: bool = False) -> dict[str, Any]:
        """What ``kvrelay status --json`` prints (with ``--check``), without the cost of a process.

        A worker that did not answer in time, since it is dead, stopped or busy, has an "error" and no figures."""
        config = ControlConfig(
            control=self.control, discovery=os.environ.get("KVRELAY_DISCOVERY", ""), connect_timeout_s=PATIENCE_S
        )
        # On a thread of its own: the test may run in an event loop.
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(asyncio.run, cluster_status(config, check=check)).result()

    def workers(self, role: str) -> list[dict[str, Any]]:
        """The workers of a role, when each has answered: who is dead must have left discovery first."""
        found: list[dict[str, Any]] = []

        def all_answer() -> bool:
            found[:] = [worker for worker in self.status()["workers"] if worker["role"] == role]
            return not any("error" in worker for worker in found)

        until(all_answer)
        return found

    def idle_workers(self, role: str) -> list[dict[str, Any]]:
        """The same, once all are idle: an answer may be complete before a worker has counted its hand-off."""
        until(self.is_idle)
        return self.workers(role)

    def check_idle(self) -> None:
        """``kvrelay status --check`` finds nothing once what is in flight has ended."""
        until(self.is_idle)
        done = kvrelay_here("status", "--json", "--check", "--control", self.control)
        assert done.returncode == 0, done.stdout + done.stderr

    def is_idle(self) -> bool:
        """As ``kvrelay status --check`` sees it: every worker answers, every pool is whole, no block is in use."""
        try:
            require_idle(self.status(check=True))
        except KvrelayError:
            return False
        return True


@contextlib.contextmanager
def ending_cleanly(arguments: tuple[str, ...]) -> Iterator[Serve]:
    """A server that must end with code 0 and without a traceback."""
    with Serve(arguments) as running:
        yield running
    assert running.process.returncode == 0, running.output
    assert "Traceback" not in running.output


def openai_client(server: Serve) -> openai.OpenAI:
    """It does not repeat what fails, and is as patient as the tests."""
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)
