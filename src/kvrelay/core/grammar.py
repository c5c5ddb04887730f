"""What an answer must look like, as it travels with a request's sampling settings to whichever worker samples."""

from __future__ import annotations

import enum
import re

import msgspec

from kvrelay.errors import InvalidInputError

MAX_GRAMMAR_CHARS = 256 * 1024
MAX_GRAMMAR_LINKS = 500
"""Rules, and references inside schemas. The compiler follows a chain of them on its thread's stack: 5,000 end the
process."""

MAX_GRAMMAR_REPETITIONS = 2048
"""Parts of patterns that may be missing or repeated. The time to compile a sequence of them grows with its square:
2,000 take 0.4 s, 30,000 take 45 s."""

_REPETITION = re.compile(r"[?*+]|\{\s*\d|\|\s*\)|\(\s*\||\(\s*\)")
"""What makes a part of a pattern optional or repeated, or a part that is empty; inside a class it counts, too."""
_PATTERN = re.compile(r'"pattern"\s*:\s*"((?:\\.|[^"\\])*+)"')
_LITERAL = re.compile(r'(?://|#).*|"(?:\\.|[^"\\\n])*+"?|/(?:\\.|[^/\\])*+/?')
"""A comment, string or regular expression of Lark. One without an end is refused by the compiler; it goes on to where
it breaks off, so that nothing is read twice."""
_JSON_LINE = re.compile(r"%json.*")
_TERMINAL = re.compile(r"^[ \t]*+([A-Z_][A-Z0-9_]*+)[^:\"/\n]*+:", re.MULTILINE)
"""Possessive, so that its time is linear."""
_NAME = re.compile(r"\b[A-Z_][A-Z0-9_]*\b")
_RULE = re.compile(r"[^\"\s]\s*:")
"""The colon behind the name of a rule. A key of a schema has a quotation mark before its colon."""


class GrammarKind(enum.StrEnum):
    """``JSON_SCHEMA``: a JSON document valid under the schema (as text). ``REGEX``: a full match, in Rust's syntax.
    ``LARK``: a context-free grammar in llguidance's variant of Lark."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"


class Grammar(msgspec.Struct, frozen=True, weakref=True):
    """``source`` of at most MAX_GRAMMAR_CHARS characters. Equal values are compiled once."""

    kind: GrammarKind
    source: str

    def check(self) -> None:
        """Raise InvalidInputError for a source that must not reach the compiler."""
        if len(self.source) > MAX_GRAMMAR_CHARS:
            raise InvalidInputError(f"a grammar has at most {MAX_GRAMMAR_CHARS} characters", param=self.kind)
        if self._num_links() > MAX_GRAMMAR_LINKS:
            raise InvalidInputError(
                f"a grammar has at most {MAX_GRAMMAR_LINKS} rules and references ($ref)", param=self.kind
            )

        if self._num_repetitions() > MAX_GRAMMAR_REPETITIONS:
            raise InvalidInputError(
                f"the patterns of a grammar have at most {MAX_GRAMMAR_REPETITIONS} repetitions and optional parts",
                param=self.kind,
            )

    def _num_repetitions(self) -> int:
        """At least as many as there are when terminals stand for what they are made of."""
        if self.kind is GrammarKind.REGEX:
            return len(_REPETITION.findall(self.source))
        if self.kind is GrammarKind.JSON_SCHEMA:
            return _repetitions_of_schema(self.source)
        bare = _LITERAL.sub(_blanks, self.source)
        schemas = [self.source[match.start() : match.end()] for match in _JSON_LINE.finditer(bare)]
        terminals = _expanded_terminals(self.source, bare)
        if sum(size for size, _ in terminals) > MAX_GRAMMAR_CHARS:
            raise InvalidInputError(
                f"the terminals of a grammar have at most {MAX_GRAMMAR_CHARS} characters in all", param=self.kind
            )
        expanded = sum(count for _, count in terminals)
        num_rules = len(_REPETITION.findall(self.source)) - sum(len(_REPETITION.findall(schema)) for schema in schemas)
        return expanded + num_rules + sum(map(_repetitions_of_schema, schemas))

    def _num_links(self) -> int:
        """At least as many as there are: an escape may stand for a letter of ``$ref``, and a colon in a text counts."""
        if self.kind is GrammarKind.REGEX:
            return 0
        num_references = self.source.count('ref"') + self.source.count("\\u")
        return num_references + (len(_RULE.findall(self.source)) if self.kind is GrammarKind.LARK else 0)


def _repetitions_of_schema(source: str) -> int:
    if "\\u" in source or '"patternProperties"' in source:
        # A key may be written by escapes, or be a pattern itself.
        return len(_REPETITION.findall(source))
    return sum(len(_REPETITION.findall(pattern)) for pattern in _PATTERN.findall(source))


def _blanks(match: re.Match[str]) -> str:
    return " " * len(match[0])


def _expanded_terminals(source: str, bare: str) -> list[tuple[int, int]]:
    """Of each terminal of a Lark grammar: characters and repetitions, with those of all terminals in it. The compiler
    puts them in place of their names, so that a few lines may stand for any number of parts. ``bare`` is the source
    with blanks for literals."""
    found = list(_TERMINAL.finditer(bare))
    ends = [match.start() for match in found[1:]] + [len(bare)]
    bodies = {match[1]: slice(match.end(), end) for match, end in zip(found, ends)}
    sizes: dict[str, tuple[int, int]] = {}

    def expand(name: str) -> tuple[int, int]:
        if name not in sizes:
            sizes[name] = (0, 0)  # of a terminal inside itself, which the compiler refuses
            body = source[bodies[name]]
            size, count = len(body), len(_REPETITION.findall(body))
            for inner in _NAME.findall(bare[bodies[name]]):
                if inner in bodies:
                    more = expand(inner)
                    size, count = size + more[0], count + more[1]
            sizes[name] = size, count
        return sizes[name]

    return [expand(name) for name in bodies]


ANY_JSON_OBJECT = Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object"}')
