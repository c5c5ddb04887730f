"""What a frontend counts per second, what follows from a worker's samples, and the sums over frontends."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import AsyncExitStack
from itertools import permutations

import msgspec
import pytest
from tests.frontend.doubles import FakeWorker, Script
from tests.patience import PATIENCE_S

from kvrelay.control.base import Keys
from kvrelay.control.memory import MemoryBroker
from kvrelay.core.activity import Activity, Spent
from kvrelay.core.events import LoadMetrics, TokenCounts
from kvrelay.core.histogram import LATENCY_BUCKETS_S, Histogram, quantile_s
from kvrelay.core.workers import CallerInfo
from kvrelay.frontend.cluster import frontends as module
from kvrelay.frontend.cluster.figures import COARSE_S, HISTORY_S, MINUTE_S, NUM_COARSE, Figures
from kvrelay.frontend.cluster.frontends import (
    FiguresReply,
    FiguresRequest,
    Frontends,
    KnownFrontend,
    figures_of,
    planners_question,
)
from kvrelay.frontend.cluster.metrics import FrontendMetrics
from kvrelay.frontend.cluster.seconds import Second, added_up, total_of
from kvrelay.frontend.cluster.snapshot import history, hour_rows
from kvrelay.frontend.cluster.worker_link import WorkerLink
from kvrelay.frontend.cluster.worker_report import WorkerReport
from kvrelay.rpc.loopback import LoopbackNetwork


def load(**changes: object) -> LoadMetrics:
    return msgspec.structs.replace(LoadMetrics("w", 3, 8, 40, 100, 2, 0.4, 0.0), **changes)


async def link(tmp_path) -> WorkerLink:
    network = LoopbackNetwork()
    worker = FakeWorker(network, Script(), "w")
    return WorkerLink(worker.info(tmp_path), network.client(worker.server.address))


async def test_a_second_has_what_was_counted_since_the_one_before(tmp_path) -> None:
    metrics, connection = FrontendMetrics(), await link(tmp_path)
    metrics.answered("/v1/completions", "200", "m")
    figures = Figures(metrics, lambda: [connection])
    metrics.rejections_of = lambda: {"in_flight": 1, "requests_per_minute": 1}
    for status in ("200", "400", "429", "429", "disconnected", "500", "503", "broken"):
        metrics.answered("/v1/completions", status, "m")
    metrics.answered("/debug/cluster", "500")
    metrics.of("m").first_token(0.003, 10, 0)
    metrics.of("other").first_token(0.003, 5, 0)
    connection.counts.generated_tokens = 7
    connection.report.heard(load(), 1.0)
    figures.take(100)
    connection.counts.generated_tokens = 9
    figures.take(101)
    first, second = figures.since(0)
    assert (first.unix_s, first.num_requests, first.num_failed) == (100, 8, 3)
    assert (first.num_answered, first.num_refused, first.num_limited) == (1, 2, 1)
    assert (first.num_prompt_tokens, first.num_output_tokens, sum(first.ttft), first.itl) == (15, 7, 2, ())
    assert (first.num_admitted, first.num_waiting, first.num_blocks_in_use, first.num_blocks) == (3, 2, 40, 100)
    assert (second.num_requests, second.num_output_tokens, second.ttft) == (0, 2, ())
    assert figures.since(100) == (second,)


async def test_rows_are_bounded_and_a_clock_may_go_back(tmp_path) -> None:
    connections = [await link(tmp_path)]
    figures = Figures(FrontendMetrics(), lambda: connections)
    for second in range(1000, 1000 + 2 * HISTORY_S):
        figures.take(second)
    assert len(figures.since(0)) == HISTORY_S
    figures.take(1500)
    assert figures.since(0)[-1].unix_s == 1500
    # A connection that was replaced counts from 0.
    connections[0].counts.generated_tokens = 50
    figures.take(1501)
    connections[:] = [await link(tmp_path)]
    connections[0].counts.generated_tokens = 4
    figures.take(1502)
    assert [row.num_output_tokens for row in figures.since(1500)] == [50, 4]


def test_an_hour_is_kept_in_steps_of_fifteen_seconds() -> None:
    metrics = FrontendMetrics()
    figures = Figures(metrics, list)
    for second in range(7200):
        if second >= 7140:
            metrics.answered("/v1/completions", "200", "m")
        figures.take(second)
    hour = figures.hour_since(0)
    assert (len(hour), hour[0].unix_s, hour[-1].unix_s) == (NUM_COARSE, 3600, 7200 - COARSE_S)
    assert [row.num_answered for row in hour[-5:]] == [0, 15, 15, 15, 15]
    assert figures.hour_since(7185) == hour[-1:]
    # A clock that went back: rows of its future are dropped, and the same quarter goes on.
    figures.take(7175)
    assert [(row.unix_s, row.num_answered) for row in figures.hour_since(7155)] == [(7155, 15), (7170, 15)]
    known = KnownFrontend("f", hour=deque(hour))
    shown = history(hour_rows([known], 7200), 7155, COARSE_S)
    # The last quarter has ended, and is not settled yet.
    assert (shown.step_s, shown.unix_s, shown.num_answered) == (COARSE_S, [7170], [15])


def test_frontends_are_added_up_by_second() -> None:
    one = [Second(10, 1, 0, 5, 7, (1, 0), (), 4, 0, 50, 100), Second(11, 2)]
    other = [Second(9, 4), Second(10, 2, 1, 5, 3, (1, 2), (1,), 3, 1, 40, 100), Second(12, 9)]
    nine, ten, eleven = added_up([one, other], 9, 11)
    assert (nine.num_requests, eleven.num_requests) == (4, 2)
    assert ten == Second(10, 3, 1, 10, 10, (2, 2), (1,), 4, 1, 50, 100)
    assert total_of([nine, ten, eleven]).num_requests == 9


async def test_a_second_has_what_workers_did_in_it(tmp_path) -> None:
    """One worker is known from its introduction on, another one from its first sample on."""
    known, other = await link(tmp_path), await link(tmp_path)
    other.info = msgspec.structs.replace(other.info, worker_id="other")
    known.first_activity = Activity({"remote": 10}, rss_bytes=1)
    metrics = FrontendMetrics()
    present = [known, other]
    figures = Figures(metrics, lambda: present)
    known.report.heard(load(activity=Activity({"remote": 12}, prefills=(0, 3), rss_bytes=1)), 1.0)
    other.report.heard(load(worker_id="other", activity=Activity({"remote": 100}, rss_bytes=5)), 1.0)
    metrics.of("m").first_token(0.003, 5, 0, "w")
    figures.take(100)
    known.report.heard(load(activity=Activity({"remote": 13}, prefills=(0, 3), cpu_s=0.5, rss_bytes=1)), 1.0)
    other.report.heard(
        load(worker_id="other", activity=Activity({"remote": 101, "local_short": 2}, {"disk": 32}, Spent(1, 0.5))), 1.0
    )
    figures.take(101)
    works = [row.work for row in figures.since(0)]
    assert works == [
        Activity({"remote": 2}, rss_bytes=6),
        Activity({"remote": 2, "local_short": 2}, {"disk": 32}, Spent(1, 0.5), cpu_s=0.5, rss_bytes=1),
    ]
    (times,) = figures.last_minute.times()
    assert (times.worker_id, sum(times.ttft), times.ttft[1], times.itl, times.prefills) == ("w", 1, 1, (), (0, 3))
    assert (times.role, times.model) == (known.info.role, known.info.model)
    # What a worker has answered just before it left is in its times, and goes on to count for its model.
    metrics.of("m").first_token(0.003, 5, 0, "w")
    present.remove(known)
    figures.take(102)
    (times,) = figures.last_minute.times()
    assert (times.worker_id, sum(times.ttft)) == ("w", 2)
    assert metrics.latencies() == {}
    assert metrics.of("m").latencies.ttft.count == 2
    # An hour's row sums up, and its memory is the most; after a minute nothing is of the last minute.
    (quarter,) = figures.hour_since(0)
    assert (quarter.work.places, quarter.work.rss_bytes) == ({"remote": 4, "local_short": 2}, 6)
    for second in range(103, 103 + MINUTE_S):
        figures.take(second)
    assert figures.last_minute.times() == ()


def test_what_frontends_know_of_workers_is_not_added_up() -> None:
    work = Activity({"remote": 3}, handoffs=Spent(2, 0.5), rss_bytes=10)
    one = [Second(10, cpu_s=0.25, rss_bytes=7, work=work), Second(11, work=None)]
    other = [Second(10, cpu_s=0.5, rss_bytes=9, work=work), Second(11, work=work)]
    ten, eleven = added_up([one, other], 9, 11)
    assert (ten.work, ten.cpu_s, ten.rss_bytes, eleven.work) == (work, 0.75, 16, work)
    whole = total_of([ten, eleven])
    assert (whole.work.places, whole.work.handoffs, whole.work.rss_bytes) == ({"remote": 6}, Spent(4, 1.0), 10)
    assert (whole.cpu_s, whole.rss_bytes) == (0.75, 16)
    shown = history([ten, eleven], 9)
    assert (shown.places["remote"], shown.handoff_ms, shown.handoff_queue_ms) == ([3, 3], [250.0, 250.0], [None, None])


async def test_a_planner_gets_the_last_minute_whatever_its_own_clock_says() -> None:
    """Its machine's may be hours ahead or behind; here seconds are counted in 1970."""
    plane, keys = MemoryBroker().plane(), Keys("default")
    figures = Figures(FrontendMetrics(), list)
    for second in range(100, 300):
        figures.take(second)
    async with Frontends(plane, keys, "f", figures, lambda: 300.5).serving():
        reply = figures_of(await plane.events.request(keys.frontend_figures("f"), planners_question(60), 10.0))
        assert reply is not None
        assert [row.unix_s for row in reply.rows] == list(range(241, 300))
        reply = figures_of(await plane.events.request(keys.frontend_figures("f"), planners_question(), 10.0))
        assert reply is not None
        assert reply.rows == ()
    await plane.close()


