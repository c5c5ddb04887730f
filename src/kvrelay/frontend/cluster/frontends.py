"""All frontends' figures in one place: a frontend answers for its own on the bus, and asks the others when someone
looks.

    GET /debug/cluster ──> this frontend ──request, "since second n"──> each frontend in discovery ──> its rows

Nothing is sent while no one looks. What was answered is kept, so each look asks for the new seconds only, and a
frontend that was just started has the others' five minutes at once. Any holder of the control plane's credentials could
answer for a frontend: the figures are shown, and a planner takes the demand from them; no request depends on them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Annotated

import msgspec

from kvrelay.control.base import ControlPlane, Keys
from kvrelay.core.control_codec import decode_caller
from kvrelay.core.decoding import UNREADABLE
from kvrelay.core.tasks import end_tasks
from kvrelay.core.workers import CallerInfo
from kvrelay.errors import ControlUnavailableError, ProtocolError, RetryElsewhereError
from kvrelay.frontend.cluster.figures import (
    COARSE_S,
    HISTORY_S,
    MAX_WORKERS,
    NUM_COARSE,
    Figures,
    HeardLoad,
    WorkerTimes,
)
from kvrelay.frontend.cluster.seconds import Count, Second
from kvrelay.planner import Traffic
from kvrelay.version import __version__

_log = logging.getLogger(__name__)

ASK_TIMEOUT_S = 0.7
MAX_ASKED = 256
FAR_FUTURE_S = 10**11
TICK_S = 1.01
"""A second is counted when it has surely ended: timers may be a millisecond early."""
GONE_AFTER_S = 30.0
"""A frontend that has left discovery keeps its part of the history, and is no longer shown after this."""
SAME_CLOCK_S = 2.0
"""A difference of two clocks up to here may be the time that an answer took."""


class FiguresRequest(msgspec.Struct, frozen=True):
    """Answer with the rows after second ``since`` and the coarse ones from second ``hour_from`` on; ``with_loads`` also
    with what each worker has told last. ``last_s``: also the rows of so many seconds, by the answering clock."""

    since: int
    hour_from: int = FAR_FUTURE_S
    with_loads: bool = False
    last_s: int = 0


class FiguresReply(msgspec.Struct, frozen=True):
    """``host``, ``pid``, ``release``: the process. ``num_in_flight``: sequences that are being generated. ``traffic``
    and ``num_unplaced`` (requests that wait for a first worker): for planners; None: the frontend is of an earlier
    release. ``times``: by worker, of the last minute. ``loads``: by worker, for planners. ``now_unix_s``: by the clock
    that numbers the rows; None: as ``traffic``."""

    frontend_id: str
    num_in_flight: Count
    rows: Annotated[tuple[Second, ...], msgspec.Meta(max_length=HISTORY_S)]
    host: Annotated[str, msgspec.Meta(max_length=1024)] = ""
    pid: Count = 0
    release: Annotated[str, msgspec.Meta(max_length=64)] = ""
    traffic: Traffic | None = None
    num_unplaced: Count = 0
    hour: Annotated[tuple[Second, ...], msgspec.Meta(max_length=NUM_COARSE)] = ()
    times: Annotated[tuple[WorkerTimes, ...], msgspec.Meta(max_length=MAX_WORKERS)] = ()
    loads: Annotated[tuple[HeardLoad, ...], msgspec.Meta(max_length=MAX_WORKERS)] = ()
    now_unix_s: float | None = None


_request_decoder = msgspec.msgpack.Decoder(FiguresRequest)
_reply_decoder = msgspec.msgpack.Decoder(FiguresReply)


def planners_question(last_s: int = 0) -> bytes:
    """What a planner asks a frontend: the counts, the rows of the last ``last_s`` seconds, and the workers' loads."""
    return msgspec.msgpack.encode(FiguresRequest(FAR_FUTURE_S, with_loads=True, last_s=last_s))


