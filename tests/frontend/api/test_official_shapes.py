"""Every event and every whole answer is valid, strictly, under the models of the official clients.

The clients themselves build their models without validation, so they would not notice a missing field.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter
from tests.frontend.doubles import byte_level_tokenizer, running
from tests.frontend.raw_http import events, send
from tests.frontend.test_openai_tools import CALLS, script
from tests.frontend.test_responses import named_events
from tests.lazily import anthropic, openai

TOKENIZER = byte_level_tokenizer()
USER = {"role": "user", "content": "x"}
PARAMETERS = {"type": "object", "properties": {"a": {}, "b": {}}}
THOUGHT = "<think>Hm.</think>Yes 🙂."
NUM_TOKENS = len(TOKENIZER.encode(CALLS).ids)
CUTS = (*range(1, NUM_TOKENS, 8), NUM_TOKENS + 1)
"""Limits on the answer's tokens: a stream is cut in each part of a call, and one is whole."""
FUNCTIONS = [{"name": name, "parameters": PARAMETERS} for name in ("add", "now")]


@pytest.mark.parametrize("text", [CALLS, THOUGHT])
async def test_messages(model_dir: Path, text: str) -> None:
    an_event: TypeAdapter[Any] = TypeAdapter(anthropic.types.RawMessageStreamEvent)
    tools = [{"name": tool["name"], "input_schema": tool["parameters"]} for tool in FUNCTIONS]
    async with running(model_dir, script(text), tool_call_parser="hermes", reasoning_parser="qwen3") as cluster:
        for limit in CUTS:
            body = {"messages": [USER], "max_tokens": limit, "tools": tools}
            whole = await send(cluster.frontend.port, "POST", "/v1/messages", body)
            message = anthropic.types.Message.model_validate_json(whole.body)
            stream = await send(cluster.frontend.port, "POST", "/v1/messages", {**body, "stream": True})
            parsed = [an_event.validate_python(event) for _, event in named_events(stream.body)]
            assert [event.type for event in parsed][-2:] == ["message_delta", "message_stop"]
            assert parsed[-2].delta.stop_reason == message.stop_reason
            opened = [event.index for event in parsed if event.type == "content_block_start"]
            assert opened == [event.index for event in parsed if event.type == "content_block_stop"]
            assert len(opened) == len(message.content)


@pytest.mark.parametrize("text", [CALLS, THOUGHT])
async def test_responses(model_dir: Path, text: str) -> None:
    an_event: TypeAdapter[Any] = TypeAdapter(openai.types.responses.ResponseStreamEvent)
    tools = [{"type": "function", "strict": False, **function} for function in FUNCTIONS]
    async with running(model_dir, script(text), tool_call_parser="hermes", reasoning_parser="qwen3") as cluster:
        for limit in CUTS:
            body = {"input": "x", "max_output_tokens": limit, "tools": tools}
            whole = await send(cluster.frontend.port, "POST", "/v1/responses", body)
            response = openai.types.responses.Response.model_validate_json(whole.body)
            stream = await send(cluster.frontend.port, "POST", "/v1/responses", {**body, "stream": True})
            parsed = [an_event.validate_python(event) for _, event in named_events(stream.body)]
            assert [event.sequence_number for event in parsed] == list(range(len(parsed)))
            last = parsed[-1].response
            assert (last.status, len(last.output)) == (response.status, len(response.output))


@pytest.mark.parametrize("text", [CALLS, THOUGHT])
async def test_chats(model_dir: Path, text: str) -> None:
    tools = [{"type": "function", "function": function} for function in FUNCTIONS]
    async with running(model_dir, script(text), tool_call_parser="hermes", reasoning_parser="qwen3") as cluster:
        for limit in CUTS:
            body = {"messages": [USER], "max_tokens": limit, "tools": tools, "stream_options": {"include_usage": True}}
            stream = await send(cluster.frontend.port, "POST", "/v1/chat/completions", {**body, "stream": True})
            chunks = [openai.types.chat.ChatCompletionChunk.model_validate(event) for event in events(stream.body)]
            del body["stream_options"]
            whole = await send(cluster.frontend.port, "POST", "/v1/chat/completions", body)
            (choice,) = openai.types.chat.ChatCompletion.model_validate_json(whole.body).choices
            assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == choice.finish_reason
            usage = chunks[-1].usage
            assert usage is not None
            assert usage.completion_tokens == min(limit, len(TOKENIZER.encode(text).ids) + 1)
