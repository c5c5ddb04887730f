"""CPU time of every process of an idle ``kvrelay serve``, and of the threads that take most of it.

    python tools/idle_cpu.py [--seconds 20] [--requests 8] -- --engine vllm --prefill 1 --decode 1

It starts the server, sends some requests, so that everything that starts with the first one runs, lets the server
settle, and then reads the kernel's counters twice.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

START_TIMEOUT_S = 600.0
SETTLE_S = 10.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
SHOWN_PERCENT = 0.04


@contextmanager
def serving(words: Sequence[str], log: Path) -> Iterator[tuple[int, str]]:
    """The server's process id and address. Raises RuntimeError if it does not become ready."""
    command = [sys.executable, "-m", "kvrelay", "serve", "--port", "0", *words]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while (found := re.search(r"ready: \S+ .* at (\S+)/v1", log.read_text())) is None:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not become ready:\n{log.read_text()[-3000:]}")
            time.sleep(0.2)
        yield process.pid, found.group(1)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("words", nargs="*", help="arguments of kvrelay serve")
    given = parser.parse_args()
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
