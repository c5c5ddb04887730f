"""Plots of HTML reports: every axis has numbers, whatever its range."""

from __future__ import annotations

import re

import msgspec
import pytest

from kvrelay.bench.report.page import line_plot, page_style


class Named(msgspec.Struct, frozen=True):
    name: str
    points: tuple[tuple[float, float], ...]


def labels(svg: str, anchor: str) -> list[str]:
    found = re.findall(rf"text-anchor={anchor}>([^<]+)</text>", svg)
    return found[:-1] if anchor == "middle" else found


@pytest.mark.parametrize(
    ("low", "high", "shown"),
    [
        (1.0, 1000.0, ["1", "10", "100", "1k"]),
        (4.0, 60.0, ["5", "10", "20", "50"]),
        (88.0, 97.0, ["88", "89", "90", "91", "92", "93", "94", "95", "96", "97"]),
        (0.62, 0.81, ["650m", "700m", "750m", "800m"]),
    ],
)
def test_an_axis_has_round_numbers(low: float, high: float, shown: list[str]) -> None:
    svg = line_plot([Named("a", ((1.0, low), (2.0, high)))], "t", "x", "y")
    assert [label.rstrip() for label in labels(svg, "end")] == shown


def test_points_without_a_logarithm_are_left_out_and_nothing_is_no_plot() -> None:
    assert line_plot([Named("a", ((1.0, 0.0), (0.0, 1.0)))], "t", "x", "y") == ""
    svg = line_plot([Named("<a>", ((1.0, 0.0), (1.0, 5.0), (10.0, 7.0)))], "t", "x", "y")
    assert len(re.search(r'points="([^"]+)"', svg)[1].split()) == 2  # type: ignore[index]
    assert "&lt;a&gt;" in svg


def test_the_style_has_both_schemes_and_loads_nothing() -> None:
    assert "prefers-color-scheme: dark" in page_style()
    assert "url(" not in page_style()
