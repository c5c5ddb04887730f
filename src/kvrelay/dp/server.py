"""The coordinator's server: a background thread in rank 0 of a group, over sockets.

It owns the listening socket and a connection to every rank, rank 0 included, and carries messages between them and two
state machines: ``Roster`` (the members) and ``Coordinator`` (the steps; unused if the ranks share memory). If it fails,
it closes all connections, and every rank ends with that reason. It never leaves a rank waiting.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
import uuid

from kvrelay.core.accepting import accept
from kvrelay.dp import messages
from kvrelay.dp.addresses import GroupAddress
from kvrelay.dp.beats import BEAT_S, LOADING_SILENCE_S, SilenceDetector, silent
from kvrelay.dp.protocol import Coordinator, StartStep
from kvrelay.dp.roster import Part, Roster
from kvrelay.dp.shared_steps import create_descriptors
from kvrelay.errors import ProtocolError

_log = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 1800.0
"""From the group's forming until all ranks are loaded. vLLM gives its engine process 600 s."""
SEND_TIMEOUT_S = 5.0
READ_BYTES = 1 << 16
BACKLOG = 256


class Connection:
    """One rank's."""

    def __init__(self, connection: socket.socket, silence_s: float) -> None:
        connection.settimeout(SEND_TIMEOUT_S)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self.reader = messages.FrameReader(messages.FromRank)
        self.silence = SilenceDetector(max(silence_s, LOADING_SILENCE_S))


