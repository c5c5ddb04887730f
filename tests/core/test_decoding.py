"""Data from outside may be malformed in three ways, and every decoder's caller expects all three."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvrelay
from kvrelay.engines.hosted.backend import AnswerError
from kvrelay.engines.openai.wire import parse_event
from kvrelay.errors import InvalidInputError
from kvrelay.frontend.api.fields import RequestFields
from kvrelay.frontend.openai.requests import CompletionRequest, parse_body

ROOT = Path(kvrelay.__file__).parent
ROOMS = ("control", "core", "engine", "engines", "executors", "frontend", "router", "rpc", "transfer", "worker")
OURS = {
    "control/nats_process.py": "the child's own file",
    "engines/hosted/backend.py": "a grammar that the frontend has encoded",
    "executors/grammar_trial.py": "what the worker and its trial process write to each other",
    "executors/grammar_vocabulary.py": "its caller expects anything of a file that it reads",
    "executors/torch/checkpoints/tokenizer.py": "the tokenizer that it has just trained",
    "transfer/ranks/channel.py": "the worker's own ranks",
    "executors/torch/parallel/messages.py": "the worker's own ranks",
    "engines/vllm/translation.py": "the worker's own parameters",
    "frontend/tokens/detokenizer.py": "UTF-8 with replacement",
    "frontend/api/fields.py": "called by parse_body",
    "frontend/tokens/text_pieces.py": "the tokenizer's own state",
    "frontend/tokens/tokenizer.py": "the tokenizer's own state",
    "frontend/tools/chat_form.py": "a schema that was encoded just before",
    "worker/cluster/callers.py": "an identity that the worker has encoded",
}


DECODERS = ("msgspec.json.d", "msgspec.msgpack.d", "decoder.", "_fields.")


def unguarded(node: ast.AST, is_guarded: bool = False) -> Iterator[int]:
    """The lines that decode JSON or MessagePack where a RecursionError is not expected."""
    if isinstance(node, ast.Call) and not is_guarded:
        function = ast.unparse(node.func)
        is_decoder = function.endswith(".decode") and any(word in function for word in DECODERS)
        if function == "json.loads" or is_decoder:
            yield node.lineno
    is_body_guarded = is_guarded or expects(node)
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from unguarded(child, is_body_guarded if name == "body" else is_guarded)


def expects(node: ast.AST) -> bool:
    if isinstance(node, ast.With):
        caught = " ".join(ast.unparse(item) for item in node.items if "suppress" in ast.unparse(item))
    elif isinstance(node, ast.Try):
        caught = " ".join(ast.unparse(handler.type) for handler in node.handlers if handler.type)
    else:
        return False
    return "UNREADABLE" in caught or "RecursionError" in caught


def test_every_decoder_expects_what_is_nested_too_deeply() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{line}"
        for room in ROOMS
        for file in sorted((ROOT / room).rglob("*.py"))
        if file.relative_to(ROOT).as_posix() not in OURS
        for line in unguarded(ast.parse(file.read_text(encoding="utf-8")))
    ]
    assert found == []


NESTED = b'{"choices":' + b"[" * 100_000


def test_a_nested_event_of_a_server_is_no_completion() -> None:
    with pytest.raises(AnswerError, match="no completion"):
        parse_event(NESTED)


@pytest.mark.parametrize("field", [b'"modalities":["\xff"]', b'"truncation_side":"\xff"', b'"\xff":1'])
def test_a_skipped_field_that_is_no_utf8_is_the_clients_fault(field: bytes) -> None:
    with pytest.raises(InvalidInputError, match="not valid JSON"):
        parse_body(b'{"prompt":"a",' + field + b"}", CompletionRequest, RequestFields("warn").check)
