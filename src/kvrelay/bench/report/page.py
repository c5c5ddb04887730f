"""What reports in HTML share. They load nothing: the style is in the page, and plots are SVG."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Protocol

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 720, 320, 70, 44, 12
_NUM_COLOURS = 8


class NamedLine(Protocol):
    """``points``: (x, y). Those that are not above 0 have no logarithm and are left out."""

    @property
    def name(self) -> str: ...

    @property
    def points(self) -> Sequence[tuple[float, float]]: ...


def page_style() -> str:
    """The style sheet: light and dark, wide and narrow."""
    return (resources.files("kvrelay.bench.report") / "page.css").read_text("utf-8")


def filled_page(package: str, texts: Mapping[str, str], parts: Mapping[str, str]) -> str:
    """``page.html`` of a package with our style, ``texts``, which are escaped, and ``parts``, which are HTML."""
    values = {**{name: html.escape(text) for name, text in texts.items()}, **parts, "STYLE": page_style()}
    page = (resources.files(package) / "page.html").read_text("utf-8")
    return re.sub(r"{{([A-Z]+)}}", lambda mark: values[mark[1]], page)


def line_plot(lines: Sequence[NamedLine], title: str, x_name: str, y_name: str) -> str:
    """A figure; empty if there is nothing to draw. The page has the classes ``c0`` to ``c7`` and ``grid``."""
    xs, ys = ([point[at] for line in lines for point in line.points if min(point) > 0] for at in (0, 1))
    if not xs:
        return ""
    x_axis = _Axis(min(xs), max(xs), _LEFT, _WIDTH - 12)
    y_axis = _Axis(min(ys), max(ys), _HEIGHT - _BOTTOM, _TOP)
    parts = [
        f'<line class=grid x1="{_LEFT}" x2="{_WIDTH - 12}" y1="{at:.1f}" y2="{at:.1f}"/>'
        f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor=end>{label}</text>'
        for at, label in y_axis.ticks()
    ]
    parts += [
        f'<text x="{at:.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor=middle>{label}</text>'
        for at, label in x_axis.ticks()
    ]
    parts.append(f'<text x="{_WIDTH // 2}" y="{_HEIGHT - 6}" text-anchor=middle>{x_name}</text>')
    legend = []
    for number, line in enumerate(lines):
        colour = f"c{number % _NUM_COLOURS}"
        points = " ".join(f"{x_axis.at(x):.1f},{y_axis.at(y):.1f}" for x, y in line.points if min(x, y) > 0)
        parts.append(f'<polyline class="{colour}" points="{points}"/>')
        legend.append(f'<li class="{colour}">{html.escape(line.name)}</li>')
    svg = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role=img aria-label="{title}">{"".join(parts)}</svg>'
    return f"<figure>{svg}<figcaption>{y_name}, both axes logarithmic<ul>{''.join(legend)}</ul></figcaption></figure>"


class _Axis:
    """A logarithmic one from ``low`` to ``high``, drawn from ``begin`` to ``end``."""

    def __init__(self, low: float, high: float, begin: float, end: float) -> None:
        self._low, self._high = math.log10(low), math.log10(max(high, low * 1.01))
        self._begin, self._end = begin, end

    def at(self, value: float) -> float:
        share = (math.log10(value) - self._low) / (self._high - self._low)
        return self._begin + share * (self._end - self._begin)

    def ticks(self) -> list[tuple[float, str]]:
        """Where to write which number: 1, 2 and 5 times powers of ten, or fewer of them, or else at equal distances."""
        decades = range(math.floor(self._low), math.ceil(self._high) + 1)
        for steps in ((1, 2, 5), (1,)):
            values = [step * 10.0**decade for decade in decades for step in steps]
            found = [value for value in values if self._low - 1e-9 <= math.log10(value) <= self._high + 1e-9]
            if 2 <= len(found) <= 9:
                break
        else:
            found = self._even()
        return [(self.at(value), short_number(value)) for value in found]

    def _even(self) -> list[float]:
        """Round numbers at equal distances, for a range within which few are 1, 2 or 5 times a power of ten."""
        low, high = 10**self._low, 10**self._high
        unit = 10.0 ** math.floor(math.log10((high - low) / 2))
        step = next(unit * times for times in (1, 2, 5, 10) if (high - low) / (unit * times) < 9)
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        # Not a sum: that would show the rounding of 0.1.
        return [float(f"{number * step:.6g}") for number in range(first, last + 1)]


def short_number(value: float) -> str:
    """With k, M, G for thousands, and m, µ for thousandths."""
    for scale, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m")):
        if value >= scale * 0.9999:
            return f"{value / scale:g}{suffix}"
    return f"{value / 1e-6:g}µ"
