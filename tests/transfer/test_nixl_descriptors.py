"""Finding UCX's epolls among the descriptors of a busy process."""

from __future__ import annotations

import os
import select
import threading

from kvrelay.transfer.nixl import epoll_fds


def test_descriptors_that_other_threads_close_meanwhile() -> None:
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            for fd in [os.open(os.devnull, os.O_RDONLY) for _ in range(8)]:
                os.close(fd)

    churning = [threading.Thread(target=churn) for _ in range(2)]
    with select.epoll() as epoll, open(os.devnull) as other:
        for thread in churning:
            thread.start()
        try:
            for _ in range(500):
                found = epoll_fds()
                assert epoll.fileno() in found
                assert other.fileno() not in found
        finally:
            stop.set()
            for thread in churning:
                thread.join()
