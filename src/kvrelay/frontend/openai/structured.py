"""Structured outputs: OpenAI's, vLLM's and SGLang's fields, converted to one grammar. Pure.

A request has at most one of them. This module checks only what the request's text shows in bounded time: size, depth
and keys. The worker checks whether a grammar compiles.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Sequence

import msgspec

from kvrelay.core.decoding import UNREADABLE
from kvrelay.core.grammar import ANY_JSON_OBJECT, MAX_GRAMMAR_CHARS, Grammar, GrammarKind
from kvrelay.errors import InvalidInputError
from kvrelay.frontend.openai.requests import GenerationFields, ResponseFormat

MAX_SCHEMA_DEPTH = 100
"""Levels of nested lists and objects."""
MAX_SCHEMA_KEYS = 4096
MAX_OBJECT_KEYS = 512
"""Keys of one object. The time to compile an object grows with the square of its properties: 512 take 0.3 s."""
MAX_BAD_CHARS = 1024
MAX_CONVERTED_CHARS = 2**15
"""Limit for a grammar in another dialect than Lark: the conversion takes 20 microseconds per character."""
MAX_CONVERSION_COST = 2**22
"""Characters times rules: the conversion visits a chain of rules once for each of its rules."""
_REFUSED_KEYS = frozenset({"x-guidance"})
"""Settings of the library that compiles schemas, not of JSON Schema."""


_FORMATS = frozenset(["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"])
"""What the library knows of ``format``. All others are only notes, as JSON Schema has it: it would refuse them."""
_NO_UNIQUE = ("uniqueItems", False)
_NAMED_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_VALUES = frozenset({"const", "enum", "default", "examples"})


class Constraint(msgspec.Struct, frozen=True):
    """A grammar and the field that requests it, for errors."""

    param: str
    grammar: Grammar


def constraint_of(request: GenerationFields) -> Constraint | None:
    """Raises InvalidInputError for more than one field, and for a value that cannot be a grammar."""
    given = _given(request)
    if len(given) > 1:
        message = f"{given[0][0]} and {given[1][0]} exclude each other: an answer has one form"
        raise InvalidInputError(message, param=given[1][0])
    if not given:
        return None
    param, value, make = given[0]
    return checked(Constraint(param, make(value, param)))


def checked(constraint: Constraint) -> Constraint:
    """Raises InvalidInputError for a grammar that is too large."""
    try:
        constraint.grammar.check()
    except InvalidInputError as exc:
        raise InvalidInputError(exc.message, param=constraint.param) from exc
    return constraint


def schema_source(schema: object, param: str) -> str:
    """A JSON schema as a grammar's text. Raises InvalidInputError if it is too large or not an object."""
    if isinstance(schema, str):
        if len(schema) > MAX_GRAMMAR_CHARS:
            raise InvalidInputError(f"{param} has more than {MAX_GRAMMAR_CHARS} characters", param=param)
        try:
            schema = msgspec.json.decode(schema)
        except UNREADABLE as exc:
            raise InvalidInputError(f"{param} is no JSON: {exc}", param=param) from exc
    if not isinstance(schema, dict):
        raise InvalidInputError(f"{param} must be a JSON schema, that is, an object", param=param)
    _check_schema(schema, param)
    source = msgspec.json.encode(_without_notes(schema)).decode()
    if len(source) > MAX_GRAMMAR_CHARS:
        raise InvalidInputError(f"{param} has more than {MAX_GRAMMAR_CHARS} characters", param=param)
    return source


