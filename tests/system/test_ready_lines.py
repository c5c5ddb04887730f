"""What the processes of a cluster print when they are ready: started by hand, and by ``serve``."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from tests.patience import PATIENCE_S, until
from tests.system.serving import Serve, kvrelay_here

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

MOCK = ("--engine", "mock", "--speedup-ratio", "0")
WORKER = r"kvrelay worker is ready: llama-kvrecall \((\w+)\) at tcp://127\.0\.0\.1:\d+, as \w+-\w{10}; next: .*\n"
FRONTEND = r"kvrelay frontend is ready: llama-kvrecall at (http://127\.0\.0\.1:\d+)/v1; next: \1/ui shows the cluster\n"


def ended_line(file: Path) -> bool:
    return file.read_text().endswith("\n")


def test_a_process_says_once_that_it_is_ready_and_serve_says_it_for_all(tmp_path: Path) -> None:
    with Serve((*MOCK, "--planner", "off"), is_real=True) as server, ExitStack() as stack:
        for arguments, line in {
            ("worker", *MOCK, "--role", "prefill"): WORKER,
            ("worker", *MOCK, "--dp", "2"): WORKER.replace(r"(\w+)", r"both, rank 0 of 2", 1),
            ("frontend", "--host", "0.0.0.0", "--port", "0", "--insecure"): FRONTEND,
        }.items():
            printed = tmp_path / arguments[-1]
            command = [sys.executable, "-m", "kvrelay", *arguments, "--control", server.control]
            process = subprocess.Popen(command, stdout=stack.enter_context(printed.open("w")))
            stack.callback(process.wait, PATIENCE_S)
            stack.callback(process.send_signal, signal.SIGTERM)
            until(partial(ended_line, printed))
            assert re.fullmatch(line, printed.read_text()), printed.read_text()
        shown = kvrelay_here("top", "--once", "--json", "--control", server.control)
        assert len(json.loads(shown.stdout)["frontends"]) == 2, shown.stderr
        assert "kvrelay is ready: " in server.read()
    assert " worker is ready" not in server.output
    assert " frontend is ready" not in server.output
