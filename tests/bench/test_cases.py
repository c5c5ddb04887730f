"""Cases, the knee search, turns and the interference table."""

from __future__ import annotations

import asyncio
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.patience import PATIENCE_S, until

from kvrelay.bench.cases import Case, CaseTimes, check_names, parse_case, running
from kvrelay.bench.client.connection import ConnectionPool, Target
from kvrelay.bench.client.service import first_model
from kvrelay.bench.compare import serve_case, summarise, take_turns
from kvrelay.bench.errors import BenchError
from kvrelay.bench.interference import ARRANGEMENTS, HOW, figures_of, interference_markdown, plot_interference
from kvrelay.bench.report.metrics import (
    ClientLoad,
    OfferedLoad,
    Outcome,
    RequestRecord,
    RunInfo,
    RunResult,
    ServeReport,
    Slo,
    serve_report,
)
from kvrelay.bench.report.table import Row, results_table
from kvrelay.bench.sweep import CaseSweep, KneeOptions, knee_of, plot_sweep, sweep_case, sweep_markdown
from kvrelay.errors import InvalidInputError

# A server with one child that outlives SIGTERM: what a case has to clean up.
SERVER = """
import http.server, json, os, signal, socket, subprocess, sys
with socket.socket() as another_program:
    try:
        another_program.bind(("127.0.0.1", int(sys.argv[1])))
    except OSError:
        pass
    else:
        sys.exit("anybody can have the port")
stubborn = "import signal, time\\nsignal.signal(15, signal.SIG_IGN)\\ntime.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", stubborn])
open(sys.argv[2], "w").write(str(child.pid))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps({"data": [{"id": "m"}]}).encode())
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_case_is_started_and_stopped_with_its_children(tmp_path: Path) -> None:
    pid_file, script = tmp_path / "pid", tmp_path / "server.py"
    script.write_text(SERVER)
    command = shlex.join([sys.executable, str(script), "{port}", str(pid_file)])

    async def use() -> str:
        async with running(parse_case(f"own={command}"), tmp_path, CaseTimes(PATIENCE_S, 5)) as target:
            pool = ConnectionPool(target)
            model = await first_model(pool)
            await pool.close()
            assert alive(int(pid_file.read_text()))
        return model

    assert asyncio.run(use()) == "m"
    until(lambda: not alive(int(pid_file.read_text())))


@pytest.mark.parametrize(
    ("code", "start_s", "message"),
    [
        ("print('no model'); raise SystemExit(3)", PATIENCE_S, "code 3 at its start: no model"),
        ("import time; time.sleep(600)", 0.5, "healthy within"),
    ],
)
def test_case_that_does_not_start(tmp_path: Path, code: str, start_s: float, message: str) -> None:
    case = Case("bad", command=shlex.join([sys.executable, "-c", code, "{port}"]))

    async def use() -> None:
        async with running(case, tmp_path, CaseTimes(start_s, 5)):
            pass

    with pytest.raises(BenchError, match=message):
        asyncio.run(use())


def test_case_texts() -> None:
    assert parse_case("a=http://h:1") == Case("a", url="http://h:1")
    assert parse_case("a b=serve --x=1 --port {port}") == Case("a b", command="serve --x=1 --port {port}")
    for wrong in ("a", "=http://x", "a=", "a=serve", "a='{port}", "a/b=http://x", "a=http://"):
        with pytest.raises(InvalidInputError):
            parse_case(wrong)
    with pytest.raises(InvalidInputError):
        check_names((Case("a"), Case("a")))
    with pytest.raises(InvalidInputError):
        check_names(())


def search(options: KneeOptions, limit: float) -> tuple[float | None, list[float]]:
    tried: list[float] = []

    async def is_good(rate: float) -> bool:
        tried.append(rate)
        return rate <= limit

    return asyncio.run(knee_of(options, is_good)), tried


def test_knee_is_found_by_doubling_and_bisection() -> None:
    found, tried = search(KneeOptions(1, 64, 6), 11.0)
    assert found is not None
    assert 10.5 < found <= 11.0
    assert tried[:5] == [1, 2, 4, 8, 16]
    assert len(tried) == 11


def test_knee_at_the_borders() -> None:
    assert search(KneeOptions(1, 6, 3), 100) == (6, [1, 2, 4, 6])
    assert search(KneeOptions(4, 64, 2), 1.5) == (1, [4, 2, 1])
    assert search(KneeOptions(4, 64, 2), 0.1) == (None, [4, 2, 1])
    for wrong in ((0, 1, 1, 0.9), (2, 1, 1, 0.9), (1, 2, -1, 0.9), (1, 2, 1, 0)):
        with pytest.raises(InvalidInputError):
            KneeOptions(*wrong)


def report(ttft_ms: float, *, chat_gap_ms: float = 5) -> ServeReport:
    """Two chats and a long prompt; everything else follows from the two figures."""
    gap = int(chat_gap_ms * 1e6)
    first = int(ttft_ms * 1e6)
    chat = RequestRecord("chat", Outcome.OK, 0, 0, (first, first + gap, first + 2 * gap), (1, 1, 1), output_tokens=3)
    long = RequestRecord("long", Outcome.OK, 0, 0, (2 * first,), (1,), output_tokens=1)
    result = RunResult((chat, chat, long), 0, 10**9, ClientLoad(0, 0))
    info = RunInfo("x", "http://x", "m", "/v1/completions", "cmd", "now")
    return serve_report(info, result, [OfferedLoad("chat"), OfferedLoad("long", 3.0)], Slo(ttft_s=0.1))


def test_sweep_of_a_case_and_its_table(tmp_path: Path) -> None:
    measured: list[float] = []

    async def measure(rate: float) -> ServeReport:
        measured.append(rate)
        return report(10 * rate)

    sweep = asyncio.run(sweep_case(measure, "one", (3.0,), KneeOptions(2, 16, 2, share=1.0)))
    assert measured[:4] == [3, 2, 4, 8]
    assert len(measured) == len(set(measured)) == 6
    assert [point.rate for point in sweep.points] == sorted(measured)
    assert sweep.knee is not None
    # A long prompt takes twice as long, so the limit of 100 ms is met up to five requests a second.
    assert 4 <= sweep.knee <= 5
    nothing = CaseSweep("two", (), None)
    text = sweep_markdown([sweep, nothing])
    assert text.count("| one |") == 6
    assert "knee of two: not reached" in text
    plot_sweep([sweep], tmp_path / "sweep.png")
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


def test_interference_takes_medians_and_the_worst_wait(tmp_path: Path) -> None:
    runs: list[Row] = [
        {"case": "a", "round": number, **figures_of(report(ttft_ms, chat_gap_ms=gap_ms), "chat", "long")}
        for number, (ttft_ms, gap_ms) in enumerate(((10, 5), (20, 9), (90, 6)), 1)
    ]
    runs.append({"case": "b", "round": 1, "error": "it did not start"})
    a, b = summaries = summarise(runs, HOW)
    assert (a["chat_itl_p50_s"], a["longest_wait_s"]) == pytest.approx((0.006, 0.009))
    assert (a["chat_ttft_p50_s"], a["long_ttft_p50_s"]) == pytest.approx((0.02, 0.04))
    assert (a["chat_tokens_per_s"], a["output_tokens_per_s"], a["rounds"]) == (6, 7, 3)
    assert (b["rounds"], b["failed_rounds"], b["chat_itl_p50_s"]) == (0, 1, None)
    text = interference_markdown({"load": "chat=...", "summaries": summaries, "runs": runs})
    assert "| a | 6.0 | 6.0 | 9.0 | 20.0 |" in text
    assert "- b, round 1: it did not start" in text
    plot_interference(summaries, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 1000


def test_what_makes_an_arrangement_wins_over_other_arguments() -> None:
    assert len(ARRANGEMENTS) == 5
    case = serve_case("x", "my model", "--dtype float32", ARRANGEMENTS["1P1D conditional"])
    words = shlex.split(case.command or "")
    assert words == [
        *(sys.executable, "-m", "kvrelay", "serve", "my model", "--dtype", "float32", "--port", "{port}"),
        *("--prefill", "1", "--decode", "1"),
    ]


def test_cases_change_places_every_round_and_one_that_fails_is_noted(scripted: Callable[..., Any]) -> None:
    async def measure(target: Target, row: Row) -> Row:
        return {"port": target.port, "half": row["rate"] / 2}

    told: list[int] = []
    with scripted() as server:
        cases = [Case("a", url=server.url), Case("b", command=f"{sys.executable} -c pass {{port}}")]
        points: list[Row] = [{"rate": 1.0}, {"rate": 3.0}]
        rows = take_turns(cases, 2, measure, points=points, done=lambda rows: told.append(len(rows)))
    assert [(row["round"], row["case"], row["rate"]) for row in rows] == [
        *((1, "a", 1.0), (1, "a", 3.0), (1, "b", 1.0), (1, "b", 3.0)),
        *((2, "b", 1.0), (2, "b", 3.0), (2, "a", 1.0), (2, "a", 3.0)),
    ]
    assert told == list(range(1, 9))
    assert all(("ended with code 0" in row["error"]) if row["case"] == "b" else not row["error"] for row in rows)
    assert [row["half"] for row in summarise(rows, labels=("case", "rate"))] == [0.5, 1.5, None, None]


def test_a_table_of_figures() -> None:
    rows: list[Row] = [{"case": "x", "n": 3, "t_s": 0.0123, "share": 0.5}, {"case": "y", "n": None}]
    columns = {"case": "case", "n": "n", "ms": "t_s:ms", "fine": "t_s:ms.2f", "share": "share:.0%"}
    *_, x, y = results_table(rows, columns).splitlines()
    assert x.split() == ["x", "3", "12.3", "12.30", "50%"]
    assert y.split() == ["y", "-", "-", "-", "-"]


def test_a_summary_takes_medians_and_what_it_is_told() -> None:
    rows: list[Row] = [
        {"case": "x", "round": number, "error": None, "p99_s": p99, "max_s": 2 * p99, "num_failed": 1, "text": "t"}
        for number, p99 in enumerate((1.0, 5.0, 2.0), 1)
    ]
    rows += [{"case": "x", "round": 4, "error": "down"}, {"case": "y", "round": 1, "error": None, "p99_s": None}]
    x, y = summarise(rows, {"max_s": max})
    assert x == {"case": "x", "rounds": 3, "failed_rounds": 1, "p99_s": 2.0, "max_s": 10.0, "num_failed": 3}
    assert (y["rounds"], y["p99_s"]) == (1, None)
