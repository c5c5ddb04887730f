"""How fast an idle data-parallel group wakes: from the call that begins a step in one process to the delivery in the
other one, over each carrier, between two processes of this machine.
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

import click

from kvrelay.bench.cases import free_port
from kvrelay.bench.report.files import print_result
from kvrelay.bench.report.table import table
from kvrelay.cli.options import json_option
from kvrelay.dp.addresses import GroupAddress
from kvrelay.dp.member import GroupMember, Notice
from kvrelay.dp.messages import AllLeft, Ended, RankInfo
from kvrelay.dp.protocol import StartStep, StepsUntil
from kvrelay.errors import FatalError

ANSWER_TIMEOUT_S = 10.0
MODULE = "benchmarks.dp_wake"


@click.command()
@click.option("--wakes", default=500, type=click.IntRange(1), help="Wake-ups measured with each carrier.")
@click.option("--pause-ms", default=10.0, type=click.FloatRange(0.0), help="Sleep before each wake-up.")
@json_option
def dp_wake(wakes: int, pause_ms: float, as_json: bool) -> None:
    """Wake-up of a sleeping process, by shared memory and by TCP.

    Example: python -m benchmarks dp-wake --wakes 300
    """
    found = {carrier: measure_wakes(carrier, wakes, pause_ms / 1e3) for carrier in ("rpc", "shm")}
    rows = [(name, f"{each['p50_ms']:.3f}", f"{each['p99_ms']:.3f}") for name, each in found.items()]
    print_result(found, table(("wake-up by", "p50 ms", "p99 ms"), rows), as_json)


def measure_wakes(carrier: str, num_wakes: int, pause_s: float) -> dict[str, float]:
    """p50 and p99 in milliseconds of ``num_wakes`` wake-ups of a sleeping process, ``pause_s`` apart."""
    with tempfile.TemporaryDirectory(prefix="kvrelay-dp-") as directory:
        address = directory if carrier == "shm" else f"127.0.0.1:{free_port()}"
        command = [sys.executable, "-m", MODULE, address]
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as other:
            try:
                member = GroupMember.join(GroupAddress.parse(address), _info(0), lookahead=0)
                try:
                    return _wake(member, other, num_wakes, pause_s)
                finally:
                    member.close()
            finally:
                other.kill()


def _wake(member: GroupMember, other: subprocess.Popen[bytes], num_wakes: int, pause_s: float) -> dict[str, float]:
    assert other.stdout is not None
    is_over = threading.Event()
    member.listen(lambda notice: is_over.set() if isinstance(notice, AllLeft | Ended) else None)
    waits_ms = []
    for step in range(1, num_wakes + 1):
        time.sleep(pause_s)
        begun = time.monotonic_ns()
        member.start_step(StartStep(step))
        if not select.select([other.stdout], [], [], ANSWER_TIMEOUT_S)[0]:
            raise FatalError(f"the other rank did not hear of step {step} within {ANSWER_TIMEOUT_S:g} s")
        waits_ms.append((int(other.stdout.readline()) - begun) / 1e6)
    member.leave()
    is_over.wait(ANSWER_TIMEOUT_S)
    ordered = sorted(waits_ms)
    return {"p50_ms": statistics.median(ordered), "p99_ms": ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]}


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


if __name__ == "__main__":
    _other_rank(sys.argv[1])
