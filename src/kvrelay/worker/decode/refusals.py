"""Refusals of frontends' requests: from an error to the message, and counted by reason for the whole worker."""

from __future__ import annotations

from kvrelay.core.messages import RequestRefused
from kvrelay.core.status import RefusalKind
from kvrelay.errors import (
    EngineDeadError,
    InvalidInputError,
    KvDemandError,
    KvrelayError,
    ObjectiveMissedError,
    OverloadedError,
    RetryElsewhereError,
)
from kvrelay.rpc.base import Peer, RpcServer

KINDS: tuple[tuple[type[KvrelayError], RefusalKind], ...] = (
    (InvalidInputError, RefusalKind.INVALID),
    (ObjectiveMissedError, RefusalKind.OBJECTIVE),
    (KvDemandError, RefusalKind.KV_FULL),
    (OverloadedError, RefusalKind.QUEUE_FULL),
    (RetryElsewhereError, RefusalKind.UNAVAILABLE),
    (EngineDeadError, RefusalKind.UNAVAILABLE),
    (KvrelayError, RefusalKind.FAILED),
)
"""By the first type that fits."""


class Refusals:
    """Sends refusals over ``server``. ``counts`` has every reason."""

    def __init__(self, server: RpcServer) -> None:
        self._server = server
        self.counts: dict[RefusalKind, int] = dict.fromkeys(RefusalKind, 0)

    def send(self, peer: Peer, refusal: RequestRefused) -> None:
        """Refuse a request."""
        self.counts[refusal.kind or RefusalKind.FAILED] += 1
        self._server.send(peer, refusal)


def refusal_of(
    request_id: str, error: KvrelayError, *, kind: RefusalKind | None = None, retry_after_s: float | None = None
) -> RequestRefused:
    """The message for ``error``. ``kind`` and ``retry_after_s`` are the error's own if None."""
    if kind is None:
        kind = next(kind for error_type, kind in KINDS if isinstance(error, error_type))
    status = error.status if isinstance(error, InvalidInputError | RetryElsewhereError) else 500
    if retry_after_s is None:
        retry_after_s = error.retry_after_s if isinstance(error, RetryElsewhereError) else 1.0
    retryable = isinstance(error, RetryElsewhereError | EngineDeadError)
    return RequestRefused(request_id, error.message, status, retryable, retry_after_s, kind)
