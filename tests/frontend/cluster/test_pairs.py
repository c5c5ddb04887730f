"""Prefill-first at the frontend: pairs are chosen, both halves are sent, and each way to lose one is survived."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.frontend.doubles import FakeCluster, FakeWorker, Script
from tests.frontend.raw_http import send
from tests.patience import PATIENCE_S, skip

from kvrelay.config import RouterConfig, WorkerRole
from kvrelay.core.events import LoadMetrics
from kvrelay.core.handoff import HandoffOrder, Pair
from kvrelay.core.messages import RequestRefused
from kvrelay.core.pair_id import parse_pair_id
from kvrelay.core.step_cost import StepCost
from kvrelay.router.pair_router import SAMPLE_LAG_S

LONG = [5 + number % 300 for number in range(300)]
"""Above the threshold from which prefills go elsewhere."""
HEADER = "x-kvrelay-order"


@asynccontextmanager
async def pair(
    model_dir: Path, prefill: Script, *decodes: Script, **settings: object
) -> AsyncIterator[tuple[FakeCluster, FakeWorker]]:
    """A frontend, a prefill worker p, and decode workers d0, d1, ..."""
    cluster = FakeCluster(model_dir)
    try:
        for number, script in enumerate(decodes):
            await cluster.add_worker(f"d{number}", script)
        worker = await cluster.add_worker("p", prefill, role=WorkerRole.PREFILL)
        await cluster.start(**{"order": "prefill-first", **settings})
        frontend = cluster.frontend
        assert frontend is not None
        await cluster.until(lambda: len(frontend.cluster.model(None).worker_ids) == len(decodes))
        await cluster.until(lambda: bool(frontend.cluster.model(None).pairs.prefills.worker_ids))
        yield cluster, worker
    finally:
        await cluster.close()


async def ask(
    cluster: FakeCluster, prompt: list[int] = LONG, headers: dict[str, str] | None = None, **fields: object
) -> Any:
    assert cluster.frontend is not None
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 3, "return_token_ids": True, **fields}
    return await send(cluster.frontend.port, "POST", "/v1/completions", body, headers=headers or {})


async def tokens_of(cluster: FakeCluster, prompt: list[int] = LONG, **fields: object) -> list[int]:
    answer = await ask(cluster, prompt, **fields)
    assert answer.status == 200, answer.body
    tokens: list[int] = answer.json["choices"][0]["token_ids"]
    return tokens


def first_tokens(cluster: FakeCluster) -> dict[str, int]:
    """How many came from each worker."""
    assert cluster.frontend is not None
    counts = cluster.frontend.metrics.of("tiny")
    return {name: counts.of_worker(name).ttft.count for name in ("p", "d0")}


async def test_both_workers_get_their_half_under_one_id(model_dir: Path) -> None:
    tokens = (10, 11, 12)
    async with pair(model_dir, Script(tokens), Script(tokens)) as (cluster, prefill):
        decode = cluster.workers["d0"]
        assert await tokens_of(cluster, temperature=1.0) == [10, 11, 12]
        (to_prefill,), (to_decode,) = prefill.requests, decode.requests
        assert (to_prefill.worker_id, to_decode.worker_id) == ("p", "d0")
        assert to_prefill.request_id == to_decode.request_id
        pair_id = parse_pair_id(to_decode.request_id)
        assert (pair_id.prefill_address, pair_id.decode_address) == (prefill.server.address, decode.server.address)
        assert to_prefill.pair == to_decode.pair == Pair("p", "d0")
        assert to_prefill.order is HandoffOrder.PREFILL_FIRST
        assert to_prefill.sampling.seed is not None
        assert to_prefill.sampling == to_decode.sampling


async def test_the_first_token_does_not_wait_for_the_decode_worker(model_dir: Path) -> None:
    async with pair(model_dir, Script((10, 11)), Script(hang=True)) as (cluster, prefill):
        assert await tokens_of(cluster, max_tokens=1) == [10]
        await cluster.until(lambda: bool(cluster.workers["d0"].aborted))
        assert not prefill.aborted
        assert first_tokens(cluster) == {"p": 1, "d0": 0}


@pytest.mark.parametrize("slow", ["prefill", "decode"])
async def test_no_token_comes_twice_whichever_is_faster(model_dir: Path, slow: str) -> None:
    tokens = (10, 11, 12)
    scripts = [Script(tokens), Script(tokens)]
    scripts[slow == "decode"].delay_s = 0.05
    async with pair(model_dir, *scripts) as (cluster, _):
        for _ in range(3):
            assert await tokens_of(cluster) == [10, 11, 12]


async def test_a_prefill_whose_decode_worker_answers_first_is_not_aborted(model_dir: Path) -> None:
    """The decode worker has its KV, or has told it that it needs none."""
    async with pair(model_dir, Script(hang=True), Script((10, 11, 12))) as (cluster, prefill):
        for _ in range(2):
            assert await tokens_of(cluster) == [10, 11, 12]
        assert len(prefill.requests) == 2
        assert not prefill.aborted
        assert first_tokens(cluster) == {"p": 0, "d0": 2}


async def test_short_prompts_and_scored_ones_go_to_a_decode_worker_alone(model_dir: Path) -> None:
    async with pair(model_dir, Script(), Script()) as (cluster, prefill):
        assert await tokens_of(cluster, LONG[:200]) == [10] * 3
        assert await tokens_of(cluster, LONG, prompt_logprobs=0) == [10] * 3
        assert not prefill.requests
        assert [(r.order, r.pair) for r in cluster.workers["d0"].requests] == [(HandoffOrder.PREFILL_FIRST, None)] * 2


async def test_thresholds_are_those_of_the_cluster(model_dir: Path) -> None:
    async with pair(model_dir, Script(), Script()) as (cluster, prefill):
        key = cluster.keys.config_value("disagg.max_local_prefill_length")
        await cluster.control.discovery.put(key, b"100")
        while not prefill.requests:
            await tokens_of(cluster, LONG[:200])
        await cluster.control.discovery.put(cluster.keys.config_value("disagg.max_prefill_queue_size"), b"0")
        num_before = -1
        while num_before != len(prefill.requests):
            num_before = len(prefill.requests)
            await tokens_of(cluster, LONG[:200])


async def test_the_order_of_one_request_is_its_headers(model_dir: Path) -> None:
    async with pair(model_dir, Script(), Script(), order="decode-first") as (cluster, prefill):
        assert (await ask(cluster)).status == 200
        assert not prefill.requests
        assert (await ask(cluster, headers={HEADER: "prefill-first"})).status == 200
        assert len(prefill.requests) == 1
        assert (await ask(cluster, headers={HEADER: "decode-first"})).status == 200
        assert len(prefill.requests) == 1
        for value in ("", "prefill", "PREFILL-FIRST"):
            answer = await ask(cluster, headers={HEADER: value})
            assert (answer.status, answer.json["error"]["param"]) == (400, HEADER)


@pytest.mark.parametrize(
    "script",
    [
        Script(refuse=RequestRefused("", "full", 429, retryable=True)),
        Script(refuse=RequestRefused("", "bad", 400, retryable=False)),
        Script(die_after=0),
        Script(fail_after=0),
    ],
    ids=["overloaded", "refuses for good", "dies", "fails"],
)
async def test_a_prefill_worker_that_fails_leaves_the_request_to_its_decode_worker(
    model_dir: Path, script: Script
) -> None:
    async with pair(model_dir, script, Script(waits_for_prefill_lost=True)) as (cluster, _):
        assert await tokens_of(cluster, max_tokens=20) == [10] * 20
        decode = cluster.workers["d0"]
        assert decode.prefills_lost == [decode.requests[0].request_id]
        assert len(decode.requests) == 1


async def test_a_prefill_worker_that_dies_after_the_first_token_is_not_missed(model_dir: Path) -> None:
    async with pair(model_dir, Script(), Script(delay_s=0.01)) as (cluster, prefill):
        decode = cluster.workers["d0"]
        answer = tokens_of(cluster, max_tokens=20)
        import asyncio

        asked = asyncio.create_task(answer)
        await cluster.until(lambda: bool(prefill.requests))
        await prefill.die()
        assert await asked == [10] * 20
        assert len(decode.requests) == 1


@pytest.mark.parametrize(
    "script", [Script(die_after=0), Script(die_after=2), Script(refuse=RequestRefused("", "full", 429, True))]
)
async def test_a_decode_worker_that_fails_is_replaced(model_dir: Path, script: Script) -> None:
    tokens = (10, 11, 12, 13, 14)
    script.tokens = tokens
    async with pair(model_dir, Script(tokens), script, Script(tokens)) as (cluster, _):
        for _ in range(2):
            assert await tokens_of(cluster, max_tokens=5) == list(tokens)


async def test_a_decode_worker_that_disagrees_continues_from_the_delivered_token(model_dir: Path) -> None:
    """Its own first token would make the answer one that no worker has computed."""
    async with pair(model_dir, Script((10, 11, 12)), Script((20, 21, 22), delay_s=0.02)) as (cluster, _):
        decode = cluster.workers["d0"]
        tokens = await tokens_of(cluster)
        # Whichever comes first counts.
        assert tokens in ([10, 21, 22], [20, 21, 22])
        if tokens[0] == 10:
            assert (decode.requests[-1].output_token_ids, decode.requests[-1].pair) == ((10,), None)


async def test_several_choices_are_pairs_of_their_own(model_dir: Path) -> None:
    async with pair(model_dir, Script(), Script()) as (cluster, prefill):
        answer = await ask(cluster, n=3)
        assert [choice["token_ids"] for choice in answer.json["choices"]] == [[10] * 3] * 3
        assert len({request.request_id for request in prefill.requests}) == 3


async def test_a_client_that_leaves_ends_both_halves(model_dir: Path) -> None:
    async with pair(model_dir, Script(hang=True), Script(hang=True)) as (cluster, prefill):
        assert cluster.frontend is not None
        asking, decode = asyncio.create_task(ask(cluster, timeout=30)), cluster.workers["d0"]
        await cluster.until(lambda: bool(prefill.requests and decode.requests))
        skip(30)
        assert (await asking).status == 504
        await cluster.until(lambda: bool(prefill.aborted and decode.aborted))


async def test_a_role_changes_and_the_worker_with_it(model_dir: Path) -> None:
    async with pair(model_dir, Script(), Script()) as (cluster, prefill):
        assert cluster.frontend is not None
        model = cluster.frontend.cluster.model(None)
        await cluster.register(prefill, role=WorkerRole.DECODE, epoch=2)
        await cluster.until(lambda: sorted(model.worker_ids) == ["d0", "p"])
        assert not model.pairs.prefills.worker_ids
        assert await tokens_of(cluster) == [10] * 3
        await cluster.register(prefill, role=WorkerRole.PREFILL, epoch=3)
        await cluster.until(lambda: model.worker_ids == ["d0"])
        await cluster.until(lambda: model.pairs.prefills.worker_ids == ("p",))
        await cluster.deregister("p")
        await cluster.until(lambda: not model.pairs.prefills.worker_ids)
        assert await tokens_of(cluster) == [10] * 3


async def test_the_pair_is_explained(model_dir: Path) -> None:
    async with pair(model_dir, Script(), Script(), Script()) as (cluster, prefill):
        await cluster.control.discovery.put(cluster.keys.config_value("router.router"), b'"kv"')
        assert cluster.frontend is not None
        explained: dict[str, Any] = {"pair": {"candidates": []}}
        while len(explained["pair"]["candidates"]) != 2:
            answer = await send(cluster.frontend.port, "POST", "/v1/kvrelay/route", {"prompt": LONG})
            explained = answer.json
        assert explained["order"] == "prefill-first"
        assert explained["pair"]["place"] == "remote"
        assert explained["pair"]["prefill"]["worker_id"] == "p"
        first = explained["pair"]["candidates"][0]
        # Equal costs: drawn at random.
        assert {c["decode_worker_id"] for c in explained["pair"]["candidates"]} == {"d0", "d1"}
        assert explained["pair"]["decode"]["worker_id"] in ("d0", "d1")
        assert first["cost"] == first["prefill_cost"] + first["decode_cost"] + first["transfer_cost"]
        short = await send(cluster.frontend.port, "POST", "/v1/kvrelay/route", {"prompt": LONG[:20]})
        assert (short.json["pair"]["place"], short.json["pair"]["prefill"]) == ("local_short", None)
        plain = await send(
            cluster.frontend.port, "POST", "/v1/kvrelay/route", {"prompt": LONG}, headers={HEADER: "decode-first"}
        )
        assert plain.json["pair"] is None
        assert not prefill.requests


def learn_costs(cluster: FakeCluster) -> None:
    """Both workers have published what their steps cost; 64 answers run at d0."""
    assert cluster.frontend is not None
    model = cluster.frontend.cluster.model(None)
    for router, name, running in ((model.pairs.prefills, "p", 0), (model.router, "d0", 64)):
        router.configure(RouterConfig(router="kv"))
        router.apply_metrics(LoadMetrics(name, running, 256, 0, 1000, 0, 0.0, 0.0, step_cost=StepCost()))


async def test_auto_leaves_the_prefill_to_the_decode_worker_until_costs_are_known(model_dir: Path) -> None:
    async with pair(model_dir, Script(), Script(), order="auto") as (cluster, prefill):
        assert await tokens_of(cluster) == [10] * 3
        assert not prefill.requests
        (alone,) = cluster.workers["d0"].requests
        assert (alone.order, alone.pair, alone.remote_wait_s) == (HandoffOrder.DECODE_FIRST, None, None)
        learn_costs(cluster)
        assert await tokens_of(cluster) == [10] * 3
        assert len(prefill.requests) == 1


async def test_auto_pairs_a_lone_prompt_and_leaves_the_next_to_the_queue(model_dir: Path) -> None:
    async with pair(model_dir, Script(hang=True), Script(hang=True), order="auto") as (cluster, prefill):
        learn_costs(cluster)
        first = asyncio.create_task(ask(cluster))
        decode = cluster.workers["d0"]
        await cluster.until(lambda: bool(prefill.requests and decode.requests))
        # What others have sent there waits before it.
        busy = LoadMetrics("p", 1, 256, 0, 1000, 1, 0.0, 0.0, num_prefill_tokens=10_000_000, step_cost=StepCost())
        assert cluster.frontend is not None
        cluster.frontend.cluster.model(None).pairs.prefills.apply_metrics(busy)
        second = asyncio.create_task(ask(cluster, LONG[::-1]))
        await cluster.until(lambda: len(decode.requests) == 2)
        paired, queued = decode.requests
        assert (paired.order, paired.pair) == (HandoffOrder.PREFILL_FIRST, Pair("p", "d0", paired.pair.begins_within_s))
        assert paired.pair.begins_within_s > 0.0
        assert (queued.order, queued.pair) == (HandoffOrder.DECODE_FIRST, None)
        # By the prior 50 us each: 15 ms for the pair before it, and 500 s for the others' tokens, less what they have
        # computed since.
        assert queued.remote_wait_s is not None
        assert 500 - PATIENCE_S < queued.remote_wait_s <= 500.015 - SAMPLE_LAG_S
        assert len(prefill.requests) == 1
        for task in (first, second):
            task.cancel()
        await asyncio.gather(first, second, return_exceptions=True)


async def test_the_way_and_the_estimates_are_told_on_request(model_dir: Path) -> None:
    async with pair(model_dir, Script(), Script(), order="auto") as (cluster, _):
        learn_costs(cluster)
        answer = await ask(cluster, headers={"x-kvrelay-decision": "1"})
        assert re.fullmatch(
            r"pair;local=0\.\d{4}s;pair=0\.\d{4}s;queue=0\.\d{4}s", answer.headers["x-kvrelay-decision"]
        )
        forced = await ask(cluster, headers={"x-kvrelay-decision": "1", HEADER: "decode-first"})
        assert "pair" not in forced.headers["x-kvrelay-decision"]
        assert cluster.frontend is not None
        explained = await send(cluster.frontend.port, "POST", "/v1/kvrelay/route", {"prompt": LONG})
        assert (explained.json["order"], explained.json["pair"]["ways"]["best"]) == ("auto", "pair")


async def test_frontends_that_disagree_and_requests_that_force_an_order_share_workers(model_dir: Path) -> None:
    """A worker does what each request says; a pair that cannot be sent is the decode worker's to place."""
    async with pair(model_dir, Script(), Script(), order="auto") as (cluster, prefill):
        learn_costs(cluster)
        for order in ("prefill-first", "decode-first", "auto"):
            assert (await ask(cluster, headers={HEADER: order})).status == 200
        orders = [request.order for request in cluster.workers["d0"].requests]
        assert orders == [HandoffOrder.PREFILL_FIRST, HandoffOrder.DECODE_FIRST, HandoffOrder.PREFILL_FIRST]
        await prefill.die()
        assert (await ask(cluster)).status == 200