def figures_of(reply: bytes) -> FiguresReply | None:
    """A frontend's answer; None if it is not readable."""
    try:
        return _reply_decoder.decode(reply)
    except UNREADABLE as exc:
        _log.debug("an answer of a frontend is not readable: %s", exc)
        return None


async def other_frontends(
    control: ControlPlane, keys: Keys, own_id: str, within_s: float | None = None
) -> dict[str, CallerInfo]:
    """The frontends in discovery but this one, by id, at most ``MAX_ASKED``; without entries that cannot be a
    frontend's, since an id becomes part of a subject. Raises ControlUnavailableError, also if no
    answer comes ``within_s``."""
    try:
        async with asyncio.timeout(within_s):
            listed = await control.discovery.list(keys.frontends)
    except TimeoutError as exc:
        raise ControlUnavailableError(f"discovery did not answer within {within_s} s") from exc
    found: dict[str, CallerInfo] = {}
    for key, value in sorted(listed.items()):
        name = key.removeprefix(keys.frontends)
        if name == own_id or not (name.isascii() and name.isalnum()) or len(found) == MAX_ASKED:
            continue
        try:
            found[name] = decode_caller(name, value)
        except ProtocolError as exc:
            _log.debug("ignored the discovery entry %s: %s", key, exc)
    return found


class KnownFrontend(msgspec.Struct):
    """A frontend as it was heard last. ``heard_s``: monotonic; None: it has never answered. ``rows`` and ``hour`` are
    numbered by our clock; its own is ``ahead_s`` ahead."""

    frontend_id: str
    host: str = ""
    pid: int = 0
    release: str = ""
    num_in_flight: int = 0
    rows: deque[Second] = msgspec.field(default_factory=lambda: deque(maxlen=HISTORY_S))
    hour: deque[Second] = msgspec.field(default_factory=lambda: deque(maxlen=NUM_COARSE))
    times: tuple[WorkerTimes, ...] = ()
    heard_s: float | None = None
    is_silent: bool = False
    """It is in discovery, and did not answer the last question."""
    ahead_s: int = 0

    def heard(self, reply: FiguresReply, now_s: float, now_unix_s: float) -> None:
        """Take in an answer."""
        self.host, self.pid, self.release = reply.host, reply.pid, reply.release
        self.num_in_flight, self.heard_s, self.is_silent = reply.num_in_flight, now_s, False
        self.times = reply.times
        ahead_s = 0.0 if reply.now_unix_s is None else reply.now_unix_s - now_unix_s
        if abs(ahead_s - self.ahead_s) > SAME_CLOCK_S:
            self.ahead_s = round(ahead_s)
        _replace(self.rows, reply.rows, self.ahead_s)
        _replace(self.hour, reply.hour, self._hour_ahead_s)

    @property
    def _hour_ahead_s(self) -> int:
        """In whole rows, so that those of all frontends begin at the same seconds."""
        return round(self.ahead_s / COARSE_S) * COARSE_S

    def missing(self, now_unix_s: float) -> FiguresRequest:
        """The question for what is not known yet. Rows of the future are dropped: a clock went back."""
        for rows in (self.rows, self.hour):
            while rows and rows[-1].unix_s > now_unix_s:
                rows.pop()
        return FiguresRequest(
            self.rows[-1].unix_s + self.ahead_s if self.rows else 0,
            self.hour[-1].unix_s + self._hour_ahead_s if self.hour else 0,
        )


def _replace(rows: deque[Second], heard: Sequence[Second], ahead_s: int) -> None:
    """What was just heard replaces what is known of the same time and later."""
    first = min((row.unix_s for row in heard), default=0) - ahead_s
    while heard and rows and rows[-1].unix_s >= first:
        rows.pop()
    for row in sorted(heard, key=lambda row: row.unix_s):
        rows.append(msgspec.structs.replace(row, unix_s=row.unix_s - ahead_s) if ahead_s else row)


