"""Random schemas and random choices among the tokens that their masks allow: every answer is valid and ends."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jsonschema_rs
import numpy as np
import pytest
from llguidance import LLExecutor
from tests.executors.constrained import COMPILER, EOS, TOKENIZER, VOCAB_SIZE, random_answer
from tests.patience import PATIENCE_S
from tests.zoo.vocabularies import Kind, tokenizer_of

from kvrelay.core.grammar import MAX_GRAMMAR_LINKS, Grammar, GrammarKind
from kvrelay.core.sampling import SamplingParams
from kvrelay.data import bundled_checkpoint_path
from kvrelay.engine.step import NO_TOKEN
from kvrelay.errors import InvalidInputError
from kvrelay.executors import grammars
from kvrelay.executors.grammars import ComputingMasks, GrammarCompiler, GrammarMasks, StepMasks, Walk
from kvrelay.frontend.openai.requests import FunctionDefinition, Tool
from kvrelay.frontend.tools.chat_form import calls_grammar
from kvrelay.frontend.tools.dialects import LLAMA3_JSON

NUM_SCHEMAS = 200
NAMES = ["name", "age", "größe", "a b", "x", "tags", "$y", "deep/er"]
DEFINITIONS = ["d0", "d1"]
PATTERNS = ["^[a-c]{2,4}$", "^\\d{3}-\\d{2}$", "^(yes|no)$", "^[A-Z][a-z]{0,3}$"]
FORMATS = ["date", "ipv4", "uuid"]
"""Not ``time``: the grammar has the form only, with second 60 in any minute."""
VALUES = ["a", "é\n", 'q"', 1, 2.5, None, True, [1], {"k": []}]

Schema = dict[str, Any]
small = st.integers(0, 3)


def bounded(low: int, span: int, **more: object) -> Schema:
    return {"minimum": low, "maximum": low + span, **more}


SCALARS: st.SearchStrategy[Schema] = st.one_of(
    st.sampled_from(["boolean", "null"]).map(lambda kind: {"type": kind}),
    st.tuples(small, st.integers(0, 6)).map(
        lambda size: {"type": "string", "minLength": size[0], "maxLength": sum(size)}
    ),
    st.sampled_from(PATTERNS).map(lambda pattern: {"type": "string", "pattern": pattern}),
    st.sampled_from(FORMATS).map(lambda form: {"type": "string", "format": form}),
    st.builds(bounded, st.integers(-1000, 1000), st.integers(0, 5000), type=st.just("integer")),
    st.builds(bounded, st.integers(-50, 50), st.integers(20, 90), type=st.just("integer"),
              multipleOf=st.sampled_from([2, 5, 10])),
    st.builds(bounded, st.integers(-20, 20), st.integers(1, 50), type=st.just("number")),
    st.lists(st.sampled_from(VALUES), min_size=1, max_size=3, unique_by=repr).map(lambda values: {"enum": values}),
    st.sampled_from([*VALUES, {"a": [1, "b"]}]).map(lambda value: {"const": value}),
)  # fmt: skip
"""Only bounded values, so that random choices come to an end."""


@st.composite
def objects(draw: st.DrawFn, inner: st.SearchStrategy[Schema]) -> Schema:
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True))
    return {
        "type": "object",
        "properties": {name: draw(inner) for name in names},
        "required": draw(st.lists(st.sampled_from(names), unique=True)),
        "additionalProperties": False,
    }


def nested(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    arrays = st.tuples(inner, small, small).map(
        lambda drawn: {"type": "array", "items": drawn[0], "minItems": drawn[1], "maxItems": drawn[1] + drawn[2]}
    )
    either = st.lists(inner, min_size=1, max_size=3).map(lambda options: {"anyOf": options})
    return st.one_of(objects(inner), arrays, either)


references = st.sampled_from(DEFINITIONS).map(lambda name: {"$ref": f"#/$defs/{name}"})
schemas = st.recursive(SCALARS | references, nested, max_leaves=12)
definitions = st.fixed_dictionaries({name: st.recursive(SCALARS, nested, max_leaves=3) for name in DEFINITIONS})


@hypothesis.given(schemas, definitions, st.integers(0, 2**32))
@hypothesis.settings(max_examples=NUM_SCHEMAS)
def test_every_answer_to_a_random_schema_is_valid(schema: Schema, defs: Schema, seed: int) -> None:
    whole = {**schema, "$defs": defs}
    validator = jsonschema_rs.validator_for(whole, validate_formats=True)
    validator.validate(json.loads(random_answer(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(whole)), Random(seed))))


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


def test_a_schema_that_no_text_satisfies_is_refused_in_plain_words() -> None:
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}))
    with pytest.raises(InvalidInputError, match=r"^json_schema cannot be used: no text satisfies it$"):
        COMPILER.compile(grammar)


NO_TYPE: Schema = {"type": "text"}
EMPTY: Schema = {"type": "integer", "minimum": 5, "maximum": 1}
MISPLACED: list[tuple[Schema, str]] = [
    (NO_TYPE, "Invalid type: text"),
    (
        {"properties": {"ok": {}, "a/b~c": {"type": "array", "items": NO_TYPE}}},
        "at #/properties/a~1b~0c/items: Invalid",
    ),
    ({"anyOf": [{"type": "null"}, {"prefixItems": [{}, NO_TYPE]}]}, "at #/anyOf/1/prefixItems/1: Invalid type: text"),
    (
        {"properties": {"a": {"$ref": "#/$defs/t"}}, "$defs": {"s": {}, "t": NO_TYPE}},
        "at #/$defs/t: Invalid type: text",
    ),
    ({"properties": {"a": {"not": {}}}}, 'at #/properties/a: Unimplemented keys: ["not"]'),
    (
        {"type": "object", "properties": {"a": EMPTY}, "required": ["a"]},
        "at #/properties/a: Unsatisfiable schema: minimum",
    ),
    ({"properties": {"a": EMPTY, "b": NO_TYPE}}, "at #/properties/b: Invalid type: text"),
    (
        {"type": "object", "properties": {"a": False}, "required": ["a"]},
        "Unsatisfiable schema: required property 'a' is unsatisfiable",
    ),
    ({"properties": [1]}, "properties must be an object"),
    ({"oneOf": [{"type": "integer"}, {"minimum": 1}]}, "oneOf constraints are not supported"),
]


@pytest.mark.parametrize(("schema", "reason"), MISPLACED)
def test_a_refusal_says_where_in_the_schema_the_fault_is(schema: Schema, reason: str) -> None:
    """As a JSON pointer (RFC 6901), and in words of JSON Schema: the options of the compiler are not the client's."""
    with pytest.raises(InvalidInputError) as caught:
        COMPILER.compile(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)))
    assert caught.value.message.startswith(f"json_schema cannot be used: {reason}")
    assert "option" not in caught.value.message


