"""The one table: aligned for a terminal, Markdown for a page."""

from __future__ import annotations

from kvrelay.bench.report.table import milliseconds, number, table


def test_a_terminal_aligns_names_left_and_figures_right() -> None:
    assert table(("case", "n"), (("a", "1"), ("long", "10"))) == "case   n\n----  --\na      1\nlong  10"
    assert table(("a", "b", "n"), (("x", "yy", "1"),), left=2) == "a  b   n\n-  --  -\nx  yy  1"


def test_markdown_has_a_rule_and_no_padding() -> None:
    assert table(("case", "n"), (("a", "1"),), markdown=True) == "| case | n |\n| --- | --- |\n| a | 1 |"


def test_a_table_without_rows_shows_its_columns() -> None:
    assert table(("case", "n"), ()) == "case  n\n----  -"


def test_what_was_not_measured_is_a_dash() -> None:
    assert (number(None), number(0.25, ".0%"), number(2.0, "g", 1e3)) == ("-", "25%", "2000")
    assert milliseconds(0.0123, None) == ["12.3", "-"]
