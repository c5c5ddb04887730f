"""What a request has needed is freed when it ends: a collection of the garbage would hold every stream up."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest
from tests.frontend.doubles import Script, running
from tests.frontend.raw_http import RawClient, request_bytes, send

from kvrelay.frontend.openai.requests import CompletionRequest

MESSAGES = [{"role": "user", "content": "Once upon a time"}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [5, 6, 7], "stream": True}),
        ("/v1/completions", {"prompt": [5, 6, 7], "n": 3, "logprobs": 1}),
        ("/v1/completions", {"prompt": [5] * 200, "stream": True}),
        ("/v1/chat/completions", {"messages": MESSAGES, "stream": True}),
        ("/v1/chat/completions", {"messages": MESSAGES, "stop": "sea"}),
        ("/v1/messages", {"messages": MESSAGES, "stream": True}),
        ("/v1/responses", {"input": "Once", "stream": True}),
    ],
)
async def test_an_ended_request_leaves_no_cycles(model_dir: Path, path: str, body: dict[str, object]) -> None:
    async with running(model_dir, Script((40, 50, 60))) as cluster:
        limit = "max_output_tokens" if "input" in body else "max_tokens"

        async def ask() -> None:
            answer = await send(cluster.frontend.port, "POST", path, {"model": "tiny", limit: 5, **body})
            assert answer.status == 200

        for _ in range(2):
            await ask()
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            for _ in range(3):
                await ask()
            gc.collect()
            left = {type(found).__qualname__ for found in gc.garbage if _is_ours(type(found).__module__)}
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
    assert not left


async def test_a_completion_that_waits_for_its_answer_keeps_no_parsed_body(model_dir: Path) -> None:
    """The prompt is an array by then: a list of Python's integers takes ten times its memory."""
    async with running(model_dir, Script((40,), hang=True)) as cluster:
        client = await RawClient.connect(cluster.frontend.port)
        body = {"model": "tiny", "prompt": [300, 301], "max_tokens": 5, "stream": True}
        client.writer.write(request_bytes("POST", "/v1/completions", json.dumps(body).encode()))
        await cluster.until(lambda: len(cluster.workers["w0"].requests) == 1)
        assert not [found for found in gc.get_objects() if type(found) is CompletionRequest]
        await client.close()


def _is_ours(module: str) -> bool:
    return module.startswith("kvrelay.frontend") or module == "kvrelay.http.exchange"
