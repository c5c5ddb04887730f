"""``/v1/messages`` with the anthropic package and raw, against scripted workers."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pytest
from tests.frontend.doubles import FakeCluster, Script, byte_level_tokenizer, running
from tests.frontend.raw_http import RawClient, send
from tests.frontend.test_openai_tools import CALLS, script
from tests.frontend.test_responses import named_events, prompt_of
from tests.lazily import anthropic

from kvrelay.frontend.anthropic import CountTokensRequest, chat_of
from kvrelay.frontend.openai.requests import parse_body

TOKENIZER = byte_level_tokenizer()
PATH = "/v1/messages"
TOOLS = [
    {"name": "add", "description": "Adds.", "input_schema": {"type": "object", "properties": {"a": {}}}},
    {"name": "now", "input_schema": {"type": "object", "properties": {}}},
]
USER = {"role": "user", "content": "x"}
BODY = {"max_tokens": 99, "messages": [USER]}


def client(cluster: FakeCluster, key: str = "none") -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=cluster.url, api_key=key, max_retries=0)


async def test_create(model_dir: Path) -> None:
    tokens = tuple(TOKENIZER.encode("Grüße 🙂.").ids)
    async with running(model_dir, Script((*tokens, 0), stop_at=len(tokens) + 1, cached=2)) as cluster:
        async with client(cluster) as api:
            answer = await api.messages.create(
                model="tiny",
                max_tokens=50,
                system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
                messages=[USER],
                extra_body={"temperature": 0.5, "top_k": 3},
            )
        assert (answer.content[0].text, answer.stop_reason, answer.type) == ("Grüße 🙂.", "end_turn", "message")
        assert answer.id.startswith("msg_")
        assert prompt_of(cluster) == "[system] Be brief.\n[user] x\n[assistant] "
        request = cluster.workers["w0"].requests[0]
        assert (request.sampling.temperature, request.sampling.top_k, request.sampling.max_tokens) == (0.5, 3, 50)
        usage = answer.usage
        assert (usage.input_tokens, usage.cache_read_input_tokens) == (len(request.prompt_token_ids) - 2, 2)
        assert usage.output_tokens == len(tokens) + 1


async def test_models(model_dir: Path) -> None:
    """The official client builds its models without validation, so the fields are validated here."""
    async with running(model_dir, Script(), api_key="secret") as cluster, client(cluster, "secret") as api:
        page = await api.models.list()
        assert (page.first_id, page.last_id, page.has_more) == ("tiny", "tiny", False)
        assert [model.id async for model in page] == ["tiny"]
        for model in (page.data[0], await api.models.retrieve("tiny")):
            shown = anthropic.types.ModelInfo.model_validate(model.model_dump(mode="json"))
            assert (shown.id, shown.type, shown.display_name, shown.lifecycle) == ("tiny", "model", "tiny", "active")
            assert shown.max_input_tokens == 512
            created = model.model_dump()["created"]
            assert (shown.created_at.tzinfo, shown.created_at.timestamp()) == (datetime.UTC, created)


@pytest.mark.parametrize("stream", [False, True])
async def test_why_it_ended(model_dir: Path, stream: bool) -> None:
    async with running(model_dir, script("one two three")) as cluster, client(cluster) as api:

        async def ask(**fields: object) -> anthropic.types.Message:
            asked = {"model": "tiny", "max_tokens": 50, "messages": [USER], **fields}
            if not stream:
                return await api.messages.create(**asked)
            async with api.messages.stream(**asked) as events:
                return await events.get_final_message()

        answer = await ask(stop_sequences=["three", " two"])
        assert (answer.stop_reason, answer.stop_sequence, answer.content[0].text) == ("stop_sequence", " two", "one")
        answer = await ask(max_tokens=2)
        assert (answer.stop_reason, answer.usage.output_tokens) == ("max_tokens", 2)
        assert (await ask()).stop_reason == "end_turn"


@pytest.mark.parametrize("per_output", [1, 1000])
async def test_stream_has_the_documented_events_in_order(model_dir: Path, per_output: int) -> None:
    async with running(model_dir, script("Hello fox.", per_output)) as cluster:
        answer = await send(cluster.frontend.port, "POST", PATH, {**BODY, "stream": True})
        named = named_events(answer.body)
        assert all(name == data["type"] for name, data in named)
        names = [name for name, _ in named]
        deltas = names.count("content_block_delta")
        assert names == [
            "message_start",
            "content_block_start",
            *["content_block_delta"] * deltas,
            "content_block_stop",
            "message_delta",
            "message_stop",
        ]
        started = named[0][1]["message"]
        assert (started["content"], started["stop_reason"]) == ([], None)
        assert started["usage"]["input_tokens"] == len(cluster.workers["w0"].requests[0].prompt_token_ids)
        assert named[-2][1]["usage"]["output_tokens"] == len(TOKENIZER.encode("Hello fox.").ids) + 1


@pytest.mark.parametrize("stream", [False, True])
async def test_calls_and_their_way_back(model_dir: Path, stream: bool) -> None:
    async with running(model_dir, script(CALLS), tool_call_parser="hermes") as cluster, client(cluster) as api:
        asked = {"model": "tiny", "max_tokens": 150, "messages": [USER], "tools": TOOLS}
        if stream:
            async with api.messages.stream(**asked) as events:
                answer = await events.get_final_message()
        else:
            answer = await api.messages.create(**asked)
        text, first, second = answer.content
        assert (text.text, answer.stop_reason) == ("Let me see.", "tool_use")
        assert (first.type, first.name, first.input) == ("tool_use", "add", {"a": 1, "b": "é🙂"})
        assert (second.name, second.input) == ("now", {})
        results = [
            {"type": "tool_result", "tool_use_id": first.id, "content": [{"type": "text", "text": "7"}]},
            {"type": "tool_result", "tool_use_id": second.id, "content": "broke", "is_error": True},
            {"type": "text", "text": "And?"},
        ]
        blocks = [block.model_dump(exclude_none=True) for block in answer.content]
        history = [USER, {"role": "assistant", "content": blocks}, {"role": "user", "content": results}]
        await api.messages.create(**{**asked, "messages": history, "tool_choice": {"type": "none"}})
        prompt = prompt_of(cluster)
        assert "add returned:\n7" in prompt
        assert "now returned:\nError: broke" in prompt
        assert prompt.endswith("[user] And?\n[assistant] ")


async def test_any_and_named_calls_are_bound_by_a_grammar(model_dir: Path) -> None:
    async with running(model_dir, script('{"name": "add", "parameters": {"a": 2}}')) as cluster, client(cluster) as api:
        for choice in ({"type": "any"}, {"type": "tool", "name": "add"}):
            answer = await api.messages.create(
                model="tiny", max_tokens=100, messages=[USER], tools=TOOLS, tool_choice=choice
            )
            assert [block.type for block in answer.content] == ["tool_use"]
            grammar = cluster.workers["w0"].requests[-1].sampling.grammar
            assert grammar is not None
            assert ("now" in grammar.source) == (choice["type"] == "any")


async def test_a_schema(model_dir: Path) -> None:
    async with running(model_dir, script('{"a": 1}')) as cluster, client(cluster) as api:
        form = {"type": "json_schema", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
        await api.messages.create(model="tiny", max_tokens=50, messages=[USER], output_config={"format": form})
        grammar = cluster.workers["w0"].requests[0].sampling.grammar
        assert grammar is not None
        assert json.loads(grammar.source) == form["schema"]


async def test_a_call_that_is_cut(model_dir: Path) -> None:
    tokens = tuple(TOKENIZER.encode(CALLS[:60]).ids)
    async with running(model_dir, Script(tokens), tool_call_parser="hermes") as cluster:
        body = {**BODY, "tools": TOOLS, "max_tokens": len(tokens)}
        answer = (await send(cluster.frontend.port, "POST", PATH, body)).json
        assert answer["stop_reason"] == "max_tokens"
        assert answer["content"][1]["input"] == {}


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_is_thinking(model_dir: Path, stream: bool) -> None:
    settings = {"reasoning_parser": "deepseek_r1"}
    async with running(model_dir, script("I wonder.</think>\n\nYes."), **settings) as cluster, client(cluster) as api:
        asked = {"model": "tiny", "max_tokens": 90, "messages": [USER], "thinking": {"type": "adaptive"}}
        if stream:
            async with api.messages.stream(**asked) as events:
                answer = await events.get_final_message()
        else:
            answer = await api.messages.create(**asked)
        thinking, text = answer.content
        assert (thinking.type, thinking.thinking, text.text) == ("thinking", "I wonder.", "Yes.")
        history = [USER, {"role": "assistant", "content": [block.model_dump() for block in answer.content]}, USER]
        (_, past, _) = chat_of(parse_body(json.dumps({"messages": history}).encode(), CountTokensRequest)).messages
        assert (past.reasoning_content, past.content) == ("I wonder.", "Yes.")


async def test_an_answer_goes_on_in_the_last_message(model_dir: Path) -> None:
    async with running(model_dir, script("!")) as cluster, client(cluster) as api:
        messages = [USER, {"role": "assistant", "content": "It is"}]
        await api.messages.create(model="tiny", max_tokens=9, messages=messages)
        assert prompt_of(cluster).endswith("[assistant] It is")


async def test_counting_is_what_the_answer_says(model_dir: Path) -> None:
    async with running(model_dir, script("a")) as cluster, client(cluster) as api:
        asked = {"model": "tiny", "messages": [USER], "system": "Be brief.", "tools": TOOLS}
        counted = await api.messages.count_tokens(**asked)
        assert not cluster.workers["w0"].requests
        answer = await api.messages.create(max_tokens=9, **asked)
        assert counted.input_tokens == answer.usage.input_tokens


async def test_a_prompt_that_does_not_fit_is_counted(model_dir: Path) -> None:
    """Clients count to learn that it does not."""
    async with running(model_dir, script("a")) as cluster, client(cluster) as api:
        one, many = [
            await api.messages.count_tokens(model="tiny", messages=[{"role": "user", "content": "x" * count}])
            for count in (1, 20_000)
        ]
        assert many.input_tokens == one.input_tokens + 19_999


async def test_the_tool_runner_sends_whole_histories_instead_of_a_thread(model_dir: Path) -> None:
    @anthropic.beta_async_tool
    async def now() -> str:
        """The time."""
        return "noon"

    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    async with running(model_dir, script(call), tool_call_parser="hermes") as cluster, client(cluster) as api:
        runner = api.beta.messages.tool_runner(
            model="tiny", max_tokens=99, messages=[USER], tools=[now], max_iterations=2
        )
        assert [message.stop_reason async for message in runner] == ["tool_use", "tool_use"]
        assert prompt_of(cluster).count("noon") == 1


async def test_a_stream_that_breaks_ends_with_an_error(model_dir: Path) -> None:
    broken = Script(TOKENIZER.encode("abcdef").ids, fail_after=3)
    async with running(model_dir, broken, migration_limit=0) as cluster, client(cluster) as api:
        answer = await send(cluster.frontend.port, "POST", PATH, {**BODY, "stream": True})
        name, data = named_events(answer.body)[-1]
        assert (name, data["type"], data["error"]["type"]) == ("error", "error", "overloaded_error")
        with pytest.raises(anthropic.APIStatusError, match="engine failed"):
            async with api.messages.stream(model="tiny", max_tokens=9, messages=[USER]) as events:
                await events.until_done()


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
        ({"context_management": {"edits": []}}, "context_management"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "image"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "content of type text needs a text"),
        ({"system": [{"type": "text"}]}, "content of type text needs a text"),
        ({"messages": [{"role": "user", "content": []}]}, "a message of role user has no content"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_result"}]}]}, "tool_result"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1"}]}]}, "messages"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "1"}]}]}, "messages"),
        ({"messages": [USER, {"role": "assistant", "content": ""}]}, "messages: the last message"),
        ({"messages": [{"role": "assistant", "content": [{"type": "thinking"}]}]}, "messages: the last message"),
        ({"system": [{"type": "image"}]}, "system"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
        ({"stop": ["a"]}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"seed": 1}, "seed"),
    ],
)
async def test_refused_by_name(model_dir: Path, fields: dict[str, object], word: str) -> None:
    async with running(model_dir, Script((10,))) as cluster:
        answer = await send(cluster.frontend.port, "POST", PATH, {**BODY, **fields})
        error = answer.json
        assert (answer.status, error["type"], error["error"]["type"]) == (400, "error", "invalid_request_error")
        assert word in error["error"]["message"]
        assert not cluster.workers["w0"].requests


async def test_keys_and_errors_of_the_client(model_dir: Path) -> None:
    async with running(model_dir, script("a"), api_key="secret") as cluster:
        asked = {"model": "tiny", "max_tokens": 9, "messages": [USER]}
        async with client(cluster, "secret") as api:
            assert (await api.messages.create(**asked)).content[0].text == "a"
            with pytest.raises(anthropic.NotFoundError):
                await api.messages.create(**{**asked, "model": "other"})
        async with client(cluster, "wrong") as api:
            with pytest.raises(anthropic.AuthenticationError) as caught:
                await api.messages.create(**asked)
            assert caught.value.body["error"]["type"] == "authentication_error"
        port = cluster.frontend.port
        bearer = {"authorization": "Bearer secret"}
        assert (await send(port, "POST", PATH, {**BODY}, bearer)).status == 200
        stolen = {"x-api-key": "secret"}
        assert (await send(port, "POST", "/v1/completions", {"prompt": "a"}, stolen)).status == 401


async def test_versions(model_dir: Path) -> None:
    async with running(model_dir, script("a")) as cluster:
        port = cluster.frontend.port
        for version, status in (("2023-06-01", 200), ("2026-10-21", 200), ("2023-01-01", 400), ("x", 400)):
            answer = await send(port, "POST", PATH, {**BODY}, {"anthropic-version": version})
            assert answer.status == status
        assert "anthropic-version" in answer.json["error"]["message"]


async def test_a_limit_that_does_not_fit_is_told_in_words_that_clients_read(model_dir: Path) -> None:
    """As Anthropic writes it: clients then ask for less. To hear of a prompt that is too long they would shorten the
    conversation, again and again."""
    async with running(model_dir, script("a")) as cluster:
        answer = await send(cluster.frontend.port, "POST", PATH, {**BODY, "max_tokens": 4096})
        counted = await send(cluster.frontend.port, "POST", f"{PATH}/count_tokens", {"messages": [USER]})
        assert answer.json["error"]["message"] == (
            f"input length and `max_tokens` exceed context limit: {counted.json['input_tokens']} + 4096 > 512, "
            "decrease input length or `max_tokens` and try again"
        )
        long = {"role": "user", "content": "x " * 600}
        answer = await send(cluster.frontend.port, "POST", PATH, {**BODY, "messages": [long]})
        assert answer.json["error"]["message"].startswith("prompt is too long: ")


CHUNKED = b"POST %s HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n800\r\n"
HTTP_ERRORS = [
    (b"POST %s HTTP/1.1\r\nhost: x\r\nbad header\r\n\r\n", 400, "invalid_request_error"),
    (b"POST %s HTTP/1.1\r\n\r\n", 400, "invalid_request_error"),
    (b"POST %s HTTP/2.0\r\nhost: x\r\n\r\n", 505, "api_error"),
    (b"POST %s HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip, chunked\r\n\r\n", 501, "api_error"),
    (b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: 9999\r\n\r\n", 413, "request_too_large"),
    (CHUNKED + b"x" * 2048, 413, "request_too_large"),
    (b"POST %s HTTP/1.1\r\nhost: x\r\na: " + b"x" * 70_000, 431, "invalid_request_error"),
    (b"GET %s HTTP/1.1\r\nhost: x\r\n\r\n", 405, "invalid_request_error"),
    (b"POST %s/batches HTTP/1.1\r\nhost: x\r\n\r\n", 404, "not_found_error"),
]


@pytest.mark.parametrize("path", [PATH, "/v1/messages/count_tokens", "/v1/chat/completions"])
async def test_errors_before_the_body_have_the_shape_of_their_api(model_dir: Path, path: str) -> None:
    async with running(model_dir, max_body_bytes=1024) as cluster:
        for head, status, kind in HTTP_ERRORS:
            client = await RawClient.connect(cluster.frontend.port)
            client.writer.write(head.replace(b"%s", path.encode()))
            answer = await client.read_answer()
            await client.close()
            assert answer.status == status
            if path.startswith(PATH):
                assert (answer.json["type"], answer.json["error"]["type"]) == ("error", kind)
                assert set(answer.json["error"]) == {"type", "message"}
            else:
                assert answer.error["message"]
