"""Tools, parsed answers and reasoning with the openai package, against scripted workers."""

from __future__ import annotations

import json
from pathlib import Path

import pydantic
import pytest
from tests.frontend.doubles import EOS, FakeCluster, Script, byte_level_tokenizer, running
from tests.frontend.raw_http import events, send
from tests.lazily import openai

from kvrelay.core.handoff import OrderPolicy
from kvrelay.core.messages import SessionPaused
from kvrelay.planner import Traffic

TOKENIZER = byte_level_tokenizer()
CALLS = (
    'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é🙂"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}},
    {"type": "function", "function": {"name": "now"}},
]
USER = {"role": "user", "content": "x"}
CHAT = "/v1/chat/completions"


def script(text: str, per_output: int = 1) -> Script:
    """The text and the end of sequence."""
    tokens = (*TOKENIZER.encode(text).ids, EOS)
    return Script(tokens, stop_at=len(tokens), per_output=per_output)


def client(cluster: FakeCluster) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=cluster.url + "/v1", api_key="none", max_retries=0)


async def test_calls_of_a_whole_answer_and_their_way_back(model_dir: Path) -> None:
    async with running(model_dir, script(CALLS), tool_call_parser="hermes") as cluster, client(cluster) as api:
        answer = await api.chat.completions.create(model="tiny", messages=[USER], tools=TOOLS)
        choice = answer.choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Let me see."
        assert choice.message.tool_calls is not None
        first, second = choice.message.tool_calls
        assert (first.function.name, json.loads(first.function.arguments)) == ("add", {"a": 1, "b": "é🙂"})
        assert (second.function.name, second.function.arguments) == ("now", "{}")
        assert first.id != second.id
        results = [{"role": "tool", "tool_call_id": call.id, "content": "7"} for call in (first, second)]
        history = [USER, choice.message.model_dump(exclude_none=True), *results]
        again = await api.chat.completions.create(model="tiny", messages=history, tools=TOOLS, tool_choice="none")
        assert again.choices[0].message.content == CALLS
        assert again.choices[0].finish_reason == "stop"
        prompt = TOKENIZER.decode(cluster.workers["w0"].requests[-1].prompt_token_ids)
        assert "add returned:\n7" in prompt
        assert "You can call" not in prompt, "tool_choice none: the model hears of no tools"


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_the_worker_hears_which_tools_a_session_waits_for(model_dir: Path, is_streamed: bool) -> None:
    async with running(model_dir, script(CALLS), tool_call_parser="hermes") as cluster, client(cluster) as api:
        worker = cluster.workers["w0"]
        if is_streamed:
            async with api.chat.completions.stream(model="tiny", messages=[USER], tools=TOOLS) as stream:
                await stream.get_final_completion()
        else:
            await api.chat.completions.create(model="tiny", messages=[USER], tools=TOOLS)
        await cluster.until(lambda: len(worker.paused) == 1)
        assert worker.paused == [SessionPaused(worker.requests[0].request_id, "add+now")]
        hints: dict[str, object] = {"tool": "bash", "retain_s": 2.5}
        for hint in (hints, {"release": True}):
            await api.chat.completions.create(model="tiny", messages=[USER], extra_body={"kv_hints": hint})
        await cluster.until(lambda: len(worker.paused) == 3)
        names = [request.request_id for request in worker.requests]
        assert worker.paused[1:] == [
            SessionPaused(names[1], "bash", within_s=2.5),
            SessionPaused(names[2], is_over=True),
        ]
        await api.chat.completions.create(model="tiny", messages=[USER])
        assert len(worker.paused) == 3, "nothing is known of this one"


@pytest.mark.parametrize("hints", [{"retain_s": -1}, {"retain_s": 1e9}, {"retain": 3}, {"tool": 3}, {"prefetch": 1}, 3])
async def test_bad_hints_are_refused_by_name(model_dir: Path, hints: object) -> None:
    async with running(model_dir, script("x")) as cluster, client(cluster) as api:
        with pytest.raises(openai.BadRequestError) as refused:
            await api.chat.completions.create(model="tiny", messages=[USER], extra_body={"kv_hints": hints})
        assert "kv_hints" in str(refused.value.body)
        assert not cluster.workers["w0"].requests


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_prefetch_asks_the_worker_for_no_answer(model_dir: Path, is_streamed: bool) -> None:
    bodies: dict[str, dict[str, object]] = {
        "/v1/completions": {"prompt": "x", "min_tokens": 2},
        CHAT: {"messages": [USER], "tools": TOOLS, "max_tokens": 5},
        "/v1/responses": {"input": "x"},
        "/v1/messages": {"messages": [USER], "max_tokens": 5},
    }
    async with running(model_dir, script("never said"), order=OrderPolicy.PREFILL_FIRST) as cluster:
        assert cluster.frontend is not None
        port, worker, hints = cluster.frontend.port, cluster.workers["w0"], {"prefetch": True, "tool": "bash"}
        for path, body in bodies.items():
            answer = await send(port, "POST", path, {**body, "model": "tiny", "kv_hints": hints, "stream": is_streamed})
            assert (answer.status, b"never" in answer.body) == (200, False)
        assert [request.sampling.max_tokens for request in worker.requests] == [0] * 4
        assert all(request.sampling.is_prefetch for request in worker.requests)
        scored = await send(port, "POST", "/v1/completions", {"prompt": "x", "echo": True, "kv_hints": hints})
        assert (scored.status, scored.error["param"]) == (400, "kv_hints")
        assert not worker.paused, "the worker knows what a prefetch waits for"
        counts = cluster.frontend.metrics.of("tiny")
        assert counts.traffic == Traffic(), "a planner must not make room for prompts that no one computes"
        assert (counts.num_in_time, sum(counts.latencies.ttft.counts), sum(counts.duration.counts)) == (0, 0, 0)
        assert not cluster.frontend.cluster.count_places(), "no prefill was placed"


