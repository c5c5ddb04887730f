"""``kvrelay bench dp``: what step synchronisation costs, and how fast an idle group wakes.

Two parts: groups of any size in simulated time (``dp_simulation``), and the real carriers between two processes of this
machine. A wake-up is timed from the call that begins a step in one process to the delivery in the other one.
"""

from __future__ import annotations

import os
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from typing import Any

from kvrelay.bench.parts.dp_simulation import Load, Outcome, SteppedGroup, run_waves
from kvrelay.bench.report.table import table
from kvrelay.dp.addresses import GroupAddress
from kvrelay.dp.member import GroupMember, Notice
from kvrelay.dp.messages import AllLeft, Ended, RankInfo
from kvrelay.dp.protocol import StartStep, StepsUntil
from kvrelay.errors import FatalError

LOOKAHEADS = (0, 8, 24)
WAVE_INTERVALS = (1, 16)
SATURATED_STEPS = 500
ANSWER_TIMEOUT_S = 10.0
MODULE = "benchmarks.dp"


def run_dp_benchmark(loads: list[Load], num_wakes: int, pause_s: float) -> dict[str, Any]:
    """Rows of the simulation, and per carrier the wake-up latencies in milliseconds."""
    rows = []
    for load in loads:
        for lookahead in LOOKAHEADS:
            outcome, full = SteppedGroup(load, lookahead).run(), SteppedGroup(_saturated(load), lookahead).run()
            rows.append(_row(load, f"lookahead {lookahead}", outcome, full))
        for interval in WAVE_INTERVALS:
            outcome, full = run_waves(load, interval), run_waves(_saturated(load), interval)
            rows.append(_row(load, f"waves, all-gather every {interval}", outcome, full))
    return {"simulated": rows, "wake_up": {name: measure_wakes(name, num_wakes, pause_s) for name in ("rpc", "shm")}}


def _saturated(load: Load) -> Load:
    """About four long requests per rank, all at once."""
    rate = 4 * load.num_ranks / load.step_s
    return replace(load, duration_s=load.step_s, rate=rate, num_steps=SATURATED_STEPS, burst_s=load.step_s, gap_s=0.0)


def _row(load: Load, name: str, outcome: Outcome, saturated: Outcome) -> dict[str, Any]:
    """The last figure is of a group that always has work: the messages that its steps wait for make it slower."""
    return {
        "num_ranks": load.num_ranks,
        "design": name,
        "messages_per_1000_steps": 1000 * outcome.num_messages / max(1, outcome.num_steps),
        "num_steps": outcome.num_steps,
        "num_superfluous_steps": outcome.num_superfluous,
        "first_step_after_idle_ms": 1000 * statistics.median(outcome.first_steps_s or [0.0]),
        "saturated_tokens_per_s": saturated.tokens_per_s,
    }


def measure_wakes(carrier: str, num_wakes: int, pause_s: float) -> dict[str, float]:
    """p50 and p99 in milliseconds of ``num_wakes`` wake-ups of a sleeping process, ``pause_s`` apart."""
    with tempfile.TemporaryDirectory(prefix="kvrelay-dp-") as directory:
        address = directory if carrier == "shm" else f"127.0.0.1:{_free_port()}"
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


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def dp_text(report: dict[str, Any]) -> str:
    """The figures as tables."""
    heads = ("ranks", "design", "messages/1,000 steps", "steps", "superfluous", "first step, ms", "tokens/s, full")
    rows = [
        (
            str(row["num_ranks"]),
            row["design"],
            f"{row['messages_per_1000_steps']:,.0f}",
            f"{row['num_steps']:,}",
            f"{row['num_superfluous_steps']:,}",
            f"{row['first_step_after_idle_ms']:.2f}",
            f"{row['saturated_tokens_per_s']:,.0f}",
        )
        for row in report["simulated"]
    ]
    wakes = [(name, f"{each['p50_ms']:.3f}", f"{each['p99_ms']:.3f}") for name, each in report["wake_up"].items()]
    return table(heads, rows) + "\n" + table(("wake-up by", "p50 ms", "p99 ms"), wakes)


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
