"""What a request has needed is freed when it ends: a collection of the garbage would hold every stream up."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from tests.frontend.doubles import Script, running
from tests.frontend.raw_http import send

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


def _is_ours(module: str) -> bool:
    return module.startswith("kvrelay.frontend") or module == "kvrelay.http.exchange"
