"""What a mark costs, in a ring with marks of a thousand requests, and what it costs to send a request's marks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import click

from kvrelay.bench.report.files import print_result
from kvrelay.bench.report.table import table
from kvrelay.cli.options import json_option
from kvrelay.marks.phases import Phase, Role
from kvrelay.marks.ring import Ring
from kvrelay.marks.run_queue import RunQueue
from kvrelay.marks.travel import ProcessMarks, encode

NUM_ROUNDS = 15
NUM_REQUESTS = 1000
MARKS_OF_REQUEST = 12


@click.command()
@click.option("--count", default=20_000, type=click.IntRange(1), help="Calls measured in each round.")
@json_option
def marks(count: int, as_json: bool) -> None:
    """CPU time of a mark, of reading the run queue, and of a request's marks as bytes.

    Example: python -m benchmarks marks
    """
    found = {name: cost_us(call, count) for name, call in calls().items()}
    rows = [(name, f"{each['median_us']:.2f}", f"{each['max_us']:.2f}") for name, each in found.items()]
    print_result(found, table(("call", "median us", "worst round us"), rows), as_json)


def calls() -> dict[str, Callable[[int], object]]:
    """By name; each gets the number of the call."""
    ring, threads = Ring(), RunQueue()
    threads.watch()
    names = [f"cmpl-{number:032x}-0" for number in range(NUM_REQUESTS)]
    full = Ring()
    for name in names:
        for _ in range(MARKS_OF_REQUEST):
            full.add(name, Phase.SENT, 1.0)

    def sent(number: int) -> bytes:
        return encode((ProcessMarks("decode-0123456789", Role.DECODE, full.read(names[number % NUM_REQUESTS])),))

    return {
        "a mark": lambda number: ring.add(names[number % NUM_REQUESTS], Phase.SENT, 1.0),
        "reading the run queue of a thread": lambda number: threads.waited_s(),
        f"{MARKS_OF_REQUEST} marks as bytes": sent,
    }


def cost_us(call: Callable[[int], object], count: int) -> dict[str, float]:
    """CPU time per call over several rounds, in microseconds."""
    rounds = []
    for _ in range(NUM_ROUNDS):
        begun_ns = time.thread_time_ns()
        for number in range(count):
            call(number)
        rounds.append((time.thread_time_ns() - begun_ns) / count / 1e3)
    return {"median_us": statistics.median(rounds), "max_us": max(rounds)}
