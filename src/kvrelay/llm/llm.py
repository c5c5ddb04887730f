"""The blocking API: AsyncLLM on an event loop in its own thread."""

from __future__ import annotations

import asyncio
import sys
import threading
import weakref
from collections.abc import Coroutine, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, TypeVar

from kvrelay.engine.stats import EngineStats
from kvrelay.errors import InvalidInputError
from kvrelay.launch.process import SWITCH_INTERVAL_S
from kvrelay.llm.async_llm import AsyncLLM, Message, TextOrTokens
from kvrelay.llm.outputs import RequestOutput
from kvrelay.llm.params import SamplingParams

T = TypeVar("T")


class LLM:
    """Like AsyncLLM, for programs without an event loop; all methods may be called from any thread.

    The constructor loads the model. ``close``, the end of a ``with`` block, garbage collection, or the end of the
    program stop the engines. While the LLM is open the interpreter switches threads more often
    (``sys.setswitchinterval``), because engine and event loop share the interpreter.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        prefill: int = 0,
        decode: int = 1,
        engine: str = "torch",
        **settings: object,
    ) -> None:
        self._async = AsyncLLM(model, prefill=prefill, decode=decode, engine=engine, **settings)
        self._loop = _LoopThread()
        self._finalizer = weakref.finalize(self, _close, self._async, self._loop)
        try:
            self._loop.run(self._async.start())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop the engines and free everything. Idempotent."""
        self._finalizer()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def max_model_len(self) -> int:
        """The longest prompt plus answer, in tokens."""
        return self._async.max_model_len

    @property
    def vocab_size(self) -> int:
        return self._async.vocab_size

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``, with the special tokens that the tokenizer adds."""
        return self._async.encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._async.decode(token_ids)

    def generate(
        self,
        prompts: TextOrTokens | Sequence[TextOrTokens],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """One output per prompt, in order. A prompt is a text or a list of token ids. ``sampling_params`` is one value
        for all prompts, or one per prompt. Ctrl-C ends all of them.

        Raises InvalidInputError, PromptTooLongError, EngineDeadError, and TypeError for what is neither.
        """
        found: list[Any] = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        is_one = bool(found) and isinstance(found[0], Integral)
        return self._run(self._generate([found] if is_one else found, sampling_params))

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | None = None,
        **template_arguments: object,
    ) -> list[RequestOutput]:
        """One output per conversation; ``messages`` is one conversation or a list of them."""
        is_one = bool(messages) and isinstance(messages[0], dict)
        conversations: Any = [messages] if is_one else messages
        return self._run(self._chat(conversations, sampling_params, template_arguments))

    def status(self) -> list[dict[str, object]]:
        """The status of each engine, as in ``kvrelay status --json``: load, requests, hand-offs, bytes moved."""
        return self._run(self._async.status())

    def engine_stats(self) -> list[EngineStats]:
        """Counts and gauges of each engine, without waiting for a step."""
        return [worker.stats().engine for worker in self._async.cluster.workers]

    def clear_prefix_cache(self) -> None:
        """Forget the KV of finished requests in every engine."""
        self._run(self._async.clear_prefix_cache())

    async def _generate(
        self, prompts: list[TextOrTokens], sampling_params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[RequestOutput]:
        params: Sequence[SamplingParams | None]
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = [sampling_params] * len(prompts)
        else:
            params = sampling_params
        if len(params) != len(prompts):
            raise InvalidInputError(
                f"{len(prompts)} prompts and {len(params)} sampling_params", param="sampling_params"
            )
        specs = {key: self._async.spec(each) for key, each in {id(each): each for each in params}.items()}
        return await _all([self._async.answer(prompt, specs[id(each)]) for prompt, each in zip(prompts, params)])

    async def _chat(
        self,
        conversations: Sequence[Sequence[Message]],
        sampling_params: SamplingParams | None,
        template_arguments: dict[str, Any],
    ) -> list[RequestOutput]:
        return await _all([self._async.chat(each, sampling_params, **template_arguments) for each in conversations])

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if not self._finalizer.alive:
            coroutine.close()
            raise InvalidInputError("this LLM is closed")
        return self._loop.run(coroutine)


class _LoopThread:
    """An event loop that runs in a daemon thread until ``stop``."""

    def __init__(self) -> None:
        import uvloop

        self._loop = uvloop.new_event_loop()
        self._switch_interval_s = sys.getswitchinterval()
        sys.setswitchinterval(min(self._switch_interval_s, SWITCH_INTERVAL_S))
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvrelay-llm", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Wait for the result in the calling thread. An exception here, e.g. Ctrl-C, cancels the coroutine."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        # There, because the caller's thread may run a loop of its own.
        self.run(self._loop.shutdown_default_executor())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        sys.setswitchinterval(self._switch_interval_s)


def _close(llm: AsyncLLM, loop: _LoopThread) -> None:
    """Stop the engines. Not a method, because the finalizer must not keep the LLM alive."""
    try:
        loop.run(llm.close())
    finally:
        loop.stop()


async def _all(calls: Sequence[Coroutine[Any, Any, RequestOutput]]) -> list[RequestOutput]:
    """All results; the first failure cancels the others."""
    if len(calls) == 1:
        return [await calls[0]]
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
