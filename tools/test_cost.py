"""What tests cost: seconds of CPU, with those of all processes that they start, and of the wall, by file and by test.

``python tools/test_cost.py [--wall] [--top 30] [-- pytest's arguments]`` runs the tests in one process and prints two
tables. Seconds of CPU hardly change when the machine is busy with something else. A file waits if it takes many more of
the wall. What files share (imports, fixtures of a session) is counted at the first of them.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Generator
from contextlib import suppress

import psutil
import pytest

Seconds = tuple[float, float]
"""Of CPU and of the wall."""


def now(living: bool) -> Seconds:
    """What this process and its children have used so far; ``living``: also children that have not ended yet."""
    times = os.times()
    cpu_s = times.user + times.system + times.children_user + times.children_system
    for process in psutil.Process().children(recursive=True) if living else ():
        with suppress(psutil.Error):
            cpu_s += sum(process.cpu_times()[:4])
    return cpu_s, times.elapsed


def since(begin: Seconds, end: Seconds) -> Seconds:
    return end[0] - begin[0], end[1] - begin[1]


class Costs:
    """A plugin of pytest that notes what each file and each test has used."""

    def __init__(self) -> None:
        self.files: dict[str, Seconds] = {}
        self.tests: dict[str, Seconds] = {}
        self._file_began = self._began = now(living=True)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, object, object]:
        begin = now(living=False)
        result = yield
        self.tests[item.nodeid] = since(begin, now(living=False))
        if nextitem is None or nextitem.path != item.path:
            end = now(living=True)
            self.files[item.nodeid.partition("::")[0]] = since(self._file_began, end)
            self._file_began = end
        return result

    def print(self, top: int, column: int) -> None:
        for title, costs in (("all, and files", self.files), ("tests", self.tests)):
            print(f"\n  CPU s   wall s  {title}")
            everything = {"all": since(self._began, now(living=True))} if costs is self.files else {}
            dearest = sorted(costs.items(), key=lambda each: -each[1][column])[:top]
            for name, (cpu_s, wall_s) in [*everything.items(), *dearest]:
                print(f"{cpu_s:7.1f}  {wall_s:7.1f}  {name}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wall", action="store_true", help="sort by seconds of the wall")
    parser.add_argument("--top", type=int, default=30, help="rows of each table")
    parser.add_argument("arguments", nargs="*", help="pytest's, after --")
    options = parser.parse_args()
    costs = Costs()
    code = pytest.main(options.arguments, plugins=[costs])
    costs.print(options.top, int(options.wall))
    return code


if __name__ == "__main__":
    sys.exit(main())
