"""A server as a backend: requests become bodies, events become tokens."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from kvrelay.config import UpstreamConfig
from kvrelay.core.sampling import SamplingParams
from kvrelay.engine.request import Request
from kvrelay.errors import InvalidInputError
from kvrelay.executors.openai.server import Description, UpstreamServer
from kvrelay.executors.openai.text_tokens import TextTokenizer, TextTokens
from kvrelay.executors.openai.wire import completion_body, require_possible
from kvrelay.executors.streamed.backend import AnswerError, Piece

MAX_HEALTH_FAILURES = 3


class ServerBackend:
    """``tokenizer`` turns text into ids, if the server returns no ids."""

    def __init__(self, upstream: UpstreamConfig, server: Description, tokenizer: TextTokenizer | None) -> None:
        self._upstream = upstream
        self._description = server
        self._tokenizer = tokenizer
        self._num_health_failures = 0

    @property
    def name(self) -> str:
        return f"the server {self._upstream.upstream}"

    @property
    def samples_ids(self) -> bool:
        return self._tokenizer is None

    def check(self, sampling: SamplingParams) -> None:
        require_possible(sampling)
        if sampling.logprobs is not None and not self.samples_ids:
            raise InvalidInputError("the server tells no token ids, so there are no logprobs", param="logprobs")

    async def open(self) -> None:
        self._server = UpstreamServer(self._upstream)

    async def stream(self, request: Request, num_tokens: int) -> AsyncGenerator[Piece, None]:
        body = completion_body(request, self._description.model, num_tokens, with_token_ids=self.samples_ids)
        texts = None if self._tokenizer is None else TextTokens(self._tokenizer, request.token_ids)
        answer = self._server.stream(body)
        try:
            async for piece in answer:
                if texts is not None:
                    token_ids = texts.add(piece.text, is_last=piece.finish is not None)
                elif piece.token_ids is None:
                    raise AnswerError("the server has stopped to tell token ids")
                else:
                    token_ids = piece.token_ids
                logprobs = None if texts is not None else piece.logprobs
                yield Piece(token_ids, logprobs, piece.finish, piece.num_prompt_tokens, piece.num_cached_tokens)
        finally:
            await answer.aclose()

    async def failure(self) -> str | None:
        if await self._server.is_healthy():
            self._num_health_failures = 0
            return None
        self._num_health_failures += 1
        if self._num_health_failures < MAX_HEALTH_FAILURES:
            return None
        return f"the server {self._server.url} has failed {self._num_health_failures} health checks"

    async def close(self) -> None:
        await self._server.close()
