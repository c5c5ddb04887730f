"""Random schemas and random choices among the tokens that their masks allow: every answer is valid and ends."""

from __future__ import annotations

import json
from random import Random

import jsonschema_rs
import pytest
from tests.executors.constrained import COMPILER, random_answer

from kvrelay.core.grammar import MAX_GRAMMAR_LINKS, Grammar, GrammarKind
from kvrelay.core.sampling import SamplingParams
from kvrelay.errors import InvalidInputError

NUM_SCHEMAS = 200


def random_schema(rng: Random, depth: int = 3) -> dict[str, object]:
    """Only bounded values, so that random choices come to an end."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern"]
    if depth:
        kinds += ["object", "object", "object", "array", "anyOf", "ref"]
    match rng.choice(kinds):
        case "string":
            return {"type": "string", "minLength": rng.randrange(3), "maxLength": rng.randrange(3, 9)}
        case "integer":
            low = rng.randrange(-1000, 1000)
            return {"type": "integer", "minimum": low, "maximum": low + rng.randrange(5000)}
        case "number":
            return {"type": "number", "minimum": 0, "exclusiveMaximum": rng.randrange(1, 50)}
        case "enum":
            return {"enum": rng.sample(["a", "é\n", 'q"', 1, 2.5, None, True, [1], {"k": []}], 3)}
        case "const":
            return {"const": rng.choice(["x", 7, None, {"a": [1, "b"]}])}
        case "pattern":
            return {"type": "string", "pattern": rng.choice(["^[a-c]{2,4}$", "^\\d{3}-\\d{2}$", "^(yes|no)$"])}
        case "object":
            names = rng.sample(["name", "age", "größe", "a b", "x", "tags", "$y"], rng.randrange(1, 5))
            return {
                "type": "object",
                "properties": {name: random_schema(rng, depth - 1) for name in names},
                "required": rng.sample(names, rng.randrange(len(names) + 1)),
                "additionalProperties": False,
            }
        case "array":
            low = rng.randrange(3)
            items = random_schema(rng, depth - 1)
            return {"type": "array", "items": items, "minItems": low, "maxItems": low + rng.randrange(3)}
        case "anyOf":
            return {"anyOf": [random_schema(rng, depth - 1) for _ in range(2)]}
        case "ref":
            name = f"d{rng.randrange(10**9)}"
            definition = {"$defs": {name: random_schema(rng, depth - 1)}}
            return {"type": "object", "properties": {"r": {"$ref": f"#/$defs/{name}"}}, "required": ["r"],
                    "additionalProperties": False, **definition}  # fmt: skip
        case kind:
            return {"type": kind}


def hoisted(schema: object, found: dict[str, object]) -> object:
    """The schema with the definitions of all its parts collected, since a reference counts from the root."""
    if isinstance(schema, list):
        return [hoisted(item, found) for item in schema]
    if not isinstance(schema, dict):
        return schema
    for name, definition in schema.get("$defs", {}).items():
        found[name] = hoisted(definition, found)
    return {key: hoisted(value, found) for key, value in schema.items() if key != "$defs"}


@pytest.mark.parametrize("seed", range(NUM_SCHEMAS))
def test_every_answer_to_a_random_schema_is_valid(seed: int) -> None:
    rng = Random(seed)
    definitions: dict[str, object] = {}
    schema = hoisted(random_schema(rng), definitions)
    assert isinstance(schema, dict)
    schema |= {"$defs": definitions} if definitions else {}
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    validator = jsonschema_rs.validator_for(schema)
    for _ in range(2):
        text = random_answer(grammar, rng)
        validator.validate(json.loads(text))


def chained_rules(count: int) -> str:
    return "start: a0\n" + "\n".join(f'a{i}: "x" a{i + 1}?' for i in range(count)) + f'\na{count}: "y"'


def chained_references(count: int) -> str:
    links = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(count)}
    return json.dumps({"$ref": "#/$defs/d0", "$defs": links | {f"d{count}": {"type": "integer"}}})


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        (GrammarKind.LARK, chained_rules(5000)),
        (GrammarKind.JSON_SCHEMA, chained_references(5000)),
        (GrammarKind.JSON_SCHEMA, chained_references(5000).replace("ref", "\\u0072ef")),
        (GrammarKind.LARK, "start: %json " + chained_references(5000)),
        (GrammarKind.LARK, chained_rules(5000).replace(": ", "\n : ")),
    ],
)
def test_a_chain_that_would_overflow_the_stack_never_reaches_the_compiler(kind: GrammarKind, source: str) -> None:
    """Without the limit these end the process with a segmentation fault."""
    grammar = Grammar(kind, source)
    with pytest.raises(InvalidInputError, match="rules and references"):
        COMPILER.compile(grammar)
    with pytest.raises(InvalidInputError, match="rules and references"):
        SamplingParams(grammar=grammar).validate()


def test_chains_of_the_allowed_length_compile() -> None:
    COMPILER.compile(Grammar(GrammarKind.LARK, chained_rules(MAX_GRAMMAR_LINKS - 2)))
    COMPILER.compile(Grammar(GrammarKind.JSON_SCHEMA, chained_references(MAX_GRAMMAR_LINKS - 1)))


def chained_terminals(depth: int, text: str) -> str:
    """20 ** depth times the text, in a few lines."""
    lines = [f"T{level + 1}: " + " ".join([f"T{level}"] * 20) for level in range(depth)]
    return "\n".join([f"start: T{depth}", f"T0: {text}", *lines])


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        (GrammarKind.REGEX, "a?" * 130_000),
        (GrammarKind.REGEX, "(a|)" * 60_000),
        (GrammarKind.REGEX, "(|a)" * 60_000),
        (GrammarKind.REGEX, "(a|())" * 40_000),
        (GrammarKind.REGEX, "a{0,1}" * 40_000),
        (GrammarKind.LARK, "start: " + '"a"? ' * 50_000),
        (GrammarKind.LARK, "start: T\nT: /" + "a*" * 100_000 + "/"),
        (GrammarKind.LARK, chained_terminals(4, "/a?/")),
        (GrammarKind.LARK, chained_terminals(12, "/a?/")),
        (GrammarKind.LARK, chained_terminals(12, '"ab"')),
        (GrammarKind.JSON_SCHEMA, json.dumps({"type": "string", "pattern": "a?" * 120_000})),
        (GrammarKind.JSON_SCHEMA, json.dumps({"pattern": "a?" * 120_000}).replace("pattern", "\\u0070attern")),
        (GrammarKind.JSON_SCHEMA, json.dumps({"type": "object", "patternProperties": {"a?" * 120_000: {}}})),
        (GrammarKind.LARK, "start: %json " + json.dumps({"type": "string", "pattern": "a?" * 120_000})),
    ],
)
def test_what_would_compile_for_minutes_never_reaches_the_compiler(kind: GrammarKind, source: str) -> None:
    grammar = Grammar(kind, source)
    with pytest.raises(InvalidInputError, match=r"repetitions and optional parts|characters in all"):
        grammar.check()


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        (GrammarKind.REGEX, "a?" * 2000),
        (GrammarKind.REGEX, r"((\w{0,99}\d{0,99}){0,99}x){1,9}"),
        (GrammarKind.LARK, chained_terminals(2, "/a?/")),
        (GrammarKind.LARK, 'start: WORD (" " WORD)*\nWORD: LETTER+\nLETTER: /[a-z]/ | /[0-9]/'),
        (GrammarKind.JSON_SCHEMA, json.dumps({"type": "string", "description": "* what? + why? " * 10_000})),
        (GrammarKind.JSON_SCHEMA, json.dumps({"type": "string", "pattern": "^[a-z]+(-[a-z]+){0,3}$"})),
    ],
)
def test_patterns_of_the_allowed_size_compile(kind: GrammarKind, source: str) -> None:
    COMPILER.compile(Grammar(kind, source))