class GroupServer:
    """Runs from construction to ``close``. Raises AddressInUseError."""

    def __init__(
        self, address: GroupAddress, size: int, lookahead: int, gather_timeout_s: float, silence_s: float
    ) -> None:
        self.roster = Roster(size, f"dp-{uuid.uuid4().hex[:8]}")
        self._coordinator = Coordinator(lookahead)
        self._size = size
        self.address = address
        self._gather_timeout_s = gather_timeout_s
        self._deadline_s = time.monotonic() + gather_timeout_s
        self._silence_s = silence_s
        self._next_beat_s = 0.0
        self._listener = address.listen(BACKLOG)
        self.connections: dict[Part, Connection] = {}
        self._store_port = 0
        self._want_store: set[Part] = set()
        self._lost: list[tuple[Part, str]] = []
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="dp-coordinator", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Idempotent. Ranks that are still connected end."""
        if self._stop >= 0:
            os.eventfd_write(self._stop, 1)
            self._thread.join()
            os.close(self._stop)
            self._stop = -1

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as exc:  # noqa: BLE001 - the thread's outermost loop
            _log.exception("the coordinator of the data-parallel group failed")
            self._tell_all(messages.Ended(f"the coordinator of the data-parallel group failed: {exc!r}"))
        finally:
            self._listener.close()
            for connection in self.connections.values():
                connection.socket.close()

    def _serve(self) -> None:
        poller = select.poll()
        poller.register(self._listener, select.POLLIN)
        poller.register(self._stop, select.POLLIN)
        while True:
            wait_s = self._wait_s()
            if wait_s is not None and wait_s <= 0:
                self._time_is_up()
            for fd, _ in poller.poll(None if wait_s is None else max(0.0, wait_s) * 1000 + 1):
                if fd == self._stop:
                    return
                if fd == self._listener.fileno():
                    self._accept(poller)
                    # The descriptor may belong to a connection that was closed since the poll.
                    break
                if fd in self.connections:
                    self._read(fd)
            self._bury(poller)

    def _accept(self, poller: select.poll) -> None:
        connection = accept(self._listener)
        if connection is not None:
            part = connection.fileno()
            self.connections[part] = Connection(connection, self._silence_s)
            poller.register(connection, select.POLLIN)
            self._send(part, messages.CoordinatorHello())

    def _wait_s(self) -> float | None:
        """Seconds until something is due; None: nothing is."""
        if self.roster.is_gathering:
            return self._deadline_s - time.monotonic()
        return self._next_beat_s - time.monotonic() if self.roster.is_formed else None

    def _time_is_up(self) -> None:
        if self.roster.is_gathering:
            self._tell_all(self.roster.overdue(self._gather_timeout_s))
            return
        if not self.roster.is_running and time.monotonic() > self._deadline_s:
            self._tell_all(_logged(self.roster.not_loaded(LOAD_TIMEOUT_S)))
            return
        self._next_beat_s = time.monotonic() + BEAT_S
        self._tell_all(messages.Beat())
        hung = [part for part, each in self.connections.items() if self.roster.has(part) and each.silence.tick()]
        for part in hung:
            # Its connection stays, so that it hears the reason if it continues.
            self._tell_all(self._end(part, silent(self.connections[part].silence.timeout_s)))

    def _read(self, part: Part) -> None:
        connection = self.connections[part]
        try:
            data = connection.socket.recv(READ_BYTES)
            if not data:
                self._lost.append((part, "has ended"))
                return
            connection.silence.received()
            for message in connection.reader.feed(data):
                self._take(part, message)
        except (OSError, ProtocolError) as exc:
            self._lost.append((part, _how(exc)))

    def _take(self, part: Part, message: messages.FromRank) -> None:
        match message:
            case messages.RegPart() if not self.roster.is_gathering:
                self._send(part, messages.GroupRefused(self.roster.closed))
            case messages.RegPart(info):
                self._tell_all(self.roster.registered(part, info))
            case messages.RankReady() if self.roster.has(part):
                self._tell_all(self.roster.ready(part))
                for each in self.connections.values() if self.roster.is_running else ():
                    each.silence.allow(self._silence_s)
            case StartStep(step) if self.roster.has(part):
                self._tell_all(self._coordinator.start_step(step))
            case messages.RankFailed(reason) if self.roster.has(part):
                self._tell_all(self.roster.lost(part, f"has failed: {reason}"))
            case messages.Leave() if self.roster.has(part):
                self._tell_all(self.roster.left(part))
            case messages.Beat():
                pass
            case messages.StorePort(port):
                self._store_port = port or self._store_port
                self._want_store.add(part)
                while self._store_port and self._want_store:
                    self._send(self._want_store.pop(), messages.StorePort(self._store_port))
            case _:
                raise ProtocolError(f"{type(message).__name__} comes before RegPart")

    def _bury(self, poller: select.poll) -> None:
        """Tell the others of connections that have ended."""
        while self._lost:
            part, how = self._lost.pop(0)
            connection = self.connections.pop(part, None)
            if connection is None:
                continue
            self._want_store.discard(part)
            poller.unregister(connection.socket)
            connection.socket.close()
            self._tell_all(self._end(part, how))

    def _end(self, part: Part, how: str) -> messages.Ended | None:
        """The group ends because of this rank, unless it is over already."""
        ended = self.roster.lost(part, how)
        return ended and _logged(ended)

    def _tell_all(self, message: messages.FromCoordinator | None) -> None:
        if isinstance(message, messages.Formed):
            self._deadline_s = time.monotonic() + LOAD_TIMEOUT_S
            if self.address.is_shared_memory:
                return self._form(message)
        for part in list(self.connections) if message is not None else ():
            if self.roster.has(part):
                self._send(part, message)  # type: ignore[arg-type]

    def _form(self, message: messages.Formed) -> None:
        descriptors = create_descriptors(self._size)
        try:
            frame = messages.encode(messages.Formed(message.group_id, len(descriptors)))
            for part, connection in self.connections.items():
                if self.roster.has(part):
                    try:
                        socket.send_fds(connection.socket, [frame], descriptors)
                    except OSError as exc:
                        self._lost.append((part, _how(exc)))
        finally:
            for fd in descriptors:
                os.close(fd)

    def _send(self, part: Part, message: messages.FromCoordinator) -> None:
        try:
            self.connections[part].socket.sendall(messages.encode(message))
        except OSError as exc:
            self._lost.append((part, _how(exc)))


def _logged(ended: messages.Ended) -> messages.Ended:
    _log.error("the data-parallel group ends: %s", ended.reason)
    return ended


def _how(error: Exception) -> str:
    """A process that ends with messages unread resets its connection."""
    return "has ended" if isinstance(error, ConnectionError) else f"is lost: {error}"
