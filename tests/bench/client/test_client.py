"""The client against a server with known delays: the client's stamps beside the server's own."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from tests.ports import free_ports

from kvrelay.bench.client import driver, service
from kvrelay.bench.client.connection import ConnectionPool, parse_target
from kvrelay.bench.client.driver import LoadDriver, RunLimits
from kvrelay.bench.client.service import count_tokens, first_model, wait_until_healthy
from kvrelay.bench.client.stream import BodyOptions, StreamEndpoint
from kvrelay.bench.errors import BenchError, ServerDownError
from kvrelay.bench.load.datasets import Dataset
from kvrelay.bench.load.mix import ClassSpec, build_class
from kvrelay.bench.load.request import Length
from kvrelay.bench.progress import ProgressBar
from kvrelay.bench.report.metrics import Outcome, RunResult, TokenSource
from kvrelay.bench.serving import RunOptions, ServeRun, require_success, run_serve
from kvrelay.cli.processes import run_async
from kvrelay.errors import InvalidInputError

Scripted = Callable[..., Any]


def spec(output_len: int = 8, **values: Any) -> ClassSpec:
    dataset = Dataset(prompt=Length("fixed", 16), output=Length("fixed", output_len))
    return ClassSpec(**({"dataset": dataset, "num_requests": 6, "max_concurrency": 2} | values))


def serve(server: Any, *classes: ClassSpec, **values: Any) -> ServeRun:
    options = RunOptions(parse_target(server.url), classes or (spec(),), **({"warm_up": 0} | values))
    return run_async(run_serve(options, ProgressBar(None)))


def test_stamps_are_the_servers_stamps(scripted: Scripted) -> None:
    with scripted(first_s=0.03, gap_s=0.01) as server:
        run = serve(server, spec(num_requests=4, max_concurrency=1, output_len=12))
        served = server.served
    delays_ms, ttft_ms = [], []
    for record, answer in zip(run.result.records, served, strict=True):
        # On a busy machine one read may bring two pieces, so each arrival is set beside the last piece in it.
        assert sum(record.tokens) == 12
        last = [sum(record.tokens[: at + 1]) - 1 for at in range(len(record.tokens))]
        delays_ms += [(mine - answer.written_ns[at]) / 1e6 for mine, at in zip(record.stamps_ns, last)]
        ttft_ms.append((record.ttft_s or 0) * 1e3 - (answer.written_ns[0] - answer.received_ns) / 1e6)
    # A write happens before its read. How long before is up to the machine: far below a millisecond when it is idle.
    assert min(delays_ms) > 0
    assert min(ttft_ms) > 0
    assert all(record.e2e_s >= 0.03 + 11 * 0.01 for record in run.result.records)
    assert run.report.total.retokenized_tokens == 48
    assert run.report.total.cached_tokens == 12


def test_coalesced_pieces_count_all_their_tokens(scripted: Scripted) -> None:
    for script, source in (
        ({"token_ids": True}, TokenSource.TOKEN_IDS),
        ({"token_ids": False}, TokenSource.USAGE),
        ({"token_ids": False, "running_usage": False}, TokenSource.ESTIMATED),
    ):
        with scripted(gap_s=0.002, tokens_per_piece=4, **script) as server:
            run = serve(server, spec(num_requests=1))
        (record,) = run.result.records
        # On a busy machine one read may bring both pieces.
        assert record.tokens in ((4, 4), (8,))
        assert (record.token_source, record.output_tokens) == (source, 8)


def test_chat_endpoint_gets_text(scripted: Scripted) -> None:
    with scripted() as server:
        run = serve(server, body=BodyOptions("", StreamEndpoint.CHAT), warm_up=1)
        assert server.served[0].path == "/v1/chat/completions"
        content = server.served[0].body["messages"][0]["content"]
    assert len(content.split()) == 16
    assert run.report.total.successful == 6


def test_closed_loop_reuses_its_connections(scripted: Scripted) -> None:
    with scripted() as server:
        run = serve(server, spec(num_requests=20, max_concurrency=2), retokenize=False)
        assert server.connections == 2
    assert run.report.total.successful == 20
    assert run.report.total.concurrency <= 2.01


def test_open_loop_sends_on_time_and_mixes_are_apart(scripted: Scripted) -> None:
    with scripted() as server:
        chat = spec(name="chat", num_requests=None)
        late = msgspec.structs.replace(
            spec(name="late", output_len=2), rate=100.0, max_concurrency=None, num_requests=10
        )
        run = serve(server, chat, late, limits=RunLimits(time_limit_s=1.5))
    names = [part.name for part in run.report.classes]
    assert names == ["chat", "late"]
    assert all(part.successful for part in run.report.classes)
    assert run.report.classes[1].request_rate == 100.0
    assert run.report.complete


def test_a_request_that_hangs_fails_and_the_run_without_a_duration_ends(scripted: Scripted) -> None:
    """It has sent a token before."""
    with scripted(first_s=0.001, gap_s=3600) as server:
        run = serve(server, spec(num_requests=3), limits=RunLimits(request_s=0.2))
    failed = (Outcome.FAILED, "no whole answer within 0.2 s (--timeout)")
    assert [(record.outcome, record.error) for record in run.result.records] == [failed] * 3


def test_run_ends_with_its_time_and_cuts_off_what_hangs(scripted: Scripted) -> None:
    with scripted(first_s=0.001, gap_s=3600) as server:
        run = serve(server, spec(num_requests=None), limits=RunLimits(time_limit_s=1.0, drain_s=0.2))
    assert [record.outcome for record in run.result.records] == [Outcome.CUT_OFF] * 2
    assert all(record.tokens == (1,) for record in run.result.records)
    assert (run.report.total.cut_off, run.report.total.successful) == (2, 0)
    assert run.report.total.output_tokens_per_s > 0


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("refuse", "HTTP 503: too many requests"),
        ("html", "text/html instead of a stream"),
        ("not-http", "not HTTP"),
        ("garbage", "no chunk"),
        ("break", "middle of an answer"),
        ("drop", "without an answer"),
    ],
)
def test_failures_are_counted_and_told(scripted: Scripted, mode: str, message: str) -> None:
    with scripted(mode=mode) as server:
        run = serve(server, spec(num_requests=3, max_concurrency=3))
        # A request without any answer is sent once more, and that is told.
        assert len(server.served) == 3 + run.report.client.reconnects
    assert run.report.client.reconnects == (3 if mode == "drop" else 0)
    assert run.report.total.failed == 3
    (error,) = run.report.errors
    assert error.count == 3
    assert message in error.message
    with pytest.raises(BenchError, match="no request succeeded"):
        require_success(run.report)


def test_answer_that_ends_with_the_connection(scripted: Scripted) -> None:
    with scripted(mode="until-close") as server:
        run = serve(server, spec(num_requests=3))
    assert run.report.total.successful == 3
    assert run.report.total.output_tokens == 24


def test_idle_connection_that_was_closed_is_replaced(scripted: Scripted) -> None:
    async def twice(url: str, restart: Callable[[], Any]) -> str:
        pool = ConnectionPool(parse_target(url))
        await first_model(pool)
        restart()
        model = await first_model(pool)
        await pool.close()
        return model

    made, (port,) = scripted(), free_ports(1)
    server, again = (type(made)(made.script, port) for _ in range(2))
    with server:

        def restart() -> None:
            server.stop()
            again.__enter__()

        try:
            assert run_async(twice(server.url, restart)) == "scripted"
        finally:
            again.stop()


def test_a_record_tells_when_its_request_was_due_and_when_it_was_written(scripted: Scripted) -> None:
    timed = spec(rate=200.0, max_concurrency=None)
    with scripted() as server:
        result = serve(server, timed).result
    offsets = build_class(timed, 0).offsets
    assert offsets is not None
    due_ns = [result.start_ns + int(next(offsets) * 1e9) for _ in result.records]
    assert sorted(record.due_ns for record in result.records) == due_ns
    for record in result.records:
        assert record.sent_ns <= record.written_ns <= record.stamps_ns[0]
        assert record.client_delay_s >= 0.0


def test_dead_server_ends_the_run() -> None:
    target = parse_target("http://127.0.0.1:9")
    with pytest.raises(ServerDownError, match="no connection"):
        run_async(run_serve(RunOptions(target, (spec(),)), ProgressBar(None)))

    async def hammer() -> RunResult:
        load = LoadDriver(ConnectionPool(target), BodyOptions("m"), RunLimits(30, max_failures=4), ProgressBar(None))
        return await load.run((build_class(spec(num_requests=None, max_concurrency=2), 0),))

    result = run_async(hammer())
    assert result.note == "given up after 4 failures in a row"
    assert 4 <= len(result.records) <= 6


def test_a_server_that_never_answers_ends_the_warm_up(scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "WARM_UP_LIMIT_S", 0.2)
    with scripted(first_s=3600) as server, pytest.raises(BenchError, match=r"every warm-up .* had not answered"):
        serve(server, warm_up=3)


def test_a_server_that_never_tells_its_model_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "ASK_TIMEOUT_S", 0.2)

    async def ask(url: str) -> None:
        async with ConnectionPool(parse_target(url)) as pool:
            await first_model(pool)

    late = pytest.raises(ServerDownError, match=r"/v1/models did not answer within 0\.2 s")
    with socket.create_server(("127.0.0.1", 0)) as silent, late:
        run_async(ask(f"http://127.0.0.1:{silent.getsockname()[1]}"))


def test_interrupt_keeps_what_was_measured(scripted: Scripted) -> None:
    async def interrupted(server: Any) -> RunResult:
        pool = ConnectionPool(parse_target(server.url))
        load = LoadDriver(pool, BodyOptions("m"), RunLimits(), ProgressBar(None))
        quick, stuck = spec(1, name="quick", num_requests=3), spec(8, name="stuck", num_requests=None)
        task = asyncio.ensure_future(load.run((build_class(quick, 0), build_class(stuck, 0))))
        while sum(len(served.written_ns) for served in server.served) < 5:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        task.cancel()
        result = await task
        await pool.close()
        return result

    with scripted(gap_s=30) as server:
        result = run_async(interrupted(server))
    assert result.note == "interrupted"
    found = sorted((record.class_name, record.outcome.value, len(record.stamps_ns)) for record in result.records)
    assert found == [("quick", "ok", 1)] * 3 + [("stuck", "cut_off", 1)] * 2


def test_health_and_token_counts(scripted: Scripted) -> None:
    async def ask(url: str, text: str) -> int | None:
        pool = ConnectionPool(parse_target(url))
        await wait_until_healthy(pool, 5)
        try:
            return await count_tokens(pool, "m", [text, "", text])
        finally:
            await pool.close()

    with scripted() as server:
        assert run_async(ask(server.url, "a b c")) == 6
    with scripted(tokenize=False) as server:
        assert run_async(ask(server.url, "a b c")) is None

    async def never() -> None:
        await wait_until_healthy(ConnectionPool(parse_target("http://127.0.0.1:9")), 0.2)

    with pytest.raises(ServerDownError, match=r"healthy within 0\.2 s: no connection"):
        run_async(never())


def test_an_answer_without_an_end_is_not_kept(scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrelay.bench.client.connection.MAX_BODY", 8)

    async def ask(url: str) -> None:
        async with ConnectionPool(parse_target(url)) as pool:
            await first_model(pool)

    with scripted() as server, pytest.raises(BenchError, match="the server's answer does not end"):
        run_async(ask(server.url))


def test_options_that_cannot_be_run() -> None:
    target = parse_target("http://127.0.0.1:9")
    with pytest.raises(InvalidInputError, match="has no end"):
        RunOptions(target, (spec(num_requests=None),))
    with pytest.raises(InvalidInputError, match="duration"):
        RunOptions(target, (spec(),), limits=RunLimits(time_limit_s=0))
