"""Code that runs in vLLM's processes: they must not outlive the worker, however it ends.

vLLM's engine process waits for requests from a socket, so it would wait for ever, and keep the device's memory, after
its parent was killed.
"""

from __future__ import annotations

import os
import select
import signal
import threading


class EndsWithParent:
    """An extension of vLLM's workers, by ``worker_extension_cls``. vLLM refuses names that its workers have."""

    def kvrelay_end_with(self, pid: int) -> None:
        """From now on this process ends as soon as process ``pid`` has ended. Raises OSError if it has ended."""
        end_with(pid)

    def kvrelay_at_rest(self) -> None:
        """Answered between two steps, so those that were given to this worker before are over."""


def end_with(pid: int) -> None:
    """A thread waits for the end of ``pid`` and then kills this process. Raises OSError if there is no such process."""
    watched = os.pidfd_open(pid)
    threading.Thread(target=_wait, args=(watched,), name="end-with-parent", daemon=True).start()


def _wait(watched: int) -> None:
    poller = select.poll()
    poller.register(watched, select.POLLIN)
    poller.poll()
    os.kill(os.getpid(), signal.SIGKILL)
