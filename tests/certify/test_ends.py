"""Ends in processes: our own transports, ranks, a crash, and Ctrl-C of the whole command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import psutil
import pytest
from tests.patience import PATIENCE_S, until
from tests.system.serving import kvrelay

from kvrelay.certify import kv
from kvrelay.certify.counters import read_octets
from kvrelay.certify.ends import RawCopy
from kvrelay.certify.findings import CertifyReport, Verdict
from kvrelay.certify.peer import EndSpec, peer_ends
from kvrelay.certify.served import way_row
from kvrelay.certify.servers import STOP_TIMEOUT_S
from kvrelay.cli.main import run
from kvrelay.config import TransferConfig
from kvrelay.core.layout import paged_kv
from kvrelay.errors import TransferError

pytestmark = pytest.mark.system


def specs(transport: str, tp: tuple[int, int] = (1, 1), num_blocks: int = 48) -> list[EndSpec]:
    config = TransferConfig(transport=transport)  # type: ignore[arg-type]
    return [
        EndSpec(f"{name}-{os.getpid()}", config, paged_kv(2, 2, 16, 32, "bfloat16", tp_size=size), num_blocks, size > 1)
        for name, size in zip(("giver", "taker"), tp, strict=True)
    ]


MORE = pytest.mark.matrix


@pytest.mark.parametrize(
    ("transport", "tp"),
    [
        pytest.param("nixl", (2, 1), id="nixl tp 2 to 1"),
        pytest.param("shm", (1, 1), id="shm", marks=MORE),
        pytest.param("p2p", (1, 1), id="p2p", marks=MORE),
    ],
)
def test_our_transports_pass(transport: str, tp: tuple[int, int]) -> None:
    with peer_ends(specs(transport, tp)) as ends:
        rows = [kv.prove_blocks(*ends, transport), kv.prove_reuse(*ends, transport, 30)]
    assert [row.verdict for row in rows] == [Verdict.PASS] * 2, rows


@pytest.mark.matrix
@pytest.mark.parametrize(("tls", "verdict"), [("auto", Verdict.PASS), ("tcp,self", Verdict.FAIL)], ids=["auto", "tcp"])
def test_tcp_within_a_host_is_found_by_counters(tls: str, verdict: Verdict, tmp_path: Path) -> None:
    config, log = TransferConfig(transport="nixl", ucx_tls=tls), tmp_path / "ucx.log"
    both = [msgspec.structs.replace(spec, transfer=config) for spec in specs("nixl", num_blocks=256)]
    with peer_ends(both, log) as ends:
        evidence = kv.carry(*ends, 64 * 2**20, read_octets)
    row = way_row("nixl", evidence, [log], "nixl", has_rdma=False)
    assert row.verdict is verdict, row.reason


@pytest.mark.matrix
def test_a_whole_cluster_passes(tmp_path: Path) -> None:
    flags = ("--transport", "shm", "--short", "--only", "right", "--serve-flags", "--num-blocks 1024 --num-threads 1")
    done = kvrelay("certify", *flags, "--output", str(tmp_path), timeout_s=4 * PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    report = msgspec.json.decode((tmp_path / "certify.json").read_bytes(), type=CertifyReport)
    assert report.is_complete
    assert {row.verdict for row in report.rows} == {Verdict.PASS}, done.stdout
    assert {row.cell for row in report.rows} == {
        "shm",
        "torch shm",
        "torch shm decode-first",
        "torch shm prefill-first",
    }
    (load,) = (row for row in report.rows if "under load" in row.title)
    assert int(load.evidence["hand-offs"]) > 30


def test_an_open_quotation_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["certify", "--serve-flags", "'", "--output", str(tmp_path)]) == 2
    assert capsys.readouterr().err.strip() == "kvrelay: --serve-flags: No closing quotation"


@pytest.mark.parametrize("is_dead_before", [False, True])
def test_an_end_that_crashes_says_so_and_takes_nothing_with_it(is_dead_before: bool) -> None:
    with peer_ends(specs("shm")) as (giver, taker):
        os.kill(taker.pid, signal.SIGKILL)
        if is_dead_before:  # Then the order itself cannot be written.
            os.waitid(os.P_PID, taker.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(TransferError, match="ended with exit code -9"):
            taker.tell(RawCopy(1024))
        assert giver.tell(RawCopy(1024)).error is None


def test_ctrl_c_ends_all_processes_and_leaves_a_report(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvrelay", "certify", "--transport", "shm", "--output", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, process_group=0)
    report = tmp_path / "certify.json"
    try:
        until(lambda: report.is_file() or process.poll() is not None)
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        # A cluster that it may be starting gets STOP_TIMEOUT_S to end.
        assert process.wait(STOP_TIMEOUT_S + PATIENCE_S) == 130
    finally:
        process.kill()
        process.wait()
    until(lambda: not any(child.is_running() for child in children))
    told = json.loads(report.read_text())
    assert told["units"]
    assert not told["is_complete"]
