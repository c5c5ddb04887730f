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

_RULE = re.compile(r"[^\"\s]\s*:")
"""The colon behind the name of a rule. A key of a schema has a quotation mark before its colon."""


class GrammarKind(enum.StrEnum):
    """``JSON_SCHEMA``: a JSON document valid under the schema (as text). ``REGEX``: a full match, in Rust's syntax.
    ``LARK``: a context-free grammar in llguidance's variant of Lark."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"


class Grammar(msgspec.Struct, frozen=True):
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

    def _num_links(self) -> int:
        """At least as many as there are: an escape may stand for a letter of ``$ref``, and a colon in a text counts."""
        if self.kind is GrammarKind.REGEX:
            return 0
        num_references = self.source.count('ref"') + self.source.count("\\u")
        return num_references + (len(_RULE.findall(self.source)) if self.kind is GrammarKind.LARK else 0)


ANY_JSON_OBJECT = Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object"}')
