"""``kvrelay bench compare``: finished runs side by side."""

from __future__ import annotations

from pathlib import Path

import click

from kvrelay.bench.commands.options import FILE


@click.command("compare")
@click.argument("files", nargs=-1, required=True, type=FILE)
def compare_command(files: tuple[Path, ...]) -> None:
    """Show reports of ``bench serve`` side by side, with ratios to the first.

    \b
    Example: kvrelay bench compare before.json after.json
    """
    from kvrelay.bench.report.files import read_serve_report
    from kvrelay.bench.report.text import comparison_text

    click.echo(comparison_text([path.stem for path in files], [read_serve_report(path) for path in files]))
