"""Calls and reasoning in text. Whatever the text, and however it is cut, the deltas add up to the same."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.frontend.openai.answer import OutputParser, ParsedDelta
from kvrelay.frontend.openai.completions import whole_calls
from kvrelay.frontend.tools.dialects import DIALECTS, HERMES, LLAMA3_JSON, MISTRAL, Dialect, guessed_dialect
from kvrelay.frontend.tools.parsing import ToolParser
from kvrelay.frontend.tools.reasoning import ReasoningParser, reasons_at_once

NAMES = frozenset({"add", "get_weather", "get"})
ARGS = '{"a": "x}\\"<tool_call>", "b": [1, {"c": "é🙂"}]}'
CALL = f'{{"name": "add", "arguments": {ARGS}}}'

Parsed = tuple[str, str, list[tuple[str, str]]]


def parsed(parser: OutputParser, pieces: list[str]) -> Parsed:
    delta = ParsedDelta()
    for piece in pieces:
        delta += parser.push(piece)
    delta += parser.flush()
    return delta.content, delta.reasoning, whole_calls(delta)


def calls_of(dialect: Dialect, text: str, single: bool = False) -> Parsed:
    return parsed(ToolParser(dialect, NAMES, single), [text])


CASES: list[tuple[Dialect, str, str, list[tuple[str, str]]]] = [
    (HERMES, "just text ", "just text ", []),
    (HERMES, f"<tool_call>\n{CALL}\n</tool_call>", "", [("add", ARGS)]),
    (HERMES, f"Let me see.\n\n<tool_call>{CALL}</tool_call>\n", "Let me see.", [("add", ARGS)]),
    (
        HERMES,
        f'<tool_call>{CALL}</tool_call>\n<tool_call>\n{{"name": "get", "arguments": {{}}}}\n</tool_call> and on',
        " and on",
        [("add", ARGS), ("get", "{}")],
    ),
    (HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>', "", [("add", '{"a": 1}')]),
    (HERMES, '<tool_call>{"name": "add"}</tool_call>', "", [("add", "{}")]),
    (HERMES, '<tool_call>{"name": "add", "arguments": null}</tool_call>', "", [("add", "{}")]),
    (HERMES, '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("add", '{"a": 1}')]),
    (HERMES, '<tool_call>{"id": 3, "name": "add", "arguments": {"a": 1}, "x": [2]}', "", [("add", '{"a": 1}')]),
    (HERMES, '<tool_call>{"name": "add", "arguments": {"a": [1, ', "", [("add", '{"a": [1, ')]),
    (HERMES, '<tool_call>{"name": "nobody", "arguments": {}}', '<tool_call>{"name": "nobody", "arguments": {}}', []),
    (HERMES, "<tool_call>I think", "<tool_call>I think", []),
    (HERMES, f"<tool_call>no <tool_call>{CALL}", "<tool_call>no", [("add", ARGS)]),
    (HERMES, "a <tool_ca", "a <tool_ca", []),
    (HERMES, "<tool_call></tool_call>", "<tool_call></tool_call>", []),
    (LLAMA3_JSON, '{"name": "add", "parameters": {"a": 1}}', "", [("add", '{"a": 1}')]),
    (LLAMA3_JSON, '\n<|python_tag|>{"name": "add", "parameters": {}}', "", [("add", "{}")]),
    (
        LLAMA3_JSON,
        '{"name": "add", "parameters": {}}; {"name": "get", "parameters": {"x": 2}}',
        "",
        [("add", "{}"), ("get", '{"x": 2}')],
    ),
    (LLAMA3_JSON, '{"answer": 42}', '{"answer": 42}', []),
    (LLAMA3_JSON, 'The call {"name": "add"}', 'The call {"name": "add"}', []),
    (LLAMA3_JSON, '<|python_tag|>print("x")', '<|python_tag|>print("x")', []),
    (MISTRAL, f"[TOOL_CALLS][{CALL}]", "", [("add", ARGS)]),
    (MISTRAL, f'[TOOL_CALLS] [{CALL}, {{"name": "get", "arguments": {{}}}}]', "", [("add", ARGS), ("get", "{}")]),
    (
        MISTRAL,
        'Hm. [TOOL_CALLS]get_weather[ARGS]{"a": 1}[TOOL_CALLS]get[CALL_ID]ab12[ARGS]{}',
        "Hm.",
        [("get_weather", '{"a": 1}'), ("get", "{}")],
    ),
    (MISTRAL, "[TOOL_CALLS]nobody[ARGS]{}", "[TOOL_CALLS]nobody[ARGS]{}", []),
    (MISTRAL, "[TOOL_CALLS]get[X]{}", "[TOOL_CALLS]get[X]{}", []),
    (MISTRAL, "[TOOL_CALLS]get", "[TOOL_CALLS]get", []),
]


@pytest.mark.parametrize(("dialect", "text", "content", "calls"), CASES)
def test_each_dialect(dialect: Dialect, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    expected = (content, "", calls)
    assert calls_of(dialect, text) == expected
    assert parsed(ToolParser(dialect, NAMES), list(text)) == expected
    for cut in range(len(text)):
        assert parsed(ToolParser(dialect, NAMES), [text[:cut], text[cut:]]) == expected


WORDS = [
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<think>", "</think>",
    '{"name": "add", "arguments": {"a": "b"}}', '{"name": "get", "parameters": {', "get", "get_weather", "{", "}", "[",
    "]", '"', ",", ":", ";", "\\", " ", "\n", "name", '"name"', '"arguments"', "x", "é", "1", "<", "<t", "[T", "null",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(WORDS), max_size=25).map("".join)


def cut(text: str, seed: int) -> list[str]:
    rng = random.Random(seed)
    pieces, start = [], 0
    while start < len(text):
        end = start + rng.choice((0, 1, 1, 2, 5, 20))
        pieces.append(text[start:end])
        start = end
    return pieces


@settings(max_examples=300, deadline=None)
@given(TEXTS, st.integers(0, 2**32), st.sampled_from(sorted(DIALECTS)), st.booleans())
def test_any_cut_of_any_text_gives_the_same(text: str, seed: int, dialect: str, single: bool) -> None:
    def parser() -> ToolParser:
        return ToolParser(DIALECTS[dialect], NAMES, single)

    whole = parsed(parser(), [text])
    assert parsed(parser(), cut(text, seed)) == whole
    assert parsed(parser(), list(text)) == whole
    assert len(whole[2]) <= 1 or not single
    if not whole[2]:
        assert whole[0] == text, "what is no call is content, character for character"


@settings(max_examples=200, deadline=None)
@given(TEXTS, st.integers(0, 2**32), st.booleans())
def test_reasoning_is_the_same_however_it_is_cut(text: str, seed: int, is_inside: bool) -> None:
    def parser() -> ReasoningParser:
        return ReasoningParser(is_inside, ToolParser(HERMES, NAMES))

    assert parsed(parser(), cut(text, seed)) == parsed(parser(), [text])


@pytest.mark.parametrize(
    ("is_inside", "text", "content", "reasoning"),
    [
        (True, "I wonder.</think>\n\nYes.", "Yes.", "I wonder."),
        (True, "<think>\nI wonder.</think>Yes.", "Yes.", "\nI wonder."),
        (True, "no end </thi", "", "no end </thi"),
        (False, "<think>a</think> b <think>c</think>", "b <think>c</think>", "a"),
        (False, "Yes. </think>", "Yes. </think>", ""),
        (False, "", "", ""),
    ],
)
def test_reasoning_stands_apart(is_inside: bool, text: str, content: str, reasoning: str) -> None:
    assert parsed(ReasoningParser(is_inside), [text]) == (content, reasoning, [])


def test_the_prompt_says_whether_reasoning_has_begun() -> None:
    assert reasons_at_once("qwen3", "<|im_start|>assistant\n<think>\n")
    assert not reasons_at_once("qwen3", "<|im_start|>assistant\n")
    assert reasons_at_once("deepseek_r1", "<|Assistant|>")
    assert not reasons_at_once("deepseek_r1", "<|Assistant|><think>\n\n</think>\n\n")


def test_a_call_comes_while_it_is_written() -> None:
    parser = ToolParser(HERMES, NAMES)
    text = f"<tool_call>{CALL}</tool_call>"
    seen = [delta for char in text if (delta := parser.push(char))]
    assert seen[0].calls[0].name == "add"
    assert len(seen) == len(ARGS)
    assert json.loads("".join(call.arguments for delta in seen for call in delta.calls)) == json.loads(ARGS)


@pytest.mark.parametrize("dialect", [HERMES, LLAMA3_JSON, MISTRAL])
@pytest.mark.parametrize("filler", ['{"name": "add", "arguments": {"a": "', "[", "{", "<tool_call>", " ", '"', "get"])
def test_long_texts_take_linear_time(dialect: Dialect, filler: str) -> None:
    """Each character is read a bounded number of times: a quadratic parser would need hours for this."""
    text = (dialect.marker or "{") + filler * 40_000
    content, _, calls = calls_of(dialect, text)
    assert content == text or calls


def test_the_dialect_is_guessed_from_the_template() -> None:
    assert guessed_dialect("{% if tools %}<tool_call>{% endif %}") is HERMES
    assert guessed_dialect("{% if tools %}[TOOL_CALLS]{% endif %}") is MISTRAL
    assert guessed_dialect('{% if tools %}{"name": f, "parameters": d}{% endif %}') is LLAMA3_JSON
    assert guessed_dialect("{% if tools %}<tool_call><function=f>{% endif %}") is None
    assert guessed_dialect("{% if tools %}?{% endif %}") is None
    for chat, dialect in (
        ('<a><tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', HERMES),
        ('<tool_call>{"arguments": {}, "name": "f"}</tool_call>', HERMES),
        ("<tool_call>f\n<arg_key>a</arg_key>", None),
        ('[TOOL_CALLS] [{"name": "f", "arguments": {}, "id": "a"}]', MISTRAL),
        ('<a>{"name": "f", "parameters": {}}<b>', LLAMA3_JSON),
        ('<a>[{"tool_name": "f", "parameters": {}}]', None),
    ):
        assert guessed_dialect('{{ tools }} "parameters" <tool_call>', chat) is dialect
