"""What an answer must look like: from the request's field to the grammar that the worker gets, or a refusal by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.executors.constrained import COMPILER
from tests.frontend.doubles import FakeCluster, FakeWorker, Script, running
from tests.frontend.raw_http import send

from kvrelay.core.grammar import ANY_JSON_OBJECT, MAX_GRAMMAR_CHARS, MAX_GRAMMAR_LINKS, Grammar, GrammarKind
from kvrelay.core.messages import GenerateRequest, OutputBatch, RequestRefused, TokenOutput
from kvrelay.core.status import FinishReason
from kvrelay.errors import InvalidInputError
from kvrelay.frontend.openai.requests import (
    MAX_CHOICES,
    ChatCompletionRequest,
    CompletionRequest,
    FunctionDefinition,
    Tool,
    parse_body,
)
from kvrelay.frontend.openai.structured import MAX_OBJECT_KEYS, MAX_SCHEMA_DEPTH, MAX_SCHEMA_KEYS, constraint_of
from kvrelay.frontend.tools.chat_form import arguments_schema
from kvrelay.rpc.base import Peer

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
SOURCE = json.dumps(SCHEMA, separators=(",", ":"))
JSON = Grammar(GrammarKind.JSON_SCHEMA, SOURCE)
REGEX = Grammar(GrammarKind.REGEX, "[0-9]+")
CHOICE = Grammar(GrammarKind.LARK, 'start: "yes" | "n\\"o"')
LARK = Grammar(GrammarKind.LARK, 'start: "x"')
MESSAGES = [{"role": "user", "content": "x"}]

FIELDS: list[tuple[dict[str, object], str, Grammar]] = [
    ({"response_format": {"type": "json_object"}}, "response_format", ANY_JSON_OBJECT),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}},
        "response_format",
        JSON,
    ),
    ({"structured_outputs": {"json": SCHEMA}}, "structured_outputs.json", JSON),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "structured_outputs.json", JSON),
    ({"structured_outputs": {"regex": "[0-9]+"}}, "structured_outputs.regex", REGEX),
    ({"structured_outputs": {"choice": ["yes", 'n"o', "yes"]}}, "structured_outputs.choice", CHOICE),
    ({"structured_outputs": {"grammar": 'start: "x"'}}, "structured_outputs.grammar", LARK),
    ({"structured_outputs": {"json_object": True}}, "structured_outputs.json_object", ANY_JSON_OBJECT),
    ({"guided_json": SCHEMA}, "guided_json", JSON),
    ({"guided_regex": "[0-9]+"}, "guided_regex", REGEX),
    ({"guided_choice": ["yes", 'n"o']}, "guided_choice", CHOICE),
    ({"guided_grammar": 'start: "x"'}, "guided_grammar", LARK),
    ({"json_schema": json.dumps(SCHEMA)}, "json_schema", JSON),
    ({"regex": "[0-9]+"}, "regex", REGEX),
]


def nested(depth: int) -> dict[str, object]:
    schema: dict[str, object] = {"type": "integer"}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


def chain(length: int) -> dict[str, object]:
    links = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(length)}
    return {"$defs": {"a": {"$defs": links}}, "$ref": "#/$defs/d0"}


REFUSED: list[tuple[dict[str, object], str, str]] = [
    ({"response_format": {"type": "grammar"}}, "response_format", "must be of type"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "needs json_schema"),
    ({"response_format": {}}, "response_format", "missing required field"),
    ({"structured_outputs": {}}, "structured_outputs", "needs one of"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs", "unknown field"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice", "exclude each other"),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex", "response_format and guided"),
    ({"guided_json": SCHEMA, "ebnf": "root ::= x"}, "ebnf", "guided_json and ebnf"),
    ({"guided_json": "{"}, "guided_json", "no JSON"),
    ({"guided_json": "[" * 200_000}, "guided_json", "no JSON"),
    ({"guided_json": "3"}, "guided_json", "must be a JSON schema"),
    ({"guided_json": {"x-guidance": {}}}, "guided_json", "x-guidance"),
    ({"guided_json": nested(MAX_SCHEMA_DEPTH)}, "guided_json", "nested deeper"),
    ({"guided_json": {"properties": {f"p{i}": {} for i in range(MAX_OBJECT_KEYS + 1)}}}, "guided_json", "keys"),
    ({"guided_json": {"allOf": [{"type": "null"}] * (MAX_SCHEMA_KEYS + 1)}}, "guided_json", "keys"),
    ({"guided_json": chain(MAX_OBJECT_KEYS)}, "guided_json", "references"),
    ({"guided_json": {"enum": ["x" * MAX_GRAMMAR_CHARS]}}, "guided_json", "characters"),
    ({"guided_json": json.dumps({"enum": ["x" * MAX_GRAMMAR_CHARS]})}, "guided_json", "length <="),
    ({"guided_choice": []}, "guided_choice", "needs choices"),
    ({"guided_choice": ["a", ""]}, "guided_choice", "none of them empty"),
    ({"guided_choice": ["a"] * (MAX_CHOICES + 1)}, "guided_choice", "length <="),
    ({"ebnf": "root ::= " + "(" * 20_000}, "ebnf", "ebnf is n"),
    ({"ebnf": 'root ::= "a' * 200}, "ebnf", "no grammar"),
    ({"ebnf": 'root ::= "' + "a" * 40_000 + '"'}, "ebnf", "only Lark"),
    ({"ebnf": "\n".join(f"a{i}: a{i + 1}" for i in range(MAX_GRAMMAR_LINKS + 1))}, "ebnf", "rules"),
]


def parsed(fields: dict[str, object]) -> ChatCompletionRequest:
    return parse_body(json.dumps({"messages": MESSAGES, **fields}).encode(), ChatCompletionRequest)


@pytest.mark.parametrize(("fields", "param", "grammar"), FIELDS)
def test_each_field_becomes_a_grammar(fields: dict[str, object], param: str, grammar: Grammar) -> None:
    constraint = constraint_of(parsed(fields))
    assert constraint is not None
    assert (constraint.param, constraint.grammar) == (param, grammar)


FORMATS = ["date-time", "uuid", "ipv6", "idn-email", "iri", "regex", "binary", "byte", "password", "path"]


@pytest.mark.parametrize("name", FORMATS)
def test_formats_are_obeyed_or_are_notes(name: str) -> None:
    """JSON Schema's own, those of OpenAPI (int64, password), and those of pydantic (path): no one is an error."""
    constraint = constraint_of(parsed({"guided_json": {"type": "string", "format": name}}))
    assert constraint is not None
    COMPILER.compile(constraint.grammar)


