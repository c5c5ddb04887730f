"""A vLLM that computes what the mock engine computes, publishes cache events as vLLM does, and fails as it is told."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import zmq

from kvrelay.engines.vllm.backend import Terms
from kvrelay.engines.vllm.library import Started
from kvrelay.executors.mock import mock_generate

VOCAB_SIZE = 1024
BLOCK_SIZE = 32
"""vLLM's, as on a CPU: two blocks of kvrelay's."""


class RefusedByVllmError(Exception):
    """As vLLM's VLLMClientError."""


class FullVllmError(Exception):
    """As vLLM's GracefulHTTPError."""


class DeadVllmError(Exception):
    """As vLLM's EngineDeadError."""


TERMS = Terms(
    prompt=dict,
    sampling=lambda values, structured: SimpleNamespace(**values, structured=structured),
    adapter=lambda *values: values,
    refusals=(RefusedByVllmError, ValueError),
    overload=(FullVllmError,),
    dead=(DeadVllmError,),
)


@dataclass
class ScriptedVllm:
    """``edit`` changes each output; an exception that it returns is raised instead."""

    num_blocks: int = 32
    edit: Callable[[int, Any], Any] = lambda number, output: output
    refusal: Exception | None = None
    is_paused_between_tokens: bool = False
    is_silent: bool = False
    """Questions to the engine process get no answer."""
    health: Exception | None = None
    begun: list[tuple[dict[str, Any], Any, str, int]] = field(default_factory=list)
    adapters: list[Any] = field(default_factory=list)
    """That of each request in ``begun``, or None."""
    loaded_adapters: list[Any] = field(default_factory=list)
    removed_adapters: list[int] = field(default_factory=list)
    """By number."""
    on_load: Callable[[Any], None] = lambda request: None
    """While an adapter is read."""
    aborted: list[str] = field(default_factory=list)
    calls: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    rejected: list[dict[str, Any]] = field(default_factory=list)
    """Parameters of KV that is to be freed at the other vLLM."""
    is_shut_down: bool = False
    publisher: Publisher | None = None

    async def generate(
        self, prompt: dict[str, Any], sampling_params: Any, request_id: str, *, lora_request: Any, priority: int
    ) -> AsyncGenerator[Any, None]:
        self.begun.append((prompt, sampling_params, request_id, priority))
        self.adapters.append(lora_request)
        if self.refusal is not None:
            raise self.refusal
        tokens = mock_generate(prompt["prompt_token_ids"], sampling_params.max_tokens, vocab_size=VOCAB_SIZE)
        is_finished = False
        try:
            for number, token in enumerate(tokens):
                await asyncio.sleep(0)
                while (self.is_paused_between_tokens and number) or self.health:
                    if self.health is not None:
                        raise self.health
                    await asyncio.sleep(0.005)
                is_stop = token in sampling_params.stop_token_ids
                reason = "stop" if is_stop else "length" if number == len(tokens) - 1 else None
                output = _output(token, reason, sampling_params.logprobs)
                if number == 0 and sampling_params.prompt_logprobs is not None:
                    output.prompt_logprobs = [None, *map(_known, prompt["prompt_token_ids"][1:])]
                edited = self.edit(number, output)
                if isinstance(edited, Exception):
                    raise edited
                if edited is None:
                    return
                if reason is not None:
                    is_finished = True
                    self._store([*prompt["prompt_token_ids"], *tokens[:number]])
                yield edited
                if is_finished:
                    return
        finally:
            if not is_finished:
                self.aborted.append(request_id)

    def _store(self, tokens: list[int]) -> None:
        if self.publisher is not None:
            self.publisher.store(tokens)

    async def add_lora(self, lora_request: Any) -> bool:
        if self.refusal is not None:
            raise self.refusal
        self.on_load(lora_request)
        self.loaded_adapters.append(lora_request)
        return True

    async def remove_lora(self, lora_id: int) -> bool:
        if self.refusal is not None:
            raise self.refusal
        self.removed_adapters.append(lora_id)
        return True

    async def check_health(self) -> None:
        if self.health is not None:
            raise self.health

    async def is_paused(self) -> bool:
        if self.is_silent:
            await asyncio.Event().wait()
        return False

    async def reset_prefix_cache(self) -> bool:
        if self.publisher is not None:
            self.publisher.clear()
        return True

    async def notify_kv_transfer_request_rejected(self, request_id: str, kv_transfer_params: dict[str, Any]) -> None:
        self.rejected.append(kv_transfer_params)

    async def abort(self, request_id: str) -> None:
        """A request that has ended is unknown."""

    async def collective_rpc(self, method: str, timeout: float | None = None, args: tuple[Any, ...] = ()) -> object:
        self.calls.append((method, args))
        return None

    def shutdown(self, timeout: float | None = None) -> None:
        self.is_shut_down = True
        if self.publisher is not None:
            self.publisher.close()


