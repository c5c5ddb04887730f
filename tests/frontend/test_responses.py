"""``/v1/responses`` with the openai package and raw, against scripted workers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pydantic
import pytest
from tests.frontend.doubles import EOS, FakeCluster, Script, byte_level_tokenizer, running
from tests.frontend.raw_http import send
from tests.frontend.test_openai_tools import CALLS, client, script
from tests.lazily import openai

from kvrelay.core.messages import RequestRefused
from kvrelay.errors import InvalidInputError
from kvrelay.frontend.api.fields import RequestFields
from kvrelay.frontend.openai.requests import parse_body
from kvrelay.frontend.responses import ResponsesRequest, chat_of

TOKENIZER = byte_level_tokenizer()
PATH = "/v1/responses"
TOOLS = [
    {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {"a": {}}}, "strict": True},
    {"type": "function", "name": "now"},
]


def named_events(body: bytes) -> list[tuple[str, dict[str, Any]]]:
    """Name and data of each event."""
    found = []
    for text in body.decode().strip().split("\n\n"):
        name, data = text.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


def prompt_of(cluster: FakeCluster) -> str:
    return TOKENIZER.decode(list(cluster.workers["w0"].requests[-1].prompt_token_ids))


async def test_create(model_dir: Path) -> None:
    text = "Grüße 🙂."
    async with running(model_dir, script(text)) as cluster, client(cluster) as api:
        answer = await api.responses.create(
            model="tiny",
            instructions="Be brief.",
            input="Hi",
            metadata={"a": "b"},
            temperature=0.5,
            max_output_tokens=99,
        )
        assert (answer.output_text, answer.status, answer.object) == (text, "completed", "response")
        assert (answer.metadata, answer.instructions, answer.store) == ({"a": "b"}, "Be brief.", False)
        assert answer.id.startswith("resp_")
        assert prompt_of(cluster) == "[system] Be brief.\n[user] Hi\n[assistant] "
        request = cluster.workers["w0"].requests[0]
        assert (request.sampling.temperature, request.sampling.max_tokens) == (0.5, 99)
        assert answer.usage is not None
        assert answer.usage.input_tokens == len(request.prompt_token_ids)
        assert answer.usage.output_tokens == len(TOKENIZER.encode(text).ids) + 1
        assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens


async def test_input_tokens_are_those_of_the_prompt(model_dir: Path) -> None:
    async with running(model_dir, script("x"), tool_call_parser="hermes") as cluster, client(cluster) as api:
        asked = {"model": "tiny", "instructions": "Be brief.", "input": "Grüße", "tools": TOOLS}
        counted = await api.responses.input_tokens.count(**asked)
        assert not cluster.workers["w0"].requests
        answer = await api.responses.create(**asked, max_output_tokens=9)
        assert answer.usage is not None
        assert (counted.object, counted.input_tokens) == ("response.input_tokens", answer.usage.input_tokens)
        same = await api.responses.input_tokens.count(**asked, extra_body={"stream": True, "max_output_tokens": 9})
        assert same == counted, "the settings of the answer count for nothing"
        with pytest.raises(openai.BadRequestError, match="no response is kept"):
            await api.responses.input_tokens.count(model="tiny", input="x", previous_response_id="resp_1")


async def test_an_answer_that_is_cut_is_incomplete(model_dir: Path) -> None:
    async with running(model_dir, script("A long text."), script("x")) as cluster, client(cluster) as api:
        answer = await api.responses.create(model="tiny", input="Hi", max_output_tokens=2)
        assert answer.status == "incomplete"
        assert answer.incomplete_details is not None
        assert answer.incomplete_details.reason == "max_output_tokens"
        assert answer.output[0].status == "incomplete"


@pytest.mark.parametrize("per_output", [1, 1000])
async def test_stream_has_the_documented_events_in_order(model_dir: Path, per_output: int) -> None:
    async with running(model_dir, script("Hello fox.", per_output)) as cluster:
        answer = await send(cluster.frontend.port, "POST", PATH, {"input": "Hi", "stream": True})
        named = named_events(answer.body)
        assert all(name == data["type"] for name, data in named)
        assert [data["sequence_number"] for _, data in named] == list(range(len(named)))
        names = [name.removeprefix("response.") for name, _ in named]
        deltas = names.count("output_text.delta")
        assert names == [
            "created",
            "in_progress",
            "output_item.added",
            "content_part.added",
            *["output_text.delta"] * deltas,
            "output_text.done",
            "content_part.done",
            "output_item.done",
            "completed",
        ]
        assert deltas == 1 if per_output > 1 else deltas > 3
        last = named[-1][1]["response"]
        assert last["output"][0]["content"][0]["text"] == "Hello fox."
        assert last["output"][0] == named[-2][1]["item"]
        assert last["usage"]["output_tokens"] == len(TOKENIZER.encode("Hello fox.").ids) + 1


@pytest.mark.parametrize("stream", [False, True])
async def test_calls_and_their_way_back(model_dir: Path, stream: bool) -> None:
    async with running(model_dir, script(CALLS), tool_call_parser="hermes") as cluster, client(cluster) as api:
        if stream:
            async with api.responses.stream(model="tiny", input="x", tools=TOOLS) as events:
                pieces = [event async for event in events]
                answer = await events.get_final_response()
            assert sum(event.type == "response.function_call_arguments.delta" for event in pieces) > 5
        else:
            answer = await api.responses.create(model="tiny", input="x", tools=TOOLS)
        text, first, second = answer.output
        assert (text.type, answer.output_text) == ("message", "Let me see.")
        assert (first.type, first.name, json.loads(first.arguments)) == ("function_call", "add", {"a": 1, "b": "é🙂"})
        assert (second.name, second.arguments, second.status) == ("now", "{}", "completed")
        history = [
            {"role": "user", "content": "x"},
            *[item.model_dump(exclude_none=True) for item in answer.output],
            *[{"type": "function_call_output", "call_id": c.call_id, "output": "7"} for c in (first, second)],
        ]
        await api.responses.create(model="tiny", input=history, tools=TOOLS, tool_choice="none")
        prompt = prompt_of(cluster)
        assert prompt.count("[assistant] ") == 2, "text and calls of one answer are one message"
        assert "add returned:\n7" in prompt
        assert "now returned:\n7" in prompt


async def test_required_and_named_calls_are_bound_by_a_grammar(model_dir: Path) -> None:
    async with running(model_dir, script('{"name": "add", "parameters": {"a": 2}}')) as cluster, client(cluster) as api:
        add = {"type": "function", "name": "add"}
        for choice in ("required", add, {"type": "allowed_tools", "mode": "required", "tools": [add]}):
            answer = await api.responses.create(model="tiny", input="x", tools=TOOLS, tool_choice=choice)
            assert [item.type for item in answer.output] == ["function_call"]
            grammar = cluster.workers["w0"].requests[-1].sampling.grammar
            assert grammar is not None
            assert ("now" in grammar.source) == (choice == "required")
            assert answer.model_dump(exclude_unset=True)["tool_choice"] == choice


class Person(pydantic.BaseModel):
    name: str
    age: int


async def test_parse(model_dir: Path) -> None:
    async with running(model_dir, script('{"name": "Ada", "age": 36}')) as cluster, client(cluster) as api:
        answer = await api.responses.parse(model="tiny", input="x", text_format=Person)
        assert answer.output_parsed == Person(name="Ada", age=36)
        grammar = cluster.workers["w0"].requests[0].sampling.grammar
        assert grammar is not None
        assert set(json.loads(grammar.source)["properties"]) == {"name", "age"}


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_is_an_item(model_dir: Path, stream: bool) -> None:
    async with running(model_dir, script("I wonder.</think>\n\nYes."), reasoning_parser="deepseek_r1") as cluster:
        body = {"input": "x", "stream": stream, "reasoning": {"effort": "low"}}
        answer = await send(cluster.frontend.port, "POST", PATH, body)
        response = named_events(answer.body)[-1][1]["response"] if stream else answer.json
        reasoning, message = response["output"]
        assert (reasoning["type"], reasoning["content"][0]["text"]) == ("reasoning", "I wonder.")
        assert message["content"][0]["text"] == "Yes."
        usage = response["usage"]
        assert 0 < usage["output_tokens_details"]["reasoning_tokens"] < usage["output_tokens"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_deadline_or_a_refusal(model_dir: Path, stream: bool) -> None:
    refusal = RequestRefused("", "json_schema cannot be used: no", 400, retryable=False)
    async with running(model_dir, Script(refuse=refusal)) as cluster:
        form = {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}}
        answer = await send(cluster.frontend.port, "POST", PATH, {"input": "x", "text": form, "stream": stream})
        assert (answer.status, answer.json["error"]["param"]) == (400, "text.format")


async def test_a_stream_that_breaks_ends_with_failed(model_dir: Path) -> None:
    broken = Script(TOKENIZER.encode("abcdef").ids, fail_after=3)
    async with running(model_dir, broken, migration_limit=0) as cluster:
        answer = await send(cluster.frontend.port, "POST", PATH, {"input": "x", "stream": True})
        name, data = named_events(answer.body)[-1]
        assert (name, data["response"]["status"]) == ("response.failed", "failed")
        assert "engine failed" in data["response"]["error"]["message"]
        assert data["response"]["output"][0]["status"] == "incomplete"


async def test_logprobs(model_dir: Path) -> None:
    async with running(model_dir, script("ab")) as cluster:
        body = {"input": "x", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
        answer = await send(cluster.frontend.port, "POST", PATH, body)
        assert answer.status == 200
        assert cluster.workers["w0"].requests[0].sampling.logprobs == 2


def chat(**fields: object) -> list[tuple[str, object]]:
    request = parse_body(json.dumps(fields).encode(), ResponsesRequest)
    return [(message.role, message.content) for message in chat_of(request).messages]


def test_items_become_messages() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert chat(input=[{"role": "user", "content": parts}]) == [("user", "a\nb")]
    system = {"role": "developer", "content": "D"}
    assert chat(instructions="I", input=[system, {"role": "user", "content": "u"}]) == [
        ("developer", "I\n\nD"),
        ("user", "u"),
    ]
    request = parse_body(
        json.dumps(
            {
                "input": [
                    {
                        "type": "reasoning",
                        "id": "r",
                        "summary": [],
                        "content": [{"type": "reasoning_text", "text": "T"}],
                    },
                    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "A"}]},
                    {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                    {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
                    {"type": "function_call_output", "call_id": "1", "output": parts},
                    {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
                    {"type": "message", "role": "assistant", "content": "again"},
                ]
            }
        ).encode(),
        ResponsesRequest,
    )
    first, result, refusal, again = chat_of(request).messages
    assert (first.reasoning_content, first.content) == ("T", "A")
    assert [call.id for call in first.tool_calls or ()] == ["1", "2"]
    assert (result.role, result.tool_call_id, result.content) == ("tool", "1", "a\nb")
    assert (refusal.content, again.content) == ("no", "again")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"conversation": {"id": "conv_1"}}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "custom", "name": "sql"}]}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"type": "computer_call"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ({"input": [{"content": "x"}]}, "input"),
        ({"input": [{"type": "function_call_output", "call_id": "1", "output": "x"}]}, "input"),
        ({"input": [{"type": "function_call", "call_id": "1"}]}, "input"),
        ({"input": []}, "input"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"n": 2}, "n"),
        ({"temperature": -1}, "temperature"),
    ],
)
async def test_refused_by_name(model_dir: Path, fields: dict[str, object], param: str) -> None:
    async with running(model_dir, Script((10,))) as cluster:
        answer = await send(cluster.frontend.port, "POST", PATH, {"input": "x", **fields})
        assert (answer.status, answer.json["error"]["param"]) == (400, param)
        assert not cluster.workers["w0"].requests


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "input_image"}, "content of type input_image is not supported"),
        ({"type": "input_text"}, "content of type input_text needs a text"),
        ({"type": "refusal", "text": "x"}, "content of type refusal needs a refusal"),
    ],
)
def test_a_part_that_cannot_be_read_is_refused_with_the_reason(part: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidInputError, match=f"^{message}$"):
        chat(input=[{"role": "user", "content": [part]}])


def test_a_hint_names_the_field_of_this_api() -> None:
    with pytest.raises(InvalidInputError, match="use max_output_tokens"):
        RequestFields("ignore").check(ResponsesRequest, {"max_new_tokens": msgspec.Raw(b"1")})


async def test_the_client_hears_of_errors(model_dir: Path) -> None:
    async with running(model_dir, Script((EOS,), stop_at=1)) as cluster, client(cluster) as api:
        with pytest.raises(openai.BadRequestError, match="no response is kept"):
            await api.responses.create(model="tiny", input="x", previous_response_id="resp_1")
        with pytest.raises(openai.NotFoundError):
            await api.responses.create(model="other", input="x")
        answer = await api.responses.create(model="tiny", input="x", store=True)
        assert (answer.output, answer.output_text, answer.store) == ([], "", False)