@pytest.mark.parametrize(("schema", "reason"), MISPLACED[1:-2])
def test_a_refusal_of_tools_names_the_function_and_quotes_no_grammar(schema: Schema, reason: str) -> None:
    right = Tool("function", FunctionDefinition("right", parameters={"title": "ours", "properties": {"a": {}}}))
    wrong = Tool("function", FunctionDefinition("wrong", parameters={**schema, "type": "object"}))
    source = json.dumps(schema)
    with pytest.raises(InvalidInputError, match=f"^the parameters of wrong cannot be used: {re.escape(reason)}"):
        COMPILER.compile(calls_grammar([right, wrong, right], LLAMA3_JSON, single=False))
    with pytest.raises(InvalidInputError, match=f"^json_schema cannot be used: {re.escape(reason)}"):
        COMPILER.compile(calls_grammar([right], LLAMA3_JSON, True, Grammar(GrammarKind.JSON_SCHEMA, source)))


def test_a_refusal_names_the_special_tokens_as_the_vocabulary_does(tmp_path: Path) -> None:
    tokenizer_of(Kind.QWEN).save(str(tmp_path / "tokenizer.json"))
    compiler = GrammarCompiler(tmp_path / "tokenizer.json", 300, [0])
    with pytest.raises(InvalidInputError, match=r"[⟦‧]<tool_call>‧"):
        compiler.compile(Grammar(GrammarKind.LARK, "start: <tool_cal>"))
    compiler.close()


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
        (GrammarKind.LARK, chained_terminals(4, "/a?/").replace(": T", ": /x\ny/ T").replace(" T", " T /z/i", 1)),
        (GrammarKind.LARK, chained_terminals(4, "/a?/").replace(": T", ': "%json" T')),
        (GrammarKind.LARK, chained_terminals(4, "/a?/").replace(": T", ": /x\nT9:/ T")),
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
        (GrammarKind.LARK, chained_terminals(2, "/a?/") + "".join(f'\nU{n}: "T2 T2"' for n in range(300))),
        (GrammarKind.LARK, 'start: WORD (" " WORD)*\nWORD: LETTER+\nLETTER: /[a-z]/ | /[0-9]/'),
        (GrammarKind.JSON_SCHEMA, json.dumps({"type": "string", "description": "* what? + why? " * 10_000})),
        (GrammarKind.JSON_SCHEMA, json.dumps({"type": "string", "pattern": "^[a-z]+(-[a-z]+){0,3}$"})),
    ],
)
def test_patterns_of_the_allowed_size_compile(kind: GrammarKind, source: str) -> None:
    COMPILER.compile(Grammar(kind, source))


