"""OpenAI servers of a few lines: each answers a prompt by arithmetic, as a test tells it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiohttp import web

Compute = Callable[[list[int], int], int]
"""The token after a prompt (with what has been answered so far), and how many have been answered."""


def sound(tokens: list[int], number: int) -> int:
    """A token that depends on all of the prompt."""
    return (sum(at * token for at, token in enumerate(tokens, 1)) + number) % 997


@asynccontextmanager
async def scripted_server(compute: Compute = sound, model: str = "m") -> AsyncIterator[str]:
    """Its URL."""

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": model}]})

    async def complete(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        tokens, answered = list(body["prompt"]), []
        for number in range(body["max_tokens"]):
            answered.append(compute(tokens, number))
            tokens.append(answered[-1])
        texts = [f"t{token}" for token in answered]
        logprobs = {
            "tokens": texts,
            "token_logprobs": [-0.1] * len(texts),
            "top_logprobs": [{text: -0.1, "other": -3.0} for text in texts],
        }
        choice = {"text": "".join(texts), "token_ids": answered, "logprobs": logprobs, "finish_reason": "length"}
        if not body.get("stream"):
            return web.json_response({"choices": [choice]})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(f"data: {json.dumps({'choices': [choice]})}\n\ndata: [DONE]\n\n".encode())
        return response

    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/completions", complete)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
