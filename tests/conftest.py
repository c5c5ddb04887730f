"""For the whole suite: assertions in shared modules are explained, the longest files come first, nothing is left over.

Clients of HTTP read the authorities that they trust when they are made, which takes 45 ms of CPU for the hundreds of a
system, and the suite makes thousands of clients. None of its tests speaks to a server of the internet, so all clients
trust one authority. Tests of the matrix may install packages: there the environment may say whom to trust.

Threads of OpenMP that wait sleep, as ``kvrelay.executors.torch`` has it: tests import torch before that could say so.

The suite starts hundreds of Python processes. Each would compile our sources anew, a third of its start, if the
environment forbade to keep the bytecode: here it may not. What collection has made lives to the end, so the garbage
collector never looks at it.

Several processes may run the suite side by side (pytest-xdist), each whole files. Long ones are handed out first, so
that nobody begins one when the others are done.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import certifi
import hypothesis
import pytest
from tests import leftovers, nursery
from tests.patience import AskingPolicy

pytest.register_assert_rewrite(*(f"tests.{folder.name}" for folder in Path(__file__).parent.iterdir()))


# Drawn examples are the same in every run, and none of them has to be quick.
hypothesis.settings.register_profile(
    "suite", derandomize=True, database=None, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("suite")
# Hypothesis also draws the numbers that stand in the sources of imported modules. Which ones a process has imported
# depends on the files that it ran before, so a test's examples would, too.
hypothesis.internal.conjecture.providers.is_local_module_file = lambda _: False


gc.disable()  # until everything is collected: almost all of it lives to the end
asyncio.set_event_loop_policy(AskingPolicy())

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As the shell starts what runs in the background. What tests start would be deaf to Ctrl-C, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "3000")

ROOTS = "SSL_CERT_FILE"
"""The environment variable by which OpenSSL and httpx find authorities."""
_END = "-----END CERTIFICATE-----\n"


def pytest_configure(config: pytest.Config) -> None:
    if not _is_helper(config):
        os.environ[leftovers.MARK] = f"{os.getpid()}-{time.time_ns()}"
        marks = config.option.markexpr
        if "not matrix" in marks or (marks != "real_model" and ROOTS not in os.environ):
            _trust_one_authority(config)
    elif config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        _begin_elsewhere(config, int(config.workerinput["workerid"][2:]), config.workerinput["workercount"])


def _begin_elsewhere(config: pytest.Config, number: int, num_processes: int) -> None:
    """Each process reads all files. The first that reads one also rewrites its assertions and keeps the bytecode, which
    takes as long again: so they begin at different folders."""
    folders = sorted(str(path) for path in Path(__file__).parent.iterdir() if path.is_dir() and path.name[0] != "_")
    at = len(folders) * number // num_processes
    config.args[:] = folders[at:] + folders[:at]


def _trust_one_authority(config: pytest.Config) -> None:
    directory = tempfile.TemporaryDirectory(prefix="kvrelay-tests-")
    before = os.environ.get(ROOTS)
    file = Path(directory.name) / "authority.pem"
    file.write_text(Path(certifi.where()).read_text(encoding="utf-8").partition(_END)[0] + _END, encoding="utf-8")
    os.environ[ROOTS] = str(file)

    def forget() -> None:
        del os.environ[ROOTS]
        if before is not None:
            os.environ[ROOTS] = before
        directory.cleanup()

    config.add_cleanup(forget)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with a test marked slow come first, then those with real processes. Processes that have begun to read at
    different folders have the same order."""
    marks: dict[Path, set[str]] = {}
    for item in items:
        marks.setdefault(item.path, set()).update(mark.name for mark in item.iter_markers())
    items.sort(key=lambda item: ("slow" not in marks[item.path], "system" not in marks[item.path], str(item.path)))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What a test has logged or printed travels to another process as UTF-8, whatever it was."""
    report = yield
    report.sections = [(name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections]
    return report


@pytest.fixture(scope="session", autouse=True)
def _end_shared_processes() -> Iterator[None]:
    """Files share a compiler of grammars, which has a process, NATS servers, and the process that ranks come from."""
    ranks = nursery.install()
    yield
    ranks.end()
    if (cluster := sys.modules.get("tests.worker.cluster")) is not None:
        cluster.end_servers()
    if (constrained := sys.modules.get("tests.executors.constrained")) is not None:
        constrained.COMPILER.close()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A process that outlives the tests is a defect, and does not outlive it any longer."""
    if _is_helper(session.config):
        return
    session.config.stash[LEFT] = leftovers.end_all()
    if session.config.stash[LEFT] and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


LEFT = pytest.StashKey[list[str]]()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for command in config.stash.get(LEFT, []):
        terminalreporter.write_line(f"ERROR a process outlived the tests: {command}", red=True)


def _is_helper(config: pytest.Config) -> bool:
    """One of the processes that run tests for another one."""
    return hasattr(config, "workerinput")
