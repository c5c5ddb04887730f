"""A plugin of pytest (``make test-late``): what a thread is told by another, or by a server, arrives late.

A test that reads a count before it can have been told passes nearly always, and fails once on a busy machine. With
this it fails in every run. So does a worker that acts before it has heard what it should wait for, and whatever relies
on nothing that comes between a question to a server and the next.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import threading
import time
from collections.abc import AsyncIterator
from weakref import WeakKeyDictionary

import pytest

from kvrelay.control.etcd import EtcdDiscovery
from kvrelay.control.etcd_channel import EtcdChannel
from kvrelay.control.memory import MemoryDiscovery
from kvrelay.control.nats.connection import NatsConnection
from kvrelay.control.nats.discovery import NatsDiscovery
from kvrelay.control.nats.lease import NatsLease
from kvrelay.rpc.zmq_client import ZmqRpcClient
from kvrelay.transfer.thread import TransferThread
from kvrelay.worker.sides.side import Side

LATE_S = 0.1
"""Far longer than anything between two threads takes, far shorter than the time limits of the tests' clusters."""


BEATS, CALMS = 30, 5
"""Something comes between so many questions in a row, then not: whoever tries until nothing does comes to an end."""


class Beating:
    """The leases that are kept alive, which send a keepalive while somebody else waits for an answer."""

    def __init__(self) -> None:
        self._loops: WeakKeyDictionary[NatsLease, asyncio.AbstractEventLoop] = WeakKeyDictionary()
        self._questions = itertools.count()

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        """Of NATS: etcd's learn of a revocation by their keepalives."""
        original = NatsLease.start

        async def start(lease: NatsLease) -> None:
            await original(lease)
            self._loops[lease] = asyncio.get_running_loop()

        patch.setattr(NatsLease, "start", start)

    async def come_between(self) -> None:
        task, here = asyncio.current_task(), asyncio.get_running_loop()
        if task is not None and task.get_name().startswith("lease "):
            return await asyncio.sleep(LATE_S / 10)
        is_calm = next(self._questions) % (BEATS + CALMS) >= BEATS
        for lease, loop in list(self._loops.items()):
            if loop is here and not is_calm:
                lease.wake()
        await asyncio.sleep(LATE_S)


BEATING = Beating()
KINDS: dict[str, list[tuple[type, str, str]]] = {
    # The end of a transfer, to who has submitted it.
    "ends": [(TransferThread, "_finish", "")],
    # What a peer says with its last write, to us.
    "notifications": [(TransferThread, "_notify", "")],
    # What a step has computed, to the hand-offs.
    "steps": [(Side, "handle", "engine")],
    # What NATS, etcd and a worker answer, to who has asked.
    "answers": [
        (NatsConnection, "request", ""),
        (NatsConnection, "flush", ""),
        (NatsConnection, "drain", ""),
        (EtcdChannel, "call", ""),
        (ZmqRpcClient, "start", ""),
    ],
    # Who has come and gone, to who watches discovery.
    "watches": [(NatsDiscovery, "watch", ""), (EtcdDiscovery, "watch", ""), (MemoryDiscovery, "watch", "")],
}
"""Methods that are late, and on threads with which beginning of a name. A coroutine is late with its result, and an
iterator with each item; other methods begin late."""


def _delay(patch: pytest.MonkeyPatch, owner: type, name: str, of_thread: str) -> None:
    original = getattr(owner, name)

    def begin_late(*arguments: object) -> object:
        if threading.current_thread().name.startswith(of_thread):
            time.sleep(LATE_S)
        return original(*arguments)

    async def end_late(*arguments: object, **options: object) -> object:
        result = await original(*arguments, **options)
        await BEATING.come_between()
        return result

    async def each_late(*arguments: object) -> AsyncIterator[object]:
        async with contextlib.aclosing(original(*arguments)) as items:
            async for item in items:
                await asyncio.sleep(LATE_S)
                yield item

    if inspect.isasyncgenfunction(original):
        patch.setattr(owner, name, each_late)
    else:
        patch.setattr(owner, name, end_late if inspect.iscoroutinefunction(original) else begin_late)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--late", choices=sorted(KINDS), help="what arrives late")


def pytest_configure(config: pytest.Config) -> None:
    if kind := config.getoption("--late"):
        patch = pytest.MonkeyPatch()
        for method in KINDS[kind]:
            _delay(patch, *method)
        if kind == "answers":
            BEATING.watch(patch)
        config.add_cleanup(patch.undo)
