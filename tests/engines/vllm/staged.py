"""A scripted vLLM with kvrelay's connector: its KV is a pure function of the tokens, and the two halves copy it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from tests.engines.connector.layouts import packed_layout
from tests.engines.vllm.scripted import TERMS, Publisher, ScriptedVllm

from kvrelay.config import WorkerConfig
from kvrelay.engines.connector.device import Event
from kvrelay.engines.connector.scheduler_half import NULL_BLOCK, Copies, SchedulerHalf
from kvrelay.engines.connector.terms import StagingPlace, decode_place, encode_place
from kvrelay.engines.connector.worker_half import RankPart, WorkerHalf
from kvrelay.engines.hosted.staging import allocate_staging
from kvrelay.engines.vllm.library import Started
from kvrelay.executors.host_memory import HostMemory

NUM_BLOCKS = 64
LAYOUT = packed_layout(num_layers=2, num_heads=1, block_size=16, head_dim=4, dtype="float32")
STAGED_BLOCK_BYTES = LAYOUT.block_bytes
STEP_TOKENS = 24
"""Of a prefill: no multiple of a block."""


@dataclass
class VllmRequest:
    """What the scheduler half reads of vLLM's Request."""

    request_id: str
    token_ids: list[int]
    kv_transfer_params: Mapping[str, Any] | None
    num_computed_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


def at_once(event: Event, then: Callable[[], None]) -> None:
    """A ``Watch``: a device that is late catches up first."""
    event.wait()
    then()


def copy(half: WorkerHalf, copies: Copies) -> None:
    """A step without a forward pass."""
    half.begin(copies)
    half.load(copies)
    half.save(copies)


class Paged:
    """vLLM's paged KV, and both halves of the connector over it."""

    def __init__(self, place: StagingPlace, num_blocks: int = NUM_BLOCKS) -> None:
        layout = self.layout = place.layout
        (region,) = layout.model
        shape = (num_blocks, region.num_heads, layout.block_size, region.entry_values // layout.block_size)
        self.caches = {f"model.layers.{layer}.attn": torch.zeros(shape) for layer in range(region.num_layers)}
        part = RankPart.of(layout, region.num_layers, 0, 1)
        self.scheduler, self.worker = SchedulerHalf(place), WorkerHalf(place, part, watch=at_once)
        self.worker.register(dict(reversed(self.caches.items())))
        self.free = [*range(NULL_BLOCK + 1, num_blocks)]

    def take(self, num_tokens: int) -> list[int]:
        count = -(-num_tokens // self.layout.block_size)
        taken, self.free = self.free[-count:], self.free[:-count]
        return taken

    def give_back(self, blocks: list[int]) -> None:
        for cache in self.caches.values():
            cache[blocks] = -1.0
        self.free = [*blocks, *self.free]

    def compute(self, blocks: list[int], token_ids: list[int], begin: int, end: int) -> None:
        for layer, cache in enumerate(self.caches.values()):
            for position in range(begin, end):
                block, offset = divmod(position, self.layout.block_size)
                cache[blocks[block], :, offset] = _value(layer, token_ids[position], position)

    def require(self, blocks: list[int], token_ids: list[int], end: int) -> None:
        """Raise RuntimeError unless the KV of the first ``end`` tokens is in ``blocks``."""
        for layer, cache in enumerate(self.caches.values()):
            for position in range(end):
                block, offset = divmod(position, self.layout.block_size)
                if not bool((cache[blocks[block], :, offset] == _value(layer, token_ids[position], position)).all()):
                    raise RuntimeError(f"wrong KV in layer {layer}, position {position}")

    def run(self, request: VllmRequest, blocks: list[int], num_cached: int = 0) -> int:
        """Load and save what is asked, and compute the rest. Returns the number of loaded tokens. The KV of the first
        ``num_cached`` is in the blocks."""
        num_loaded = self.scheduler.num_to_load(request, num_cached)
        self.scheduler.allocated(request, [blocks], num_loaded)
        copy(self.worker, self.scheduler.plan({}, lambda request_id: [blocks]))
        assert self.worker.take_loaded() == ({request.request_id} if num_loaded else set())
        request.num_computed_tokens = num_cached + num_loaded
        self.require(blocks, request.token_ids, request.num_computed_tokens)
        while (begin := request.num_computed_tokens) < request.num_tokens:
            end = min(begin + STEP_TOKENS, request.num_tokens)
            copies = self.scheduler.plan({request.request_id: end - begin}, lambda request_id: [blocks])
            self.compute(blocks, request.token_ids, begin, end)
            copy(self.worker, copies)
            request.num_computed_tokens = end
        return num_loaded


def _value(layer: int, token_id: int, position: int) -> float:
    return float(token_id * 1000 + position * 8 + layer)


@dataclass
class StagedVllm(ScriptedVllm):
    """``holds``: no request begins while it is set; ``holds_answers``: none is answered. ``confirms``: a worker of vLLM
    answers if it is set. ``gives_up``: requests end before their first step."""

    paged: Paged | None = None
    loaded: dict[str, int] = field(default_factory=dict)
    """Tokens that each request has loaded."""
    holds: bool = False
    holds_answers: bool = False
    gives_up: bool = False
    confirms: bool = True

    async def generate(
        self, prompt: dict[str, Any], sampling_params: Any, request_id: str, *, lora_request: Any, priority: int
    ) -> AsyncGenerator[Any, None]:
        assert self.paged is not None
        params = (getattr(sampling_params, "extra_args", None) or {}).get("kv_transfer_params")
        request = VllmRequest(request_id, list(prompt["prompt_token_ids"]), params)
        blocks = self.paged.take(request.num_tokens)
        try:
            while self.holds:
                await asyncio.sleep(0.002)
            if self.gives_up:
                completion = SimpleNamespace(token_ids=[], logprobs=None, finish_reason="error")
                yield SimpleNamespace(outputs=[completion], finished=True)
                return
            num_cached = 0 if self.publisher is None else self.publisher.num_known(request.token_ids[:-1])
            self.paged.compute(blocks, request.token_ids, 0, num_cached)
            self.loaded[request_id.partition("/")[0]] = self.paged.run(request, blocks, num_cached)
            while self.holds_answers:
                await asyncio.sleep(0.002)
            answer = super().generate(prompt, sampling_params, request_id, lora_request=lora_request, priority=priority)
            async with aclosing(answer) as outputs:
                async for output in outputs:
                    yield output
        finally:
            self.paged.scheduler.finished(request_id)
            self.paged.give_back(blocks)

    async def collective_rpc(self, method: str, timeout: float | None = None, args: tuple[Any, ...] = ()) -> object:
        while method == "kvrelay_at_rest" and not self.confirms:
            await asyncio.sleep(0.002)
        return await super().collective_rpc(method, timeout, args)


def staged_start(
    engine: StagedVllm, arguments: Mapping[str, Any], settings: WorkerConfig, memory: HostMemory
) -> Started:
    """In place of ``library.start_vllm``, with ``--vllm-connector kvrelay``."""
    assert arguments["block_size"] == LAYOUT.block_size
    staging = allocate_staging(LAYOUT, arguments["max_model_len"], "scripted", settings, memory)
    if "kv_events_config" in arguments:
        engine.publisher = Publisher(arguments["kv_events_config"])
    engine.paged = Paged(decode_place(encode_place(staging.place)))
    return Started(engine, TERMS, LAYOUT.block_size, NUM_BLOCKS, arguments["max_model_len"], staging)