@pytest.mark.parametrize("ahead_s", [-3600, -20, 0, 20, 7207])
async def test_frontends_whose_clocks_differ_are_added_up(ahead_s: int) -> None:
    """Each numbers its seconds by its own clock; both have counted for 200 s."""
    broker, keys, num_s = MemoryBroker(), Keys("default"), 200
    begun, frontends = {"a": 9000, "b": 9000 + ahead_s}, []
    async with AsyncExitStack() as stack:
        for name, first in begun.items():
            plane, metrics = broker.plane(), FrontendMetrics()
            figures = Figures(metrics, list)
            frontends.append(Frontends(plane, keys, name, figures, lambda first=first: first + num_s + 0.5))
            await stack.enter_async_context(frontends[-1].serving())
            entry = msgspec.json.encode(CallerInfo(name, "k" * 40))
            await plane.discovery.put(keys.frontend(name), entry, await plane.discovery.grant(60.0))
            for second in range(first, first + num_s):
                metrics.answered("/v1/completions", "200", "m")
                figures.take(second)
        for asking, (first, other_first) in zip(frontends, permutations(begun.values()), strict=True):
            own, other = await asking.gather()
            rows = added_up([own.rows, other.rows], first, first + num_s)
            assert [(row.unix_s, row.num_answered) for row in rows] == [(first + second, 2) for second in range(num_s)]
            assert {row.unix_s % COARSE_S for row in other.hour} == {0}
            assert sum(row.num_answered for row in other.hour) == num_s
            # Only what is new is asked for, by the other's clock.
            last = other_first + num_s - 1
            assert other.missing(first + num_s) == FiguresRequest(last, last - last % COARSE_S)


