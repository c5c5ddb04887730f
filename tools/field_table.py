"""Writes the table of request fields into docs/openai-api.md, from the tables that decide: ``python
tools/field_table.py``. A test fails while the page has another table.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from kvrelay.frontend.anthropic import MessagesRequest
from kvrelay.frontend.api.fields import TABLES, FieldTable
from kvrelay.frontend.openai.requests import ChatCompletionRequest, CompletionRequest, TokenizeRequest
from kvrelay.frontend.responses import ResponsesRequest

PAGE = Path(__file__).parents[1] / "docs/openai-api.md"
BEGIN, END = "<!-- fields: written by tools/field_table.py -->\n", "<!-- fields end -->\n"
COLUMNS = {
    "completions": TABLES[CompletionRequest],
    "chats": TABLES[ChatCompletionRequest],
    "responses": TABLES[ResponsesRequest],
    "messages": TABLES[MessagesRequest],
    "tokenize": TABLES[TokenizeRequest],
}
DONE, REFUSED, ADVICE, UNKNOWN = "**done**", "refused", "advice", "unknown"


def verdict(table: FieldTable, name: str) -> str:
    """What one API does with a field."""
    if name in table.done:
        return DONE
    if name in table.renamed:
        return f"use {table.renamed[name]}"
    if name in table.refused:
        return REFUSED
    return ADVICE if name in table.advice else UNKNOWN


def section() -> str:
    """All tables, in Markdown: fields that an API has, names of others for ours, advice, and what nothing has."""
    names = sorted(frozenset().union(*(table.names for table in COLUMNS.values())))
    verdicts = {name: tuple(verdict(table, name) for table in COLUMNS.values()) for name in names}
    refused = [name for name in names if set(verdicts[name]) == {REFUSED}]
    advice = [name for name in names if set(verdicts[name]) == {ADVICE}]
    renamed = [
        name for name in names if name not in refused and set(verdicts[name]).isdisjoint((DONE, ADVICE, UNKNOWN))
    ]
    rest = [name for name in names if name not in {*refused, *advice, *renamed}]
    return "".join(
        f"{line}\n"
        for line in (
            *_table(("fields", *COLUMNS), _grouped((name, verdicts[name]) for name in rest)),
            "",
            f"Advice everywhere: {', '.join(f'`{name}`' for name in advice)}.",
            "",
            "Refused everywhere, with our name for the same:",
            "",
            *_table(("fields", "use"), _grouped((name, (_ours(verdicts[name]),)) for name in renamed)),
            "",
            "Refused everywhere; the error says why, or what to use. What asks for nothing passes, logged once unless "
            "null: null, an empty value, the one in brackets, or false unless that is `True`. "
            f"{', '.join(map(_refused, refused))}.",
        )
    )


def _ours(verdicts: tuple[str, ...]) -> str:
    """What to use: that of the first API that says so, and of those that say otherwise."""
    uses = {api: told.removeprefix("use ") for api, told in zip(COLUMNS, verdicts, strict=True) if told != REFUSED}
    first, *_ = uses.values()
    return "; ".join((first, *(f"{api}: {use}" for api, use in uses.items() if use != first)))


def _refused(name: str) -> str:
    harmless = next(table.refused[name].harmless for table in COLUMNS.values())
    return f"`{name}`" if harmless is None else f"`{name}` (`{harmless}`)"


def _grouped(rows: Iterable[tuple[str, tuple[str, ...]]]) -> Iterator[tuple[str, ...]]:
    """One row for all names with the same cells, in the order of their first."""
    names: dict[tuple[str, ...], list[str]] = {}
    for name, cells in rows:
        names.setdefault(cells, []).append(f"`{name}`")
    return ((", ".join(named), *cells) for cells, named in names.items())


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield "|---" * len(head) + "|"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def with_section(page: str) -> str:
    """The page with the present tables between the two marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{section()}\n{END}{after}"


def main() -> int:
    PAGE.write_text(with_section(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
