"""A plugin of pytest (``make test LANES=3``): tests side by side, in processes that are forked after the collection.

Imports and collection are paid once, and lanes share the memory of what they have made. Lanes take whole files, one
after the other, from a common pipe, so that fixtures of a file are set up once. A lane learns its next file before the
last test of the present one: fixtures of the session live until a lane's end. Reports travel to the first process,
which shows and counts them. A lane that dies fails the test that it was at.
"""

from __future__ import annotations

import json
import os
import random
import selectors
import signal
import struct
import sys
import threading
import time
import traceback
from itertools import groupby
from typing import Any

import pytest

LANE = pytest.StashKey[bool]()
"""Set in a lane."""
END_S = 20.0
"""What a lane gets to end its servers after an interrupt."""
_NUMBER = struct.Struct("!i")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--lanes", type=int, default=1, metavar="N", help="run files in so many processes side by side")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    num_lanes = session.config.getoption("--lanes")
    if num_lanes < 2 or session.config.option.collectonly or session.testsfailed:
        return None
    if threading.active_count() > 1:
        raise pytest.UsageError("a thread was started during the collection: what it holds would be held for ever")
    files = [list(items) for _, items in groupby(session.items, key=lambda item: item.path)]
    todo, give = os.pipe()
    sys.stdout.flush()
    lanes = [_Lane(session, files, todo, give) for _ in range(num_lanes)]
    os.close(todo)
    # Written before anyone reads: a pipe has room for 16,000 files.
    os.write(give, b"".join(_NUMBER.pack(number) for number in range(len(files))))
    os.close(give)
    try:
        _follow(session, {lane.reports: lane for lane in lanes})
    finally:
        for lane in lanes:
            lane.end()
    return True


def _follow(session: pytest.Session, lanes: dict[int, _Lane]) -> None:
    """Pass on what lanes report, until all have ended."""
    selector = selectors.DefaultSelector()
    for reports in lanes:
        selector.register(reports, selectors.EVENT_READ)
    while selector.get_map():
        for key, _ in selector.select():
            lane = lanes[key.fd]
            if not lane.read(session):
                selector.unregister(key.fd)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)


class _Lane:
    """One process, as the first one sees it."""

    def __init__(self, session: pytest.Session, files: list[list[pytest.Item]], todo: int, give: int) -> None:
        self.reports, write = os.pipe()
        self._buffer = bytearray()
        self._at: str | None = None
        self._is_done = False
        self._pid = os.fork()
        if not self._pid:
            os.close(give)
            os.close(self.reports)
            _run_lane(session, files, todo, write)
        os.close(write)

    def read(self, session: pytest.Session) -> bool:
        """What has come; False at its end."""
        data = os.read(self.reports, 1 << 16)
        self._buffer += data
        while (end := self._buffer.find(b"\n")) >= 0:
            kind, value = json.loads(self._buffer[:end])
            del self._buffer[: end + 1]
            self._hear(session, kind, value)
        if not data and not self._is_done:
            self._fail(session, f"a lane ended while it was at {self._at}")
        return bool(data)

    def _hear(self, session: pytest.Session, kind: str, value: Any) -> None:
        hook = session.config.hook
        if kind == "start":
            self._at = value["nodeid"]
            hook.pytest_runtest_logstart(**value)
        elif kind == "finish":
            hook.pytest_runtest_logfinish(**value)
        elif kind == "report":
            report = hook.pytest_report_from_serializable(config=session.config, data=value)
            hook.pytest_runtest_logreport(report=report)
        elif kind == "broken":
            self._fail(session, value)
        else:
            self._is_done = True

    def _fail(self, session: pytest.Session, reason: str) -> None:
        self._is_done = True
        nodeid = self._at or "a lane"
        report = pytest.TestReport(nodeid, (nodeid, None, nodeid), {}, "failed", reason, "call")
        session.config.hook.pytest_runtest_logreport(report=report)

    def end(self) -> None:
        """The process ends, if it has not."""
        os.close(self.reports)
        for signum in () if self._is_done else (signal.SIGINT, signal.SIGKILL):
            os.kill(self._pid, signum)
            deadline_s = time.monotonic() + END_S
            while time.monotonic() < deadline_s:
                if os.waitpid(self._pid, os.WNOHANG)[0]:
                    return
                time.sleep(0.05)
        os.waitpid(self._pid, 0)


class _Telling:
    """In a lane: reports go to the first process."""

    def __init__(self, config: pytest.Config, write: int) -> None:
        self._config, self._write = config, write

    def tell(self, kind: str, value: Any) -> None:
        data = memoryview(json.dumps((kind, value), default=str).encode() + b"\n")
        while data:
            data = data[os.write(self._write, data) :]

    def pytest_runtest_logstart(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self.tell("start", {"nodeid": nodeid, "location": location})

    def pytest_runtest_logfinish(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self.tell("finish", {"nodeid": nodeid, "location": location})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.tell("report", self._config.hook.pytest_report_to_serializable(config=self._config, report=report))


def _run_lane(session: pytest.Session, files: list[list[pytest.Item]], todo: int, write: int) -> None:
    """Does not return."""
    config = session.config
    config.stash[LANE] = True
    capture: Any = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()
    for fd in (1, 2):  # what its own reporter prints; what tests print is captured in a file of its own
        os.dup2(os.open(os.devnull, os.O_WRONLY), fd)
    capture.start_global_capturing()
    random.seed()
    telling = _Telling(config, write)
    config.pluginmanager.register(telling)
    code = 1
    try:
        try:
            _run_files(session, files, todo)
        finally:
            config.hook.pytest_sessionfinish(session=session, exitstatus=0)
        telling.tell("done", None)
        code = 0
    except BaseException:  # noqa: BLE001 - a lane's outermost loop
        telling.tell("broken", traceback.format_exc())
    finally:
        os._exit(code)


def _run_files(session: pytest.Session, files: list[list[pytest.Item]], todo: int) -> None:
    number = _next(todo)
    while number is not None:
        items, following = files[number], None
        for item, after in zip(items, [*items[1:], None]):
            if after is None and (following := _next(todo)) is not None:
                after = files[following][0]
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
            if session.shouldstop or session.shouldfail:
                return
        number = following


def _next(todo: int) -> int | None:
    data = os.read(todo, _NUMBER.size)
    return _NUMBER.unpack(data)[0] if data else None
