"""What kvrelay costs while it has nothing to do: CPU time of every process, and messages through the NATS server.

    python tools/idle_cpu.py [--seconds 20] [--requests 8] -- --engine vllm --prefill 1 --decode 1
    python tools/idle_cpu.py --workers 8 24 [--seconds 30] [--frontend]

The first starts ``kvrelay serve``, sends some requests, so that everything that starts with the first one runs, lets
the server settle, and then reads the kernel's counters twice; it also tells of the threads that take most.

The second starts a NATS server, mock workers (half of them prefill) and, if asked for, a frontend; waits until all are
registered and have settled; then counts. The figures are those of the server's own counters and of the kernel. On a
busy machine CPU times are higher; messages and wake-ups (threads that had waited) are not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil

from kvrelay.config import ControlConfig
from kvrelay.control import connect_control
from kvrelay.control.base import Keys
from kvrelay.control.nats_process import find_binary

START_TIMEOUT_S = 600.0
SETTLE_S = 15.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
SHOWN_PERCENT = 0.04


@contextmanager
def running(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


@contextmanager
def serving(words: Sequence[str], log: Path) -> Iterator[tuple[int, str]]:
    """The server's process id and address. Raises RuntimeError if it does not become ready."""
    with running([sys.executable, "-m", "kvrelay", "serve", "--port", "0", *words], log) as process:
        deadline = time.monotonic() + START_TIMEOUT_S
        while (found := re.search(r"ready: \S+ .* at (\S+)/v1", log.read_text())) is None:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not become ready:\n{log.read_text()[-3000:]}")
            time.sleep(0.2)
        yield process.pid, found.group(1)


def send(url: str, number: int) -> None:
    """One prompt long enough to be prefilled remotely."""
    with urllib.request.urlopen(f"{url}/v1/models") as answer:
        model = json.load(answer)["data"][0]["id"]
    body = {"model": model, "prompt": [20 + number, *range(30, 430)], "max_tokens": 8, "ignore_eos": True}
    headers = {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)):
        pass


def cpu_s(stat: Path) -> float:
    fields = stat.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def counts(root: int) -> dict[tuple[int, int], float]:
    """CPU seconds by (process, thread) of a process and all its descendants; thread 0 is the whole process."""
    found = {}
    for process in [psutil.Process(root), *psutil.Process(root).children(recursive=True)]:
        with suppress(OSError):
            found[process.pid, 0] = cpu_s(Path(f"/proc/{process.pid}/stat"))
            for thread in Path(f"/proc/{process.pid}/task").iterdir():
                found[process.pid, int(thread.name)] = cpu_s(thread / "stat")
    return found


def name_of(pid: int) -> str:
    words = psutil.Process(pid).cmdline()
    return next((word for word in words if word in ("serve", "worker", "frontend")), Path(words[0]).name.strip())


def report(before: dict[tuple[int, int], float], after: dict[tuple[int, int], float], took_s: float) -> Iterator[str]:
    shares = {key: 100 * (now - before.get(key, 0.0)) / took_s for key, now in after.items()}
    for pid in sorted(pid for pid, thread in shares if not thread):
        yield f"{shares[pid, 0]:6.2f} %  {pid} {name_of(pid)}"
        for (process, thread), share in sorted(shares.items(), key=lambda item: -item[1]):
            if process == pid and thread and share >= SHOWN_PERCENT:
                comm = Path(f"/proc/{pid}/task/{thread}/comm").read_text().strip()
                yield f"    {share:6.2f} %  thread {thread} {comm}"
    yield f"{sum(share for (_, thread), share in shares.items() if not thread):6.2f} %  of a core in all"


def wake_ups(pids: Sequence[int]) -> int:
    """How often threads of these processes have waited so far: the same on a busy machine as on an idle one."""
    tasks = [task for pid in pids for task in Path(f"/proc/{pid}/task").iterdir()]
    return sum(
        int((task / "status").read_text().partition("\nvoluntary_ctxt_switches:")[2].split()[0]) for task in tasks
    )


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