def _known(token: int) -> dict[int, SimpleNamespace]:
    """The likeliest token, and the next one."""
    return {(token + step) % VOCAB_SIZE: SimpleNamespace(logprob=-0.25 - step, rank=step + 1) for step in range(2)}


def _output(token: int, reason: str | None, num_logprobs: int | None) -> SimpleNamespace:
    logprobs = None
    if num_logprobs is not None:
        logprobs = [_known(token)]
    completion = SimpleNamespace(token_ids=[token], logprobs=logprobs, finish_reason=reason)
    return SimpleNamespace(
        outputs=[completion],
        finished=reason is not None,
        num_cached_tokens=16,
        kv_transfer_params=None,
        metrics=None,
        prompt_logprobs=None,
    )


def _name(block: tuple[int, ...]) -> bytes:
    """Of 32 bytes, as vLLM's."""
    return hashlib.sha256(repr(block).encode()).digest()


class Publisher:
    """Publishes and replays events of stored blocks, as vLLM's ZMQ publisher does."""

    def __init__(self, events: Mapping[str, str]) -> None:
        self._context = zmq.Context()
        self._events = self._context.socket(zmq.PUB)
        self._events.linger = 0
        self._events.bind(events["endpoint"])
        self._batches: list[bytes] = []
        self._known: set[tuple[int, ...]] = set()
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._replay, args=(events["replay_endpoint"],), daemon=True)
        self._thread.start()

    def store(self, tokens: list[int]) -> None:
        events = []
        for end in range(BLOCK_SIZE, len(tokens) + 1, BLOCK_SIZE):
            block = tuple(tokens[:end])
            if block not in self._known:
                self._known.add(block)
                events.append(
                    {
                        "type": "BlockStored",
                        "block_hashes": [_name(block)],
                        "parent_block_hash": _name(block[:-BLOCK_SIZE]) if end > BLOCK_SIZE else None,
                        "token_ids": list(block[-BLOCK_SIZE:]),
                        "block_size": BLOCK_SIZE,
                    }
                )
        if events:
            with self._lock:
                self._publish(events)

    def num_known(self, tokens: list[int]) -> int:
        """How many of ``tokens`` are in stored blocks, from the first on."""
        last = len(tokens) // BLOCK_SIZE * BLOCK_SIZE
        ends = range(BLOCK_SIZE, last + 1, BLOCK_SIZE)
        return next((end - BLOCK_SIZE for end in ends if tuple(tokens[:end]) not in self._known), last)

    def clear(self) -> None:
        self._known.clear()
        with self._lock:
            self._publish([{"type": "AllBlocksCleared"}])

    def _publish(self, events: list[dict[str, Any]]) -> None:
        self._batches.append(msgspec.msgpack.encode([0.0, events]))
        number = len(self._batches) - 1
        self._events.send_multipart([b"", number.to_bytes(8, "big"), self._batches[-1]])

    def _replay(self, endpoint: str) -> None:
        with self._context.socket(zmq.ROUTER) as router:
            router.linger = 0
            router.bind(endpoint)
            while not self._over.is_set():
                if router.poll(20):
                    asker, _, first = router.recv_multipart()
                    with self._lock:
                        batches = list(self._batches)
                    for number in range(int.from_bytes(first, "big"), len(batches)):
                        router.send_multipart([asker, b"", b"", number.to_bytes(8, "big"), batches[number]])
                    router.send_multipart([asker, b"", b"", (2**64 - 1).to_bytes(8, "big"), b""])

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self._events.close()
        self._context.term()


def scripted_start(engine: ScriptedVllm, arguments: Mapping[str, Any]) -> Started:
    """In place of ``library.start_vllm``."""
    if "kv_events_config" in arguments:
        engine.publisher = Publisher(arguments["kv_events_config"])
    return Started(engine, TERMS, BLOCK_SIZE, engine.num_blocks, arguments.get("max_model_len", 8192))