async def test_a_control_plane_that_does_not_answer_holds_no_look_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page waited 5 s for a NATS server that was paused, until its connection counted as lost."""

    async def never(prefix: str) -> dict[str, bytes]:
        await asyncio.Event().wait()
        raise AssertionError

    plane, keys = MemoryBroker().plane(), Keys("default")
    frontends = Frontends(plane, keys, "f", Figures(FrontendMetrics(), list))
    monkeypatch.setattr(plane.discovery, "list", never)
    monkeypatch.setattr(module, "ASK_TIMEOUT_S", 0.01)
    async with asyncio.timeout(PATIENCE_S), frontends.serving():
        assert [known.frontend_id for known in await frontends.gather()] == ["f"]


def test_what_another_frontend_says_replaces_what_it_said_of_the_same_seconds() -> None:
    known = KnownFrontend("f")
    known.heard(FiguresReply("f", 2, (Second(10, 1), Second(11, 1))), 5.0, 12.5)
    known.heard(FiguresReply("f", 3, (Second(12, 4), Second(11, 2))), 6.0, 13.5)
    assert [(row.unix_s, row.num_requests) for row in known.rows] == [(10, 1), (11, 2), (12, 4)]
    assert (known.num_in_flight, known.missing(20.0)) == (3, FiguresRequest(12, 0))
    assert known.missing(11.5) == FiguresRequest(11, 0)
    # The last coarse row grows: it is asked for again.
    known.heard(FiguresReply("f", 3, (), hour=(Second(0, 5), Second(15, 2))), 7.0, 20.0)
    assert known.missing(20.0).hour_from == 15
    known.heard(FiguresReply("f", 3, (), hour=(Second(15, 6),)), 8.0, 21.0)
    assert [(row.unix_s, row.num_requests) for row in known.hour] == [(0, 5), (15, 6)]
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(FiguresReply("f", -1, ())), type=FiguresReply)


def test_quantiles_lie_within_their_bucket() -> None:
    histogram = Histogram((1.0, 2.0, 4.0))
    assert quantile_s((1.0, 2.0, 4.0), histogram.counts, 0.5) is None
    for value in (0.5, 1.5, 1.6, 3.0):
        histogram.observe(value)
    assert quantile_s((1.0, 2.0, 4.0), histogram.counts, 0.5) == 1.5
    assert quantile_s((1.0, 2.0, 4.0), histogram.counts, 1.0) == 4.0
    histogram.observe(100.0)
    assert quantile_s((1.0, 2.0, 4.0), histogram.counts, 0.99) == 4.0
    assert quantile_s((1.0, 2.0, 4.0), (), 0.5) is None


def test_rates_come_from_counts_and_waiting_from_its_begin() -> None:
    report = WorkerReport()
    report.heard(load(tokens=TokenCounts(100, 10)), 10.0)
    assert (report.generated_per_s, report.waiting_since_s) == (None, 10.0)
    report.heard(load(tokens=TokenCounts(110, 12)), 10.1)
    assert report.generated_per_s is None
    report.heard(load(tokens=TokenCounts(300, 30)), 12.0)
    assert (report.prefilled_per_s, report.generated_per_s, report.waiting_since_s) == (100.0, 10.0, 10.0)
    report.heard(load(num_waiting=0, tokens=TokenCounts(0, 0)), 14.0)
    assert (report.prefilled_per_s, report.generated_per_s, report.waiting_since_s) == (0.0, 0.0, None)
    # A worker of an earlier release tells no counts.
    report.heard(load(), 15.0)
    assert (report.waiting_since_s, report.cpu_cores) == (15.0, None)
    for at, (cpu_s, cores) in enumerate(((7.0, None), (9.0, 1.0), (8.0, 0.0))):
        report.heard(load(tokens=TokenCounts(), activity=Activity(cpu_s=cpu_s)), 20.0 + 2.0 * at)
        assert report.cpu_cores == cores


def test_quantiles_of_the_history_are_over_ten_seconds() -> None:
    width = len(LATENCY_BUCKETS_S) + 1
    slow = tuple(int(at == width - 2) for at in range(width))
    fast = tuple(int(at == 0) for at in range(width))
    rows = [Second(1, ttft=slow), *(Second(at, ttft=fast) for at in range(2, 15)), Second(15)]
    shown = history(rows, 9)
    assert shown.unix_s == [10, 11, 12, 13, 14, 15]
    assert [value > 30_000 for value in shown.ttft_p95_ms if value is not None] == [True, *[False] * 5]
    assert shown.itl_p95_ms == [None] * 6
    assert history(rows, 15).ttft_p50_ms == []
    assert history([], 0).unix_s == []
