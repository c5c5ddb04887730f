"""Runs trials in processes, one for each core, or in this one.

    submit(trial) ──> a process that has the Setting ──> results(): pairs of trial and outcome, as they end

Processes are spawned: they share nothing with the caller. They end with the context, also if it is left by Ctrl-C, and
by themselves if the caller dies.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import wait as wait_for_end
from typing import Protocol

from kvrelay.errors import ConfigError
from kvrelay.simulate.trial import Outcome, Setting, Trial, run_trial

MAX_PROCESSES = 16
_shared: list[Setting] = []
"""Of a process of the pool: what its trials share."""


class Runner(Protocol):
    """``capacity``: how many trials run at once. More may be submitted, and wait."""

    capacity: int

    def submit(self, trial: Trial) -> None: ...

    def results(self) -> Iterator[tuple[Trial, Outcome]]:
        """Until nothing is left of what was submitted, also meanwhile. Raises what a trial raises."""


class RunsHere:
    """One after the other in this process."""

    capacity = 1

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._waiting: deque[Trial] = deque()

    def submit(self, trial: Trial) -> None:
        self._waiting.append(trial)

    def results(self) -> Iterator[tuple[Trial, Outcome]]:
        while self._waiting:
            trial = self._waiting.popleft()
            yield trial, run_trial(self._setting, trial)


class _RunsInProcesses:
    def __init__(self, executor: ProcessPoolExecutor, num_processes: int) -> None:
        self.capacity = num_processes
        self._executor = executor
        self._running: dict[Future[Outcome], Trial] = {}

    def submit(self, trial: Trial) -> None:
        # A process that this starts inherits the mask: Ctrl-C would end its imports with a traceback. See _begin.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._running[self._executor.submit(_run_shared, trial)] = trial
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def results(self) -> Iterator[tuple[Trial, Outcome]]:
        while self._running:
            for done in wait(self._running, return_when=FIRST_COMPLETED).done:
                try:
                    yield self._running.pop(done), done.result()
                except BrokenProcessPool as exc:
                    raise ConfigError(
                        "a process that simulates was ended from outside, perhaps for its memory; try --processes 1",
                        param="processes",
                    ) from exc

    def cancel(self) -> None:
        """Begin nothing more."""
        for future in self._running:
            future.cancel()


def num_processes_for(wanted: int) -> int:
    """``wanted``, or one for each core that this process may use (0)."""
    return min(wanted or len(os.sched_getaffinity(0)), MAX_PROCESSES)


@contextmanager
def runner(setting: Setting, num_processes: int) -> Iterator[Runner]:
    """Processes while this context is open; with one it is this process itself."""
    if num_processes <= 1:
        yield RunsHere(setting)
        return
    others = set(multiprocessing.active_children())
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_processes, context, _begin, (setting,)) as executor:
        runs = _RunsInProcesses(executor, num_processes)
        try:
            yield runs
        except BaseException:
            runs.cancel()
            for child in set(multiprocessing.active_children()) - others:
                child.terminate()
            raise


def _begin(setting: Setting) -> None:
    """A process begins: Ctrl-C ends it without a word, and so does the end of its parent."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    if parent := multiprocessing.parent_process():
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()
    _shared.append(setting)
    gc.freeze()


def _end_with(sentinel: int) -> None:
    wait_for_end([sentinel])
    os._exit(1)


def _run_shared(trial: Trial) -> Outcome:
    return run_trial(_shared[0], trial)