@pytest.mark.parametrize("per_output", [1, 4, 1000])
async def test_streamed_deltas_add_up(model_dir: Path, per_output: int) -> None:
    async with (
        running(model_dir, script(CALLS, per_output), tool_call_parser="hermes") as cluster,
        client(cluster) as api,
    ):
        async with api.chat.completions.stream(model="tiny", messages=[USER], tools=TOOLS) as stream:
            final = await stream.get_final_completion()
        choice = final.choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Let me see."
        assert choice.message.tool_calls is not None
        calls = [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]
        assert calls == [("add", {"a": 1, "b": "é🙂"}), ("now", {})]


async def test_raw_events_name_each_call_once(model_dir: Path) -> None:
    async with running(model_dir, script(CALLS), tool_call_parser="hermes") as cluster:
        body = {"messages": [USER], "tools": TOOLS, "stream": True, "n": 2}
        answer = await send(cluster.frontend.port, "POST", CHAT, body)
        deltas = [(c["index"], c["delta"]) for event in events(answer.body) for c in event["choices"]]
        for index in (0, 1):
            own = [delta for choice, delta in deltas if choice == index]
            named = [call for delta in own for call in delta.get("tool_calls", ()) if "id" in call]
            assert [(call["index"], call["type"], call["function"]["name"]) for call in named] == [
                (0, "function", "add"),
                (1, "function", "now"),
            ]
            assert "".join(delta.get("content", "") for delta in own) == "Let me see."
            pieces = [call for delta in own for call in delta.get("tool_calls", ()) if call["index"] == 0]
            assert len(pieces) > 5, "arguments are streamed as they are written"


async def test_a_call_that_is_cut_says_length(model_dir: Path) -> None:
    tokens = tuple(TOKENIZER.encode(CALLS[:60]).ids)
    async with running(model_dir, Script(tokens), tool_call_parser="hermes") as cluster:
        body = {"messages": [USER], "tools": TOOLS, "max_tokens": len(tokens)}
        whole = (await send(cluster.frontend.port, "POST", CHAT, body)).json["choices"][0]
        assert whole["finish_reason"] == "length"
        assert whole["message"]["tool_calls"][0]["function"]["arguments"] == CALLS[53:60]
        stream = events((await send(cluster.frontend.port, "POST", CHAT, {**body, "stream": True})).body)
        assert [c["finish_reason"] for e in stream for c in e["choices"]][-1] == "length"


async def test_without_a_known_template_calls_are_plain_json(model_dir: Path) -> None:
    """The tiny model's template knows no tools: they are described to the model in words."""
    async with running(model_dir, script('{"name": "add", "parameters": {"a": 2}}')) as cluster, client(cluster) as api:
        answer = await api.chat.completions.create(model="tiny", messages=[USER], tools=TOOLS)
        message = answer.choices[0].message
        assert message.content is None
        assert message.tool_calls is not None
        assert message.tool_calls[0].function.arguments == '{"a": 2}'
        request = cluster.workers["w0"].requests[0]
        assert "You can call these functions" in TOKENIZER.decode(request.prompt_token_ids)
        assert request.sampling.grammar is None
        await api.chat.completions.create(model="tiny", messages=[USER], tools=TOOLS, tool_choice="required")
        grammar = cluster.workers["w0"].requests[1].sampling.grammar
        assert grammar is not None
        assert '"add"' in grammar.source.replace("\\", "")


class Person(pydantic.BaseModel):
    name: str
    age: int


async def test_parse(model_dir: Path) -> None:
    async with running(model_dir, script('{"name": "Ada", "age": 36}')) as cluster, client(cluster) as api:
        answer = await api.chat.completions.parse(model="tiny", messages=[USER], response_format=Person)
        assert answer.choices[0].message.parsed == Person(name="Ada", age=36)
        grammar = cluster.workers["w0"].requests[0].sampling.grammar
        assert grammar is not None
        assert set(json.loads(grammar.source)["properties"]) == {"name", "age"}


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_stands_apart(model_dir: Path, stream: bool) -> None:
    text = "I wonder.</think>\n\nYes."
    async with running(model_dir, script(text), reasoning_parser="deepseek_r1") as cluster:
        body = {"messages": [USER], "stream": stream, "logprobs": False}
        answer = await send(cluster.frontend.port, "POST", CHAT, body)
        if stream:
            deltas = [c["delta"] for event in events(answer.body) for c in event["choices"]]
            message = {
                name: "".join(delta.get(name, "") for delta in deltas)
                for name in ("content", "reasoning", "reasoning_content")
            }
        else:
            message = answer.json["choices"][0]["message"]
        assert (message["content"], message["reasoning_content"]) == ("Yes.", "I wonder.")
        assert message["reasoning"] == "I wonder."


async def test_a_bound_answer_has_no_reasoning(model_dir: Path) -> None:
    async with running(model_dir, script('{"a": 1}'), reasoning_parser="deepseek_r1") as cluster:
        body = {"messages": [USER], "response_format": {"type": "json_object"}}
        message = (await send(cluster.frontend.port, "POST", CHAT, body)).json["choices"][0]["message"]
        assert message["content"] == '{"a": 1}'
        assert not {"reasoning", "reasoning_content"} & message.keys()
