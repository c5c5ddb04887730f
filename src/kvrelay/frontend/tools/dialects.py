"""The dialects in which models write function calls, and how to find a model's dialect.

hermes, qwen3   <tool_call>\\n{"name": "f", "arguments": {...}}\\n</tool_call>   per call, after any text
llama3_json     {"name": "f", "parameters": {...}}; ...                          and no other text
mistral         [TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]             or per call
                [TOOL_CALLS]f[ARGS]{...}
"""

from __future__ import annotations

import msgspec


class Dialect(msgspec.Struct, frozen=True):
    """``marker`` opens calls (empty: the answer's first character does), ``end`` closes them; ``skipped`` are
    characters between calls. ``optional`` is a marker that may precede a call. ``has_special_tokens``: markers are
    special tokens, which the detokenizer must not skip.

    For grammars: ``before`` all calls, ``between``, ``behind``, and the ``key`` of the arguments.
    """

    name: str
    between: str
    marker: str = ""
    end: str = ""
    skipped: str = ""
    before: str = ""
    behind: str = ""
    key: str = "arguments"
    optional: str = ""
    has_names: bool = False
    has_special_tokens: bool = False
    call_id_chars: int = 24


HERMES = Dialect(
    "hermes",
    marker="<tool_call>",
    end="</tool_call>",
    before="<tool_call>\n",
    between="\n</tool_call>\n<tool_call>\n",
    behind="\n</tool_call>",
)
LLAMA3_JSON = Dialect(
    "llama3_json", skipped=";", between="; ", key="parameters", optional="<|python_tag|>", has_special_tokens=True
)
MISTRAL = Dialect(
    "mistral",
    marker="[TOOL_CALLS]",
    skipped="[],",
    before="[TOOL_CALLS][",
    between=", ",
    behind="]",
    has_names=True,
    has_special_tokens=True,
    call_id_chars=9,
)
DIALECTS = {"hermes": HERMES, "qwen3": HERMES, "llama3_json": LLAMA3_JSON, "mistral": MISTRAL}


def guessed_dialect(template: str) -> Dialect | None:
    """The dialect that a chat template's source shows; None if it supports tools, but in no known dialect.

    For a template without tools, ``histories.described`` describes the functions, and calls are plain JSON.
    """
    if "tools" not in template:
        return LLAMA3_JSON
    if "<function=" in template:
        return None
    if "<tool_call>" in template:
        return HERMES
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    return LLAMA3_JSON if '"parameters"' in template or "python_tag" in template else None
