"""Figures without a display: matplotlib is loaded here, on demand, and nowhere kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from kvrelay.bench.errors import MissingPackageError
from kvrelay.errors import InvalidInputError

_T = TypeVar("_T")


def new_figure(width: float, height: float) -> Any:
    """An empty figure of that many inches. Raises MissingPackageError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as exc:
        raise MissingPackageError("matplotlib", "plotting") from exc
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Any, path: Path) -> None:
    """Write the figure; the name's ending chooses the format. An ending that is no picture is refused."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as exc:
        raise InvalidInputError(f"cannot write the plot {path}: {exc}", param="plot") from exc


def plot_beside(plot: Callable[[_T, Path], None], report: _T, path: Path) -> None:
    """Draw a picture that nobody asked for: without matplotlib, say so and go on."""
    try:
        plot(report, path)
    except MissingPackageError as exc:
        click.echo(f"no plot: {exc.message}", err=True)
