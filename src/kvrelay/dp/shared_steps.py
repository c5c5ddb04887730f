"""The step protocol between processes of one host: the coordinator's state in shared memory, and a bell for each
rank.

    memory (memfd)     [ step: int64 ] per rank  written by that rank alone, read by every rank; the greatest counts
    bells (eventfd)    one per rank              rung when a step has risen

There is no message to a coordinator and no lock: the rank that begins a step decides by ``protocol.raised`` and the
greatest of the steps, writes the result as its own, and rings. No step ever falls. If two ranks do so at once, each
tells all. One thread of each rank does nothing but wait for its bell: nothing wakes a process sooner.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Sequence

from kvrelay.dp.protocol import StartStep, StepsUntil, raised

_STEP_BYTES = 8


def create_descriptors(num_ranks: int) -> list[int]:
    """The memory, then the bells. Each rank gets copies of all descriptors; the caller closes its own."""
    memory = os.memfd_create("kvrelay-dp-step")
    os.ftruncate(memory, num_ranks * _STEP_BYTES)
    return [memory, *(os.eventfd(0, os.EFD_CLOEXEC) for _ in range(num_ranks))]


class SharedSteps:
    """One rank's end. Owns the given descriptors. One thread at a time calls ``start_step``."""

    def __init__(self, descriptors: Sequence[int], rank: int, lookahead: int) -> None:
        memory, *self._bells = descriptors
        self._map = mmap.mmap(memory, len(self._bells) * _STEP_BYTES)
        os.close(memory)
        self._steps = memoryview(self._map).cast("q")
        self._rank = rank
        self._lookahead = lookahead
        self._bell = self._bells[rank]
        self._in_order = [*self._bells[rank + 1 :], *self._bells[: rank + 1]]
        """The others' bells first: our own thread, once awake, would take the interpreter from the ringer."""
        self._thread: threading.Thread | None = None
        self._has_stopped = False

    def start_step(self, message: StartStep) -> int:
        """Raise the step if this one is not covered, and wake every rank. Returns the number of ranks woken."""
        step = raised(message.step, max(self._steps), self._lookahead)
        if step is None:
            return 0
        self._steps[self._rank] = step
        for bell in self._in_order:
            os.eventfd_write(bell, 1)
        return len(self._bells)

    def listen(self, deliver: Callable[[StepsUntil], None]) -> None:
        """Call ``deliver`` whenever the step has risen, on a separate thread, until ``stop``."""
        self._thread = threading.Thread(target=self._listen, args=(deliver,), name="dp-steps", daemon=True)
        self._thread.start()

    def _listen(self, deliver: Callable[[StepsUntil], None]) -> None:
        heard, is_last = 0, False
        while not is_last:
            os.eventfd_read(self._bell)
            is_last = self._has_stopped  # first: what was begun before ``stop`` is delivered
            step = max(self._steps)
            if step > heard:
                heard = step
                deliver(StepsUntil(step))

    def stop(self) -> None:
        """Returns once all that was begun before is delivered; after that nothing is. Idempotent. Not from the thread
        that delivers."""
        self._has_stopped = True
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
