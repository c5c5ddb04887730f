"""llguidance, which kvrelay uses, beside xgrammar: time to compile, time per mask, and what each lets through.

    pip install --no-deps --target /tmp/xgrammar xgrammar apache-tvm-ffi
    PYTHONPATH=/tmp/xgrammar python tools/grammar_libraries.py TOKENIZER_JSON ...

Both get one thread, walk the tokens of the same answer, and compute a mask before each. xgrammar is no dependency of
kvrelay: it needs torch, transformers and triton. Prints Markdown.
"""

from __future__ import annotations

import importlib
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import tokenizers

from kvrelay.core.grammar import Grammar, GrammarKind
from kvrelay.errors import InvalidInputError
from kvrelay.executors.grammars import GrammarCompiler

NUM_COMPILATIONS = 5
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


class Walk(Protocol):
    """An answer in progress."""

    def mask(self) -> None:
        """Compute which tokens may come next."""

    def take(self, token: int) -> bool:
        """Whether this token was allowed."""


class LlguidanceWalk:
    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def mask(self) -> None:
        self._matcher.compute_bitmask()

    def take(self, token: int) -> bool:
        return bool(self._matcher.consume_token(token))


class XgrammarWalk:
    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._words = np.zeros((1, -(-vocab_size // 32)), dtype=np.int32)

    def mask(self) -> None:
        self._matcher.fill_next_token_bitmask(self._words)

    def take(self, token: int) -> bool:
        return bool(self._matcher.accept_token(token))


Compile = Callable[[dict[str, Any]], Walk]
"""A schema compiled anew; raises an exception of the library if it refuses the schema."""


def llguidance(file: Path, vocab_size: int, eos: int) -> Compile:
    compiler = GrammarCompiler(file, vocab_size, [eos])
    compiler.compile(Grammar(GrammarKind.REGEX, "a"))  # builds the vocabulary's trie
    numbers = itertools.count()

    def compiled(schema: dict[str, Any]) -> Walk:
        # The title makes it another entry of the cache.
        source = json.dumps({"title": f"schema {next(numbers)}", **schema})
        return LlguidanceWalk(compiler.compile(Grammar(GrammarKind.JSON_SCHEMA, source)))

    return compiled


def xgrammar(file: Path, vocab_size: int, eos: int) -> Compile:
    library = importlib.import_module("xgrammar")
    transformers = importlib.import_module("transformers")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(file))
    info = library.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size, stop_token_ids=[eos])
    compiler = library.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compiled(schema: dict[str, Any]) -> Walk:
        return XgrammarWalk(library.GrammarMatcher(compiler.compile_json_schema(json.dumps(schema))), vocab_size)

    return compiled


LIBRARIES: dict[str, Callable[[Path, int, int], Compile]] = {"llguidance": llguidance, "xgrammar": xgrammar}


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds, and the result."""
    began = time.perf_counter()
    result = call()
    return time.perf_counter() - began, result


def measured(compile_schema: Compile, schema: dict[str, Any], tokens: list[int]) -> tuple[str, ...]:
    """Compile time (median, ms) and mask time (median, 99th percentile and longest, us)."""
    runs = [timed(lambda: compile_schema(schema)) for _ in range(NUM_COMPILATIONS)]
    masks = []
    for _, walk in runs:
        for token in tokens:
            masks.append(timed(walk.mask)[0] * 1e6)
            if not walk.take(token):
                raise ValueError(f"token {token} of a valid answer is refused")
    masks.sort()
    figures = statistics.median(masks), masks[int(len(masks) * 0.99)], masks[-1]
    return f"{statistics.median(seconds for seconds, _ in runs) * 1e3:.1f}", *(f"{figure:.0f}" for figure in figures)


def obeyed(compile_schema: Compile, schema: dict[str, Any], tokens: list[int]) -> str:
    """What becomes of a keyword, by the tokens of a wrong answer and the end of sequence."""
    try:
        walk = compile_schema(schema)
    except (InvalidInputError, RuntimeError, ValueError):
        return "refused"
    return "ignored" if all(walk.take(token) for token in tokens) else "obeyed"


def report(file: Path) -> Iterator[str]:
    tokenizer = tokenizers.Tokenizer.from_file(str(file))
    vocab_size = tokenizer.get_vocab_size()
    eos = next(
        found for name in ("<|im_end|>", "<|endoftext|>", "</s>", "<eos>") if (found := tokenizer.token_to_id(name))
    )
    yield f"{vocab_size:,} tokens | | compile, ms | mask, us | 99 % | longest"
    yield "|---" * 6 + "|"
    compilers = {name: make(file, vocab_size, eos) for name, make in LIBRARIES.items()}

    def tokens_of(document: Any) -> list[int]:
        text = json.dumps(document, ensure_ascii=False)
        return [*tokenizer.encode(text, add_special_tokens=False).ids, eos]

    for case, (schema, document) in CASES.items():
        for name, compile_schema in compilers.items():
            yield " | ".join((case, name, *measured(compile_schema, schema, tokens_of(document))))
    yield ""
    yield f"keyword | {' | '.join(compilers)}"
    yield "|---" * 3 + "|"
    for keyword, (schema, document) in WRONG.items():
        found = (obeyed(compile_schema, schema, tokens_of(document)) for compile_schema in compilers.values())
        yield f"{keyword} | {' | '.join(found)}"
    yield ""


def main(files: list[str]) -> int:
    if not files:
        print(__doc__, file=sys.stderr)
        return 2
    for file in files:
        for line in report(Path(file)):
            print(f"| {line} |" if line and not line.startswith("|") else line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
