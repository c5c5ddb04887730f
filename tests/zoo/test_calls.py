"""Calls, reasoning and constrained answers where markers are one token, special or not, or no token at all.

Expected values are what vLLM's parsers return for the same tokens, and what grammars say.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from tests.zoo.cluster import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    MUST_CALL,
    RESPONSES,
    ZooCluster,
    body_of,
    with_tools,
    zoo_cluster,
)
from tests.zoo.models import ZooModel, zoo_model
from tests.zoo.vocabularies import END, MARKERS, OTHER, SENTENCEPIECE, Kind

pytestmark = pytest.mark.slow

PROMPT = "q"
CHATS = (CHAT, RESPONSES, MESSAGES)
HERMES_CALL = ('\n{"name": "add", "arguments": {"a": 7}}\n',)
SCRIPTS: dict[str, tuple[Kind, str, tuple[str, ...]]] = {
    "qwen": (Kind.QWEN, "hermes", ("<tool_call>", *HERMES_CALL, "</tool_call>")),
    "hermes": (Kind.QWEN_SPECIAL, "hermes", ("<tool_call>", *HERMES_CALL, "</tool_call>")),
    "qwen3": (Kind.QWEN_SPECIAL, "qwen3", ("<tool_call>", *HERMES_CALL, "</tool_call>")),
    "no-token": (Kind.BYTE_LEVEL, "hermes", ("<tool_call>", *HERMES_CALL, "</tool_call>")),
    "mistral": (Kind.MISTRAL, "mistral", ("[TOOL_CALLS]", '[{"name": "add", "arguments": {"a": 7}}]')),
    "tekken": (Kind.TEKKEN, "mistral", ("[TOOL_CALLS]", "add", "[ARGS]", '{"a": 7}')),
    "call-id": (Kind.TEKKEN, "mistral", ("[TOOL_CALLS]", "add", "[CALL_ID]", "123456789", "[ARGS]", '{"a": 7}')),
}


def half_of_kinds(first: int) -> list[Any]:
    """Every other one from ``first`` on; the others are the matrix's. ``test_text_that_spells_a_marker_is_text`` has
    all."""
    return [pytest.param(kind, marks=[pytest.mark.matrix] * (number % 2 != first)) for number, kind in enumerate(Kind)]


async def each_way(cluster: ZooCluster, make: Any) -> dict[tuple[str, bool], Any]:
    return {
        (path, stream): await cluster.ask(path, make(path), stream=stream) for path in CHATS for stream in (False, True)
    }


@pytest.mark.parametrize("case", SCRIPTS)
async def test_a_call_is_a_call(case: str, tmp_path: Path) -> None:
    kind, parser, call = SCRIPTS[case]
    model = zoo_model(tmp_path / "zoo", kind, (PROMPT, "Sure.", OTHER, *call, END))
    async with zoo_cluster(model.directory, tool_call_parser=parser) as cluster:
        for way, seen in (await each_way(cluster, with_tools)).items():
            assert (way, seen.text, seen["calls"]) == (way, "Sure.", [("add", {"a": 7})])
        without = await cluster.ask(CHAT, body_of(CHAT, PROMPT))
        expected = model.decoded("Sure.", OTHER, *call, after=PROMPT)
        assert without.text == expected, "without tools special markers are skipped, as in vLLM"


async def test_llama3_writes_json_after_its_tag_and_ends_with_eom(tmp_path: Path) -> None:
    call = ("<|python_tag|>", '{"name": "add", "parameters": {"a": 7}}')
    script = (PROMPT, *call, "<|eom_id|>", "never")
    model = zoo_model(tmp_path / "zoo", Kind.LLAMA3, script, generation_ends=(END, "<|eom_id|>"))
    async with zoo_cluster(model.directory, tool_call_parser="llama3_json") as cluster:
        for way, seen in (await each_way(cluster, with_tools)).items():
            assert (way, seen.text, seen["calls"]) == (way, "", [("add", {"a": 7})])


@pytest.mark.parametrize("parser", ["mistral", "llama3_json", "hermes"])
@pytest.mark.parametrize("kind", [Kind.TEKKEN, Kind.LLAMA3, Kind.QWEN_SPECIAL, Kind.LLAMA2])
async def test_other_special_tokens_are_no_content(kind: Kind, parser: str, tmp_path: Path) -> None:
    model = zoo_model(tmp_path / "zoo", kind, (PROMPT, " there", OTHER, " cat", END))
    async with zoo_cluster(model.directory, tool_call_parser=parser) as cluster:
        for way, seen in (await each_way(cluster, with_tools)).items():
            assert (way, seen.text.lstrip(), seen["calls"]) == (way, "there cat", [])
        shown = await cluster.ask(CHAT, with_tools(CHAT, skip_special_tokens=False))
        assert shown.text.lstrip() == f"there{OTHER} cat", "a client may ask for all"


@pytest.mark.parametrize("parser", ["qwen3", "deepseek_r1"])
@pytest.mark.parametrize("kind", [Kind.QWEN, Kind.QWEN_SPECIAL, Kind.LLAMA2])
async def test_reasoning_stands_apart(kind: Kind, parser: str, tmp_path: Path) -> None:
    model = zoo_model(tmp_path / "zoo", kind, (PROMPT, "<think>", "Hm.", "</think>", OTHER, "Yes.", END))
    async with zoo_cluster(model.directory, reasoning_parser=parser) as cluster:
        for way, seen in (await each_way(cluster, lambda path: body_of(path, PROMPT))).items():
            assert (way, seen["reasoning"], seen.text) == (way, "Hm.", "Yes.")


async def test_reasoning_and_then_a_call(tmp_path: Path) -> None:
    script = (PROMPT, "<think>", "Hm.", "</think>", "<tool_call>", *HERMES_CALL, "</tool_call>", END)
    model = zoo_model(tmp_path / "zoo", Kind.QWEN_SPECIAL, script)
    async with zoo_cluster(model.directory, reasoning_parser="qwen3", tool_call_parser="hermes") as cluster:
        for way, seen in (await each_way(cluster, with_tools)).items():
            assert (way, seen["reasoning"], seen.text, seen["calls"]) == (way, "Hm.", "", [("add", {"a": 7})])


DIALECTS = {Kind.MISTRAL: "mistral", Kind.TEKKEN: "mistral", Kind.LLAMA3: "llama3_json"}


@pytest.mark.parametrize("kind", half_of_kinds(0))
async def test_a_call_that_must_be(kind: Kind, tmp_path: Path) -> None:
    """The model prefers its end, so what it writes is what the grammar forces."""
    model = zoo_model(tmp_path / "zoo", kind, (PROMPT, END), padding=7)
    parser = DIALECTS.get(kind, "hermes")
    async with zoo_cluster(model.directory, tool_call_parser=parser) as cluster:
        for path, choices in MUST_CALL.items():
            for choice in choices:
                single = {"parallel_tool_calls": False} if path != MESSAGES else {}
                for stream in (False, True):
                    seen = await cluster.ask(path, with_tools(path, choice, **single), stream=stream)
                    assert (path, seen["calls"][:1]) == (path, [("add", {"a": 7})])
        body = with_tools(CHAT, "required", parallel_tool_calls=False, return_token_ids=True)
        tokens = (await cluster.send(CHAT, body)).json["choices"][0]["token_ids"]
        opening = {"hermes": ["<tool_call>", "</tool_call>"], "mistral": ["[TOOL_CALLS]", "[ARGS]"], "llama3_json": []}[
            parser
        ]
        written = [marker for marker in opening if marker in MARKERS.get(kind, ())]
        assert [token for token in tokens if token in map(model.id, written)] == list(map(model.id, written))


@pytest.mark.parametrize("kind", Kind)
async def test_text_that_spells_a_marker_is_text(kind: Kind, tmp_path: Path) -> None:
    model = zoo_model(tmp_path / "zoo", kind, (PROMPT, " there", END))
    spelled = [*MARKERS.get(kind, ()), OTHER, "<tool_call>", "[TOOL_CALLS]"]
    async with zoo_cluster(model.directory) as cluster:
        for text in (*(f"{marker}x" for marker in spelled), "a<|im_end|>", " é🙂", "<0x41>"):
            for path in (COMPLETIONS, CHAT):
                seen = await cluster.ask(path, body_of(path, PROMPT, structured_outputs={"choice": [text]}))
                assert (path, seen.text) == (path, text)
        matched = await cluster.ask(
            COMPLETIONS, body_of(COMPLETIONS, PROMPT, structured_outputs={"regex": "( [a-z]+)+"})
        )
        assert matched.text == " there"


@pytest.mark.parametrize("engine", ["torch", "mock"])
async def test_a_grammar_ends_before_min_tokens(engine: str, tmp_path: Path) -> None:
    """No token follows what the grammar has written, so the answer ends in any order and on any engine."""
    model = zoo_model(tmp_path / "zoo", Kind.QWEN, (PROMPT, "yes", END))
    body = body_of(COMPLETIONS, PROMPT, structured_outputs={"choice": ["yes"]}, min_tokens=40)
    async with zoo_cluster(model.directory, engine) as cluster:
        for stream in (False, True):
            seen = await cluster.ask(COMPLETIONS, body, stream=stream)
            assert (seen.text, seen["finish"]) == ("yes", "stop")


@pytest.mark.parametrize("kind", half_of_kinds(1))
async def test_schemas(kind: Kind, tmp_path: Path) -> None:
    model = zoo_model(tmp_path / "zoo", kind, (PROMPT, END))
    schema = {
        "type": "object",
        "properties": {"k": {"enum": ["<tool_call>", "é"]}, "n": {"enum": [3]}},
        "required": ["k", "n"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    async with zoo_cluster(model.directory) as cluster:
        for stream in (False, True):
            seen = await cluster.ask(CHAT, body_of(CHAT, PROMPT, response_format=form, max_tokens=300), stream=stream)
            jsonschema_rs.validate(schema, json.loads(seen.text))


@pytest.mark.parametrize("kind", [Kind.QWEN, Kind.QWEN_SPECIAL, Kind.LLAMA3])
async def test_a_lark_grammar_may_name_a_special_token(kind: Kind, tmp_path: Path) -> None:
    model = zoo_model(tmp_path / "zoo", kind, (PROMPT, END))
    marker = MARKERS[kind][0]
    source = f'start: {marker} "<x>" /[<]/ // {marker}\n'
    async with zoo_cluster(model.directory) as cluster:
        body = body_of(COMPLETIONS, PROMPT, structured_outputs={"grammar": source}, skip_special_tokens=False)
        answer = (await cluster.send(COMPLETIONS, {**body, "return_token_ids": True})).json["choices"][0]
        assert answer["text"] == f"{marker}<x><"
        assert answer["token_ids"][0] == model.id(marker)


async def test_a_marker_that_has_no_row_is_written_as_text(tmp_path: Path) -> None:
    """The model cannot write it as a token, so a call is forced in words."""
    model = zoo_model(tmp_path / "zoo", Kind.QWEN, (PROMPT, END), padding=-5)
    assert model.tokenizer.get_vocab_size() - 5 <= model.id("<tool_call>")
    async with zoo_cluster(model.directory, tool_call_parser="hermes") as cluster:
        body = with_tools(CHAT, "required", parallel_tool_calls=False, max_tokens=200)
        assert (await cluster.ask(CHAT, body))["calls"] == [("add", {"a": 7})]


@pytest.mark.parametrize("kind", [Kind.BYTE_LEVEL, Kind.QWEN, Kind.LLAMA2])
async def test_tokens_that_have_no_row(kind: Kind, tmp_path: Path) -> None:
    """A tokenizer with more tokens than the model has rows still writes grammars."""
    model = zoo_model(tmp_path / "zoo", kind, (PROMPT, END), padding=-1)
    async with zoo_cluster(model.directory) as cluster:
        seen = await cluster.ask(COMPLETIONS, body_of(COMPLETIONS, PROMPT, structured_outputs={"choice": ["yes"]}))
        assert seen.text == "yes"


def test_kinds_are_what_they_say(tmp_path: Path) -> None:
    for kind in Kind:
        model: ZooModel = zoo_model(tmp_path / kind.value, kind, (PROMPT, END))
        added = model.tokenizer.get_added_tokens_decoder()
        special = {token.content for token in added.values() if token.special}
        assert special.issuperset({END, OTHER})
        assert special.isdisjoint(MARKERS[kind]) if kind is Kind.QWEN else special.issuperset(MARKERS.get(kind, ()))
        assert (kind in SENTENCEPIECE) == (model.tokenizer.token_to_id("<0x41>") is not None)
