"""What the benchmarks share that start a ``kvrelay serve`` of their own, several times: its command line, and medians
over the turns."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence

import click

serve_args_option = click.option("--serve-args", default="", help="More arguments for kvrelay serve.")


def serve_command(model: str | None, flags: str, more: str) -> str:
    """The command line of ``kvrelay serve``; ``{port}`` stands for the port. ``more`` wins over ``flags``."""
    return f"{sys.executable} -m kvrelay serve {model or ''} {flags} --port {{port}} {more}"


def medians(turns: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of each figure over the turns; ``failed`` is the sum."""
    return {
        figure: (sum if figure == "failed" else statistics.median)([turn[figure] for turn in turns])
        for figure in turns[0]
    }
