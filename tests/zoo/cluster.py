"""A frontend on a real socket over real workers, all in this process: what a client gets of a model of the zoo."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.frontend.raw_http import Answer, send
from tests.patience import PATIENCE_S

from kvrelay.config import (
    EngineConfig,
    FrontendConfig,
    RouterConfig,
    RunnerConfig,
    TransferConfig,
    UpstreamConfig,
    WorkerConfig,
    WorkerRole,
)
from kvrelay.config.settings import DisaggConfig
from kvrelay.control.base import Keys
from kvrelay.control.memory import MemoryBroker
from kvrelay.core.clock import MonotonicClock
from kvrelay.engine.contract import EngineHost
from kvrelay.engines.registry import build_host
from kvrelay.frontend.api.server import Frontend
from kvrelay.launch.worker_process import load_engine
from kvrelay.router import Router
from kvrelay.rpc.base import RpcClient
from kvrelay.rpc.loopback import LoopbackNetwork
from kvrelay.transfer import build_transport
from kvrelay.transfer.loopback import LoopbackFabric
from kvrelay.worker.identity import WorkerIdentity, new_worker_id
from kvrelay.worker.worker import Worker

COMPLETIONS, CHAT, RESPONSES, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"
ENGINE = EngineConfig(num_blocks=128, block_size=16, max_num_seqs=4)


def worker_config(model_dir: Path, engine: str, upstream: str = "", **changes: object) -> WorkerConfig:
    return WorkerConfig(
        model_path=model_dir,
        model=model_dir.name,
        engine_kind=engine,
        engine=ENGINE,
        runner=RunnerConfig(num_threads=1),
        upstream=UpstreamConfig(upstream=upstream),
        transfer=TransferConfig(transport="loopback"),
        disagg=DisaggConfig(disagg_policy="always"),
        **changes,
    )


class ZooCluster:
    """``ask`` gives what a client sees: the same of a whole answer and of a stream's events."""

    def __init__(self, frontend: Frontend) -> None:
        self.frontend = frontend
        self.url = frontend.url

    async def send(self, path: str, body: Mapping[str, object], headers: Mapping[str, str] | None = None) -> Answer:
        return await send(self.frontend.port, "POST", path, body, headers)

    async def ask(self, path: str, body: Mapping[str, object], *, stream: bool = False, order: str = "") -> Seen:
        headers = {"x-kvrelay-order": order} if order else None
        answer = await self.send(path, {**body, "stream": stream} if stream else body, headers)
        assert answer.status == 200, answer.body
        if not stream:
            return seen_whole(path, answer.json)
        return seen_streamed(path, stream_events(answer.body))


def _host(config: WorkerConfig, worker_id: str) -> EngineHost:
    return build_host(config.engine_kind, config, worker_id) or load_engine(config, worker_id)


@asynccontextmanager
async def zoo_cluster(
    model_dir: Path, engine: str = "torch", *, prefill: int = 0, upstream: str = "", **frontend: object
) -> AsyncIterator[ZooCluster]:
    """One decode worker and ``prefill`` prefill workers; with any, every prompt is prefilled remotely."""
    broker, network, fabric = MemoryBroker(tick_s=0.5), LoopbackNetwork(), LoopbackFabric()
    roles = [WorkerRole.PREFILL] * prefill + [WorkerRole.DECODE if prefill else WorkerRole.BOTH]

    async def connect(address: str, public_key: str) -> RpcClient:
        client = network.client(address)
        await client.start()
        return client

    async with AsyncExitStack() as stack:
        running = []
        for role in roles:
            config = replace(worker_config(model_dir, engine, upstream), role=role)
            worker_id = new_worker_id()
            host = await asyncio.to_thread(_host, config, worker_id)
            plane = broker.plane()
            stack.push_async_callback(plane.close)
            transport = build_transport(config.transfer, worker_id, fabric)
            worker = Worker(config, WorkerIdentity(worker_id), host, transport, plane, network.server(), connect)
            await worker.start()
            running.append((worker, asyncio.get_running_loop().create_task(worker.run())))
        plane = broker.plane()
        stack.push_async_callback(plane.close)
        server = Frontend(
            FrontendConfig(**{"port": 0, "shutdown_timeout_s": 1.0, **frontend}),
            plane,
            Keys(config.control.namespace),
            lambda info: network.client(info.address),
            lambda block_size, replay, stage: Router(RouterConfig(), block_size, MonotonicClock(), stage, replay),
        )
        await server.start()
        async with asyncio.timeout(PATIENCE_S):
            while not (server.cluster.models and await server.cluster.wait_connected(PATIENCE_S)):
                await asyncio.sleep(0.005)
        try:
            yield ZooCluster(server)
        finally:
            await server.close()
            for worker, _ in running:
                worker.request_drain()
            await asyncio.gather(*(task for _, task in running))


def stream_events(body: bytes) -> list[dict[str, Any]]:
    data = [line.removeprefix(b"data: ") for line in body.split(b"\n") if line.startswith(b"data: ")]
    return [json.loads(event) for event in data if event != b"[DONE]"]


