"""Requests that need compilation before they go to the engine: those with a grammar.

Compiling may take long, and neither the event loop nor the engine's thread may wait for it. Requests without a grammar
skip this module.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvrelay.core.messages import GenerateRequest, RequestRefused
from kvrelay.core.sampling import SamplingParams
from kvrelay.core.tasks import TaskSet
from kvrelay.errors import InvalidInputError
from kvrelay.rpc.base import Peer
from kvrelay.worker.decode.refusals import refusal_of


class Preparation:
    """``prepare`` runs in a thread and raises InvalidInputError for a request that cannot be served. ``go_on`` gets the
    request after success, ``refuse`` the refusal after a failure. Neither is called for a dropped request."""

    def __init__(
        self,
        prepare: Callable[[SamplingParams], None],
        go_on: Callable[[Peer, GenerateRequest], None],
        refuse: Callable[[Peer, RequestRefused], object],
        tasks: TaskSet,
    ) -> None:
        self._prepare = prepare
        self._go_on = go_on
        self._refuse = refuse
        self._tasks = tasks
        self._pending: set[tuple[Peer, str]] = set()

    def begin(self, peer: Peer, message: GenerateRequest) -> None:
        """Prepare ``message``, then pass it on."""
        self._pending.add((peer, message.request_id))
        self._tasks.spawn(self._run(peer, message))

    def drop(self, peer: Peer, request_id: str) -> None:
        """The request was aborted."""
        self._pending.discard((peer, request_id))

    def drop_all(self, peer: Peer) -> None:
        """The connection ended."""
        self._pending = {entry for entry in self._pending if entry[0] != peer}

    async def _run(self, peer: Peer, message: GenerateRequest) -> None:
        refusal = None
        try:
            await asyncio.to_thread(self._prepare, message.sampling)
        except InvalidInputError as exc:
            refusal = refusal_of(message.request_id, exc)
        if (peer, message.request_id) not in self._pending:
            return
        self._pending.discard((peer, message.request_id))
        if refusal is None:
            self._go_on(peer, message)
        else:
            self._refuse(peer, refusal)