def test_a_compiled_grammar_outlives_the_cache_while_a_request_holds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A preempted request that comes back must not compile on the engine's thread."""
    monkeypatch.setattr(grammars, "MAX_COMPILED", 2)
    compiler = GrammarCompiler(bundled_checkpoint_path() / "tokenizer.json", VOCAB_SIZE, [EOS])
    held = [Grammar(GrammarKind.REGEX, "held") for _ in range(2)]
    for grammar in held:
        compiler.compile(grammar)
    for number in range(5):
        compiler.compile(Grammar(GrammarKind.REGEX, f"other {number}"))
    del held[0], grammar

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("compiled again")

    with monkeypatch.context() as patch:
        patch.setattr(grammars, "LLMatcher", refuse)
        masks = GrammarMasks(compiler, VOCAB_SIZE)
        masks.enter(0, SamplingParams(grammar=held[0]), [])
        masks.release(0)
    del held[0]
    for number in range(5):
        compiler.compile(Grammar(GrammarKind.REGEX, f"later {number}"))
    assert repr(compiler) == "GrammarCompiler(2 compiled)"


AMBIGUOUS = Grammar(GrammarKind.LARK, 'start: e\ne: e e e | e e | "a"')


@pytest.fixture
def masks() -> Iterator[GrammarMasks]:
    made = GrammarMasks(COMPILER, VOCAB_SIZE)
    yield made
    made.close()


def begin(masks: GrammarMasks, slots: list[int]) -> StepMasks:
    computing = masks.begin(slots)
    assert computing is not None
    step = computing.result()
    assert step is not None
    return step


