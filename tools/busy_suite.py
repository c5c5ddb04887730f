"""Runs the test suite several times on a machine that is busy with something else: one busy loop on each core.

Whatever passes on an idle machine only has waited too short. ``make test-busy RUNS=3`` calls this; the words behind
``--`` are the command to run. Prints each run's last line; ends with 1 if a run has failed, and leaves no loop behind.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time

LOOP = """
import os, sys, time
end = time.monotonic() + float(sys.argv[2])
while time.monotonic() < end and os.getppid() == int(sys.argv[1]):
    for _ in range(1_000_000):
        pass
"""
"""Ends by itself with us, or when its time is up, should we be killed."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--loops", type=int, default=len(os.sched_getaffinity(0)), help="busy loops; default: cores")
    parser.add_argument("--run-limit-s", type=float, default=2400.0, help="what one run may take")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    command = [word for word in arguments.command if word != "--"]
    limit_s = str(arguments.runs * arguments.run_limit_s)
    loops = [subprocess.Popen([sys.executable, "-c", LOOP, str(os.getpid()), limit_s]) for _ in range(arguments.loops)]
    print(f"busy loops: {', '.join(str(loop.pid) for loop in loops)}", flush=True)
    try:
        results = [run_once(number + 1, command, arguments.run_limit_s) for number in range(arguments.runs)]
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
    return 0 if all(code == 0 for code in results) else 1


def run_once(number: int, command: list[str], limit_s: float) -> int:
    """Run it with its output on ours; gives its exit code, 124 when it took too long."""
    begin = time.monotonic()
    try:
        code = subprocess.run(command, timeout=limit_s, check=False).returncode
    except subprocess.TimeoutExpired:
        code = 124
    print(f"run {number}: exit code {code} after {time.monotonic() - begin:.0f} s", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
