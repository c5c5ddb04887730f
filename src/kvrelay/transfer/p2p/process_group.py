"""Two-rank process groups of torch: gloo on the host, NCCL on a GPU. One code path, no default group, no TCPStore.

What gloo and NCCL exchange before they are connected goes through ``PairStore``, and so over the control connection,
which is encrypted and knows its callers. An outsider cannot enter a group, since it never learns where to connect.

Every wait has a deadline. A gloo wait that runs out closes the connection of the pair, so the group is of no use after
any failure. Neither library can be told from outside to give up a wait, but a wait ends at once when the peer's end is
closed; ``hang_up`` closes our end of gloo's connection, which ends our own waits too.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from kvrelay.errors import TransferError

_MAX_TAG = 2**31 - 1
"""Of torch: a C int."""
_FAMILIES = (socket.AF_INET, socket.AF_INET6)


class PairStore(dist.Store):  # type: ignore[misc,name-defined]
    """A store of two ranks: what one sets is sent to the other by ``send(key, value)``. Thread-safe."""

    def __init__(self, send: Callable[[str, bytes], None], timeout_s: float) -> None:
        super().__init__()
        self._send = send
        self._timeout_s = timeout_s
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._is_closed = False
        self.peer_value = b""
        """The first value of the other rank: with gloo, where that rank listens."""
        self.own_value = b""

    def receive(self, key: str, value: bytes) -> None:
        """From the other rank."""
        with self._changed:
            self.peer_value = self.peer_value or value
            self._values[key] = value
            self._changed.notify_all()

    def close(self) -> None:
        """Nothing more will come: waits fail."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    # -- what torch calls ---------------------------------------------------------------------------------------------

    def set(self, key: str, value: bytes) -> None:
        data = bytes(value)
        with self._changed:
            self.own_value = self.own_value or data
            self._values[key] = data
            self._changed.notify_all()
        self._send(key, data)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        end = time.monotonic() + (self._timeout_s if timeout is None else timeout.total_seconds())
        with self._changed:
            while not all(key in self._values for key in keys):
                rest = end - time.monotonic()
                if self._is_closed or rest <= 0:
                    raise RuntimeError("the peer did not take part in making the communicator")
                self._changed.wait(rest)

    def check(self, keys: list[str]) -> bool:
        with self._changed:
            return all(key in self._values for key in keys)

    def has_extended_api(self) -> bool:
        return False


class PairGroup:
    """Rank ``rank`` of 2. Making it blocks until the other rank makes it too. Raises TransferError.

    Sends and receives may be called from one thread each.
    """

    def __init__(self, store: PairStore, rank: int, device: str, timeout_s: float) -> None:
        timeout = timedelta(seconds=timeout_s)
        self._other = 1 - rank
        self._timeout_s = timeout_s
        self._ports = (0, 0)
        self._device = device
        try:
            if device == "cpu":
                self._group: Any = dist.ProcessGroupGloo(store, rank, 2, timeout)
                self._ports = (_port(store.own_value), _port(store.peer_value))
            else:
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = timeout
                with torch.cuda.device(device):
                    self._group = dist.ProcessGroupNCCL(store, rank, 2, options)
        except RuntimeError as exc:
            raise TransferError(f"the communicator could not be made: {_first_line(exc)}") from exc

    def send(self, tensor: torch.Tensor, tag: int) -> Any:
        """Begin; ``wait`` for what it returns. The peer's receive has the same tag, a number of any size. Raises
        TransferError."""
        return _checked(lambda: self._group.send([tensor], self._other, tag & _MAX_TAG))

    def receive(self, tensor: torch.Tensor, tag: int) -> Any:
        """Begin; ``wait`` for what it returns. Raises TransferError."""
        return _checked(lambda: self._group.recv([tensor], self._other, tag & _MAX_TAG))

    def wait(self, work: Any) -> None:
        """Raises TransferError when the peer does not do its part within the deadline."""
        if self._device == "cpu":
            _checked(lambda: work.wait(timedelta(seconds=self._timeout_s)))
        else:
            _checked(lambda: _wait_for_device(work, self._timeout_s))

    def hang_up(self) -> None:
        """Close the connection under waits of other threads: they fail. From any thread."""
        if self._device == "cpu":
            _shut_down(*self._ports)
        else:
            with contextlib.suppress(RuntimeError):
                self._group.abort()


def _checked(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except RuntimeError as exc:
        raise TransferError(f"the communicator failed: {_first_line(exc)}") from exc


def _wait_for_device(work: Any, timeout_s: float) -> None:
    """NCCL's ``wait`` only orders streams: the end of the work is asked for, with pauses."""
    end = time.monotonic() + timeout_s
    pause_s = 0.00005
    while not work.is_completed():
        if time.monotonic() > end:
            raise RuntimeError("timed out")
        time.sleep(pause_s)
        pause_s = min(pause_s * 2, 0.001)
    work.wait()


def _first_line(exc: RuntimeError) -> str:
    return str(exc).split("\n", 1)[0][:200]


def _port(blob: bytes) -> int:
    """The port in gloo's address of a rank. 0: unknown.

    A rank and a sequence number, 8 bytes each, then a sockaddr; later versions of torch have 2 bytes before it.
    """
    for at in (16, 18):
        if len(blob) >= at + 4 and struct.unpack_from("=H", blob, at)[0] in _FAMILIES:
            return int(struct.unpack_from("!H", blob, at + 2)[0])
    return 0


def _shut_down(own_port: int, peer_port: int) -> None:
    """Shut down the connected TCP sockets of this process between these listeners' ports. Best effort."""
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as found:
                if found.family not in _FAMILIES or found.type != socket.SOCK_STREAM:
                    continue
                near, far = found.getsockname()[1], found.getpeername()[1]
                if (own_port and near == own_port) or (peer_port and far == peer_port):
                    found.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue  # closed meanwhile, or not connected
