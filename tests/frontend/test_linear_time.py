"""Work on a client's text grows with its length, not with its square.

``re`` counts no steps, so CPU time is compared, of one thread, for a text and one EIGHTFOLD as long: a linear search
takes 8 times as long, a quadratic one 64 times.
"""

from __future__ import annotations

import ast
import importlib
import itertools
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import kvrelay
from kvrelay.core.grammar import Grammar, GrammarKind
from kvrelay.errors import InvalidInputError
from kvrelay.frontend.openai.bounds import check_body
from kvrelay.frontend.openai.structured import lark_of_gbnf
from kvrelay.frontend.tokens.text_pieces import cut_text
from kvrelay.frontend.tools.dialects import HERMES, LLAMA3_JSON, MISTRAL, Dialect
from kvrelay.frontend.tools.parsing import ToolParser
from kvrelay.frontend.tools.reasoning import ReasoningParser

ROOT = Path(kvrelay.__file__).parent
ROOMS = ("core", "frontend", "router", "worker", "engine", "control")
"""Rooms that read what a client or another process writes. The others read an operator's files and options."""
SMALL = 2048
EIGHTFOLD = 8
BOUND = 3 * EIGHTFOLD
CHARS = ("A", "a", " ", "\n", '"', "\\", "/", ":", ".")
WORDS = (
    "0",
    "(",
    "|",
    "{",
    "[",
    "=",
    "é",
    "\u4e2d",
    '"pattern":',
    '"pattern":"',
    '\\"pattern":"\\',
    "%json",
    "A:",
    "$.",
    "tcp://",
    "{ 1",
    "-04-",
    "A'b",
)


def patterns() -> Iterator[tuple[str, tuple[re.Pattern[str] | re.Pattern[bytes], frozenset[str]]]]:
    """Every regular expression in the rooms, by where it stands, and the methods that its module calls."""
    for file in sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py")):
        source = file.read_text(encoding="utf-8")
        if not re.search(r"\bre\s*\.", source):
            continue  # parsing takes its time, in each process that collects tests
        where = file.relative_to(ROOT.parent).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
        tree = list(ast.walk(ast.parse(source)))
        names = {id(node.value): ast.unparse(node.targets[0]) for node in tree if isinstance(node, ast.Assign)}
        called = [node.func for node in tree if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
        calls = [(ast.unparse(function.value), function.attr) for function in called]
        for node in tree:
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and ast.unparse(node.func.value) == "re"
            ):
                scope = vars(importlib.import_module(where))
                compiled = re.compile(eval(ast.unparse(node.args[0]), scope), _flags(node, scope))
                methods = {method for name, method in calls if name == names.get(id(node))} or {node.func.attr}
                yield f"{where}:{node.lineno}", (compiled, frozenset(methods))


def _flags(node: ast.Call, scope: dict[str, object]) -> int:
    given = [argument for argument in node.args[1:] if ast.unparse(argument).startswith("re.")]
    return int(eval(ast.unparse(given[0]), scope)) if given else 0


PATTERNS = dict(patterns())


def cpu_s(work: Callable[[], object]) -> float:
    began = time.thread_time()
    work()
    return time.thread_time() - began


def is_linear(work: Callable[[int], object], small_length: int = SMALL) -> bool:
    """``work`` is given a length. The best of some attempts counts: other programs share the machine's caches, and its
    host may stall it for longer than an attempt takes, so they are apart in time."""

    def large_s() -> float:
        return cpu_s(lambda: work(small_length * EIGHTFOLD))

    small, large = float("inf"), large_s()
    for attempt in range(8):
        if large < 1e-4:
            return True
        time.sleep(0.01 * attempt)
        # Several times: a stall here would hide a square.
        small = min(small, *(cpu_s(lambda: work(small_length)) for _ in range(3)))
        if large <= BOUND * small:
            return True
        large = min(large, large_s())
    return False


