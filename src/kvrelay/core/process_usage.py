"""CPU time and memory of this process and of those that it has started: ranks of a worker, vLLM's engine.

Linux only; elsewhere the CPU time of this process alone. A process that has ended takes its CPU time with it.
Not by psutil: its import is 25 ms of a worker's start, and to find children it reads every process of the machine.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

FRESH_S = 1.0
"""What was read is told for so long."""
FAMILY_S = 10.0
"""How often processes are looked for that were started meanwhile."""


class Usage(NamedTuple):
    """``cpu_s``: since the start; ``rss_bytes``: now. Memory that several processes map counts in each."""

    cpu_s: float = 0.0
    rss_bytes: int = 0

    def plus(self, other: Usage) -> Usage:
        return Usage(self.cpu_s + other.cpu_s, self.rss_bytes + other.rss_bytes)


class ProcessUsage:
    """Reads little, and rarely: whoever asks more often gets the last answer."""

    def __init__(self, now: Callable[[], float] = time.monotonic, proc: Path = Path("/proc")) -> None:
        self._now, self._proc = now, proc
        self._read_s = self._family_s = float("-inf")
        self._family: list[int] = []
        self._usage = Usage()

    def read(self) -> Usage:
        now_s = self._now()
        if now_s - self._read_s < FRESH_S:
            return self._usage
        if now_s - self._family_s >= FAMILY_S:
            self._family, self._family_s = list(self._descendants(os.getpid())), now_s
        usage = Usage(time.process_time(), self._memory(os.getpid()))
        for pid in self._family:
            usage = usage.plus(Usage(self._cpu_s(pid), self._memory(pid)))
        self._usage, self._read_s = usage, now_s
        return usage

    def _descendants(self, pid: int) -> Iterator[int]:
        """None where the kernel does not tell (CONFIG_PROC_CHILDREN)."""
        for task in _listed(self._proc / str(pid) / "task"):
            for child in _words(task / "children"):
                yield int(child)
                yield from self._descendants(int(child))

    def _memory(self, pid: int) -> int:
        words = _words(self._proc / str(pid) / "statm")
        return int(words[1]) * os.sysconf("SC_PAGE_SIZE") if len(words) > 1 else 0

    def _cpu_s(self, pid: int) -> float:
        """User and system time: the 14th and 15th field, counted after the name in brackets, which may have spaces."""
        words = " ".join(_words(self._proc / str(pid) / "stat")).rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK") if len(words) > 12 else 0.0


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:  # it has ended
        return []


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []
