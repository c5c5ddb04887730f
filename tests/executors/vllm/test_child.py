"""vLLM's processes end with the worker, even if that one is killed."""

from __future__ import annotations

import subprocess
import sys

from tests.patience import PATIENCE_S

CHILD = """
import sys, time
from kvrelay.executors.vllm.child import end_with
end_with(int(sys.argv[1]))
print(".", flush=True)
time.sleep(600)
"""


def test_a_process_ends_with_the_one_that_it_watches() -> None:
    watched = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        with subprocess.Popen([sys.executable, "-c", CHILD, str(watched.pid)], stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == b".\n"
            assert child.poll() is None
            watched.kill()
            watched.wait()
            assert child.wait(PATIENCE_S) == -9
    finally:
        watched.kill()
        watched.wait()
