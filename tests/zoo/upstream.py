"""A server with the OpenAI API that streams what it is told, by text alone or with token ids, as vLLM and others do."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import msgspec
from aiohttp import web


class Event(msgspec.Struct, frozen=True):
    """One event of a stream. ``token_ids`` None: the server tells only text."""

    text: str
    token_ids: Sequence[int] | None = None
    finish: str | None = None


@asynccontextmanager
async def upstream(events: Sequence[Event]) -> AsyncIterator[str]:
    """The server's URL. Every completion is these events."""

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "zoo", "max_model_len": 4096}]})

    async def complete(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in events:
            choice = {"index": 0, "text": event.text, "finish_reason": event.finish}
            if event.token_ids is not None:
                choice["token_ids"] = list(event.token_ids)
            await response.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/completions", complete)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
