"""Prints a flat report: one JSON object, or a two-column table."""

from __future__ import annotations

import json
from typing import Any

import click
from rich.console import Console
from rich.table import Table


def print_report(title: str, report: dict[str, Any], as_json: bool) -> None:
    """``report`` as one JSON object, or as a table with readable numbers."""
    if as_json:
        click.echo(json.dumps(report))
        return
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(justify="left")
    table.add_column(justify="right")
    for name, value in report.items():
        table.add_row(name, f"{value:,.4g}" if isinstance(value, float) and value < 1000 else _plain(value))
    Console().print(table)


def _plain(value: object) -> str:
    return f"{value:,.0f}" if isinstance(value, float) else str(value)
