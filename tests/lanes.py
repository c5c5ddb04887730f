"""A plugin of pytest (``-p tests.lanes --lanes N``): runs whole files side by side, in processes that are forked when
everything is collected.

To import and to collect everything takes seven seconds of CPU, once for all lanes. A lane asks for its next file when
it has ended one, so files that take long should come first (``tests/conftest.py``). Reports of its tests are told as
those of this process. If a lane dies, the test that it was at fails, and so does the rest of its file; another lane
takes its place. Warnings that are no errors are not told.

A fork has one thread, whichever its parent had: no import may start one, and libraries that would are told not to.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count, groupby
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
from _pytest import runner, tmpdir

GRACE_S = 60.0
"""What is interrupted ends its clusters for so long."""
WITHOUT_THREADS = {"OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
"""For the imports. Before tests run the environment is again as it was."""
File = list[pytest.Item]

_before = {name: os.environ.get(name) for name in WITHOUT_THREADS}
os.environ.update(WITHOUT_THREADS)  # before ``conftest.py`` imports NumPy


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--lanes", type=int, default=1, metavar="N", help="processes that run files side by side")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    for name, value in _before.items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})
    config = session.config
    files = [list(items) for _, items in groupby(session.items, lambda item: item.path)]
    num_lanes = min(config.getoption("--lanes"), len(files))
    if num_lanes < 2 or session.testsfailed or config.option.collectonly:
        return None  # pytest's own loop
    if threads := set(os.listdir("/proc/self/task")) - {str(os.getpid())}:
        raise pytest.UsageError(f"--lanes: an import has started {len(threads)} threads, which a fork would lack")
    lanes = Lanes(session, files)
    try:
        lanes.run(num_lanes)
    finally:
        lanes.end()
    return True


class Lanes:
    """The process that has collected everything, and tells what the others do."""

    def __init__(self, session: pytest.Session, files: Sequence[File]) -> None:
        self._session = session
        self._hook = session.config.hook
        self._files = files
        self._waiting = deque(range(len(files)))
        self._numbers = count()
        self._pids: dict[Connection, int] = {}
        self._at: dict[Connection, deque[pytest.Item]] = {}
        """What of a lane's file has not ended, the running test first."""
        base = pytest.TempPathFactory.from_config(session.config, _ispytest=True)
        self._directory = base.getbasetemp()

    def run(self, num_lanes: int) -> None:
        """Until every file has been run."""
        while self._waiting or self._pids:
            while self._waiting and len(self._pids) < num_lanes:
                self._fork()
            for connection in wait(list(self._pids)):
                assert isinstance(connection, Connection)
                try:
                    self._hear(connection, connection.recv())
                except EOFError:
                    self._lost(connection)
                if self._session.shouldfail:
                    raise self._session.Failed(self._session.shouldfail)
                if self._session.shouldstop:
                    raise self._session.Interrupted(self._session.shouldstop)

    def end(self) -> None:
        """Lanes that still run are interrupted, and killed if they do not end."""
        left = set(self._pids.values())
        for connection, pid in self._pids.items():
            connection.close()
            os.kill(pid, signal.SIGINT)
        deadline_s = time.monotonic() + GRACE_S
        while left and time.monotonic() < deadline_s:
            left = {pid for pid in left if os.waitpid(pid, os.WNOHANG)[0] == 0}
            time.sleep(0.05)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def _fork(self) -> None:
        ours, theirs = Pipe()
        number = next(self._numbers)
        if pid := os.fork():
            theirs.close()
            self._pids[ours], self._at[ours] = pid, deque()
            return
        code = 1
        try:
            for connection in (ours, *self._pids):
                connection.close()
            run_lane(self._session, self._files, theirs, self._directory / f"lane{number}")
            code = 0
        except (KeyboardInterrupt, OSError):  # we are interrupted, or the one who listens has ended
            pass
        finally:
            os._exit(code)

    def _hear(self, connection: Connection, reports: list[dict[str, Any]] | None) -> None:
        """Of a test that has ended; None: the lane wants a file."""
        at = self._at[connection]
        if reports is None:
            number = self._waiting.popleft() if self._waiting else None
            at.extend(() if number is None else self._files[number])
            with contextlib.suppress(OSError):  # it has died just now
                connection.send(number)
            return
        if not at:  # the fixtures of the lane
            self._tell(reports)
            return
        item = at.popleft()
        self._hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        self._tell(reports)
        self._hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)

    def _tell(self, reports: list[dict[str, Any]]) -> None:
        for data in reports:
            report = self._hook.pytest_report_from_serializable(config=self._session.config, data=data)
            self._hook.pytest_runtest_logreport(report=report)

    def _lost(self, connection: Connection) -> None:
        _, status = os.waitpid(self._pids.pop(connection), 0)
        connection.close()
        code = os.waitstatus_to_exitcode(status)
        reason = f"the process that ran it has ended with exit code {code}"
        for item in self._at.pop(connection):
            report = pytest.TestReport(item.nodeid, item.location, {}, "failed", reason, "call")
            self._hook.pytest_runtest_logreport(report=report)
            reason = f"not run: {reason.removeprefix('not run: ')}"


class _Reports:
    """A plugin: the reports of the running test."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self.told: list[dict[str, Any]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.told.append(self._config.hook.pytest_report_to_serializable(config=self._config, report=report))


def run_lane(session: pytest.Session, files: Sequence[File], told: Connection, directory: Path) -> None:
    """In the forked process. Raises EOFError, OSError, KeyboardInterrupt."""
    config = session.config
    random.seed()
    config.pluginmanager.unregister(name="terminalreporter")
    config.option.basetemp = str(directory)
    tmpdir.pytest_configure(config)
    # It would write to the same files as the other lanes.
    capture = config.pluginmanager.getplugin("capturemanager")
    assert capture is not None
    capture.stop_global_capturing()
    capture.start_global_capturing()
    capture.suspend_global_capture()
    reports = _Reports(config)
    config.pluginmanager.register(reports)
    item = None
    try:
        for file in _asked_for(files, told):
            # After the session itself, as a next one, its fixtures stay.
            for item, following in zip(file, [*file[1:], session]):
                config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                told.send(reports.told)
                reports.told.clear()
    finally:
        if item is not None:
            ended = pytest.CallInfo.from_call(partial(runner.pytest_runtest_teardown, item, None), "teardown")
    if item is not None and ended.excinfo is not None:
        report = pytest.TestReport.from_item_and_call(item, ended)
        told.send([config.hook.pytest_report_to_serializable(config=config, report=report)])


def _asked_for(files: Sequence[File], told: Connection) -> Iterator[File]:
    while True:
        told.send(None)
        if (number := told.recv()) is None:
            return
        yield files[number]
