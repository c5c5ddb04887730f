"""What becomes of each keyword of a schema: none is ignored, whatever the library does with it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from tests.executors.constrained import EOS, TOKENIZER, VOCAB_SIZE

from kvrelay.core.grammar import Grammar, GrammarKind
from kvrelay.data import bundled_checkpoint_path
from kvrelay.errors import InvalidInputError
from kvrelay.executors.grammars import GrammarCompiler

ITEM = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 0},
        "name": {"type": "string", "maxLength": 40},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
        "price": {"type": "number"},
    },
    "required": ["id", "name", "tags", "price"],
    "additionalProperties": False,
}
DOCUMENT = {"id": 4711, "name": "a quick brown fox, né à Paris", "tags": ["red", "blue"], "price": 12.75}
LONG = {f"field_{number}": {"type": "string"} for number in range(100)}
CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "a record of 4 fields": (ITEM, DOCUMENT),
    "a list of records": ({"type": "array", "items": ITEM}, [DOCUMENT] * 8),
    "100 required texts": (
        {"type": "object", "properties": LONG, "required": list(LONG), "additionalProperties": False},
        dict.fromkeys(LONG, "some words of text"),
    ),
    "any JSON object": ({"type": "object"}, {"a": [DOCUMENT, None, True]}),
}
WRONG: dict[str, tuple[dict[str, Any], Any]] = {
    "multipleOf": ({"type": "integer", "minimum": 0, "maximum": 99, "multipleOf": 5}, 7),
    "maximum": ({"type": "integer", "minimum": 0, "maximum": 99}, 100),
    "maximum of a number": ({"type": "number", "minimum": 0, "maximum": 1.5}, 1.75),
    "maxLength": ({"type": "string", "maxLength": 3}, "abcd"),
    "pattern with maxLength": ({"type": "string", "pattern": "^a+$", "maxLength": 3}, "aaaa"),
    "format": ({"type": "string", "format": "date"}, "2026-13-45"),
    "maxItems": ({"type": "array", "items": {"type": "null"}, "maxItems": 2}, [None, None, None]),
    "allOf": ({"allOf": [{"type": "integer", "minimum": 5}, {"type": "integer", "maximum": 9}]}, 3),
    "oneOf": ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, 3),
    "uniqueItems": ({"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2, "uniqueItems": True}, [1, 1]),
}
"""Documents that are not valid under their schemas."""


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    """Its helper process ends with it."""
    compiler = GrammarCompiler(bundled_checkpoint_path() / "tokenizer.json", VOCAB_SIZE, [EOS])
    yield compiler
    compiler.close()


def allows(compiler: GrammarCompiler, schema: dict[str, Any], document: object) -> bool:
    """Whether the document may be written to its end, token by token. Raises InvalidInputError."""
    matcher = compiler.compile(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)))
    tokens = [*TOKENIZER.encode(json.dumps(document, ensure_ascii=False), False), EOS]
    return all(matcher.consume_token(token) for token in tokens)


@pytest.mark.parametrize("case", CASES)
def test_a_valid_document_may_be_written(case: str, compiler: GrammarCompiler) -> None:
    assert allows(compiler, *CASES[case])


@pytest.mark.parametrize("keyword", WRONG)
def test_no_keyword_is_ignored(keyword: str, compiler: GrammarCompiler) -> None:
    if keyword in ("oneOf", "uniqueItems"):
        with pytest.raises(InvalidInputError):
            allows(compiler, *WRONG[keyword])
    else:
        assert not allows(compiler, *WRONG[keyword])