def test_only_keywords_are_notes() -> None:
    kept: dict[str, object] = {"format": {"format": "date"}, "uniqueItems": False, "const": {"const": {"format": "x"}}}
    schema = {"properties": {**kept, "default": {"format": "byte"}, "items": {"uniqueItems": False}}}
    kept = {"properties": {**kept, "default": {}, "items": {}}}
    assert constraint_of(parsed({"guided_json": schema})) == constraint_of(parsed({"guided_json": kept}))
    tools = [Tool("function", FunctionDefinition("f", parameters=parameters)) for parameters in (schema, kept)]
    assert arguments_schema(tools[0]) == arguments_schema(tools[1])


def test_gbnf_becomes_lark() -> None:
    constraint = constraint_of(parsed({"ebnf": 'root ::= "a" item*\nitem ::= [0-9]'}))
    assert constraint is not None
    assert constraint.grammar.kind is GrammarKind.LARK
    assert "::=" not in constraint.grammar.source


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"response_format": None}])
def test_text_is_free(fields: dict[str, object]) -> None:
    assert constraint_of(parsed(fields)) is None
    assert constraint_of(parse_body(json.dumps({"prompt": "a", **fields}).encode(), CompletionRequest)) is None


@pytest.mark.parametrize(("fields", "param", "message"), REFUSED)
def test_what_cannot_be_is_refused_by_name(fields: dict[str, object], param: str, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message) as caught:
        constraint_of(parsed(fields))
    assert caught.value.param == param


async def test_the_grammar_reaches_the_worker_and_its_refusal_names_the_field(model_dir: Path) -> None:
    refusal = RequestRefused("", "json_schema cannot be used: Unsatisfiable", 400, retryable=False)
    async with running(model_dir, Script((10,), refuse=refusal)) as cluster:
        port = cluster.frontend.port
        body = {"messages": MESSAGES, "response_format": FIELDS[1][0]["response_format"]}
        for path, request in (
            ("/v1/chat/completions", body),
            ("/v1/completions", {"prompt": "a", "response_format": body["response_format"]}),
        ):
            answer = await send(port, "POST", path, request)
            assert answer.status == 400
            assert answer.error["param"] == "response_format"
            assert "Unsatisfiable" in str(answer.error["message"])
        assert [request.sampling.grammar for request in cluster.workers["w0"].requests] == [JSON, JSON]


class GivingUp(FakeWorker):
    """An answer of it fails after a token, by its grammar."""

    status = 400

    async def _generate(self, peer: Peer, request: GenerateRequest) -> None:
        self.server.send(peer, OutputBatch((TokenOutput(request.request_id, (10,)),)))
        failed = TokenOutput(
            request.request_id,
            (),
            FinishReason.ERROR,
            error="the answer failed",
            position=1,
            is_final=True,
            status=self.status,
        )
        self.server.send(peer, OutputBatch((failed,)))


@pytest.mark.parametrize(("status", "param"), [(400, "regex"), (500, None)])
async def test_an_answer_that_fails_on_its_way_is_tried_nowhere_else(
    model_dir: Path, status: int, param: str | None
) -> None:
    """It names the grammar unless the model is at fault."""
    cluster = FakeCluster(model_dir)
    try:
        for name in ("a", "b"):
            worker = cluster.workers[name] = GivingUp(cluster.network, Script(), name)
            worker.status = status
            await worker.server.start()
            await cluster.register(worker)
        await cluster.start()
        await cluster.until(lambda: len(cluster.frontend.cluster.model(None).worker_ids) == 2)
        body = {"messages": MESSAGES, "regex": "(a{1000}){1000}"}
        answer = await send(cluster.frontend.port, "POST", "/v1/chat/completions", body)
        assert (answer.status, answer.error["param"]) == (status, param)
        assert sum(len(worker.requests) for worker in cluster.workers.values()) == 1
    finally:
        await cluster.close()
