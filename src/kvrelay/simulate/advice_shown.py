"""An Advice for people: a table in the terminal, and one HTML page that loads nothing from elsewhere."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import msgspec

from kvrelay.bench.report.files import write_text
from kvrelay.bench.report.page import filled_page
from kvrelay.bench.report.table import table
from kvrelay.config.byte_sizes import shown_bytes
from kvrelay.simulate.advise import Advice
from kvrelay.simulate.trial import Memory
from kvrelay.simulate.verdict import Measured

HEAD = ("cluster", "goodput", "good tokens/s", "TTFT p50", "p90", "p99 ms", "ITL p50", "p90", "p99 ms", "per M tokens")


def text_of(advice: Advice) -> str:
    """Table, capacities, verdict and command line."""
    lines = [table(HEAD, map(_cells, advice.table))]
    for found in advice.capacities:
        spread = f"{min(found.by_seed):.3g} to {max(found.by_seed):.3g} over {len(found.by_seed)} seeds"
        at_least = "at least " if found.is_least else ""
        lines.append(f"capacity of {found.candidate}: {at_least}{found.requests_per_s:.3g} requests/s ({spread})")
    lines.append(f"KV of a worker: {_blocks(advice)}; load: {advice.rate:.3g} requests/s")
    return "\n".join([*lines, *_memory_lines(advice), advice.verdict, *_memory_verdict(advice), advice.command])


def _memory_lines(advice: Advice) -> list[str]:
    return [
        f"with {' and '.join(_sizes(one.memory)) or 'pools alone'}: {one.computed:.1%} of the prompt tokens computed, "
        f"first token of later turns {one.later_ttft_ms:.0f} ms, goodput {one.goodput:.1%}"
        for one in (advice.memory.tried if advice.memory is not None else ())
    ]


def _sizes(memory: Memory) -> list[str]:
    given = ((memory.host_bytes, "host memory"), (memory.disk_bytes, "disk"))
    return [f"{shown_bytes(size)} of {name} for each worker" for size, name in given if size]


def _memory_verdict(advice: Advice) -> list[str]:
    return [] if advice.memory is None else [advice.memory.verdict]


def _blocks(advice: Advice) -> str:
    each = ", ".join(
        f"{blocks:,} blocks{f' at tp {tp}' if len(advice.num_blocks) > 1 else ''}"
        for tp, blocks in advice.num_blocks.items()
    )
    return f"{each} ({'--num-blocks' if advice.are_blocks_given else 'kv_tokens of the costs'})"


def page_of(advice: Advice, load: str) -> str:
    """The HTML. ``load`` describes the load and the costs, in a sentence."""
    data = {
        "verdict": " ".join([advice.verdict, *_memory_verdict(advice)]),
        "command": advice.command,
        "load": f"{load} KV of a worker: {_blocks(advice)}.",
        "head": HEAD,
        "rows": [_cells(row) for row in advice.table],
        "capacity": [{"name": str(one.candidate), "points": one.points} for one in advice.capacities],
        "ttft": [{"name": str(row.candidate), "points": _shares(row.outcome.ttft_sample_ms)} for row in advice.table],
    }
    # "<" would let a name end the script element.
    encoded = msgspec.json.encode(data).decode().replace("<", "\\u003c")
    plot = resources.files("kvrelay.frontend") / "ui" / "uplot"
    files = {"PLOTCSS": "uPlot.min.css", "PLOTJS": "uPlot.iife.min.js"}
    parts = {mark: (plot / name).read_text("utf-8") for mark, name in files.items()}
    return filled_page("kvrelay.simulate", {}, {**parts, "DATA": encoded})


def write_page(path: Path, advice: Advice, load: str) -> None:
    """Raises InvalidInputError if the file cannot be written."""
    write_text(path, page_of(advice, load))


def _cells(row: Measured) -> tuple[str, ...]:
    found = row.outcome
    return (
        str(row.candidate),
        f"{found.goodput:.1%}",
        f"{found.good_tokens_per_s:.1f}",
        *(f"{value:.0f}" for value in found.ttft_ms),
        *(f"{value:.1f}" for value in found.itl_ms),
        "-" if row.price is None else f"{row.price:.2f}",
    )


def _shares(values: tuple[float, ...]) -> list[tuple[float, float]]:
    """The share of requests at or below each value; ``values`` ascend."""
    return [(value, (at + 1) / len(values)) for at, value in enumerate(values)]
