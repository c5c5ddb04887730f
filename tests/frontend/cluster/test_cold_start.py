"""A model without workers: its requests wait for a planner to start one, for a bounded time."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from tests.frontend.doubles import FakeCluster, Script, running
from tests.frontend.raw_http import send
from tests.patience import skip

from kvrelay.core.clock import ManualClock
from kvrelay.core.messages import RequestRefused
from kvrelay.core.status import RefusalKind
from kvrelay.frontend.api.server import Frontend
from kvrelay.frontend.cluster.cold_start import ASKED_FOR_S, ColdStart
from kvrelay.frontend.cluster.frontends import figures_of, planners_question
from kvrelay.frontend.generate.sequence import REPLACEMENT_WAIT_S
from kvrelay.planner.report import PlannerReport

BODY: dict[str, object] = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 2, "return_token_ids": True}
REPORT = PlannerReport(planner_id="a", host="h", pid=1, started_unix=1.0, mode="act", is_leader=True, can_start=True)


async def tell(cluster: FakeCluster, report: PlannerReport) -> Frontend:
    """A planner says something, and the frontend has heard it."""
    frontend = cluster.frontend
    assert frontend is not None
    lease = await cluster.control.discovery.grant(60.0)
    await cluster.control.discovery.put(cluster.keys.planner("a"), msgspec.json.encode(report), lease)
    await cluster.until(lambda: frontend.cluster.planners() == [report])
    return frontend


async def num_unplaced(cluster: FakeCluster, name: str = "front") -> int:
    """As a planner asks."""
    answer = await cluster.bus.request(cluster.keys.frontend_figures(name), planners_question(), 10.0)
    figures = figures_of(answer)
    assert figures is not None
    return figures.num_unplaced


async def test_requests_without_a_worker_wait_for_the_first_and_are_seen_by_the_planner(model_dir: Path) -> None:
    async with running(model_dir, Script(), name="front") as cluster:
        frontend = await tell(cluster, REPORT)
        assert await num_unplaced(cluster) == 0
        await cluster.deregister("w0")
        await cluster.until(lambda: not frontend.cluster.model(None).is_available)
        listed = await send(frontend.port, "GET", "/v1/models")
        assert [model["id"] for model in listed.json["data"]] == ["tiny"]
        assert (await send(frontend.port, "GET", "/health")).status == 200
        bad = await send(frontend.port, "POST", "/v1/completions", BODY | {"max_tokens": -1})
        assert bad.status == 400, "it needs no worker to be refused"
        asking = [asyncio.create_task(send(frontend.port, "POST", "/v1/completions", BODY)) for _ in range(3)]
        while await num_unplaced(cluster) < 3:
            await asyncio.sleep(0.01)
        await cluster.add_worker("w1", Script(tokens=(20,)))
        for answer in await asyncio.gather(*asking):
            assert answer.status == 200, answer.body
            assert answer.json["choices"][0]["token_ids"] == [20, 20]
        assert await num_unplaced(cluster) == 0


async def test_if_none_comes_in_time_it_is_503_with_retry_after(model_dir: Path) -> None:
    async with running(model_dir, Script(), cold_start_wait_s=0.05) as cluster:
        frontend = await tell(cluster, REPORT)
        await cluster.deregister("w0")
        await cluster.until(lambda: not frontend.cluster.model(None).is_available)
        asking = asyncio.create_task(send(frontend.port, "POST", "/v1/completions", BODY))
        await cluster.until(lambda: frontend.cluster.cold_start.num_unplaced == 1)
        skip(REPLACEMENT_WAIT_S)
        answer = await asking
        assert answer.status == 503
        assert b"none was started within" in answer.body
        assert int(answer.headers["retry-after"]) >= 5


@pytest.mark.parametrize("change", [{"can_start": False}, {"is_leader": False}])
async def test_without_a_planner_that_can_start_one_it_is_503_at_once(
    model_dir: Path, change: dict[str, object]
) -> None:
    async with running(model_dir, Script()) as cluster:
        frontend = await tell(cluster, msgspec.structs.replace(REPORT, **change))
        await cluster.deregister("w0")
        await cluster.until(lambda: not frontend.cluster.models)
        answer = await send(frontend.port, "POST", "/v1/completions", BODY)
        assert answer.status == 503
        assert b"at the moment" in answer.body
        assert (await send(frontend.port, "GET", "/health")).status == 503


async def test_at_most_so_many_wait_as_may_be_in_flight(model_dir: Path) -> None:
    async with running(model_dir, Script(), name="front", max_waiting_requests=2) as cluster:
        frontend = await tell(cluster, REPORT)
        await cluster.deregister("w0")
        await cluster.until(lambda: not frontend.cluster.model(None).is_available)
        asking = [asyncio.create_task(send(frontend.port, "POST", "/v1/completions", BODY)) for _ in range(2)]
        while await num_unplaced(cluster) < 2:
            await asyncio.sleep(0.01)
        assert (await send(frontend.port, "POST", "/v1/completions", BODY)).status == 429
        await cluster.add_worker("w1", Script())
        assert [answer.status for answer in await asyncio.gather(*asking)] == [200, 200]


async def test_a_request_that_its_last_worker_gives_up_while_it_leaves_waits_too(model_dir: Path) -> None:
    """The planner stops the last worker while the request is on its way."""
    async with running(model_dir, Script(waits_for_prefill_lost=True, fail_after=0)) as cluster:
        frontend = await tell(cluster, REPORT)
        worker = cluster.workers["w0"]
        asking = asyncio.create_task(send(frontend.port, "POST", "/v1/completions", BODY))
        await cluster.until(lambda: len(worker.requests) == 1)
        await cluster.deregister("w0")
        await cluster.until(lambda: not frontend.cluster.model(None).is_available)
        worker.prefills_lost.append(worker.requests[0].request_id)
        await cluster.until(lambda: frontend.cluster.cold_start.num_unplaced == 1)
        await cluster.add_worker("w1", Script(tokens=(20,)))
        assert (await asking).status == 200


@pytest.mark.parametrize("kind", [RefusalKind.DRAINING, RefusalKind.GONE])
async def test_a_request_that_the_last_worker_refuses_because_it_leaves_waits_too(
    model_dir: Path, kind: RefusalKind
) -> None:
    """The frontend hears the refusal before it hears that the worker has left."""
    leaves = RequestRefused("", "leaving", 503, retryable=True, kind=kind)
    async with running(model_dir, Script(refuse=leaves)) as cluster:
        frontend = await tell(cluster, REPORT)
        asking = asyncio.create_task(send(frontend.port, "POST", "/v1/completions", BODY))
        await cluster.until(lambda: frontend.cluster.cold_start.num_unplaced == 1)
        await cluster.deregister("w0")
        await cluster.add_worker("w1", Script(tokens=(20,)))
        assert (await asking).status == 200


@pytest.mark.parametrize("kind", [RefusalKind.QUEUE_FULL, RefusalKind.UNAVAILABLE])
async def test_a_worker_that_is_there_and_refuses_is_not_waited_for(model_dir: Path, kind: RefusalKind) -> None:
    refusal = RequestRefused("", "no", 503, retryable=True, kind=kind)
    async with running(model_dir, Script(refuse=refusal)) as cluster:
        frontend = await tell(cluster, REPORT)
        assert (await send(frontend.port, "POST", "/v1/completions", BODY)).status == 503


async def test_a_frontend_that_knows_no_model_says_503_and_counts_as_demand(model_dir: Path) -> None:
    """It was restarted while there were no workers. It must not say 404, and the next attempt finds a worker."""
    async with running(model_dir, name="front") as cluster:
        frontend = await tell(cluster, REPORT)
        assert (await send(frontend.port, "GET", "/v1/models")).json["data"] == []
        answer = await send(frontend.port, "POST", "/v1/completions", BODY)
        assert answer.status == 503
        assert answer.headers["retry-after"]
        assert await num_unplaced(cluster) == 1
        await cluster.add_worker("w1", Script())
        await cluster.until(lambda: bool(frontend.cluster.models))
        assert (await send(frontend.port, "POST", "/v1/completions", BODY)).status == 200


def test_a_refused_request_counts_as_demand_for_a_while() -> None:
    clock = ManualClock()
    cold_start = ColdStart(60.0, clock)
    assert cold_start.num_unplaced == 0
    cold_start.asked()
    assert cold_start.num_unplaced == 1
    with cold_start.waiting():
        assert cold_start.num_unplaced == 2
    clock.advance(ASKED_FOR_S)
    assert cold_start.num_unplaced == 0
