"""Requests that need compilation before they go to the engine: those with a grammar.

Compiling may take a second, and neither the event loop nor the engine's thread may wait for it. Each client (by
``tenant``) has one grammar compiled at a time, and clients take turns. So one client's slow grammars delay no other
client's. Grammars that were compiled before wait for no turn. Requests without a grammar skip this module.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable

import msgspec

from kvrelay.core.grammar import Grammar
from kvrelay.core.latest import Latest
from kvrelay.core.messages import GenerateRequest, RequestRefused
from kvrelay.core.sampling import SamplingParams
from kvrelay.core.tasks import TaskSet, failure_of
from kvrelay.rpc.base import Peer
from kvrelay.worker.decode.refusals import refusal_of

MAX_COMPILING = 2
"""Grammars that are compiled at the same time, of different clients."""
MAX_KNOWN = 256


class Preparation(msgspec.Struct, eq=False):
    """``prepare`` runs in a thread and raises a KvrelayError for a request that cannot be served. ``go_on`` gets the
    request after success, ``refuse`` the refusal after a failure. Neither is called for a dropped request."""

    _prepare: Callable[[SamplingParams], None]
    _go_on: Callable[[Peer, GenerateRequest], None]
    _refuse: Callable[[Peer, RequestRefused], object]
    _tasks: TaskSet
    _pending: set[tuple[Peer, str]] = set()
    _waiting: OrderedDict[str, deque[tuple[Peer, GenerateRequest]]] = msgspec.field(default_factory=OrderedDict)
    """By client; the client whose turn is next comes first."""
    _compiling: set[str] = set()
    """The clients that have a grammar compiled now."""
    _known: Latest[Grammar, None] = msgspec.field(default_factory=lambda: Latest(MAX_KNOWN))

    def begin(self, peer: Peer, message: GenerateRequest) -> None:
        """Prepare ``message``, then pass it on."""
        self._pending.add((peer, message.request_id))
        if message.sampling.grammar in self._known:
            self._tasks.spawn(self._run(peer, message))
        else:
            self._waiting.setdefault(message.tenant, deque()).append((peer, message))
            self._take_turns()

    def drop(self, peer: Peer, request_id: str) -> None:
        """The request was aborted."""
        self._pending.discard((peer, request_id))

    def drop_all(self, peer: Peer) -> None:
        """The connection ended."""
        self._pending = {entry for entry in self._pending if entry[0] != peer}

    def _take_turns(self) -> None:
        """Begin the next compilations."""
        for tenant in tuple(self._waiting):
            if len(self._compiling) < MAX_COMPILING and tenant not in self._compiling:
                queue = self._waiting.pop(tenant)
                while queue and (queue[0][0], queue[0][1].request_id) not in self._pending:
                    queue.popleft()  # dropped meanwhile
                if queue:
                    self._compiling.add(tenant)
                    self._tasks.spawn(self._run_turn(tenant, *queue.popleft()))
                if queue:
                    self._waiting[tenant] = queue

    async def _run_turn(self, tenant: str, peer: Peer, message: GenerateRequest) -> None:
        try:
            await self._run(peer, message)
        except asyncio.CancelledError:
            self._waiting.clear()  # the worker leaves
            raise
        finally:
            self._compiling.remove(tenant)
            if tenant in self._waiting:
                self._waiting.move_to_end(tenant)
            self._take_turns()

    async def _run(self, peer: Peer, message: GenerateRequest) -> None:
        grammar = message.sampling.grammar
        error = await failure_of(asyncio.to_thread(self._prepare, message.sampling), "preparing a request")
        if error is None and grammar is not None:
            self._known[grammar] = None
        if (peer, message.request_id) not in self._pending:
            return
        self._pending.discard((peer, message.request_id))
        if error is None:
            self._go_on(peer, message)
        else:
            self._refuse(peer, refusal_of(message.request_id, error))
