"""A server as a backend: requests become bodies, events become tokens."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable

from kvrelay.config import UpstreamConfig
from kvrelay.core.sampling import SamplingParams
from kvrelay.engine.request import Request
from kvrelay.engines.hosted.backend import AnswerChunk, AnswerError, Prefilled, ignore
from kvrelay.engines.hosted.vllm_transfer import Body, stops_short
from kvrelay.engines.openai.kv_transfer import KvTransfer
from kvrelay.engines.openai.server import Description, UpstreamServer
from kvrelay.engines.openai.text_tokens import TextTokenizer, TextTokens
from kvrelay.engines.openai.wire import completion_body, parse_event, require_possible
from kvrelay.errors import InvalidInputError

MAX_HEALTH_FAILURES = 3


class ServerBackend:
    """``tokenizer`` turns text into ids, if the server returns no ids. ``kv_transfer``: how it exchanges KV."""

    tells_moments = scores_prompts = False

    def __init__(
        self,
        upstream: UpstreamConfig,
        server: Description,
        tokenizer: TextTokenizer | None,
        kv_transfer: KvTransfer | None = None,
    ) -> None:
        self.name = "the server"
        self._upstream = upstream
        self._description = server
        self._tokenizer = tokenizer
        self._kv_transfer = kv_transfer
        self._num_health_failures = 0

    @property
    def samples_ids(self) -> bool:
        return self._tokenizer is None

    def check(self, sampling: SamplingParams) -> None:
        require_possible(sampling)
        if sampling.logprobs is not None and not self.samples_ids:
            raise InvalidInputError("the server tells no token ids, so there are no logprobs", param="logprobs")

    async def open(self) -> None:
        self._server = UpstreamServer(self._upstream)

    async def stream(
        self, request: Request, num_tokens: int, kv_transfer_params: bytes | None = None
    ) -> AsyncGenerator[AnswerChunk, None]:
        body = self._body(request, num_tokens)
        if kv_transfer_params is not None and self._kv_transfer is not None:
            body = self._kv_transfer.decode_body(body, kv_transfer_params)
        texts = None if self._tokenizer is None else TextTokens(self._tokenizer, request.token_ids)
        answer = self._server.stream(body, request.traceparent)
        try:
            async for piece in answer:
                if texts is not None:
                    token_ids = texts.add(piece.text, is_last=piece.finish is not None)
                elif piece.token_ids is None:
                    raise AnswerError("the server has stopped to tell token ids")
                else:
                    token_ids = piece.token_ids
                logprobs = None if texts is not None else piece.logprobs
                yield AnswerChunk(token_ids, logprobs, piece.finish, piece.num_prompt_tokens, piece.num_cached_tokens)
        finally:
            await answer.aclose()

    def _body(self, request: Request, num_tokens: int) -> Body:
        return completion_body(request, self._description.model, num_tokens, with_token_ids=self.samples_ids)

    async def prefill(
        self, request: Request, kv_transfer_params: bytes | None = None, saved: Callable[[int], None] = ignore
    ) -> AsyncGenerator[Prefilled, None]:
        assert self._kv_transfer is not None, "only asked of a server that exchanges KV"
        body = self._body(request, max(request.length_limit - len(request.token_ids), 1))
        body, params = self._kv_transfer.prefill_body(body)
        if params is not None:
            yield Prefilled(params)
        answer = await self._server.complete(body, request.traceparent)
        piece = parse_event(answer)  # it may be an error
        if params is None:
            params = self._kv_transfer.params_of(answer)
            has_first = piece.token_ids is not None and not stops_short(params, len(request.token_ids))
            first = AnswerChunk(piece.token_ids or (), piece.logprobs) if has_first else None
            yield Prefilled(params, first)

    async def discard(self, kv_transfer_params: bytes) -> None:
        assert self._kv_transfer is not None, "only asked of a server that exchanges KV"
        body = self._kv_transfer.discard_body(self._description.model, kv_transfer_params)
        if body is not None:
            await self._server.complete(body)

    async def failure(self) -> str | None:
        if await self._server.is_healthy():
            self._num_health_failures = 0
            return None
        self._num_health_failures += 1
        if self._num_health_failures < MAX_HEALTH_FAILURES:
            return None
        return f"the server {self._server.url} has failed {self._num_health_failures} health checks"

    async def clear_cache(self) -> None:
        """The server's cache serves others, too: it stays."""

    async def close(self) -> None:
        await self._server.close()
