"""Which callers may send which messages to this worker: discovery's public keys, and the messages of each kind of
caller.

    discovery ──> frontends/ID, operators/ID (watched here), kv_metadata/ID/0 (told by ``PeerEvents``) ──> keys, holders
    handshake ──public key, proved──> admit() ──> identity of the connection, for its whole life
    message ──identity──> refusal(): frontends generate, a worker claims in its own name, operators send admin commands

A connection outlives its entry: a frontend that cannot reach the control plane continues with the workers that it has.
Messages that need a live lease (claims) are checked by the ledger each time. This module does not know sockets or
hand-offs.
"""

from __future__ import annotations

import asyncio
import enum
from collections import defaultdict
from functools import lru_cache, partial
from typing import get_args

import msgspec

from kvrelay.control.base import Discovery, Keys, WatchEvent, WatchKind
from kvrelay.control.following import follow
from kvrelay.core.control_codec import decode_caller
from kvrelay.core.messages import AbortRequest, AdminRequest, GenerateRequest, Ping, PrefillLost, SessionPaused
from kvrelay.core.tasks import TaskSet
from kvrelay.handoff.messages import HandoffClaim, HandoffReleased, ToDecode
from kvrelay.rpc.wire import Message

ADMISSION_WAIT_S = 1.0
"""How long a handshake waits for a key to appear in our watch: its holder may be ahead of it."""


class CallerKind(enum.StrEnum):
    FRONTEND = "frontend"
    OPERATOR = "operator"
    WORKER = "worker"


MAY_SAY: dict[CallerKind, tuple[type[Message], ...]] = {
    CallerKind.FRONTEND: (GenerateRequest, AbortRequest, PrefillLost, SessionPaused, Ping),
    CallerKind.OPERATOR: (AdminRequest, Ping),
    CallerKind.WORKER: (*get_args(ToDecode), Ping),
}


class Caller(msgspec.Struct, frozen=True):
    """The caller at the other end of a connection; as JSON it is the connection's identity."""

    kind: CallerKind
    caller_id: str


_caller_of = lru_cache(maxsize=1024)(msgspec.json.Decoder(Caller).decode)
"""Each message of a connection asks."""


class Callers:
    """From ``start`` to ``close``. ``is_open``: the request plane identifies no caller (``--insecure``)."""

    def __init__(self, discovery: Discovery, keys: Keys, *, is_open: bool) -> None:
        self._discovery = discovery
        self._keys = keys
        self._is_open = is_open
        self._key_of: dict[Caller, str] = {}
        self._callers_of: defaultdict[str, list[Caller]] = defaultdict(list)
        self._changed = asyncio.Event()
        self._tasks = TaskSet()

    def __repr__(self) -> str:
        return f"Callers({len(self._key_of)} known{', open' if self._is_open else ''})"

    def start(self) -> None:
        watched = ((self._keys.frontends, CallerKind.FRONTEND), (self._keys.operators, CallerKind.OPERATOR))
        for prefix, kind in watched:
            self._tasks.spawn(follow(self._discovery, prefix, partial(self._apply, kind, prefix)))

    async def close(self) -> None:
        await self._tasks.close()

    # -- what discovery says ------------------------------------------------------------------------------------------

    def learn(self, caller: Caller, public_key: str) -> None:
        """From now on this key, and no other, is the caller's. An empty key belongs to no caller."""
        if self._key_of.get(caller) == public_key:
            return
        self.forget(caller)
        if not public_key:
            return
        self._key_of[caller] = public_key
        # A key that another caller has registered before stays with that caller.
        self._callers_of[public_key].append(caller)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def forget(self, caller: Caller) -> None:
        """Its lease has ended. Connections that it has stay."""
        public_key = self._key_of.pop(caller, None)
        if public_key is not None:
            self._callers_of[public_key].remove(caller)
            if not self._callers_of[public_key]:
                del self._callers_of[public_key]

    def _apply(self, kind: CallerKind, prefix: str, event: WatchEvent) -> None:
        caller = Caller(kind, event.key.removeprefix(prefix))
        if event.kind is WatchKind.DELETE:
            self.forget(caller)
        else:
            self.learn(caller, decode_caller(caller.caller_id, event.value).public_key)

    # -- what callers do ----------------------------------------------------------------------------------------------

    async def admit(self, public_key: str) -> str | None:
        """The identity of a connection whose client holds this key; None if no caller in discovery has it."""
        try:
            async with asyncio.timeout(ADMISSION_WAIT_S):
                while public_key not in self._callers_of:
                    await self._changed.wait()
        except TimeoutError:
            return None
        return msgspec.json.encode(self._callers_of[public_key][0]).decode()

    @staticmethod
    def is_frontend(identity: str) -> bool:
        return bool(identity) and _caller_of(identity).kind is CallerKind.FRONTEND

    def refusal(self, identity: str, message: Message) -> str | None:
        """Why a message over a connection of that identity must be dropped; None: it may be handled."""
        if self._is_open:
            return None
        if not identity:
            return "its sender is not known"
        caller = _caller_of(identity)
        if not isinstance(message, MAY_SAY[caller.kind]):
            return f"{caller.kind} {caller.caller_id} has no business with it"
        if isinstance(message, HandoffClaim | HandoffReleased) and message.prefill_worker_id != caller.caller_id:
            return f"{caller.caller_id} speaks in the name of {message.prefill_worker_id:.64}"
        return None
