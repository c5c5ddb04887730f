"""The step protocol between processes of one host: the coordinator's state in shared memory, and a bell for each
rank.

    memory (memfd)     [ step: int64 ] per rank  written by that rank alone, read by every rank; the greatest counts
    bells (eventfd)    one per rank              rung by the other ranks when their steps have risen

There is no message to a coordinator and no lock: the rank that begins a step decides by ``protocol.raised`` and the
step that it has told before, writes the result as its own, rings the others' bells, and tells its own engine by a call.
No step ever falls. If two ranks do so at once, each tells all. One thread of each rank does nothing but wait for its
bell: nothing wakes a process sooner.

The first code that runs after a sleep runs from cold caches, tens of times slower than later. So the ringer reads no
other rank's step, and wakes no thread of its own, which would take a core from the one that it has woken.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Sequence

from kvrelay.dp.protocol import StartStep, Step, StepsUntil, raised

_STEP_BYTES = 8


def create_descriptors(num_ranks: int) -> list[int]:
    """The memory, then the bells. Each rank gets copies of all descriptors; the caller closes its own."""
    memory = os.memfd_create("kvrelay-dp-step")
    os.ftruncate(memory, num_ranks * _STEP_BYTES)
    return [memory, *(os.eventfd(0, os.EFD_CLOEXEC) for _ in range(num_ranks))]


def _ignore(message: StepsUntil) -> None:
    """No one listens."""


class SharedSteps:
    """One rank's end. Owns the given descriptors. One thread at a time calls ``start_step``."""

    def __init__(self, descriptors: Sequence[int], rank: int, lookahead: int) -> None:
        memory, *self._bells = descriptors
        self._map = mmap.mmap(memory, len(self._bells) * _STEP_BYTES)
        os.close(memory)
        self._steps = memoryview(self._map).cast("q")
        self._rank = rank
        self._lookahead = lookahead
        self._told: Step = 0
        """What this rank has told."""
        self._bell = self._bells[rank]
        self._others = [other for other in range(len(self._bells)) if other != rank]
        self._others_bells = [self._bells[other] for other in self._others]
        self._deliver: Callable[[StepsUntil], None] = _ignore
        self._thread: threading.Thread | None = None
        self._has_stopped = False

    def start_step(self, message: StartStep) -> None:
        """Raise the step if this rank has not told so yet, wake every other rank, and deliver it here, on the caller's
        thread."""
        step = raised(message.step, self._told, self._lookahead)
        if step is not None:
            self._steps[self._rank] = self._told = step
            for bell in self._others_bells:
                os.eventfd_write(bell, 1)
            self._deliver(StepsUntil(step))

    def listen(self, deliver: Callable[[StepsUntil], None]) -> None:
        """Call ``deliver`` whenever another rank has raised the step, on a separate thread, until ``stop``."""
        self._deliver = deliver
        self._thread = threading.Thread(target=self._listen, args=(deliver,), name="dp-steps", daemon=True)
        self._thread.start()

    def _listen(self, deliver: Callable[[StepsUntil], None]) -> None:
        heard, is_last = 0, False
        while not is_last:
            os.eventfd_read(self._bell)
            is_last = self._has_stopped  # first: what was begun before ``stop`` is delivered
            for other in self._others:
                if (told := self._steps[other]) > heard:
                    heard = told
                    deliver(StepsUntil(told))

    def stop(self) -> None:
        """Returns once all that was begun before is delivered; after that nothing is. Idempotent. Not from the thread
        that delivers."""
        self._has_stopped, self._deliver = True, _ignore
        if self._thread is not None:
            os.eventfd_write(self._bell, 1)
            self._thread.join()
            self._thread = None

    def close(self) -> None:
        self.stop()
        self._steps.release()
        self._map.close()
        for bell in self._bells:
            os.close(bell)