def traffic(monitoring: str, pids: Sequence[int]) -> tuple[int, int, list[float]]:
    """Messages into and out of the server, and CPU seconds of each process."""
    with urllib.request.urlopen(f"{monitoring}/varz") as answer:
        server = json.load(answer)
    return server["in_msgs"], server["out_msgs"], [cpu_s(Path(f"/proc/{pid}/stat")) for pid in pids]


def measure_traffic(num_workers: int, seconds: float, *, with_frontend: bool) -> str:
    """One line of figures."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        command = [str(find_binary()), "-a", "127.0.0.1", "-p", "-1", "-m", "-1", "-js"]
        command += ["-sd", str(directory / "js"), "--ports_file_dir", str(directory)]
        nats = stack.enter_context(running(command, directory / "nats.log"))
        control, monitoring = wait_for_ports(directory, nats.pid)
        kvrelay = [sys.executable, "-m", "kvrelay"]
        workers = []
        for number in range(num_workers):
            role = "prefill" if number % 2 == 0 else "decode"
            command = [
                *kvrelay,
                "worker",
                "--control",
                control,
                "--engine",
                "mock",
                "--num-blocks",
                "256",
                "--role",
                role,
            ]
            workers.append(stack.enter_context(running(command, directory / f"worker-{number}.log")))
        frontends = []
        if with_frontend:
            command = [*kvrelay, "frontend", "--control", control, "--port", "0"]
            frontends.append(stack.enter_context(running(command, directory / "frontend.log")))
        asyncio.run(wait_for_workers(control, num_workers))
        time.sleep(SETTLE_S)
        pids = [process.pid for process in (nats, *frontends, *workers)]
        of_workers = [process.pid for process in workers]
        woken = [-wake_ups(some) for some in (pids[:1], of_workers)]
        before, start_s = traffic(monitoring, pids), time.monotonic()
        time.sleep(seconds)
        after, took_s = traffic(monitoring, pids), time.monotonic() - start_s
        woken = [(count + wake_ups(some)) / took_s for count, some in zip(woken, (pids[:1], of_workers), strict=True)]
        into, out = ((after[index] - before[index]) / took_s for index in (0, 1))
        shares = [100 * (now - then) / took_s for now, then in zip(after[2], before[2], strict=True)]
        ours = shares[1 + len(frontends) :]
        prefill, decode = ours[::2], ours[1::2]
        server, frontend = shares[0], sum(shares[1 : 1 + len(frontends)])
        return (
            f"{num_workers} workers: {into:.1f} messages/s in, {out:.1f} out; "
            f"CPU in % of a core: server {server:.2f}, frontend {frontend:.2f}, workers {sum(ours):.2f} "
            f"(a prefill worker {sum(prefill) / max(len(prefill), 1):.3f}, a decode worker "
            f"{sum(decode) / max(len(decode), 1):.3f}), server and workers {server + sum(ours):.2f}; "
            f"wake-ups/s: server {woken[0]:.0f}, workers {woken[1]:.0f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument(
        "--workers", type=int, nargs="+", default=[], metavar="N", help="count the traffic of N workers"
    )
    parser.add_argument("--frontend", action="store_true", help="also run a frontend, which hears every load sample")
    parser.add_argument("words", nargs="*", help="arguments of kvrelay serve")
    given = parser.parse_args()
    for num_workers in given.workers:
        print(measure_traffic(num_workers, given.seconds, with_frontend=given.frontend), flush=True)
    if given.workers:
        return
    with tempfile.TemporaryDirectory() as directory, serving(given.words, Path(directory) / "log") as (pid, url):
        for number in range(given.requests):
            send(url, number)
        time.sleep(SETTLE_S)
        before, start_s = counts(pid), time.monotonic()
        time.sleep(given.seconds)
        for line in report(before, counts(pid), time.monotonic() - start_s):
            print(line)


if __name__ == "__main__":
    main()