def _without_notes(schema: object, *, names: bool = False) -> object:
    """A schema without what asserts nothing, but is refused. ``names``: its keys are not keywords."""
    if isinstance(schema, list):
        return [_without_notes(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if names:
        return {name: _without_notes(value) for name, value in schema.items()}
    return {
        key: value if key in _VALUES else _without_notes(value, names=key in _NAMED_SCHEMAS)
        for key, value in schema.items()
        if not ((key == "format" and isinstance(value, str) and value not in _FORMATS) or (key, value) == _NO_UNIQUE)
    }


def lark_string(text: str) -> str:
    """``text`` as a literal of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)


def _given(request: GenerationFields) -> list[tuple[str, object, Callable[..., Grammar]]]:
    """The fields that are set, each with the function that makes its grammar of value and name."""
    found: list[tuple[str, object, Callable[..., Grammar]]] = []
    form = request.response_format
    if form is not None and form.type != "text":
        found.append(("response_format", form, _of_format))
    outputs = request.structured_outputs
    if outputs is not None:
        parts: tuple[tuple[str, object, Callable[..., Grammar]], ...] = (
            ("json", outputs.json, _of_schema),
            ("regex", outputs.regex, _of_regex),
            ("choice", outputs.choice, _of_choices),
            ("grammar", outputs.grammar, _of_text),
            ("json_object", outputs.json_object or None, lambda value, param: ANY_JSON_OBJECT),
        )
        own = [(f"structured_outputs.{name}", value, make) for name, value, make in parts if value is not None]
        if not own:
            message = "structured_outputs needs one of json, regex, choice, grammar and json_object"
            raise InvalidInputError(message, param="structured_outputs")
        found += own
    values = _plain_fields(request)
    if values == _NOTHING:
        # Nearly all requests.
        return found
    fields = [(name, value, make) for (name, make), value in zip(_PLAIN_FIELDS.items(), values, strict=True)]
    # An empty list of bad words forbids nothing.
    return found + [field for field in fields if field[1] is not None and field[:2] != ("bad_words", [])]


def _of_format(form: ResponseFormat, param: str) -> Grammar:
    if form.type == "json_object":
        return ANY_JSON_OBJECT
    if form.type != "json_schema":
        message = f"response_format must be of type text, json_object or json_schema, got {form.type}"
        raise InvalidInputError(message, param=param)
    if form.json_schema is None or form.json_schema.schema is None:
        raise InvalidInputError("response_format needs json_schema with a name and a schema", param=param)
    return _of_schema(form.json_schema.schema, param)


def _of_schema(schema: object, param: str) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, schema_source(schema, param))


def _of_regex(pattern: str, param: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, pattern)


def _of_choices(choices: Sequence[str], param: str) -> Grammar:
    if not choices or "" in choices:
        raise InvalidInputError(f"{param} needs choices, none of them empty", param=param)
    return Grammar(GrammarKind.LARK, "start: " + " | ".join(map(lark_string, dict.fromkeys(choices))))


def _of_text(text: str, param: str) -> Grammar:
    """Lark, or GBNF (``root ::= ...``), which is converted to Lark."""
    return Grammar(GrammarKind.LARK, lark_of_gbnf(text, param) if "::=" in text else text)


def lark_of_gbnf(text: str, param: str) -> str:
    """Raises InvalidInputError for text that is no grammar, and for what would take long."""
    if len(text) > MAX_CONVERTED_CHARS or len(text) * text.count("::=") > MAX_CONVERSION_COST:
        message = (
            f"{param} has more than {MAX_CONVERTED_CHARS} characters, or its characters times its rules are more than "
            f"{MAX_CONVERSION_COST}; only Lark grammars may have more"
        )
        raise InvalidInputError(message, param=param)
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        # vLLM's other library refuses the line by which llguidance tells its own dialect.
        return gbnf_to_lark(text).removeprefix("%llguidance {}\n").lstrip()
    except RecursionError as exc:
        raise InvalidInputError(f"{param} is nested too deeply", param=param) from exc
    except Exception as exc:  # the converter may raise anything for a text that is no grammar
        raise InvalidInputError(f"{param} is no grammar: {exc}", param=param) from exc


def _without_words(words: Sequence[str], param: str) -> Grammar:
    """Any text without these words, independent of its tokens."""
    if "" in words or sum(map(len, words)) > MAX_BAD_CHARS:
        message = f"{param} are not empty, and have at most {MAX_BAD_CHARS} characters in all"
        raise InvalidInputError(message, param=param)
    bad = "|".join(map(_escaped, dict.fromkeys(words)))
    return Grammar(GrammarKind.LARK, f"start: TEXT\nTEXT: /(?s:.*)/ & ~/(?s:.*)({bad})(?s:.*)/")


def _escaped(text: str) -> str:
    """``text`` as a regular expression inside slashes."""
    return "".join(char if char.isalnum() else f"\\u{{{ord(char):x}}}" for char in text)


def _of_tokens(token_ids: Sequence[int], param: str) -> Grammar:
    """These tokens, and the end of sequence."""
    if not token_ids or min(token_ids) < 0:
        raise InvalidInputError(f"{param} needs token ids that are not negative", param=param)
    return Grammar(GrammarKind.LARK, f"start: <[{','.join(map(str, sorted(set(token_ids))))}]>*")


def _check_schema(schema: object, param: str) -> None:
    num_keys, level = 0, [schema]
    for _ in range(MAX_SCHEMA_DEPTH):
        below: list[object] = []
        for item in level:
            if isinstance(item, list):
                below += item
            elif isinstance(item, dict):
                num_keys += len(item)
                below += item.values()
                if len(item) > MAX_OBJECT_KEYS or num_keys > MAX_SCHEMA_KEYS:
                    message = f"{param} has more than {MAX_OBJECT_KEYS} keys in an object or {MAX_SCHEMA_KEYS} in all"
                    raise InvalidInputError(message, param=param)
                if not _REFUSED_KEYS.isdisjoint(item):
                    raise InvalidInputError(f"{param} must not have x-guidance", param=param)
        if not below:
            return
        level = below
    raise InvalidInputError(f"{param} is nested deeper than {MAX_SCHEMA_DEPTH} levels", param=param)


_PLAIN_FIELDS: dict[str, Callable[..., Grammar]] = {
    "guided_json": _of_schema,
    "guided_regex": _of_regex,
    "guided_choice": _of_choices,
    "guided_grammar": _of_text,
    "json_schema": _of_schema,
    "regex": _of_regex,
    "ebnf": _of_text,
    "bad_words": _without_words,
    "allowed_token_ids": _of_tokens,
}
"""Fields of a request whose value is a grammar's source, and the function that makes the grammar."""
_plain_fields = operator.attrgetter(*_PLAIN_FIELDS)
_NOTHING = (None,) * len(_PLAIN_FIELDS)
