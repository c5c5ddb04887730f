"""One rank's connection to its group: joined once, read by a separate thread, closed at the end.

``start_step`` and the delivered ``StepsUntil`` use one of two carriers of the step protocol: messages over the
connection (groups that span hosts), or shared memory (``shared_steps``). Registration, leaving and loss always go over
the connection: if a process ends, the kernel closes it.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable

from kvrelay.dp import messages
from kvrelay.dp.addresses import GroupAddress
from kvrelay.dp.beats import BEAT_S, DEFAULT_SILENCE_S, LOADING_SILENCE_S, SilenceDetector, silent
from kvrelay.dp.protocol import DEFAULT_LOOKAHEAD, StartStep, StepsUntil
from kvrelay.dp.server import READ_BYTES, SEND_TIMEOUT_S, GroupServer
from kvrelay.dp.shared_steps import SharedSteps
from kvrelay.errors import ConfigError, FatalError, ProtocolError

_log = logging.getLogger(__name__)

GATHER_TIMEOUT_S = 60.0
HELLO_TIMEOUT_S = 5.0
MAX_FDS = 128
COORDINATOR = "rank 0 of the data-parallel group, its coordinator"

Notice = messages.AllReady | StepsUntil | messages.AllLeft | messages.Ended
"""The messages to a rank once the group is formed."""


class GroupMember:
    """See ``join``. All methods except ``close`` are called by one thread at a time; it sends heartbeats itself."""

    def __init__(self, connection: socket.socket, server: GroupServer | None, silence_s: float) -> None:
        self._socket = connection
        self._sending = threading.Lock()
        self._silence_s = silence_s
        self._next_beat_s = 0.0
        self.silence = SilenceDetector(max(silence_s, LOADING_SILENCE_S))
        self.server = server
        self._reader = messages.FrameReader(messages.FromCoordinator)
        self._fds: list[int] = []
        self._waiting: list[messages.FromCoordinator] = []
        """Messages that came with the one that was awaited."""
        self._shared: SharedSteps | None = None
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread: threading.Thread | None = None
        self.group_id = ""

    @classmethod
    def join(
        cls,
        address: GroupAddress,
        info: messages.RankInfo,
        lookahead: int = DEFAULT_LOOKAHEAD,
        timeout_s: float = GATHER_TIMEOUT_S,
        silence_s: float = DEFAULT_SILENCE_S,
    ) -> GroupMember:
        """Register, and wait until all ranks have. Rank 0 runs the coordinator. ``silence_s``: how long a rank or the
        coordinator may send nothing after all are loaded, before it counts as hung; until then it is
        LOADING_SILENCE_S at least.

        Raises AddressInUseError (rank 0), ConfigError if the group is refused, FatalError if it is not formed.
        """
        server = GroupServer(address, info.size, lookahead, timeout_s, silence_s) if info.rank == 0 else None
        try:
            member = cls(address.connect(timeout_s), server, silence_s)
        except FatalError:
            if server is not None:
                server.close()
            raise
        try:
            member._register(address, info, lookahead, timeout_s)
        except BaseException:
            member.close()
            raise
        return member

    @property
    def carrier(self) -> str:
        return "rpc" if self._shared is None else "shm"

    def listen(self, deliver: Callable[[Notice], None]) -> None:
        """Call ``deliver`` with each message until ``close`` or the end of the group: with shared memory the steps that
        other ranks begin on one thread, and those that this rank begins within ``start_step``; all else on another
        thread. The last message is ``AllLeft`` or ``Ended``."""
        if self._shared is not None:
            self._shared.listen(deliver)
        self._thread = threading.Thread(target=self._listen, args=(deliver,), name="dp-group", daemon=True)
        self._thread.start()

    def ready(self) -> None:
        """This rank is loaded. Steps begin after ``AllReady``."""
        self._send(messages.RankReady())

    def start_step(self, message: StartStep) -> None:
        """Does not wait. If the group is gone, ``deliver`` reports it."""
        start = self._send if self._shared is None else self._shared.start_step
        start(message)

    def fail(self, reason: str) -> None:
        """This rank's engine has failed: the group ends, and every rank gets the reason."""
        self._send(messages.RankFailed(reason))

    def leave(self) -> None:
        """This rank has no requests left. It runs the group's steps until ``AllLeft`` arrives."""
        self._send(messages.Leave())

    def close(self) -> None:
        """Idempotent. Not from the thread that delivers."""
        if self._stop < 0:
            return
        os.eventfd_write(self._stop, 1)
        if self._thread is not None:
            self._thread.join()
        self._socket.close()
        if self._shared is not None:
            self._shared.close()
        for fd in (*self._fds, self._stop):
            os.close(fd)
        self._fds, self._stop = [], -1
        if self.server is not None:
            self.server.close()

    # -- start --------------------------------------------------------------------------------------------------------

    def _register(self, address: GroupAddress, info: messages.RankInfo, lookahead: int, timeout_s: float) -> None:
        hello = self._await(HELLO_TIMEOUT_S)
        if not isinstance(hello, messages.CoordinatorHello):
            raise FatalError(f"what listens at {address} is not the coordinator of a data-parallel group")
        self._send(messages.RegPart(info))
        # The coordinator times out first and gives the reason.
        answer = self._await(timeout_s + HELLO_TIMEOUT_S)
        match answer:
            case messages.Formed(group_id, num_fds):
                self.group_id = group_id
                if num_fds:
                    if len(self._fds) != num_fds:
                        raise FatalError(f"{len(self._fds)} of {num_fds} descriptors of the group's memory have come")
                    descriptors, self._fds = self._fds, []
                    self._shared = SharedSteps(descriptors, info.rank, lookahead)
                self._socket.settimeout(SEND_TIMEOUT_S)
            case messages.GroupRefused(reason):
                raise ConfigError(f"rank {info.rank} cannot join its data-parallel group: {reason}", param="dp")
            case messages.Ended(reason):
                raise FatalError(f"rank {info.rank} cannot join its data-parallel group: {reason}")
            case _:
                raise FatalError(f"the coordinator at {address} has ended, or does not answer")

    def _await(self, timeout_s: float) -> messages.FromCoordinator | None:
        """The next message; None if none comes."""
        deadline_s = time.monotonic() + timeout_s
        while not self._waiting:
            self._socket.settimeout(max(deadline_s - time.monotonic(), 0.001))
            try:
                if not self._receive():
                    return None
            except (OSError, ProtocolError) as exc:
                _log.debug("no message from the coordinator: %s", exc)
                return None
        return self._waiting.pop(0)

    def _receive(self) -> bool:
        """Read what is there. False: the other end is gone. Raises OSError, ProtocolError."""
        if self._socket.family == socket.AF_UNIX:
            data, fds, _, _ = socket.recv_fds(self._socket, READ_BYTES, MAX_FDS)
            self._fds += fds
        else:
            data = self._socket.recv(READ_BYTES)
        self._waiting += self._reader.feed(data)
        return bool(data)

    # -- afterwards ---------------------------------------------------------------------------------------------------

    def _send(self, message: messages.FromRank) -> None:
        try:
            with self._sending:
                self._socket.sendall(messages.encode(message))
        except OSError as exc:
            # The listener notices the end of the connection and reports it.
            _log.debug("the coordinator does not take %s: %s", message, exc)

    def _listen(self, deliver: Callable[[Notice], None]) -> None:
        poller = select.poll()
        for fd in (self._socket.fileno(), self._stop):
            poller.register(fd, select.POLLIN)
        while True:
            if self._hand_on(deliver):
                return
            events = {fd for fd, _ in poller.poll(self._wait_ms())}
            if self._stop in events:
                return
            if self._socket.fileno() in events:
                try:
                    is_there = self._receive()
                except (OSError, ProtocolError) as exc:
                    is_there = False
                    _log.error("the connection to the coordinator has failed: %s", exc)
                self.silence.received()
                if not is_there:
                    self._waiting.append(messages.Ended(f"{COORDINATOR}, has ended"))
            # After reading: what has arrived while this process was stopped counts.
            if time.monotonic() >= self._next_beat_s:
                self._beat()

    def _wait_ms(self) -> float:
        """Until the next heartbeat."""
        return max(0.0, self._next_beat_s - time.monotonic()) * 1000

    def _beat(self) -> None:
        self._next_beat_s = time.monotonic() + BEAT_S
        self._send(messages.Beat())
        if self.silence.tick():
            self._waiting.append(messages.Ended(f"{COORDINATOR}, {silent(self.silence.timeout_s)}"))

    def _hand_on(self, deliver: Callable[[Notice], None]) -> bool:
        """Deliver the received messages. True after the last one."""
        while self._waiting:
            message = self._waiting.pop(0)
            if isinstance(message, messages.AllReady):
                self.silence.allow(self._silence_s)
            if isinstance(message, messages.AllLeft | messages.Ended) and self._shared is not None:
                self._shared.stop()
            if isinstance(message, Notice):
                deliver(message)
            if isinstance(message, messages.AllLeft | messages.Ended):
                return True
        return False
