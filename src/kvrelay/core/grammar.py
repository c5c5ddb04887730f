"""What an answer must look like, as it travels with a request's sampling settings to whichever worker samples."""

from __future__ import annotations

import enum

import msgspec

MAX_GRAMMAR_CHARS = 256 * 1024


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


ANY_JSON_OBJECT = Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object"}')