def test_a_slow_mask_makes_its_own_row_late_alone(masks: GrammarMasks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its step goes on with the other rows, and a later step has the mask."""
    may_go_on, compute = threading.Event(), Walk.compute

    def slow_compute(walk: Walk, num_words: int) -> None:
        assert walk is not slow or may_go_on.wait(PATIENCE_S)
        compute(walk, num_words)

    for slot in (3, 5):
        masks.enter(slot, SamplingParams(grammar=Grammar(GrammarKind.REGEX, "yes|no")), [])
    slow = masks.walks[3]
    slow.spent_s = 60.0  # so far
    monkeypatch.setattr(Walk, "compute", slow_compute)
    monkeypatch.setattr(grammars, "BUDGET_S", 1e9)
    monkeypatch.setattr(grammars, "PATIENCE_S", PATIENCE_S)
    for _ in range(3):
        step = begin(masks, [3, 4, 5])
        assert (step.rows, step.late, step.failures) == ([2], [0], {})
        masks.advance([3, 4, 5], [NO_TOKEN, 7, 7])
        masks.enter(5, SamplingParams(grammar=Grammar(GrammarKind.REGEX, "yes|no")), [])
    may_go_on.set()
    step = begin(masks, [3])  # alone it is waited for
    assert (step.rows, step.late, step.failures) == ([0], [], {})


def test_a_sequence_left_during_its_mask_hinders_no_other_one(
    masks: GrammarMasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    masks.enter(0, SamplingParams(grammar=AMBIGUOUS), [])
    masks.begin([0])
    masks.enter(0, SamplingParams(grammar=Grammar(GrammarKind.REGEX, "yes|no")), [])
    (forbidden,) = begin(masks, [0]).forbidden()
    assert forbidden[TOKENIZER.encode("a")[-1]]


def test_the_budget_of_a_request_ends_it_alone(masks: GrammarMasks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "BUDGET_S", 0.0)
    monkeypatch.setattr(grammars, "BUDGET_TOKEN_S", 1e9)
    masks.enter(0, SamplingParams(grammar=AMBIGUOUS), TOKENIZER.encode("a")[-1:] * 3)
    assert begin(masks, [0]).failures == {}
    masks.enter(1, SamplingParams(grammar=AMBIGUOUS), [])  # no token that would count
    failures = begin(masks, [0, 1]).failures
    assert list(failures) == [1]
    assert "CPU time" in failures[1]


def test_masks_that_grow_slower_end_their_request_and_leave_the_quick_ones(masks: GrammarMasks) -> None:
    """The tokens of an ambiguous grammar take more time the longer the answer is."""
    masks.enter(0, SamplingParams(grammar=AMBIGUOUS), [])
    walk, (token,) = masks.walks[0], TOKENIZER.encode("a")[-1:]
    num_tokens = 0
    while not (failures := begin(masks, [0]).failures):
        masks.advance([0], [token])
        num_tokens += 1
        assert num_tokens < 2000
    assert walk.is_slow
    assert "ambiguous" in failures[0]


PAIRS = Grammar(GrammarKind.REGEX, "([ab][cd])*")


def walk_on(masks: GrammarMasks, slots: list[int], num_tokens: int) -> list[bytes]:
    """Greedy by the lowest allowed token; the masks on the way."""
    seen = []
    for _ in range(num_tokens):
        step = begin(masks, slots)
        assert not step.late
        seen.append(step.words.tobytes())
        masks.advance(slots, [int(np.flatnonzero(~row)[-1 - slot]) for slot, row in zip(slots, step.forbidden())])
    return seen


@pytest.mark.parametrize("inline_s", [0.0, 1e9])
def test_masks_that_are_computed_together_are_those_of_each_alone(
    masks: GrammarMasks, monkeypatch: pytest.MonkeyPatch, inline_s: float
) -> None:
    together: list[int] = []
    compute_together = Walk.compute_together

    def noted(walks: Sequence[Walk], num_words: int, executor: Any) -> None:
        together.append(len(walks))
        compute_together(walks, num_words, executor)

    monkeypatch.setattr(Walk, "compute_together", staticmethod(noted))
    monkeypatch.setattr(grammars, "SLOW_S", 1e9)  # whatever the machine does
    monkeypatch.setattr(grammars, "PATIENCE_S", PATIENCE_S)
    monkeypatch.setattr(grammars, "INLINE_S", inline_s)
    slots = [0, 1, 2]
    for slot in slots:
        masks.enter(slot, SamplingParams(grammar=PAIRS), [])
    seen = walk_on(masks, slots, 20)
    monkeypatch.setattr(Walk, "is_steady", False)
    for slot in slots:
        masks.enter(slot, SamplingParams(grammar=PAIRS), [])
    assert walk_on(masks, slots, 20) == seen
    assert set(together) == (set() if inline_s else {3})


def test_walks_whose_masks_took_long_together_are_measured_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    num_words = -(-VOCAB_SIZE // 32)
    monkeypatch.setattr(grammars, "SLOW_S", 1e9)
    letters = [TOKENIZER.encode(letter)[-1] for letter in "ac"]
    walks = [Walk(COMPILER.compile(PAIRS), letters * 5, is_awaited=False) for _ in range(2)]
    for walk in walks:
        walk.compute(num_words)
        walk.advance(letters[0])
        assert walk.is_steady
    for patience_s, is_steady in ((1e9, True), (0.0, False)):
        monkeypatch.setattr(grammars, "PATIENCE_S", patience_s)
        Walk.compute_together(walks, num_words, LLExecutor(1))
        for walk in walks:
            walk.advance(letters[1] if is_steady else letters[0])
            assert (walk.failure, walk.is_steady) == ("", is_steady)


def test_a_panic_of_the_library_ends_its_sequence_alone(masks: GrammarMasks, monkeypatch: pytest.MonkeyPatch) -> None:
    class Panic(BaseException):
        pass

    def panic(*_: object) -> None:
        raise Panic("index out of bounds")

    masks.enter(0, SamplingParams(grammar=PAIRS), [])
    with monkeypatch.context() as patch:
        patch.setattr(grammars, "fill_next_token_bitmask", panic)
        step = begin(masks, [0])
    assert step.failures == {0: "the grammar failed: index out of bounds"}
    masks.enter(1, SamplingParams(grammar=PAIRS), [])
    assert begin(masks, [1]).failures == {}


FORCING = Grammar(
    GrammarKind.JSON_SCHEMA,
    json.dumps({"type": "object", "properties": {"a name": {"type": "integer"}, "b": {}}, "required": ["a name"]}),
)


@pytest.mark.parametrize("grammar", [PAIRS, FORCING, AMBIGUOUS], ids=["pairs", "forcing", "ambiguous"])
def test_a_guess_is_accepted_only_if_the_mask_allows_it(grammar: Grammar) -> None:
    """All tokens at every position. Of several forced bytes the matcher would read tokens that the mask forbids: the
    walk reads the one that the mask allows, whatever was guessed."""
    rng, num_words, num_accepted, num_forced = Random(5), -(-VOCAB_SIZE // 32), 0, 0
    matcher = COMPILER.compile(grammar)
    for _ in range(40):
        walk = Walk(matcher.deep_copy(), [], is_awaited=False)
        walk.compute(num_words)
        assert walk.words is not None
        assert not walk.failure
        allowed = set(np.flatnonzero(np.unpackbits(walk.words.view(np.uint8), bitorder="little")).tolist())
        if allowed == {EOS}:
            return
        for token_id in range(VOCAB_SIZE):
            guessing = Walk(matcher.deep_copy(), [], is_awaited=False)
            read = guessing.read(token_id)
            if read == token_id:
                assert token_id in allowed
                num_accepted += 1
            elif read != NO_TOKEN:
                assert allowed == {read}
                num_forced += 1
            assert not guessing.failure
            guessing.compute(num_words)  # a refused guess leaves the matcher where it was
            assert guessing.words is not None
            assert read != NO_TOKEN or guessing.words.tobytes() == walk.words.tobytes()
            assert read != NO_TOKEN or token_id not in allowed
        matcher.consume_tokens([rng.choice(sorted(allowed - {EOS}))])
    assert num_accepted
    assert bool(num_forced) == (grammar is FORCING)


NAMED = Grammar(GrammarKind.REGEX, "(name: [ab];)*")
QUOTED = Grammar(GrammarKind.REGEX, "([ab] 'to){30}")
"""At the space the library says that a quotation mark and ``to`` follow, after the mark that ``t`` and ``o`` do: the
tokenizer keeps letters together with a mark before them, but for the contraction ``'t``."""


@pytest.mark.parametrize(
    ("grammar", "is_obedient", "guesses"),
    [
        (PAIRS, True, (51, 0)),
        (PAIRS, False, (5, 5)),
        (NAMED, True, (51, 0)),
        (NAMED, False, (7, 5)),
        (QUOTED, True, (51, 0)),
    ],
)
def test_a_greedy_answer_is_the_same_with_guesses(
    masks: GrammarMasks, monkeypatch: pytest.MonkeyPatch, grammar: Grammar, is_obedient: bool, guesses: tuple[int, int]
) -> None:
    """A model that obeys the grammar by itself needs no mask but for the first tokens. One that does not obey is rarely
    asked in vain."""
    monkeypatch.setattr(grammars, "SLOW_S", 1e9)  # whatever the machine does
    monkeypatch.setattr(grammars, "PATIENCE_S", PATIENCE_S)
    monkeypatch.setattr(grammars, "INLINE_S", 1e9)
    answers: list[list[int]] = []
    for may_guess in (False, True):
        masks.enter(0, SamplingParams(temperature=0.0, grammar=grammar), [])
        answer: list[int] = []
        num_guesses = num_refused = 0
        for number in range(60):
            best = answers[0][number] if answers and is_obedient else EOS + 1
            computing = masks.begin([0], may_guess=may_guess)
            assert computing is not None
            step, token_id = computing.result(), best
            if step is None:
                num_guesses += 1
                chosen = np.array([best])
                step, token_id = computing.refused(chosen), int(chosen[0])
                num_refused += step is not None
            if step is not None:
                assert (step.rows, step.late, step.failures) == ([0], [], {})
                (forbidden,) = step.forbidden()
                token_id = int(np.flatnonzero(~forbidden)[-1]) if forbidden[best] else best
            masks.advance([0], [token_id])
            answer.append(token_id)
        answers.append(answer)
    assert answers[0] == answers[1]
    assert (num_guesses, num_refused) == guesses


@pytest.mark.usefixtures("no_haste")
@pytest.mark.parametrize("grammar", [NAMED, QUOTED], ids=["named", "quoted"])
def test_guesses_that_take_long_change_no_answer(
    masks: GrammarMasks, monkeypatch: pytest.MonkeyPatch, grammar: Grammar
) -> None:
    """Tokens that were read ahead come out, though masks are computed from then on."""
    masks.enter(0, SamplingParams(temperature=0.0, grammar=grammar), [])
    words, answer = walk_on(masks, [0], 60), list[int]()
    expected = [
        int(np.flatnonzero(np.unpackbits(np.frombuffer(each, np.uint8), bitorder="little"))[-1]) for each in words
    ]
    for first in range(10, 50):
        masks.enter(0, SamplingParams(temperature=0.0, grammar=grammar), expected[:first])
        begin(masks, [0])
        masks.advance([0], expected[first : first + 1])
        answer = expected[: first + 1]
        while len(answer) < 60:
            computing = guessing(masks, [0])
            chosen = np.array(expected[len(answer) : len(answer) + 1])
            step = computing.result()
            with monkeypatch.context() as patch:
                patch.setattr(grammars, "PATIENCE_S", 0.0)
                step = computing.refused(chosen) if step is None else step
            if step is not None:
                (chosen[0],) = np.flatnonzero(~step.forbidden()[0])[-1:]
            masks.advance([0], chosen.tolist())
            answer += chosen.tolist()
        assert answer == expected


def test_a_long_constant_is_written_as_tokens_once_per_guess() -> None:
    """The time of that grows with its length, and the step waits for a guess."""

    class Counting:
        """A matcher that counts the bytes that it writes as tokens."""

        def __init__(self) -> None:
            self.matcher = COMPILER.compile(Grammar(GrammarKind.REGEX, "to be or not to be, " * 50))
            self.num_bytes = 0

        def __getattr__(self, name: str) -> Any:
            return getattr(self.matcher, name)

        def compute_ff_tokens(self) -> list[int]:
            self.num_bytes += len(self.matcher.compute_ff_bytes())
            return self.matcher.compute_ff_tokens()

    counting: Any = Counting()
    walk, answer = Walk(counting, [], is_awaited=False), list[int]()
    while (token := walk.read(0)) != NO_TOKEN:
        answer.append(token)
        assert counting.num_bytes <= 1000
        counting.num_bytes = 0
    assert TOKENIZER.decode(answer) == ("to be or not to be, " * 50)[:-1]  # the last byte must be guessed
    assert walk.failure == ""


def begin_guessing(masks: GrammarMasks, slots: list[int]) -> ComputingMasks:
    """A step in which new sequences guess: "c" follows."""
    letters = [TOKENIZER.encode(letter)[-1] for letter in "acacacacaca"]
    for slot in slots:
        masks.enter(slot, SamplingParams(temperature=0.0, grammar=PAIRS), letters[:-1])
    begin(masks, slots)
    masks.advance(slots, letters[-1:] * len(slots))
    return guessing(masks, slots)


def guessing(masks: GrammarMasks, slots: list[int]) -> ComputingMasks:
    computing = masks.begin(slots, may_guess=True)
    assert computing is not None
    return computing


@pytest.fixture
def no_haste(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the machine does, nothing takes long."""
    for name in ("SLOW_S", "INLINE_S", "PATIENCE_S"):
        monkeypatch.setattr(grammars, name, 1e9)


@pytest.mark.usefixtures("no_haste")
def test_a_step_of_the_same_sequences_begins_like_the_last_one(masks: GrammarMasks) -> None:
    computing = begin_guessing(masks, [0, 1])
    for letter in "cac":
        assert computing.refused(np.array([TOKENIZER.encode(letter)[-1]] * 2)) is None
        assert computing.is_settled
        assert guessing(masks, [0, 1]) is computing
    assert guessing(masks, [1, 0]) is not computing
    computing = guessing(masks, [0, 1])
    assert computing.refused(np.array([EOS + 1, TOKENIZER.encode("a")[-1]])) is not None
    assert not computing.is_settled
    assert list(begin_guessing(masks, [0]).guessed) == [0]


@pytest.mark.usefixtures("no_haste")
def test_a_guess_that_took_long_is_timed_once_more_before_masks_are_computed_one_by_one(
    masks: GrammarMasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    computing = begin_guessing(masks, [0])
    for letter, patience_s, may_guess in (("c", 0.0, True), ("a", 1e9, True), ("c", 0.0, True), ("a", 0.0, False)):
        monkeypatch.setattr(grammars, "PATIENCE_S", patience_s)
        assert computing.refused(np.array([TOKENIZER.encode(letter)[-1]])) is None
        assert not computing.is_settled
        monkeypatch.setattr(grammars, "PATIENCE_S", 1e9)
        computing = guessing(masks, [0])
        assert bool(computing.guessed) == may_guess


@pytest.mark.usefixtures("no_haste")
def test_sequences_that_obey_guess_however_many_there_are(masks: GrammarMasks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were refused guess only if their masks would take next to no time together."""
    computing = begin_guessing(masks, [0, 1, 2])
    monkeypatch.setattr(grammars, "INLINE_S", 1.0)
    for walk in masks.walks.values():
        walk.latest_s = 0.6
    computing = guessing(masks, [0, 1, 2])
    assert list(computing.guessed) == [0, 1, 2]
    letter = TOKENIZER.encode("c")[-1]
    assert computing.refused(np.array([letter, EOS + 1, EOS + 1])) is not None
    masks.advance([0, 1, 2], [letter] * 3)
    for pause in "ac":
        begin(masks, [1, 2])
        masks.advance([1, 2], [TOKENIZER.encode(pause)[-1]] * 2)
    for walk in masks.walks.values():
        walk.latest_s = 0.6
    for inline_s, rows in ((2.0, [0, 1, 2]), (1.0, [0])):
        monkeypatch.setattr(grammars, "INLINE_S", inline_s)
        assert list(guessing(masks, [0, 1, 2]).guessed) == rows


TAGGED = [{"type": "object", "properties": {"k": {"const": name}}, "required": ["k"]} for name in "ab"]


@pytest.mark.parametrize(
    ("options", "is_obeyed"),
    [
        ([{"type": "string"}, {"type": "integer"}], True),
        (TAGGED, True),
        ([{"type": "integer"}, {"type": "number"}], False),
        ([{"type": "string", "maxLength": 5}, {"type": "string", "pattern": "^a"}], False),
    ],
    ids=["types", "constants", "numbers", "texts"],
)
def test_one_of_is_obeyed_if_its_options_can_be_told_apart(options: list[Schema], is_obeyed: bool) -> None:
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"oneOf": options}))
    if is_obeyed:
        COMPILER.compile(grammar)
    else:
        with pytest.raises(InvalidInputError, match="oneOf"):
            COMPILER.compile(grammar)
