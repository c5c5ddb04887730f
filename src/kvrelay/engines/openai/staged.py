"""A plain ``vllm serve`` with kvrelay's connector as a backend: its KV goes through this worker's staging pool.

    worker                                                     vllm serve, on the same host, of the same user
    takes staging blocks, grants a ticket ── HTTP: the request, which names pool, blocks and ticket ──> connector copies
    revokes the ticket, waits until no copy is under way, frees the blocks

``connectors/directory`` has how the two find each other, ``connectors/tickets`` why a late copy harms no other request.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Any

import msgspec

from kvrelay.config import UpstreamConfig
from kvrelay.engine.request import Request
from kvrelay.engines.connector.directory import (
    ENGINE,
    ENGINE_LOCK,
    POOL,
    TICKETS,
    WORKER_LOCK,
    EngineEntry,
    StagingDirectory,
)
from kvrelay.engines.connector.terms import PARAMS_KEY, StagedKv, StagingPlace
from kvrelay.engines.connector.tickets import TicketTable
from kvrelay.engines.hosted.backend import AnswerError, Piece, Prefilled, UnconfirmedError
from kvrelay.engines.hosted.vllm_transfer import VllmTransfer
from kvrelay.engines.openai.backend import ServerBackend
from kvrelay.engines.openai.server import Description
from kvrelay.engines.openai.wire import parse_event
from kvrelay.errors import ConfigError, InvalidInputError

QUIET_TIMEOUT_S = 60.0
QUIET_INTERVAL_S = 0.002


class ServerStaging:
    """The worker's end of a staging directory. ``engine`` is the vLLM in it; ``publish`` comes before any ``lend``."""

    def __init__(self, path: str, server: str) -> None:
        """Raises ConfigError unless a vLLM is there whose connector is of this version, and no other worker."""
        if not path:
            raise ConfigError(
                "--upstream-kv-transfer kvrelay needs --upstream-staging DIR, the kvrelay_staging_dir of the server",
                param="upstream_staging",
            )
        self._directory = StagingDirectory(path)
        self._server = server
        self._lock = self._directory.hold(WORKER_LOCK, "worker")
        self._table: TicketTable | None = None
        self._place: StagingPlace | None = None
        try:
            self.engine = self._read_engine()
        except InvalidInputError:
            os.close(self._lock)
            raise

    def _read_engine(self) -> EngineEntry:
        entry = self._directory.read(ENGINE, EngineEntry)
        if entry is None or not self._directory.is_held(ENGINE_LOCK):
            raise ConfigError(
                f"no vLLM with kvrelay's connector uses the staging directory {self._directory.path}: start "
                f"{self._server} with --kv-transfer-config, KvrelayConnector and this kvrelay_staging_dir",
                param="upstream_staging",
            )
        return entry

    def publish(self, place: StagingPlace) -> None:
        """Tell the connector of this pool. Raises ConfigError."""
        pool = os.urandom(16).hex()
        directory = self._directory.path
        for left in directory.glob(f"{TICKETS}*"):
            # Of an earlier worker: this one has the lock.
            left.unlink(missing_ok=True)
        tickets = directory / f"{TICKETS}{pool}"
        self._table = TicketTable(tickets, place.num_blocks, create=True)
        self._place = msgspec.structs.replace(
            place, pool=pool, tickets=str(tickets), fingerprint=self.engine.fingerprint
        )
        self._directory.write(POOL, self._place)

    def lend(self, kv_transfer_params: bytes) -> StagingUse:
        """``kv_transfer_params``: a StagedKv of this worker, by ``terms.encode_request``."""
        assert self._table is not None
        assert self._place is not None
        staged = msgspec.convert(msgspec.json.decode(kv_transfer_params)[PARAMS_KEY], StagedKv)
        ticket = self._table.grant(staged.block_ids)
        named = msgspec.structs.replace(staged, pool=self._place.pool, ticket=ticket)
        return StagingUse(self._table, named)

    def changed(self) -> str | None:
        """Why this pool does not fit the vLLM that is there now; None if it does, or if none is there at the moment."""
        try:
            entry = self._directory.read(ENGINE, EngineEntry)
        except InvalidInputError as exc:
            return exc.message
        if entry is None or (entry.fingerprint, entry.layout) == (self.engine.fingerprint, self.engine.layout):
            return None
        return f"{self._server} was {self.engine.fingerprint} and is {entry.fingerprint} now"

    def close(self) -> None:
        """Idempotent. What is mapped stays mapped."""
        if self._lock < 0:
            return
        if self._place is not None:
            for name in (POOL, f"{TICKETS}{self._place.pool}"):
                with suppress(OSError):
                    (self._directory.path / name).unlink(missing_ok=True)
        os.close(self._lock)
        self._lock = -1


