"""A listener whose ``accept`` fails for a while."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from kvrelay.core import accepting
from kvrelay.core.accepting import accept


class FailingListener(socket.socket):
    """Fails with these errors, one after another."""

    failures: Iterator[int] = iter(())

    def accept(self) -> tuple[socket.socket, Any]:
        if failure := next(self.failures, 0):
            raise OSError(failure, os.strerror(failure))
        return super().accept()


def test_a_connection_waits_until_it_can_be_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(accepting.time, "sleep", pauses.append)
    with FailingListener() as listener, socket.socket() as client:
        listener.failures = iter([errno.EMFILE, errno.ENFILE, errno.ECONNABORTED])
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        client.connect(listener.getsockname())
        assert [accept(listener) for _ in range(3)] == [None] * 3
        assert len(pauses) == 3, "a loop that polls would spin"
        connection = accept(listener)
        assert connection is not None
        connection.close()