def body_of(path: str, prompt: str, **fields: object) -> dict[str, object]:
    """A request of any API, with the default template's prompt. ``tools``: names of functions, with arguments."""
    body: dict[str, object] = {"model": "zoo", "max_tokens": 64, "temperature": 0.0, **fields}
    if path == COMPLETIONS:
        return {**body, "prompt": prompt}
    if path == RESPONSES:
        body["max_output_tokens"] = body.pop("max_tokens")
        return {**body, "input": prompt}
    return {**body, "messages": [{"role": "user", "content": prompt}]}


SCHEMA = {"type": "object", "properties": {"a": {"enum": [7]}}, "required": ["a"]}
MUST_CALL: dict[str, tuple[object, ...]] = {
    CHAT: ("required", {"type": "function", "function": {"name": "add"}}),
    RESPONSES: ("required", {"type": "function", "name": "add"}),
    MESSAGES: ({"type": "any"}, {"type": "tool", "name": "add"}),
}
"""Ways to ask for a call, by API."""


def with_tools(path: str, choice: object = None, prompt: str = "q", **fields: object) -> dict[str, object]:
    """A chat that offers one function, in the API's own shape."""
    function = {"name": "add", "parameters": SCHEMA}
    tool: dict[str, object] = {"type": "function", "function": function}
    if path == RESPONSES:
        tool = {"type": "function", **function}
    elif path == MESSAGES:
        tool = {"name": "add", "input_schema": SCHEMA}
    return body_of(path, prompt, tools=[tool], **({"tool_choice": choice} if choice else {}), **fields)


class Seen(dict[str, Any]):
    """``text``, ``reasoning``, ``calls`` (name and arguments), ``finish``."""

    @property
    def text(self) -> str:
        return str(self["text"])


def seen_whole(path: str, answer: Mapping[str, Any]) -> Seen:
    if path == COMPLETIONS:
        choice = answer["choices"][0]
        return Seen(text=choice["text"], reasoning="", calls=[], finish=choice["finish_reason"])
    if path == CHAT:
        choice = answer["choices"][0]
        message = choice["message"]
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        return Seen(
            text=message["content"] or "",
            reasoning=message.get("reasoning_content") or "",
            calls=[(call["name"], json.loads(call["arguments"])) for call in calls],
            finish=choice["finish_reason"],
        )
    if path == RESPONSES:
        items = answer["output"]
        return Seen(
            text="".join(part["text"] for item in items if item["type"] == "message" for part in item["content"]),
            reasoning="".join(
                part["text"] for item in items if item["type"] == "reasoning" for part in item.get("content") or ()
            ),
            calls=[(item["name"], json.loads(item["arguments"])) for item in items if item["type"] == "function_call"],
            finish=answer["status"],
        )
    blocks = answer["content"]
    return Seen(
        text="".join(block["text"] for block in blocks if block["type"] == "text"),
        reasoning="".join(block["thinking"] for block in blocks if block["type"] == "thinking"),
        calls=[(block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"],
        finish=answer["stop_reason"],
    )


def seen_streamed(path: str, found: list[dict[str, Any]]) -> Seen:
    if path == RESPONSES:
        (last,) = [
            event["response"] for event in found if event["type"] in ("response.completed", "response.incomplete")
        ]
        whole = seen_whole(path, last)
        deltas = [event["delta"] for event in found if event["type"] == "response.output_text.delta"]
        assert "".join(deltas) == whole.text
        return whole
    if path == MESSAGES:
        return _streamed_messages(found)
    text, reasoning, finish = "", "", None
    calls: dict[int, list[str]] = {}
    for event in found:
        for choice in event["choices"]:
            finish = choice["finish_reason"] or finish
            if path == COMPLETIONS:
                text += choice["text"]
                continue
            delta = choice["delta"]
            text += delta.get("content") or ""
            reasoning += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls") or ():
                function = call["function"]
                if "name" in function:
                    calls[call["index"]] = [function["name"], ""]
                calls[call["index"]][1] += function.get("arguments", "")
    told = [(name, json.loads(arguments)) for name, arguments in calls.values()]
    return Seen(text=text, reasoning=reasoning, calls=told, finish=finish)


def _streamed_messages(found: list[dict[str, Any]]) -> Seen:
    blocks: dict[int, dict[str, Any]] = {}
    finish = None
    for event in found:
        if event["type"] == "content_block_start":
            blocks[event["index"]] = {**event["content_block"], "partial": ""}
        elif event["type"] == "content_block_delta":
            delta, block = event["delta"], blocks[event["index"]]
            if delta["type"] == "text_delta":
                block["text"] += delta["text"]
            elif delta["type"] == "thinking_delta":
                block["thinking"] += delta["thinking"]
            elif delta["type"] == "input_json_delta":
                block["partial"] += delta["partial_json"]
        elif event["type"] == "message_delta":
            finish = event["delta"]["stop_reason"]
    for block in blocks.values():
        if block["type"] == "tool_use":
            block["input"] = json.loads(block["partial"] or "{}")
    return seen_whole(MESSAGES, {"content": list(blocks.values()), "stop_reason": finish})
