"""How fast an idle data-parallel group wakes: from the call that begins a step in one process to the delivery in the
other one, over each carrier and beside them by a bare eventfd, between two processes of this machine. The ways take
turns.
"""

from __future__ import annotations

import os
import select
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import click

from kvrelay.bench.report.files import print_result
from kvrelay.bench.report.table import table
from kvrelay.cli.options import json_option
from kvrelay.dp.addresses import GroupAddress
from kvrelay.dp.member import GroupMember, Notice
from kvrelay.dp.messages import AllLeft, Ended, RankInfo
from kvrelay.dp.protocol import StartStep, StepsUntil
from kvrelay.errors import FatalError
from kvrelay.http import reserve_port

ANSWER_TIMEOUT_S = 10.0
MODULE = "benchmarks.dp_wake"
BARE, CARRIERS = "eventfd", ("shm", "rpc")

Wake = Callable[[int], None]
Waking = tuple[Wake, "subprocess.Popen[bytes]"]
"""What wakes the other process for a step, and that process, which prints when it has awoken."""


@click.command()
@click.option("--wakes", default=500, type=click.IntRange(1), help="Wake-ups measured each way.")
@click.option("--pause-ms", default=10.0, type=click.FloatRange(0.0), help="Sleep before each wake-up.")
@json_option
def dp_wake(wakes: int, pause_ms: float, as_json: bool) -> None:
    """Wake-up of a sleeping process, by a bare eventfd, by shared memory and by TCP.

    Example: python -m benchmarks dp-wake --wakes 300
    """
    found = measure_wakes(wakes, pause_ms / 1e3)
    bare = found[BARE]
    rows = [
        (name, *(f"{each[key]:.3f}" for key in bare), *(f"{each[key] / bare[key]:.2f}" for key in bare))
        for name, each in found.items()
    ]
    print_result(found, table(("wake-up by", "p50 ms", "p90 ms", "p99 ms", "p50 of bare", "p90", "p99"), rows), as_json)


def measure_wakes(num_wakes: int, pause_s: float) -> dict[str, dict[str, float]]:
    """p50, p90 and p99 in milliseconds of ``num_wakes`` wake-ups of a sleeping process each way, ``pause_s`` apart."""
    waits_ms: dict[str, list[float]] = {}
    with ExitStack() as stack:
        ways = {BARE: stack.enter_context(_bare_eventfd())}
        ways |= {carrier: stack.enter_context(_group(carrier)) for carrier in CARRIERS}
        for step in range(1, num_wakes + 1):
            for name, (wake, other) in ways.items():
                time.sleep(pause_s)
                begun = time.monotonic_ns()
                wake(step)
                waits_ms.setdefault(name, []).append((_awoken_ns(other, step) - begun) / 1e6)
    return {name: _percentiles(sorted(each)) for name, each in waits_ms.items()}


def _percentiles(ordered: list[float]) -> dict[str, float]:
    last = len(ordered) - 1
    p90, p99 = (ordered[min(last, len(ordered) * share // 100)] for share in (90, 99))
    return {"p50_ms": statistics.median(ordered), "p90_ms": p90, "p99_ms": p99}


def _awoken_ns(other: subprocess.Popen[bytes], step: int) -> int:
    assert other.stdout is not None
    if not select.select([other.stdout], [], [], ANSWER_TIMEOUT_S)[0]:
        raise FatalError(f"the other rank did not hear of step {step} within {ANSWER_TIMEOUT_S:g} s")
    return int(other.stdout.readline())


@contextmanager
def _bare_eventfd() -> Iterator[Waking]:
    """Another process that only waits for an eventfd."""
    bell = os.eventfd(0, os.EFD_CLOEXEC)
    command = [sys.executable, "-m", MODULE, BARE, str(bell)]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, pass_fds=[bell]) as other:
        try:
            yield lambda _: os.eventfd_write(bell, 1), other
        finally:
            other.kill()
            os.close(bell)


@contextmanager
def _group(carrier: str) -> Iterator[Waking]:
    """A group of this process and another one."""
    with tempfile.TemporaryDirectory(prefix="kvrelay-dp-") as directory, reserve_port("127.0.0.1", 0) as reserved:
        address = directory if carrier == "shm" else f"127.0.0.1:{reserved.getsockname()[1]}"
        command = [sys.executable, "-m", MODULE, address]
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as other:
            try:
                member = GroupMember.join(GroupAddress.parse(address), _info(0), lookahead=0)
                is_over = threading.Event()
                member.listen(lambda notice: is_over.set() if isinstance(notice, AllLeft | Ended) else None)
                try:
                    yield lambda step: member.start_step(StartStep(step)), other
                    member.leave()
                    is_over.wait(ANSWER_TIMEOUT_S)
                finally:
                    member.close()
            finally:
                other.kill()


def _info(rank: int) -> RankInfo:
    return RankInfo(rank, 2, f"pid {os.getpid()}", {})


def _other_rank(address: str) -> None:
    """Rank 1, in a process of its own: print the time of each notification."""
    is_over = threading.Event()

    def deliver(notice: Notice) -> None:
        if isinstance(notice, StepsUntil):
            print(time.monotonic_ns(), flush=True)
        elif isinstance(notice, AllLeft | Ended):
            is_over.set()

    member = GroupMember.join(GroupAddress.parse(address), _info(1), lookahead=0)
    member.listen(deliver)
    member.leave()
    is_over.wait()
    member.close()


def _wait_bare(bell: int) -> None:
    """Print the time of each wake-up."""
    while True:
        os.eventfd_read(bell)
        print(time.monotonic_ns(), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == BARE:
        _wait_bare(int(sys.argv[2]))
    _other_rank(sys.argv[1])
