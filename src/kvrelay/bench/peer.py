"""Another process of this Python that does as it is told: a line in, a line out, until its input ends.

Its errors are kept, so that its end can be explained. One that crashes inside a library takes nothing else with it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress

from kvrelay.errors import TransferError

START_TIMEOUT_S = 60.0
ANSWER_TIMEOUT_S = 120.0
STOP_S = 10.0


class Peer:
    """``python -m module`` with these arguments; an end of this context is its end. ``hello``: the first line that it
    prints. ``name``: for messages; None: the module's."""

    def __init__(
        self, module: str, *arguments: str, name: str | None = None, environment: Mapping[str, str] | None = None
    ) -> None:
        """``environment``: besides ours. Raises TransferError if it prints nothing."""
        self._name = name or module
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        # A group of its own: Ctrl-C reaches only us. It ends with its input, also if we are killed.
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, **(environment or {})},
            process_group=0,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self.output = self._process.stdin, self._process.stdout
        try:
            self.hello = self.read(START_TIMEOUT_S)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, line: bytes) -> bytes:
        """The answer to a line. Raises TransferError."""
        self.tell(line)
        return self.read()

    def tell(self, line: bytes) -> None:
        """Nothing if it is gone: how it ended is what the missing answer tells."""
        with suppress(OSError):
            self._input.write(line + b"\n")
            self._input.flush()

    def read(self, timeout_s: float = ANSWER_TIMEOUT_S) -> bytes:
        """The next line. A process that hangs for so long is killed, which ends the wait. Raises TransferError."""
        guard = threading.Timer(timeout_s, self._process.kill)
        guard.daemon = True
        guard.start()
        line = self.output.readline()
        guard.cancel()
        if line:
            return line
        self._process.kill()
        code = self._process.wait()
        self._errors.seek(0)
        said = self._errors.read().decode("utf-8", "replace").strip().splitlines()
        why = said[-1] if said else "it said nothing"
        raise TransferError(f"{self._name} ended with exit code {code}: {why}", peer=self._name)

    def close(self) -> None:
        """Idempotent."""
        with suppress(OSError):
            self._input.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.output.close()
        self._errors.close()


def say(line: bytes) -> None:
    """In a peer: an answer."""
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()
