"""Child processes: started with the command line that a cluster would use, ended with their parent, restarted when they
crash. The same error of n equal workers appears once on our stderr, not n times.

Ctrl-C reaches only ``serve``, which then ends its children in order. On Linux the kernel ends a child whose parent has
died. ``core/child_process.py`` says why children share our session.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from enum import Enum
from typing import IO

import msgspec

from kvrelay.config import ControlConfig, WorkerConfig
from kvrelay.config.loading import environment_with, settings_to_flags
from kvrelay.config.settings import Settings
from kvrelay.config.worker import WORKER_SECTIONS
from kvrelay.core.child_process import start_child_process
from kvrelay.errors import ControlUnavailableError

_log = logging.getLogger(__name__)

SECRETS = ("control", "discovery", "api_key")
AFTER_CRASH = "KVRELAY_AFTER_CRASH"
"""The environment variable that tells a restarted child how the process before it ended."""
MAX_LINE = 300
NO_READY_LINE = "--no-ready-line"
"""For a child of a command that announces all of them in one line."""
RESTART_BACKOFF_S = (0.5, 1.0, 2.0, 4.0)
CRASH_LOOP_WINDOW_S = 60.0
CRASH_LOOP_LIMIT = 5
SILENT_WAIT_S = 0.5
"""If a child takes longer to end, ``on_waiting`` tells the user."""


class Fate(Enum):
    """What becomes of a child."""

    GOES_ON = "runs, or is restarted after a pause"
    HAS_LEFT = "was told to leave, and has left"
    CRASHES = "crashes in a loop"


class Child(msgspec.Struct):
    """One child and its history of crashes."""

    name: str
    command: list[str]
    process: subprocess.Popen[bytes]
    environment: dict[str, str] | None = None
    errors: ChildErrors | None = None
    restart_flags: tuple[str, ...] = ()
    """Arguments added to the command at a restart."""
    crashes_s: list[float] = []
    num_without_control: int = 0
    """Consecutive exits because the control plane was unreachable; these do not count as crashes."""
    restart_s: float | None = None
    """The time of the next restart; None: not decided, or the child runs."""
    worker: WorkerConfig | None = None
    """What a worker was started with."""
    is_extra: bool = False
    """A planner wanted it: the cluster began without it, and may go on without it."""

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def exit_code(self) -> int | None:
        return self.process.poll()


def kvrelay_command(*arguments: str) -> list[str]:
    """The command line of another ``kvrelay`` process with this Python environment."""
    return [sys.executable, "-m", "kvrelay", *arguments]


def worker_command(config: WorkerConfig) -> list[str]:
    """The command line of ``kvrelay worker`` with this configuration. It names no control server."""
    words = [str(config.model_path), "--served-model-name", config.model, "--role", config.role]
    words += ["--engine", config.engine_kind, "--worker-host", config.host, "--worker-port", str(config.port)]
    return kvrelay_command("worker", *words, *settings_flags(*(getattr(config, name) for name in WORKER_SECTIONS)))


def settings_flags(*sections: Settings) -> list[str]:
    """The flags with which a child that has our environment gets these settings. Secrets are not among them."""
    return [word for each in sections for word in settings_to_flags(each, skip=SECRETS)]


def control_environment(control: ControlConfig, **secret: str) -> dict[str, str]:
    """Our environment, and the settings that may hold passwords: other users of this machine can read command lines."""
    return environment_with(control=control.control, discovery=control.discovery, **secret)


def start_child(
    name: str,
    command: list[str],
    output: IO[bytes] | None = None,
    environment: dict[str, str] | None = None,
    errors: ChildErrors | None = None,
) -> Child:
    """Start ``command`` with our stdout and stderr, or with ``output`` for both.

    ``environment`` None: ours. ``errors``, if given, filters the child's stderr.
    """
    stderr = subprocess.PIPE if errors is not None else output
    process = start_child_process(command, stdout=output, stderr=stderr, environment=environment)
    if errors is not None and process.stderr is not None:
        errors.follow(name, process.stderr)
    return Child(name, command, process, environment, errors)


def restart_delay_s(child: Child, now_s: float) -> float | None:
    """Seconds to wait before restarting a child that has ended; None if it crashes in a loop.

    A child that found no control plane has not crashed: it is restarted until the control plane is back.
    """
    if child.exit_code == ControlUnavailableError.exit_code:
        child.num_without_control += 1
        return RESTART_BACKOFF_S[min(child.num_without_control, len(RESTART_BACKOFF_S)) - 1]
    child.num_without_control = 0
    child.crashes_s = [at for at in child.crashes_s if now_s - at < CRASH_LOOP_WINDOW_S] + [now_s]
    if len(child.crashes_s) >= CRASH_LOOP_LIMIT:
        return None
    return RESTART_BACKOFF_S[min(len(child.crashes_s), len(RESTART_BACKOFF_S)) - 1]


def supervise(child: Child, now_s: float) -> Fate:
    """Look at a child, and restart one that has crashed when that is due. Call it several times a second. Whether a
    cluster goes on without a child that does not come back is its owner's business."""
    if child.exit_code is None:
        return Fate.GOES_ON
    if child.restart_s is not None:
        if now_s >= child.restart_s:
            try:
                restart(child)
            except OSError as exc:
                # The machine is short of something: no reason to end the others.
                child.restart_s = now_s + RESTART_BACKOFF_S[-1]
                print(f"kvrelay: {child.name} cannot be started again now: {exc}", file=sys.stderr)
        return Fate.GOES_ON
    if child.exit_code == 0:
        return Fate.HAS_LEFT
    delay_s = restart_delay_s(child, now_s)
    if delay_s is None:
        return Fate.CRASHES
    print(
        f"kvrelay: {child.name} (pid {child.pid}) ended with exit code {child.exit_code}; restart in {delay_s:g} s",
        file=sys.stderr,
    )
    child.restart_s = now_s + delay_s
    return Fate.GOES_ON


