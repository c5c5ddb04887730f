"""A worker whose engine hangs, as a process: it says so, ends with its own exit code, and loses nothing."""

from __future__ import annotations

import os
from pathlib import Path

import httpx
import pytest
from tests.patience import PATIENCE_S, until
from tests.system.serving import Serve
from tests.system.streams import Streams

from kvrelay.errors import EngineHungError

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]


HOST = f"127.{os.getpid() >> 8 & 255}.{os.getpid() & 255}.3"
"""An address that no other run of this test uses."""
PORT = 9400


def health(port: int) -> int:
    """Status of a worker's health; 0 while it is not there."""
    try:
        return httpx.get(f"http://{HOST}:{port}/health", timeout=PATIENCE_S).status_code
    except httpx.TransportError:
        return 0


def test_a_worker_that_hangs_ends_itself_and_its_streams_go_on(tmp_path: Path) -> None:
    hang = tmp_path / "hang"
    flags = f"--engine mock --prefill 0 --decode 2 --decode-base-s 0.02 --hang-file {hang} --step-timeout-s 6"
    with Serve((*flags.split(), "--metrics-host", HOST, "--metrics-port", str(PORT))) as server:
        victim = server.workers("both")[0]["pid"]
        with Streams(server) as streams:
            streams.wait_for_tokens(30)
            stop = hang.with_name(f"{hang.name}.{victim}")
            stop.touch()
            until(lambda: 503 in {health(PORT), health(PORT + 1)})
            streams.check()
        until(lambda: f"pid {victim}) ended with exit code {EngineHungError.exit_code}" in server.read())
        assert "it hangs; this worker ends, its requests go on elsewhere" in server.output
        # The stack of the engine's thread shows where.
        assert "mock.py" in server.output.partition("(most recent call first)")[2]
        until(lambda: len(server.workers("both")) == 2)
    assert server.process.returncode == 0, server.output
