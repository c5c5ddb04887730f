"""A progress bar on stderr if that is a terminal, else no output."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_T = TypeVar("_T")
_REDRAW_S = 0.2


class ProgressBar:
    """One bar that goes through named stages; without a terminal every call does nothing."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._task: TaskID | None = None
        self._drawn_at = 0.0

    def stage(self, name: str, total: float | None = None) -> None:
        """Begin a stage; with ``total`` None the bar moves without an end."""
        if self._progress is None:
            return
        if self._task is not None:
            self._progress.stop_task(self._task)
        self._task = self._progress.add_task(name, total=total, note="")
        self._progress.refresh()

    def update(self, completed: float, note: str = "") -> None:
        """Show ``completed`` of the stage's total; cheap to call often."""
        now = time.monotonic()
        if self._progress is None or self._task is None or now - self._drawn_at < _REDRAW_S:
            return
        self._drawn_at = now
        self._progress.update(self._task, completed=completed, note=note)
        self._progress.refresh()

    def count(self, items: Iterable[_T]) -> Iterator[_T]:
        """Pass the items through and show their number."""
        for number, item in enumerate(items, 1):
            if not number & 0xFFF:
                self.update(number, f"{number}")
            yield item


@contextmanager
def progress_bar(enabled: bool = True) -> Iterator[ProgressBar]:
    """A bar while this context is open. It redraws only on calls: no thread runs beside a measurement."""
    if not (enabled and sys.stderr.isatty()):
        yield ProgressBar(None)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False) as progress:
        yield ProgressBar(progress)