class Frontends(msgspec.Struct, eq=False):
    """``frontend_id``: ours, as in discovery."""

    _control: ControlPlane
    _keys: Keys
    frontend_id: str
    _figures: Figures
    _now_unix_s: Callable[[], float] = time.time
    _known: dict[str, KnownFrontend] = {}

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Seconds are counted and other frontends answered while this context is open. Raises
        ControlUnavailableError."""
        service = await self._control.events.serve(self._keys.frontend_figures(self.frontend_id), self._answer)
        counting = asyncio.create_task(self._count())
        try:
            yield
        finally:
            await end_tasks([counting])
            await service.unsubscribe()

    async def gather(self) -> Sequence[KnownFrontend]:
        """Every frontend, this one first. Others that do not answer in time are marked, with what they said last. One
        call at a time."""
        await asyncio.gather(*map(self._ask, await self._others()))
        own, now_unix_s = self._known.setdefault(self.frontend_id, KnownFrontend(self.frontend_id)), self._now_unix_s()
        own.heard(self._reply(own.missing(now_unix_s)), time.monotonic(), now_unix_s)
        others = sorted(set(self._known) - {self.frontend_id})
        return [self._known[name] for name in (self.frontend_id, *others)]

    async def _others(self) -> list[KnownFrontend]:
        """Those in discovery; without a control plane, or if it does not answer, those that were there before."""
        try:
            listed = await other_frontends(self._control, self._keys, self.frontend_id, ASK_TIMEOUT_S)
        except ControlUnavailableError as exc:
            _log.debug("cannot list the frontends: %s", exc)
            return [known for name, known in self._known.items() if name != self.frontend_id]
        limit_s = time.monotonic() - GONE_AFTER_S
        self._known = {
            name: known
            for name, known in self._known.items()
            if name in listed or name == self.frontend_id or (known.heard_s is not None and known.heard_s > limit_s)
        }
        for name, known in self._known.items():
            known.is_silent = known.is_silent and name in listed
        for name, info in listed.items():
            self._known.setdefault(name, KnownFrontend(name, info.host, info.pid))
        return [self._known[name] for name in listed]

    async def _ask(self, known: KnownFrontend) -> None:
        try:
            question = msgspec.msgpack.encode(known.missing(self._now_unix_s()))
            subject = self._keys.frontend_figures(known.frontend_id)
            data = await self._control.events.request(subject, question, ASK_TIMEOUT_S)
            reply = _reply_decoder.decode(data)
        except (RetryElsewhereError, *UNREADABLE) as exc:
            _log.debug("frontend %s tells no figures: %s", known.frontend_id, exc)
            known.is_silent = True
            return
        known.heard(reply, time.monotonic(), self._now_unix_s())

    async def _answer(self, data: bytes) -> bytes:
        try:
            request = _request_decoder.decode(data)
        except UNREADABLE as exc:
            raise ProtocolError(f"malformed question for figures: {exc}") from exc
        return msgspec.msgpack.encode(self._reply(request))

    def _reply(self, request: FiguresRequest) -> FiguresReply:
        figures = self._figures
        return FiguresReply(
            self.frontend_id,
            figures.metrics.num_in_flight_of(),
            figures.since(min(request.since, int(self._now_unix_s()) - request.last_s)),
            socket.gethostname(),
            os.getpid(),
            __version__,
            figures.metrics.traffic(),
            figures.cold_start.num_unplaced,
            figures.hour_since(request.hour_from),
            figures.last_minute.times() if request.hour_from < FAR_FUTURE_S else (),
            figures.loads(time.monotonic()) if request.with_loads else (),
            self._now_unix_s(),
        )

    async def _count(self) -> None:
        while True:
            now = self._now_unix_s()
            await asyncio.sleep(TICK_S - now % 1.0)
            self._figures.take(int(now))
