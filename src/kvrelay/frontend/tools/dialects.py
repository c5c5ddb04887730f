"""The dialects in which models write function calls, and how to find a model's dialect.

hermes, qwen3   <tool_call>\\n{"name": "f", "arguments": {...}}\\n</tool_call>   per call, after any text
llama3_json     {"name": "f", "parameters": {...}}; ...                          and no other text
mistral         [TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]             or per call
                [TOOL_CALLS]f[ARGS]{...}
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping

import msgspec
from msgspec.structs import replace

NAME = "{name}"
"""Stands for a function's name in a dialect's ``head``."""


def _json_head(key: str) -> tuple[str, ...]:
    """Word by word, as JSON is read: a longer literal would hide documents that begin like a call."""
    return ("{", '"name"', ": ", f'"{NAME}"', ", ", f'"{key}"', ": ")


class Dialect(msgspec.Struct, frozen=True):
    """``marker`` opens calls (empty: the answer's first character does), ``end`` closes them; ``skipped`` are
    characters between calls. ``optional`` is a marker that may precede a call. ``others`` are more texts that models
    of the dialect may have as one token.

    For grammars: ``before`` all calls, ``between``, ``behind``; and ``head`` and ``tail`` around a call's arguments.
    """

    name: str
    between: str
    head: tuple[str, ...]
    tail: str = "}"
    marker: str = ""
    end: str = ""
    skipped: str = ""
    before: str = ""
    behind: str = ""
    optional: str = ""
    has_names: bool = False
    others: tuple[str, ...] = ()
    call_id_chars: int = 24

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that may be tokens, special or not."""
        return tuple(filter(None, (self.marker, self.end, self.optional, *self.others)))


HERMES = Dialect(
    "hermes",
    head=_json_head("arguments"),
    marker="<tool_call>",
    end="</tool_call>",
    before="<tool_call>\n",
    between="\n</tool_call>\n<tool_call>\n",
    behind="\n</tool_call>",
)
LLAMA3_JSON = Dialect(
    "llama3_json", head=_json_head("parameters"), skipped=";", between="; ", optional="<|python_tag|>"
)
MISTRAL = Dialect(
    "mistral",
    head=_json_head("arguments"),
    marker="[TOOL_CALLS]",
    skipped="[],",
    before="[TOOL_CALLS][",
    between=", ",
    behind="]",
    has_names=True,
    others=("[ARGS]", "[CALL_ID]"),
    call_id_chars=9,
)
NAMED_MISTRAL = replace(MISTRAL, before="", between="", behind="", head=("[TOOL_CALLS]", NAME, "[ARGS]"), tail="")
"""How models write whose vocabulary has ``[ARGS]``."""
DIALECTS = {"hermes": HERMES, "qwen3": HERMES, "llama3_json": LLAMA3_JSON, "mistral": MISTRAL}
_MARKERS = frozenset(marker for dialect in DIALECTS.values() for marker in dialect.markers)


def known_markers(tokens: Mapping[str, int], vocab_size: int) -> dict[str, int]:
    """The markers of any dialect that are tokens of a model, with their ids. ``tokens``: those of its tokenizer, which
    may be more than the model's."""
    return {marker: tokens[marker] for marker in _MARKERS if tokens.get(marker, vocab_size) < vocab_size}


def written_dialect(dialect: Dialect, markers: Container[str]) -> Dialect:
    """How a model whose vocabulary has these markers writes calls of the dialect."""
    return NAMED_MISTRAL if dialect is MISTRAL and "[ARGS]" in markers else dialect


def guessed_dialect(template: str, chat: str = "") -> Dialect | None:
    """The dialect of a chat template with tools: from ``chat``, where it has written a call, if it writes calls; else
    from its source. None if it is not known."""
    if chat:
        return next((dialect for pattern, dialect in _CALLS if pattern.search(chat)), None)
    if "<function=" in template:
        return None
    if "<tool_call>" in template:
        return HERMES
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    return LLAMA3_JSON if '"parameters"' in template or "python_tag" in template else None


_CALLS = (
    (re.compile(r'<tool_call>\s*\{\s*"'), HERMES),
    (re.compile(r"\[TOOL_CALLS\]"), MISTRAL),
    (re.compile(r'\{\s*"name":\s*"[^"]*",\s*"parameters"'), LLAMA3_JSON),
)
