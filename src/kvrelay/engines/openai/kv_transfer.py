"""How a pair of servers exchanges KV: what each is asked, and what the prefill server's worker tells the other's.

    vllm     P: kv_transfer_params {do_remote_decode}, one token  ──answer──> its kv_transfer_params ──> D: the same
    sglang   P and D: bootstrap_host, bootstrap_port, bootstrap_room; both are asked at once and find each other

A dialect is pure: bodies in, bodies out. The fields are those of vLLM's ``NixlConnector`` and of SGLang's
``--disaggregation-mode``. What comes from a peer is checked, since a server may not survive nonsense.
"""

from __future__ import annotations

import secrets
from typing import Protocol
from urllib.parse import urlsplit

import msgspec

from kvrelay.config import UpstreamConfig
from kvrelay.core.decoding import UNREADABLE
from kvrelay.engines.hosted.backend import AnswerError
from kvrelay.engines.hosted.vllm_transfer import Body, VllmTransfer, one_answer
from kvrelay.errors import ConfigError

SGLANG_BOOTSTRAP_PORT = 8998
SGLANG_NO_PEER = {"bootstrap_host": "2.2.2.2", "bootstrap_room": 0}
"""SGLang's own warm-up sends this: a request that exchanges no KV."""


class KvTransfer(Protocol):
    """One kind of server. ``prefills_here``: a decode server can also compute prompts."""

    prefills_here: bool

    def probe_fields(self) -> Body:
        """What a request needs that only shows the form of an answer."""

    def prefill_body(self, body: Body) -> tuple[Body, bytes | None]:
        """The body for the prefill server, and the ``kv_transfer_params`` if they are known before its answer."""

    def params_of(self, answer: bytes) -> bytes:
        """The ``kv_transfer_params`` in a prefill server's answer. Raises AnswerError."""

    def decode_body(self, body: Body, kv_transfer_params: bytes) -> Body:
        """The body for the decode server. Raises AnswerError for parameters that it could not use."""

    def discard_body(self, model: str, kv_transfer_params: bytes) -> Body | None:
        """A body for the decode server that makes the prefill server free the KV; None: that one frees it by itself.

        Raises AnswerError."""


class SglangTransfer:
    """Servers with ``--disaggregation-mode prefill`` and ``decode``. The first token comes with the KV, so both get the
    same settings. A decode server computes no prompts."""

    prefills_here = False

    def __init__(self, host: str, port: int) -> None:
        """``host`` and ``port``: where decode servers reach the bootstrap server of this prefill server."""
        self._host, self._port = host, port

    def probe_fields(self) -> Body:
        return dict(SGLANG_NO_PEER)

    def prefill_body(self, body: Body) -> tuple[Body, bytes | None]:
        # A room names one request at the bootstrap server.
        fields = _Bootstrap(self._host, self._port, secrets.randbits(63))
        return {**one_answer(body), **msgspec.to_builtins(fields)}, msgspec.json.encode(fields)

    def params_of(self, answer: bytes) -> bytes:
        raise AnswerError("a bootstrap room is chosen before the prefill server is asked")

    def decode_body(self, body: Body, kv_transfer_params: bytes) -> Body:
        try:
            fields = msgspec.json.decode(kv_transfer_params, type=_Bootstrap)
        except UNREADABLE as exc:
            raise AnswerError(f"the kv_transfer_params are no bootstrap fields: {exc}") from exc
        return {**body, **msgspec.to_builtins(fields)}

    def discard_body(self, model: str, kv_transfer_params: bytes) -> Body | None:
        return None


def kv_transfer_for(config: UpstreamConfig) -> KvTransfer | None:
    """The dialect that ``upstream_kv_transfer`` names; None: the server keeps its KV. Raises ConfigError."""
    if config.upstream_kv_transfer == "none":
        if config.upstream_bootstrap:
            raise ConfigError("--upstream-bootstrap is for --upstream-kv-transfer sglang", param="upstream_bootstrap")
        return None
    if config.upstream_kv_transfer == "vllm":
        return VllmTransfer()
    try:
        given = urlsplit(f"//{config.upstream_bootstrap}")
        host = given.hostname or urlsplit(config.upstream).hostname or "127.0.0.1"
        return SglangTransfer(host, given.port or SGLANG_BOOTSTRAP_PORT)
    except ValueError as exc:
        raise ConfigError(
            f"--upstream-bootstrap must be HOST:PORT, got {config.upstream_bootstrap!r}", param="upstream_bootstrap"
        ) from exc


class _Bootstrap(msgspec.Struct, forbid_unknown_fields=True):
    bootstrap_host: str
    bootstrap_port: int
    bootstrap_room: int
