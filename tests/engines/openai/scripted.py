"""A server that speaks vLLM's dialect of the completions API, computes what the mock engine computes, and misbehaves
as it is told."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import uvloop
from aiohttp import web
from tests.patience import PATIENCE_S

from kvrelay.executors.mock import mock_generate

Event = dict[str, Any]


class Exchange(Protocol):
    async def take(self, body: dict[str, Any]) -> dict[str, Any] | None:
        """Fields of the answer; None: the KV has not come, so the request fails."""


@dataclass
class Script:
    """How the server answers. ``edit`` changes each event before it is sent; None ends the connection there."""

    model: str = "served"
    parent: str | None = None
    """The model of which it is an adapter."""
    vocab_size: int = 512
    eos_token_ids: tuple[int, ...] = ()
    max_model_len: int = 256
    delay_s: float = 0.0
    """Before each event."""
    tells_token_ids: bool = True
    decode: Callable[[list[int]], str] = lambda ids: "".join(f"<{token}>" for token in ids)
    edit: Callable[[int, Event], Event | bytes | None] = lambda number, event: event
    status: int = 200
    retry_after: str = ""
    health: int = 200
    needs_key: str = ""
    is_paused: bool = False
    """Answers begin, and go no further."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    traceparents: list[str | None] = field(default_factory=list)
    """As in each request's header."""
    num_ended: int = 0
    num_cut: int = 0
    """Answers whose client went away."""
    exchange: Exchange | None = None
    """The KV that servers exchange: it checks each request and adds fields to its answer."""


class ScriptedServer:
    """Runs in a thread of its own, on an ephemeral port of the loopback interface."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.url = ""
        self._loop = uvloop.new_event_loop()  # asyncio 3.11 leaves a connection that is accepted during the close
        self._ready = threading.Event()
        self._over = asyncio.Event()
        self._thread = threading.Thread(target=self._run)

    def start(self) -> None:
        self._thread.start()
        assert self._ready.wait(PATIENCE_S)

    def close(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._over.set)
            self._thread.join()

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._complete)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._ready.set()
        await self._over.wait()
        await runner.cleanup()

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=self.script.health)

    async def _models(self, request: web.Request) -> web.Response:
        if self.script.needs_key and request.headers.get("Authorization") != f"Bearer {self.script.needs_key}":
            return web.json_response({"error": {"message": "no key"}}, status=401)
        model = {"id": self.script.model, "max_model_len": self.script.max_model_len, "parent": self.script.parent}
        return web.json_response({"data": [model]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        script, body = self.script, await request.json()
        script.bodies.append(body)
        script.traceparents.append(request.headers.get("traceparent"))
        if script.status != 200:
            return web.json_response(
                {"error": {"message": "not now"}}, status=script.status, headers={"Retry-After": script.retry_after}
            )
        try:
            fields = {} if script.exchange is None else await script.exchange.take(body)
        except asyncio.CancelledError:
            script.num_cut += 1
            raise
        if fields is None:
            return web.json_response({"error": {"message": "the KV has not come"}}, status=500)
        if not body["stream"]:
            script.num_ended += 1
            return web.json_response({**self._whole(body), **fields})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        try:
            await response.prepare(request)
            for number, event in enumerate(self._events(body)):
                await asyncio.sleep(script.delay_s)
                while script.is_paused and number:
                    await asyncio.sleep(0.01)
                edited = script.edit(number, event)
                if edited is None:
                    assert request.transport is not None
                    request.transport.close()
                    return response
                data = edited if isinstance(edited, bytes) else json.dumps(edited).encode()
                await response.write(b"data: " + data + b"\n\n")
            await response.write(b"data: [DONE]\n\n")
        except asyncio.CancelledError:
            script.num_cut += 1
            raise
        except ConnectionResetError:  # the client has left, perhaps before the answer began
            script.num_cut += 1
            return response
        script.num_ended += 1
        return response

    def _whole(self, body: dict[str, Any]) -> Event:
        """The answer in one piece."""
        *events, last = self._events(body)
        choices = [event["choices"][0] for event in events]
        token_ids = [token for choice in choices for token in choice.get("token_ids", ())]
        return {**last, "choices": [{**choices[-1], "logprobs": None, "token_ids": token_ids}]}

    def _events(self, body: dict[str, Any]) -> Iterator[Event]:
        prompt, num_tokens = body["prompt"], body["max_tokens"]
        usage = {"prompt_tokens": len(prompt), "prompt_tokens_details": {"cached_tokens": len(prompt) // 16 * 16 // 2}}
        tokens = mock_generate(
            prompt, num_tokens, vocab_size=self.script.vocab_size, eos_token_ids=self.script.eos_token_ids
        )
        for number, token in enumerate(tokens):
            choice: Event = {"index": 0, "text": self.script.decode([token]), "finish_reason": None}
            if self.script.tells_token_ids and body.get("return_token_ids"):
                choice["token_ids"] = [token]
            if body.get("logprobs") is not None:
                others = {f"token_id:{other}": -1.0 - other for other in range(body["logprobs"])}
                choice["logprobs"] = {
                    "tokens": [f"token_id:{token}"],
                    "token_logprobs": [-0.25],
                    "top_logprobs": [{f"token_id:{token}": -0.25, **others}],
                }
            if number == num_tokens - 1:
                choice["finish_reason"] = "length"
            yield {"id": "cmpl-1", "object": "text_completion", "choices": [choice], "usage": usage}
        yield {"id": "cmpl-1", "object": "text_completion", "choices": [], "usage": usage}


@contextmanager
def scripted_server(script: Script) -> Iterator[ScriptedServer]:
    server = ScriptedServer(script)
    server.start()
    try:
        yield server
    finally:
        server.close()
