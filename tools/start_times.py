"""What ``kvrelay serve`` takes until it is ready, over the least that its processes need: their imports, and the start
of the control plane's server. All in one run, in turn.

    python tools/start_times.py [--rounds 3] -- --engine mock --prefill 1 --decode 1

The least is what serve cannot avoid, in the order in which it must happen: its own imports, the start of the NATS
server, then the imports of all its children at once. Children import here what they also import in ``serve``; model,
kernels and sockets come on top there. On a busy machine only the ratio of the CPU times means anything.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from kvrelay.control.nats_process import NatsServerProcess

START_TIMEOUT_S = 600.0
SERVE = ("kvrelay.cli.serve", "kvrelay.launch.serve")
FRONTEND = ("kvrelay.cli.processes", "kvrelay.launch.frontend_process", "kvrelay.frontend.tokens.tokenizer")
WORKER = ("kvrelay.cli.processes", "kvrelay.launch.worker_process")
ENGINES = {
    "mock": ("kvrelay.executors.mock",),
    "torch": (
        "kvrelay.executors.torch.build",
        "kvrelay.executors.torch.attention.cpu",
        "kvrelay.executors.torch.kernels.numba_kernels",
    ),
}


class Took(NamedTuple):
    """``cpu_s``: of all processes together."""

    wall_s: float
    cpu_s: float


def import_all(processes: Sequence[Sequence[str]]) -> Took:
    """Until processes that start at once have imported their modules and ended."""
    start_s = time.monotonic()
    running = [
        subprocess.Popen([sys.executable, "-c", f"import os, {', '.join(modules)}; os._exit(0)"])
        for modules in processes
    ]
    cpu_s = 0.0
    for process in running:
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = status
        if status:
            raise RuntimeError("an import failed")
        cpu_s += used.ru_utime + used.ru_stime
    return Took(time.monotonic() - start_s, cpu_s)


def start_server() -> float:
    server = NatsServerProcess()
    start_s = time.monotonic()
    try:
        server.start()
        return time.monotonic() - start_s
    finally:
        server.stop()


def start_serve(words: Sequence[str]) -> Took:
    """Until it says that it is ready. Raises RuntimeError with its output if it never is."""
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "log"
        start_s = time.monotonic()
        with log.open("wb") as output:
            command = [sys.executable, "-m", "kvrelay", "serve", "--port", "0", *words]
            process = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            while re.search(r"kvrelay is ready", log.read_text()) is None:
                if process.poll() is not None or time.monotonic() - start_s > START_TIMEOUT_S:
                    raise RuntimeError(f"serve did not become ready:\n{log.read_text()[-3000:]}")
                time.sleep(0.005)
            wall_s, serve = time.monotonic() - start_s, psutil.Process(process.pid)
            times = [one.cpu_times() for one in (serve, *serve.children(recursive=True))]
            return Took(wall_s, sum(one.user + one.system for one in times))
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("words", nargs="*", help="arguments of kvrelay serve; no --port")
    given = parser.parse_args()
    named = argparse.ArgumentParser(add_help=False)
    named.add_argument("--engine", default="torch", choices=ENGINES)
    for name, default in (("--prefill", 1), ("--decode", 1), ("--frontends", 1)):
        named.add_argument(name, type=int, default=default)
    shape, _ = named.parse_known_args(given.words)
    children = [FRONTEND] * shape.frontends + [WORKER + ENGINES[shape.engine]] * (shape.prefill + shape.decode)
    import_all([SERVE, FRONTEND, *children[-1:]])  # into the page cache, and compiled
    ratios = []
    for number in range(1, given.rounds + 1):
        own, server_s, imports = import_all([SERVE]), start_server(), import_all(children)
        ready = start_serve(given.words)
        ratios.append(ready.wall_s / (own.wall_s + server_s + imports.wall_s))
        print(
            f"round {number}: imports {own.wall_s:.2f} s of serve + {imports.wall_s:.2f} s of {len(children)} children "
            f"at once, server {server_s:.2f} s; ready after {ready.wall_s:.2f} s: {ratios[-1]:.2f} of these; CPU "
            f"{ready.cpu_s:.2f} s: {ready.cpu_s / (own.cpu_s + imports.cpu_s):.2f} of the imports'",
            flush=True,
        )
    print(f"median: {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
