"""Models of the zoo on real vLLM: texts, calls and grammars as on kvrelay's own engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.patience import PATIENCE_S
from tests.system.serving import Serve
from tests.zoo.cluster import CHAT, COMPLETIONS, MESSAGES, MUST_CALL, RESPONSES, body_of, seen_whole, with_tools
from tests.zoo.models import zoo_model
from tests.zoo.vocabularies import END, OTHER, SENTENCEPIECE, Kind, bytes_of

pytestmark = [pytest.mark.vllm, pytest.mark.system, pytest.mark.timeout(600)]

PROMPT = "q"
ENGINE = (
    *("--engine", "vllm", "--dtype", "float32", "--enforce-eager", "--kv-cache-memory", "256MiB"),
    *("--engine-args", '{"block_size": 32}', "--max-model-len", "1024", "--prefill", "0", "--decode", "1"),
)


@pytest.mark.parametrize("kind", [Kind.QWEN_SPECIAL, Kind.LLAMA2])
def test_answers(kind: Kind, tmp_path: Path) -> None:
    call = ("<tool_call>", '\n{"name": "add", "arguments": {"a": 7}}\n', "</tool_call>")
    scripts = (PROMPT, " there", OTHER, " cat", *bytes_of(kind, "🙂"), "!", *call, "?")
    # Only the list in generation_config.json has the end of this answer.
    model = zoo_model(tmp_path / "zoo", kind, (*scripts, END), generation_ends=("?",))
    with Serve((str(model.directory), *ENGINE, "--tool-call-parser", "hermes")) as server:

        def answer(path: str, body: dict[str, object]) -> Any:
            response = httpx.post(server.url + path, json={**body, "model": server.model}, timeout=2 * PATIENCE_S)
            assert response.status_code == 200, response.text
            return seen_whole(path, response.json())

        text = model.decoded(*scripts[1:-1], after=PROMPT)
        for path in (COMPLETIONS, CHAT, RESPONSES, MESSAGES):
            assert answer(path, body_of(path, PROMPT)).text == text
        for path in (CHAT, RESPONSES, MESSAGES):
            seen = answer(path, with_tools(path))
            assert (seen.text, seen["calls"]) == (" there cat🙂!", [("add", {"a": 7})])
        assert answer(COMPLETIONS, body_of(COMPLETIONS, PROMPT, stop=[" c"])).text == " there"
        # Where nothing is preferred, vLLM's library lets the least id be written without end: a tab in SentencePiece.
        for path, choices in MUST_CALL.items() if kind not in SENTENCEPIECE else ():
            single = {"parallel_tool_calls": False} if path != MESSAGES else {}
            seen = answer(path, with_tools(path, choices[0], max_tokens=200, **single))
            assert seen["calls"][0] == ("add", {"a": 7})
        for wanted in ("<tool_call>x", "yes", " é🙂"):
            seen = answer(COMPLETIONS, body_of(COMPLETIONS, PROMPT, structured_outputs={"choice": [wanted]}))
            assert seen.text == wanted
        for source in ('start: "a" "b"', 'root ::= "a" "b"'):
            seen = answer(COMPLETIONS, body_of(COMPLETIONS, PROMPT, structured_outputs={"grammar": source}))
            assert seen.text == "ab"
        short = answer(COMPLETIONS, body_of(COMPLETIONS, PROMPT, min_tokens=20, max_tokens=24))
        assert len(short.text) >= len(text)
        assert server.workers("both"), "the worker lives"
