"""The address of a group: a directory of this host, or a port for groups that span hosts. The address decides the
carrier.

    /tmp/kvrelay-dp-x1y2    a socket in that directory, and steps by shared memory
    10.0.0.1:29500          TCP, and steps by messages; rank 0 listens there
"""

from __future__ import annotations

import errno
import socket
import time
from pathlib import Path

import msgspec

from kvrelay.config.addresses import bare_host, host_port
from kvrelay.core.unix_sockets import short_path
from kvrelay.errors import AddressInUseError, ConfigError, FatalError

CONNECT_INTERVAL_S = 0.02
SOCKET_NAME = "coordinator"


class GroupAddress(msgspec.Struct, frozen=True):
    """Either ``directory`` or ``host`` and ``port``."""

    directory: Path | None = None
    host: str = ""
    port: int = 0

    @classmethod
    def parse(cls, text: str) -> GroupAddress:
        """Raises ConfigError."""
        if text.startswith("/"):
            return cls(directory=Path(text))
        host, _, port = text.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise ConfigError(
                f"--dp-address {text or '(empty)'}: give HOST:PORT, or the path of an empty directory if all ranks "
                "run on this host",
                param="dp_address",
            )
        return cls(host=bare_host(host), port=int(port))

    def __str__(self) -> str:
        return str(self.directory) if self.directory is not None else host_port(self.host, self.port)

    @property
    def is_shared_memory(self) -> bool:
        return self.directory is not None

    def own_host(self) -> str:
        """The address by which other hosts reach this one: the local address of a connection to ``host``."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((self.host, self.port))
            return str(probe.getsockname()[0])

    def listen(self, backlog: int) -> socket.socket:
        """Raises AddressInUseError."""
        if self.directory is not None:
            listener = socket.socket(socket.AF_UNIX)
        else:
            listener = socket.socket(socket.AF_INET6 if ":" in self.host else socket.AF_INET)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            if self.directory is not None:
                with short_path(self.directory, SOCKET_NAME) as path:
                    listener.bind(path)
            else:
                listener.bind((self.host, self.port))
            listener.listen(backlog)
        except OSError as exc:
            listener.close()
            if self.directory is None:
                raise AddressInUseError.at(str(self), exc) from exc
            raise AddressInUseError(f"cannot listen at {self.directory / SOCKET_NAME}: {exc.strerror or exc}") from exc
        return listener

    def connect(self, timeout_s: float) -> socket.socket:
        """Connect; retry until the coordinator listens. Raises FatalError."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                return self._connect()
            except OSError as exc:
                if time.monotonic() > deadline_s or exc.errno == errno.ENAMETOOLONG:
                    raise FatalError(
                        f"rank 0 of the data-parallel group does not listen at {self} ({exc.strerror or exc})"
                    ) from exc
            time.sleep(CONNECT_INTERVAL_S)

    def _connect(self) -> socket.socket:
        if self.directory is None:
            connection = socket.create_connection((self.host, self.port), timeout=5.0)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection
        connection = socket.socket(socket.AF_UNIX)
        try:
            with short_path(self.directory, SOCKET_NAME) as path:
                connection.connect(path)
        except OSError:
            connection.close()
            raise
        return connection
