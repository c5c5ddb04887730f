"""vLLM's AsyncLLM as a backend: requests in, pieces out, and whether its engine process still answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import ExitStack, aclosing
from typing import Any, Protocol

import msgspec

from kvrelay.core.sampling import SamplingParams
from kvrelay.engine.request import Request
from kvrelay.engines.hosted.backend import (
    AnswerChunk,
    AnswerError,
    BackendRefusedError,
    Prefilled,
    UnconfirmedError,
    ignore,
    one_line,
    structured_values,
)
from kvrelay.engines.hosted.staging import KvReports, Progress
from kvrelay.engines.hosted.vllm_transfer import VllmTransfer, stops_short
from kvrelay.engines.vllm.adapters import AdapterEngine, LoadedAdapters
from kvrelay.engines.vllm.translation import (
    RequestOutput,
    is_answered,
    num_staged_blocks,
    piece_of,
    prefill_values,
    prompt_logprobs_of,
    sampling_values,
    staged_values,
)

NAME = "vLLM"
ENDED = "vLLM's engine process has ended"
_kv_transfer = VllmTransfer()
SHUTDOWN_TIMEOUT_S = 5.0
START_TIMEOUT_S = 60.0
CONFIRM_TIMEOUT_S = 60.0


class AsyncEngine(AdapterEngine, Protocol):
    """The part of vLLM's AsyncLLM that is used."""

    def generate(
        self, prompt: object, sampling_params: object, request_id: str, *, lora_request: object | None, priority: int
    ) -> AsyncGenerator[RequestOutput, None]:
        """Closing it aborts the request."""

    async def check_health(self) -> None:
        """Raise if the engine process has ended."""

    async def is_paused(self) -> bool:
        """A question to the engine process, answered between two steps."""

    async def reset_prefix_cache(self) -> bool:
        """False if requests use it."""

    async def notify_kv_transfer_request_rejected(self, request_id: str, kv_transfer_params: dict[str, Any]) -> None:
        """Let vLLM's connector tell the other vLLM that the KV of ``kv_transfer_params`` is not needed."""

    async def abort(self, request_id: str) -> None:
        """Unknown ids are ignored."""

    async def collective_rpc(self, method: str, timeout: float | None = None, args: tuple[Any, ...] = ()) -> object:
        """Call ``method`` of every worker of vLLM."""

    def shutdown(self, timeout: float | None = None) -> None: ...


class Terms(msgspec.Struct, frozen=True):
    """vLLM's types, so that this module needs no vLLM."""

    prompt: Callable[[Mapping[str, Any]], object]
    """From ``prompt_token_ids`` and ``cache_salt``."""
    sampling: Callable[[Mapping[str, Any], Mapping[str, Any] | None], object]
    """From ``sampling_values`` and ``structured_values``."""
    adapter: Callable[[str, int, str], object]
    """From its name, number and path."""
    refusals: tuple[type[Exception], ...] = (ValueError,)
    """What ``generate`` raises for a request that is at fault."""
    overload: tuple[type[Exception], ...] = ()
    """What ``generate`` raises for a request above vLLM's own limits."""
    dead: tuple[type[Exception], ...] = ()
    """What it raises when the engine process has ended."""


