"""The half of the comparison that needs no other package: what kvrelay's library does with each keyword."""

from __future__ import annotations

import json

import pytest
from tests.executors.constrained import EOS, TOKENIZER, VOCAB_SIZE

from kvrelay.data import bundled_checkpoint_path
from tools import grammar_libraries


@pytest.fixture(scope="module")
def compile_schema() -> grammar_libraries.Compile:
    """Its helper process ends with it."""
    return grammar_libraries.llguidance(bundled_checkpoint_path() / "tokenizer.json", VOCAB_SIZE, EOS)


def tokens_of(document: object) -> list[int]:
    return [*TOKENIZER.encode(json.dumps(document, ensure_ascii=False), False), EOS]


@pytest.mark.parametrize("case", grammar_libraries.CASES)
def test_the_answers_of_the_comparison_are_valid(case: str, compile_schema: grammar_libraries.Compile) -> None:
    schema, document = grammar_libraries.CASES[case]
    figures = grammar_libraries.measured(compile_schema, schema, tokens_of(document))
    assert len(figures) == 4
    assert all(float(figure) >= 0 for figure in figures)


@pytest.mark.parametrize("keyword", grammar_libraries.WRONG)
def test_no_keyword_is_ignored(keyword: str, compile_schema: grammar_libraries.Compile) -> None:
    schema, document = grammar_libraries.WRONG[keyword]
    expected = "refused" if keyword in ("oneOf", "uniqueItems") else "obeyed"
    assert grammar_libraries.obeyed(compile_schema, schema, tokens_of(document)) == expected
