"""Agents' libraries against real processes with a prefill worker: each gets valid calls and objects, though the mock
engine draws its tokens, because grammars enforce them. A library is imported by its tests, not by each lane."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pydantic
import pytest
from tests.lazily import anthropic, openai
from tests.patience import PATIENCE_S
from tests.system.serving import Serve, by_threshold, ending_cleanly, openai_client

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

SERVE = ("--engine", "mock", "--speedup-ratio", "0", "--prefill", "1", "--decode", "1", *by_threshold(32))
QUESTION = "What is the weather by the sea, and how are the people who live there?"
INSTRUCTOR = Path(sys.prefix) / "instructor"
"""An environment of its own: it wants other versions of openai's dependencies than openai does."""


class Weather(pydantic.BaseModel):
    """The weather of a place."""

    place: Literal["sea", "hills"]
    windy: bool
    days: int = pydantic.Field(ge=1, le=9)


def get_weather(place: Literal["sea", "hills"]) -> str:
    """Look up the weather of a place."""
    return f"fine at the {place}"


@pytest.fixture(scope="module")
def server() -> Iterator[Serve]:
    with ending_cleanly(SERVE) as running:
        yield running


@pytest.fixture
def api(server: Serve) -> Iterator[openai.OpenAI]:
    with openai_client(server) as client:
        yield client


def test_openai_responses(api: openai.OpenAI, server: Serve) -> None:
    asked: Any = {"model": server.model, "input": QUESTION, "max_output_tokens": 200}
    assert isinstance(api.responses.parse(**asked, text_format=Weather).output_parsed, Weather)
    tool: Any = openai.pydantic_function_tool(Weather, name="report")["function"]
    tools: Any = [{"type": "function", **tool}]
    with api.responses.stream(**asked, tools=tools, tool_choice="required", parallel_tool_calls=False) as stream:
        final = stream.get_final_response()
    (call,) = final.output
    assert call.type == "function_call"
    Weather.model_validate_json(call.arguments)
    history: Any = [
        {"role": "user", "content": QUESTION},
        call.model_dump(exclude_none=True),
        {"type": "function_call_output", "call_id": call.call_id, "output": "noted"},
    ]
    again = api.responses.create(model=server.model, input=history, max_output_tokens=8)
    assert again.usage is not None
    assert again.usage.output_tokens <= 8


def test_anthropic(server: Serve) -> None:
    tool: Any = {"name": "report", "input_schema": Weather.model_json_schema()}
    asked: Any = {
        "model": server.model, "max_tokens": 200, "messages": [{"role": "user", "content": QUESTION}],
        "tools": [tool], "tool_choice": {"type": "tool", "name": "report"},
    }  # fmt: skip
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        whole = client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            streamed = stream.get_final_message()
    for answer in (whole, streamed):
        (block,) = answer.content
        assert (block.type, answer.stop_reason) == ("tool_use", "tool_use")
        Weather.model_validate(block.input)


@pytest.fixture
def chat(server: Serve) -> Any:
    from langchain_openai import ChatOpenAI

    settings: Any = {"model": server.model, "base_url": f"{server.url}/v1", "api_key": "none"}
    return ChatOpenAI(**settings, max_retries=0, timeout=PATIENCE_S, max_tokens=200)


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_structured_output(chat: Any, method: Any) -> None:
    assert isinstance(chat.with_structured_output(Weather, method=method).invoke(QUESTION), Weather)


def test_langchain_tools(chat: Any) -> None:
    bound = chat.bind_tools([get_weather], tool_choice="any", parallel_tool_calls=False)
    answer = bound.invoke(QUESTION)
    (call,) = answer.tool_calls
    assert (call["name"], call["args"]["place"] in ("sea", "hills")) == ("get_weather", True)
    whole = None
    for chunk in bound.stream(QUESTION):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    assert [call["name"] for call in whole.tool_calls] == ["get_weather"]


@pytest.mark.parametrize("kind", ["OpenAIChatModel", "OpenAIResponsesModel"])
@pytest.mark.parametrize("form", ["tool", "native"])
async def test_pydantic_ai(server: Serve, kind: str, form: str) -> None:
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models import openai as models
    from pydantic_ai.providers.openai import OpenAIProvider

    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        model = getattr(models, kind)(server.model, provider=OpenAIProvider(openai_client=client))
        wanted: Any = Weather if form == "tool" else NativeOutput(Weather)
        agent: Agent[None, Weather] = Agent(model, output_type=wanted, model_settings={"max_tokens": 200})
        assert isinstance((await agent.run(QUESTION)).output, Weather)


@pytest.mark.matrix
def test_instructor(server: Serve) -> None:
    python = INSTRUCTOR / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(INSTRUCTOR)], check=True)
    if not (INSTRUCTOR / "installed").exists():
        install = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", "instructor==1.17.0"]
        if subprocess.run(install, check=False, capture_output=True).returncode:
            pytest.skip("the package index does not give instructor")
        (INSTRUCTOR / "installed").touch()
    script = Path(__file__).with_name("instructor_client.py")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(python), str(script), f"{server.url}/v1", server.model]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=env, timeout=4 * PATIENCE_S)
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == 3
    for answer in answers:
        Weather.model_validate(answer)