def repeated(unit: str, length: int) -> str:
    return (unit * (length // len(unit) + 1))[:length]


def test_the_measure_tells_linear_from_quadratic() -> None:
    slow, fast = re.compile("a*b"), re.compile("a*+b|a++")
    assert not is_linear(lambda length: slow.findall("a" * length))
    assert is_linear(lambda length: fast.findall("a" * length))


@pytest.mark.parametrize("where", PATTERNS)
def test_regular_expressions(where: str) -> None:
    pattern, methods = PATTERNS[where]
    is_whole = methods <= {"fullmatch", "match"}
    units = [*CHARS, *WORDS, *map("".join, itertools.permutations(CHARS, 2))]
    for unit, start in itertools.product(units, ("", '"', "0")):

        def search(length: int, unit: str = unit, start: str = start) -> None:
            text = start + repeated(unit, length)
            subject = text.encode() if isinstance(pattern.pattern, bytes) else text
            if is_whole:
                pattern.fullmatch(subject)  # type: ignore[arg-type]
            else:
                pattern.sub(subject[:0], subject)  # type: ignore[arg-type]

        assert is_linear(search), (unit, start)


def refused_or_not(work: Callable[[], object]) -> None:
    try:
        work()
    except InvalidInputError:
        pass


@pytest.mark.parametrize("kind", GrammarKind)
@pytest.mark.parametrize(
    "unit", ["A", "A ", "A?", 'A: "a"\n', '"\\"', "/\\/", '"pattern":"\\', "a ", "( ", "A:A\n", "%json {}\n", "{1"]
)
@pytest.mark.parametrize("start", ["", 'A: "', "A: /", "start: A\n"])
def test_grammars_are_checked(kind: GrammarKind, unit: str, start: str) -> None:
    assert is_linear(lambda length: refused_or_not(Grammar(kind, start + repeated(unit, length)).check))


@pytest.mark.parametrize("unit", ["[", '"', '\\"', '"\\', "{}", '",', "\\", "[{"])
def test_bodies_are_checked(unit: str) -> None:
    assert is_linear(lambda length: refused_or_not(lambda: check_body(repeated(unit, length).encode() * 64)))


@pytest.mark.parametrize("unit", ["a", " ", "a ", "\n", "a\n", "\u4e2d\n", "é"])
def test_texts_are_cut(unit: str) -> None:
    assert is_linear(lambda length: list(cut_text(repeated(unit, length) * 16, 256)))


@pytest.mark.parametrize("dialect", [HERMES, LLAMA3_JSON, MISTRAL], ids=lambda dialect: dialect.name)
@pytest.mark.parametrize("unit", [" ", "MARKER", "MARKERf", "MARKER{", ";", "["])
@pytest.mark.parametrize("start", ["", "MARKER", '{"arguments": {"a": "'])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_calls_are_parsed(dialect: Dialect, unit: str, start: str, is_streamed: bool) -> None:
    def parse(length: int) -> None:
        parser = ReasoningParser(False, ToolParser(dialect, frozenset({"f"})))
        text = (start + repeated(unit, length)).replace("MARKER", dialect.marker)
        size = 4 if is_streamed else len(text)
        for at in range(0, len(text), size):
            parser.push(text[at : at + size])
        parser.flush()

    assert is_linear(parse, 4096 if is_streamed else 16384)


@pytest.mark.parametrize(
    "text",
    [
        "".join(f"r{number} ::= r{number + 1}\n" for number in range(1500)) + 'r1500 ::= "a"\nroot ::= r0\n',
        "root ::= x\nx ::= "
        + '"" ' * 5000
        + "r0\n"
        + "".join(f"r{number} ::= r{number + 1}\n" for number in range(400))
        + 'r400 ::= "a"\n',
    ],
    ids=["many rules", "long rules"],
)
def test_a_conversion_that_takes_rules_times_length_is_refused(text: str) -> None:
    with pytest.raises(InvalidInputError, match="rules"):
        lark_of_gbnf(text, "ebnf")