class StagingUse:
    """Staging blocks while the server may copy them. ``end`` it."""

    def __init__(self, table: TicketTable, staged: StagedKv) -> None:
        self._table = table
        self._staged = staged
        self._has_ended = False

    @property
    def params(self) -> dict[str, Any]:
        """For the body of the request."""
        return {PARAMS_KEY: msgspec.to_builtins(self._staged)}

    @property
    def is_copied(self) -> bool:
        """Whether the connector has copied every block."""
        return self._table.is_confirmed(self._staged.block_ids, self._staged.ticket)

    async def end(self) -> None:
        """The connector copies none of the blocks any more. Idempotent.

        Raises UnconfirmedError if it was stopped in the middle of a copy and does not go on.
        """
        if self._has_ended:
            return
        self._has_ended = True
        self._table.revoke(self._staged.block_ids)
        deadline_s = time.monotonic() + QUIET_TIMEOUT_S
        while not self._table.is_quiet():
            if time.monotonic() > deadline_s:
                raise UnconfirmedError(f"vLLM has been in the middle of a copy for {QUIET_TIMEOUT_S:.0f} s")
            await asyncio.sleep(QUIET_INTERVAL_S)


class StagedServerBackend(ServerBackend):
    """``staging`` is published, and closed with the backend."""

    def __init__(self, upstream: UpstreamConfig, server: Description, staging: ServerStaging) -> None:
        super().__init__(upstream, server, tokenizer=None)
        self._staging = staging

    async def stream(
        self, request: Request, num_tokens: int, kv_transfer_params: bytes | None = None
    ) -> AsyncGenerator[Piece, None]:
        body = self._body(request, num_tokens)
        use = None if kv_transfer_params is None else self._staging.lend(kv_transfer_params)
        if use is not None:
            body["kv_transfer_params"] = use.params
        try:
            async with aclosing(self._pieces(request, body)) as pieces:
                async for piece in pieces:
                    if use is not None:
                        # Tokens come when the KV is loaded, or was computed.
                        await use.end()
                    yield piece
        finally:
            if use is not None:
                await use.end()

    async def prefill(
        self, request: Request, kv_transfer_params: bytes | None = None
    ) -> AsyncGenerator[Prefilled, None]:
        assert kv_transfer_params is not None, "a staged engine names the blocks"
        body, _ = VllmTransfer().prefill_body(self._body(request, 1))
        use = self._staging.lend(kv_transfer_params)
        body["kv_transfer_params"] = use.params
        try:
            piece = parse_event(await self._server.complete(body))
            if not piece.token_ids or not use.is_copied:
                raise AnswerError(f"{self.name} has computed a prompt and not saved its KV")
            await use.end()
            yield Prefilled(None, Piece(piece.token_ids, piece.logprobs, num_cached_tokens=piece.num_cached_tokens))
        finally:
            await use.end()

    async def failure(self) -> str | None:
        return self._staging.changed() or await super().failure()

    async def close(self) -> None:
        await super().close()
        self._staging.close()
