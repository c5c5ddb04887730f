"""What a mark costs, among marks of a thousand requests, and what it costs to send a request's marks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import click

from kvrelay.bench.report.files import print_result
from kvrelay.bench.report.table import table
from kvrelay.cli.options import json_option
from kvrelay.marks.phases import Phase, Role
from kvrelay.marks.recorder import Recorder
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
    rows = [(name, f"{each['min_us']:.2f}", f"{each['median_us']:.2f}") for name, each in found.items()]
    print_result(found, table(("call", "best round us", "median us"), rows), as_json)


def calls() -> dict[str, Callable[[int], object]]:
    """By name; each gets the number of the call."""
    threads, full = RunQueue(), Recorder()
    threads.watch()
    names = [f"cmpl-{number:032x}-0" for number in range(NUM_REQUESTS)]
    for name in names * MARKS_OF_REQUEST:
        full.add(name, Phase.SENT, time.monotonic(), 1.0)

    def mark(number: int) -> None:
        full.add(names[number % NUM_REQUESTS], Phase.SENT, time.monotonic(), 1.0)
        if number % MARKS_OF_REQUEST == 0:
            full.take(names[number % NUM_REQUESTS])

    def sent(number: int) -> bytes:
        return encode(
            ProcessMarks("decode-0123456789", Role.DECODE, [Phase.SENT, 1e6 + number, 1.0] * MARKS_OF_REQUEST)
        )

    return {
        "a mark": mark,
        "reading the run queue of a thread": threads.waited_s,
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
    return {"median_us": statistics.median(rounds), "min_us": min(rounds)}
