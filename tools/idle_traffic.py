"""What a cluster costs while it has nothing to do: messages through the NATS server, and CPU time of every process.

    python tools/idle_traffic.py [--workers 8 24] [--seconds 30] [--frontend]

It starts a server, mock workers (half of them prefill) and, if asked for, a frontend; waits until all are registered
and have settled; then counts for some seconds. The figures are those of the server's own counters and of the kernel.
On a busy machine CPU times are higher, message counts are not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from kvrelay.config import ControlConfig
from kvrelay.control import connect_control
from kvrelay.control.base import Keys
from kvrelay.control.nats_process import find_binary

START_TIMEOUT_S = 300.0
SETTLE_S = 15.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@contextmanager
def running(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def wait_for_ports(directory: Path, pid: int) -> tuple[str, str]:
    """The server's addresses for clients and for monitoring."""
    path = directory / f"nats-server_{pid}.ports"
    while not path.exists():
        time.sleep(0.05)
    ports = json.loads(path.read_text())
    return ports["nats"][0], ports["monitoring"][0]


async def wait_for_workers(control: str, count: int) -> None:
    """Raises TimeoutError if they are not all registered in time."""
    plane = await connect_control(ControlConfig(control=control))
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            while len(await plane.discovery.list(Keys(ControlConfig().namespace).workers)) < count:
                await asyncio.sleep(0.5)
    finally:
        await plane.close()


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def counts(monitoring: str, pids: Sequence[int]) -> tuple[int, int, list[float]]:
    """Messages into and out of the server, and CPU seconds of each process."""
    with urllib.request.urlopen(f"{monitoring}/varz") as answer:
        server = json.load(answer)
    return server["in_msgs"], server["out_msgs"], [cpu_s(pid) for pid in pids]


def measure(num_workers: int, seconds: float, *, with_frontend: bool) -> str:
    """One line of figures."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        command = [str(find_binary()), "-a", "127.0.0.1", "-p", "-1", "-m", "-1", "-js"]
        command += ["-sd", str(directory / "js"), "--ports_file_dir", str(directory)]
        nats = stack.enter_context(running(command, directory / "nats.log"))
        control, monitoring = wait_for_ports(directory, nats.pid)
        ours = [sys.executable, "-m", "kvrelay"]
        workers = []
        for number in range(num_workers):
            role = "prefill" if number % 2 == 0 else "decode"
            command = [*ours, "worker", "--control", control, "--engine", "mock", "--num-blocks", "256", "--role", role]
            workers.append(stack.enter_context(running(command, directory / f"worker-{number}.log")))
        frontends = []
        if with_frontend:
            command = [*ours, "frontend", "--control", control, "--port", "0"]
            frontends.append(stack.enter_context(running(command, directory / "frontend.log")))
        asyncio.run(wait_for_workers(control, num_workers))
        time.sleep(SETTLE_S)
        pids = [process.pid for process in (nats, *frontends, *workers)]
        before, start_s = counts(monitoring, pids), time.monotonic()
        time.sleep(seconds)
        after, took_s = counts(monitoring, pids), time.monotonic() - start_s
        into, out = ((after[index] - before[index]) / took_s for index in (0, 1))
        shares = [100 * (now - then) / took_s for now, then in zip(after[2], before[2], strict=True)]
        of_workers = shares[1 + len(frontends) :]
        prefill, decode = of_workers[::2], of_workers[1::2]
        server, frontend = shares[0], sum(shares[1 : 1 + len(frontends)])
        return (
            f"{num_workers} workers: {into:.1f} messages/s in, {out:.1f} out; "
            f"CPU in % of a core: server {server:.2f}, frontend {frontend:.2f}, workers {sum(of_workers):.2f} "
            f"(a prefill worker {sum(prefill) / max(len(prefill), 1):.3f}, a decode worker "
            f"{sum(decode) / max(len(decode), 1):.3f})"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 24], metavar="N", help="Numbers of workers.")
    parser.add_argument("--seconds", type=float, default=30.0, metavar="S", help="How long to count.")
    parser.add_argument("--frontend", action="store_true", help="Also run a frontend, which hears every load sample.")
    arguments = parser.parse_args()
    for num_workers in arguments.workers:
        print(measure(num_workers, arguments.seconds, with_frontend=arguments.frontend), flush=True)


if __name__ == "__main__":
    main()