class VllmBackend:
    """``hang_timeout_s``: an engine process that does not answer for so long counts as hung; 0: never.
    ``on_close`` runs when no one reads the engine's events any more. With ``reports`` KV goes through the worker's
    staging pool, by kvrelay's connector, or else to other vLLMs by vLLM's own. ``adapters``: those that requests may
    ask for."""

    name = NAME
    samples_ids = True
    tells_moments = scores_prompts = True

    def __init__(
        self,
        engine: AsyncEngine,
        terms: Terms,
        hang_timeout_s: float,
        on_close: Callable[[], None] = lambda: None,
        *,
        reports: KvReports | None = None,
        adapters: LoadedAdapters | None = None,
    ) -> None:
        self._engine = engine
        self._terms = terms
        self._hang_timeout_s = hang_timeout_s
        self._on_close = on_close
        self._reports = reports
        self._adapters = adapters or LoadedAdapters(engine, terms.adapter)
        self._num_begun = 0
        self._is_gone = False
        """It will answer nothing any more."""
        self._question: asyncio.Task[bool] | None = None
        self._asked_s = 0.0

    def check(self, sampling: SamplingParams) -> None:
        """vLLM takes everything else that a request may ask for."""
        self._adapters.request(sampling.adapter)

    async def open(self) -> None:
        """The engine runs already; its processes hear that their start is over."""
        if self._reports is not None:
            self._reports.open(asyncio.get_running_loop())
        await self._adapters.open()
        await self._engine.collective_rpc("kvrelay_started", START_TIMEOUT_S)

    async def stream(
        self, request: Request, num_tokens: int, kv_transfer_params: bytes | None = None
    ) -> AsyncGenerator[AnswerChunk, None]:
        values = sampling_values(request, num_tokens)
        with ExitStack() as stack:
            loading = None
            if self._reports is not None and kv_transfer_params is not None:
                loading = stack.enter_context(self._reports.expect(num_staged_blocks(kv_transfer_params), ignore))
                values["extra_args"] = staged_values(kv_transfer_params, loading.ticket)
            elif kv_transfer_params is not None:
                values["extra_args"] = _kv_transfer.decode_body({}, kv_transfer_params)
            async with aclosing(self._outputs(request, values, is_staged=loading is not None)) as outputs:
                async for output in outputs:
                    piece = piece_of(output, num_logprobs=request.sampling.logprobs)
                    if request.wants_prompt_logprobs and output.prompt_logprobs:
                        piece = msgspec.structs.replace(piece, prompt_logprobs=prompt_logprobs_of(request, output))
                    yield piece if loading is None else self._with_load(piece, loading)

    async def prefill(
        self, request: Request, kv_transfer_params: bytes | None = None, saved: Callable[[int], None] = ignore
    ) -> AsyncGenerator[Prefilled, None]:
        with ExitStack() as stack:
            saving = None
            if self._reports is not None and kv_transfer_params is not None:
                saving = stack.enter_context(self._reports.expect(num_staged_blocks(kv_transfer_params), saved))
            values = prefill_values(request, kv_transfer_params, 0 if saving is None else saving.ticket)
            outputs = self._outputs(request, values, is_staged=saving is not None, saving=saving)
            async with aclosing(outputs):
                async for output in outputs:
                    if output.finished:
                        yield self._prefilled(request, output)

    def _with_load(self, piece: AnswerChunk, loading: Progress) -> AnswerChunk:
        """The piece with the moments of its request's load."""
        if piece.moments is None or self._reports is None:
            return piece
        self._reports.read()
        loaded = {"loading_s": loading.began_s, "loaded_s": loading.ended_s, "loaded_bytes": loading.num_bytes}
        return msgspec.structs.replace(piece, moments=msgspec.structs.replace(piece.moments, **loaded))

    def _prefilled(self, request: Request, output: RequestOutput) -> Prefilled:
        is_staged = self._reports is not None
        if not is_staged and not output.kv_transfer_params:
            raise AnswerError("vLLM keeps no KV of a finished prefill")
        piece = piece_of(output, num_logprobs=request.sampling.logprobs)
        first = msgspec.structs.replace(piece, finish=None)
        params = None if is_staged else msgspec.json.encode(output.kv_transfer_params)
        is_short = params is not None and stops_short(params, len(request.token_ids))
        return Prefilled(params, None if is_short else first)

    async def discard(self, kv_transfer_params: bytes) -> None:
        params = _kv_transfer.decode_body({}, kv_transfer_params)["kv_transfer_params"]
        self._num_begun += 1
        await self._engine.notify_kv_transfer_request_rejected(f"discard/{self._num_begun}", params)

    async def _outputs(
        self, request: Request, values: dict[str, Any], *, is_staged: bool = False, saving: Progress | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """``saving``: the last output waits until all ranks have saved the request's KV."""
        self._num_begun += 1
        # A request that was aborted here may come again while vLLM still has the first one.
        request_id = f"{request.request_id}/{self._num_begun}"
        answer = self._engine.generate(
            self._terms.prompt(_prompt(request)),
            self._sampling(request, values),
            request_id,
            lora_request=self._adapters.request(request.sampling.adapter),
            priority=request.keyless_priority,
        )
        is_finished = False
        try:
            async for output in answer:
                is_finished = is_answered(output)
                if is_finished and saving is not None:
                    await saving.complete()
                yield output
        except self._terms.overload as exc:
            raise BackendRefusedError(f"vLLM is full: {one_line(exc)}", 503) from exc
        except self._terms.dead as exc:
            raise AnswerError(ENDED) from exc
        except self._terms.refusals as exc:
            raise BackendRefusedError(f"vLLM refuses the request: {one_line(exc)}", 400) from exc
        finally:
            await answer.aclose()
            if is_staged and not is_finished:
                await self._confirm_end(request_id)
        if not is_finished:
            raise AnswerError("vLLM ended the answer in the middle")

    async def _confirm_end(self, request_id: str) -> None:
        """Return when no step of vLLM copies KV of this request any more: aborts and questions arrive in order, and
        vLLM's workers answer between two steps. Raises UnconfirmedError if they do not."""
        if self._is_gone:
            raise UnconfirmedError(ENDED)
        try:
            # vLLM's own timeout counts from when its engine process has read the question.
            async with asyncio.timeout(CONFIRM_TIMEOUT_S):
                # Again: vLLM cannot abort a request that was cancelled while it was being added.
                await self._engine.abort(request_id)
                await self._engine.collective_rpc("kvrelay_at_rest", CONFIRM_TIMEOUT_S)
        except self._terms.dead as exc:
            raise UnconfirmedError(ENDED) from exc
        except Exception as exc:  # whatever it is, the engine does not answer
            raise UnconfirmedError(f"vLLM does not confirm the end of an aborted request: {one_line(exc)}") from exc

    def _sampling(self, request: Request, values: dict[str, Any]) -> object:
        grammar = request.sampling.grammar
        try:
            return self._terms.sampling(values, None if grammar is None else structured_values(grammar))
        except self._terms.refusals as exc:
            raise BackendRefusedError(f"vLLM refuses the request: {one_line(exc)}", 400) from exc

    async def failure(self) -> str | None:
        failure = await self._ended() or self._silence()
        self._is_gone = failure is not None
        return failure

    async def _ended(self) -> str | None:
        try:
            await self._engine.check_health()
        except self._terms.dead:
            return f"{ENDED}; its own messages are above, unless it was killed"
        except Exception as exc:  # noqa: BLE001 - whatever it is, the engine is gone
            return f"{ENDED}: {one_line(exc)}"
        return None

    def _silence(self) -> str | None:
        """Ask the engine process something, and look whether an earlier question is answered."""
        if self._question is not None and not self._question.done():
            silent_s = time.monotonic() - self._asked_s
            if self._hang_timeout_s and silent_s > self._hang_timeout_s:
                return f"vLLM's engine process has not answered for {silent_s:.0f} s"
            return None
        if self._question is not None and not self._question.cancelled() and (exc := self._question.exception()):
            return f"vLLM's engine process has failed: {one_line(exc)}"
        self._question = asyncio.ensure_future(self._engine.is_paused())
        self._asked_s = time.monotonic()
        return None

    async def clear_cache(self) -> None:
        await self._engine.reset_prefix_cache()

    async def close(self) -> None:
        if self._question is not None:
            self._question.cancel()
            await asyncio.gather(self._question, return_exceptions=True)
        # First: a worker that has failed does not wait for vLLM's end.
        self._on_close()
        try:
            await asyncio.to_thread(self._engine.shutdown, SHUTDOWN_TIMEOUT_S)
        finally:
            if self._reports is not None:
                self._reports.close(asyncio.get_running_loop())


def _prompt(request: Request) -> dict[str, Any]:
    prompt: dict[str, Any] = {"prompt_token_ids": list(request.token_ids)}
    if request.sampling.cache_salt is not None:
        prompt["cache_salt"] = request.sampling.cache_salt
    return prompt