def restart(child: Child) -> None:
    """Start the child's command again; ``child`` now stands for the new process."""
    command = [*child.command, *child.restart_flags]
    environment = dict(os.environ if child.environment is None else child.environment)
    if child.exit_code not in (0, ControlUnavailableError.exit_code):
        last_line = "" if child.errors is None else child.errors.last_line(child.name)
        environment[AFTER_CRASH] = end_of(child.exit_code or 0, last_line)
    child.process = start_child(child.name, command, environment=environment, errors=child.errors).process
    child.restart_s = None


def end_of(exit_code: int, last_line: str) -> str:
    """How a process ended, for people. ``exit_code``: negative for a signal. ``last_line``: of its stderr, if known."""
    try:
        end = f"killed by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"exit code {exit_code}"
    except ValueError:
        end = f"killed by signal {-exit_code}"
    return f"{end}: {last_line}" if last_line else end


async def stop_children(
    children: list[Child], timeout_s: float, on_waiting: Callable[[list[Child]], None] = lambda _: None
) -> None:
    """SIGTERM, wait for a clean end, SIGKILL the rest. ``on_waiting`` is called once, with the slow children."""
    for child in children:
        if child.exit_code is None:
            child.process.terminate()
    started_s, is_notified = time.monotonic(), False
    while (waited_s := time.monotonic() - started_s) < timeout_s:
        left = [child for child in children if child.exit_code is None]
        if not left:
            break
        if waited_s >= SILENT_WAIT_S and not is_notified:
            is_notified = True
            on_waiting(left)
        await asyncio.sleep(0.02)
    for child in children:
        if child.exit_code is None:
            _log.warning("killed %s (pid %d): it did not end in %g s", child.name, child.pid, timeout_s)
            child.process.kill()
        child.process.wait()


WINDOW_S = 10.0
ERROR_PREFIX = b"kvrelay: "
"""The start of the line in which the command line gives its reason to end. Other lines pass unchanged."""


def write_error(line: bytes) -> None:
    """On our stderr."""
    sys.stderr.buffer.write(line)
    sys.stderr.buffer.flush()


class ChildErrors:
    """Passes lines on to ``write``. It drops an error that another child reported word for word within ``WINDOW_S``."""

    def __init__(self, write: Callable[[bytes], None], now: Callable[[], float] = time.monotonic) -> None:
        self._write = write
        self._now = now
        self._notified: dict[bytes, tuple[str, float]] = {}
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._last: dict[str, str] = {}

    def last_line(self, name: str) -> str:
        """The last that child ``name`` has written, without control characters: mostly the reason of its end."""
        return self._last.get(name, "")

    def follow(self, name: str, stream: IO[bytes]) -> None:
        """Pass on the lines of child ``name`` until it closes ``stream``."""
        self._last.pop(name, None)
        thread = threading.Thread(target=self._run, args=(name, stream), name=f"stderr of {name}", daemon=True)
        self._threads = [other for other in self._threads if other.is_alive()] + [thread]
        thread.start()

    def pass_on(self, name: str, line: bytes) -> None:
        """One line of child ``name``."""
        text = line.removeprefix(ERROR_PREFIX).decode(errors="replace").strip()
        if text:
            self._last[name] = "".join(filter(str.isprintable, text))[:MAX_LINE]
        with self._lock:
            if line.startswith(ERROR_PREFIX) and self._is_notified(name, line):
                return
            self._write(line)

    def finish(self, timeout_s: float) -> None:
        """Wait until all lines of the ended children are passed on."""
        for thread in self._threads:
            thread.join(timeout_s)

    def _is_notified(self, name: str, line: bytes) -> bool:
        now_s = self._now()
        self._notified = {told: (by, at) for told, (by, at) in self._notified.items() if now_s - at < WINDOW_S}
        by, _ = self._notified.setdefault(line, (name, now_s))
        return by != name

    def _run(self, name: str, stream: IO[bytes]) -> None:
        with stream:
            for line in stream:
                self.pass_on(name, line)
