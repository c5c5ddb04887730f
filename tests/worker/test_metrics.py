"""What a worker tells Prometheus: true numbers, without waiting for the engine, and each of them documented."""

from __future__ import annotations

import asyncio
import re
import threading
from pathlib import Path

import msgspec
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families
from tests.worker.cluster import Client, Node, cluster, expected, prompt

from kvrelay.config import WorkerRole
from kvrelay.core.messages import GenerateRequest
from kvrelay.core.sampling import SamplingParams
from kvrelay.core.status import RefusalKind
from kvrelay.core.step_cost import StepCost
from kvrelay.core.token_ids import to_bytes
from kvrelay.core.vllm_metrics import OF_FRONTENDS, OF_WORKERS
from kvrelay.engine.stats import DraftCounts
from kvrelay.frontend.cluster.metrics import FrontendMetrics
from kvrelay.handoff.base import EndReason, RefusalReason, count_end
from kvrelay.handoff.decode_state import DecodeCounters
from kvrelay.worker.reporting import publisher
from kvrelay.worker.reporting.metrics import PREFIX, WorkerMetrics
from kvrelay.worker.worker import Worker

PAGE = Path(__file__).parents[2] / "docs" / "operations-reference.md"


def samples(worker: Worker) -> dict[str, float]:
    """Values by name and labels, without the prefix, as a scrape shows them."""
    text = WorkerMetrics(worker.stats).render().decode()
    values = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        for sample in family.samples:
            named = {name: value for name, value in sample.labels.items() if (name, value) != ("model", "m")}
            labels = ",".join(f"{name}={value}" for name, value in sorted(named.items()))
            name = sample.name.removeprefix(PREFIX) + (f"{{{labels}}}" if labels else "")
            assert name not in values
            values[name] = sample.value
    return values


def hold_steps(node: Node) -> tuple[threading.Event, threading.Event]:
    """From now on steps wait for the second event; the first tells that one does."""
    execute = node.core.executor.execute
    held, go_on = threading.Event(), threading.Event()

    def holding(work: object) -> object:
        held.set()
        go_on.wait(60)
        return execute(work)

    node.core.executor.execute = holding
    return held, go_on


async def test_each_name_of_vllm_is_told_by_a_frontend_or_by_a_worker_and_not_by_both():
    async with cluster() as shared:
        _, decode, client = await shared.pair()
        client.send("short", prompt(20, 3), max_tokens=4)
        assert await client.answer("short") == expected(prompt(20, 3), 4)
        frontend = FrontendMetrics(vllm_names=True)
        frontend.workers_of = lambda: {"m": 1}
        stats = decode.worker.stats()
        load = replace(stats.engine.load, step_cost=StepCost(tokens_per_step=1.8))
        engine = replace(stats.engine, load=load, drafts=DraftCounts(5, 15, 4))
        drafting = replace(stats, engine=engine)
        texts = (frontend.render().decode(), WorkerMetrics(lambda: drafting, vllm_names=True).render().decode())
        of_frontend, of_worker = (
            {family.name: family for family in text_string_to_metric_families(text)} for text in texts
        )
        assert {name for name in of_frontend if name.startswith("vllm:")} == set(OF_FRONTENDS.values())
        assert {name for name in of_worker if name.startswith("vllm:")} == set(OF_WORKERS.values())
        assert not set(OF_FRONTENDS.values()) & set(OF_WORKERS.values())
        for ours, theirs in OF_WORKERS.items():
            models = {sample.labels["model_name"] for sample in of_worker[theirs].samples}
            values = [sample.value for sample in of_worker[theirs].samples]
            assert (models, values) == ({"m"}, [sample.value for sample in of_worker[ours].samples])
        assert of_worker["vllm:prefix_cache_queries"].samples[0].value == 20
        drafted = ("drafts", "draft_tokens", "accepted_tokens")
        assert [of_worker[f"vllm:spec_decode_num_{name}"].samples[0].value for name in drafted] == [5, 15, 4]
        assert of_worker["kvrelay_worker_tokens_per_step"].samples[0].value == 1.8
        assert "vllm:" not in WorkerMetrics(decode.worker.stats).render().decode()
        await shared.check_idle()


async def test_both_sides_of_a_remote_prefill(monkeypatch):
    monkeypatch.setattr(publisher, "IDLE_INTERVAL_S", publisher.MIN_INTERVAL_S)
    async with cluster() as shared:
        prefill, decode, client = await shared.pair()
        client.send("long", prompt(300), max_tokens=8)
        assert await client.answer("long") == expected(prompt(300), 8)
        client.send("short", prompt(20, 3), max_tokens=4)
        assert await client.answer("short") == expected(prompt(20, 3), 4)
        await shared.check_idle()
        await shared.until(lambda: prefill.worker.stats().prefill.num_prefills == 1)
        there, here = samples(prefill.worker), samples(decode.worker)
        stats = decode.worker.stats().decode
        loads = await (await shared.client(prefill)).loads(prefill)
        await shared.until(lambda: loads)
        (published,) = loads[-1].transfer_costs

    assert there["prefill_tokens_total"] == 300
    assert there["generation_tokens_total"] == 1
    assert there["prefill_prefills_total"] == 1
    assert there["prefill_sent_bytes_total"] == here["decode_received_bytes_total"] == stats.num_received_bytes > 0
    assert there["transfer_bytes_total{op=write}"] == stats.num_received_bytes
    assert there["transfers_total{op=write}"] > 0
    assert there["transfer_seconds_total{op=write}"] > 0
    assert published.worker_id == decode.id
    assert published.is_sound
    assert there["transfer_duration_seconds_count{op=write}"] == there["transfers_total{op=write}"]
    counts = ("queue", "prefill", "handoff")
    assert [there[f"{name}_seconds_count"] for name in counts] == [1, 1, 0]
    assert [here[f"{name}_seconds_count"] for name in counts] == [2, 1, 1]
    for side in (there, here):
        assert side["step_seconds_count"] == side["step_seconds_bucket{le=+Inf}"] == side["steps_total"] > 0
        assert side["step_seconds_sum"] > 0
    assert there["transfer_errors_total{op=write}"] == there["transfers_total{op=read}"] == 0

    assert here["prefill_tokens_total"] == 20
    assert here["generation_tokens_total"] == 7 + 4
    assert here["prefix_cache_query_tokens_total"] == 320
    assert here["prefix_cache_hit_tokens_total"] == here["preemptions_total"] == 0
    assert [here[f"handoffs_{event}_total"] for event in ("opened", "granted", "done", "stale")] == [1, 1, 1, 0]
    assert here["decode_requests_total"] == 2
    assert here["placements_total{place=remote}"] == here["placements_total{place=local_short}"] == 1
    assert here["process_cpu_seconds_total"] > 0
    assert here["kv_blocks"] == 512
    assert here["kv_blocks_in_use"] == here["kv_usage_ratio"] == here["grants_open"] == here["requests_running"] == 0


async def test_a_scrape_does_not_wait_for_a_step():
    async with cluster() as shared:
        node = await shared.join(WorkerRole.BOTH, num_blocks=100)
        client = await shared.client(node)
        held, go_on = hold_steps(node)
        client.send("held", prompt(32))
        await shared.until(held.is_set)
        during = samples(node.worker)
        go_on.set()
        await client.answer("held")
    assert during["requests_running"] == 1
    assert during["kv_blocks_in_use"] == 2
    assert during["kv_usage_ratio"] == 0.02


async def test_role_and_readiness():
    async with cluster() as shared:
        node = await shared.join(WorkerRole.DECODE)
        worker = node.worker
        info = f"info{{dp_group=,dp_rank=0,engine=mock,epoch=0,role=decode,worker_id={node.id}}}"
        assert samples(worker)[info] == samples(worker)["ready"] == 1
        await worker.set_role(WorkerRole.PREFILL)
        assert samples(worker)[info.replace("epoch=0", "epoch=1").replace("decode,", "prefill,")] == 1
        ranked = msgspec.structs.replace(worker.stats(), dp_group="g-1", dp_rank=3)
        text = WorkerMetrics(lambda: ranked).render().decode()
        assert 'kvrelay_worker_info{dp_group="g-1",dp_rank="3",' in text
        assert worker.is_ready
        mend = node.cut_from_nats()
        node.run_out()
        assert not worker.is_ready
        mend()
        node.lease.wake()
        await shared.until(lambda: worker.is_ready)
        worker.request_drain()
        assert samples(worker)["ready"] == 0
        assert await shared.gone(node) is None


async def test_it_stays_ready_while_it_finishes_for_another_role():
    async with cluster() as shared:
        node = await shared.join(WorkerRole.BOTH)
        client = await shared.client(node)
        held, go_on = hold_steps(node)
        client.send("held", prompt(8))
        await shared.until(held.is_set)
        changing = asyncio.create_task(node.worker.set_role(WorkerRole.PREFILL))
        await shared.until(lambda: node.worker.inspect().queue.is_pulling)
        assert node.worker.is_ready
        assert not changing.done()
        go_on.set()
        await changing
        assert node.worker.is_ready


async def test_a_new_count_becomes_a_metric_by_itself():
    class More(DecodeCounters):
        num_new_kind: int = 0

    async with cluster() as shared:
        node = await shared.join(WorkerRole.DECODE)
        node.ledger.counters = More(num_new_kind=3)
        assert samples(node.worker)["handoffs_new_kind_total"] == 3


async def refuse(client: Client, count: int) -> None:
    """So many requests are refused, because they name another worker."""
    for number in range(count):
        message = GenerateRequest(
            f"gone-{number}", "worker-of-before", to_bytes(prompt(8)), SamplingParams(max_tokens=1)
        )
        client.connection.send(message)
    await client.until(lambda: len(client.refused) == count)


async def test_every_reason_is_a_series():
    async with cluster() as shared:
        node = await shared.join(WorkerRole.DECODE)
        await refuse(await shared.client(node), 2)
        count_end(node.ledger.counters.ends, EndReason.DEADLINE)
        count_end(node.outgoing.counters.ends, EndReason.CLAIM_TIMEOUT)
        found = samples(node.worker)
    assert {found[f"refusals_total{{reason={kind}}}"] for kind in RefusalKind} == {0, 2}
    assert found["refusals_total{reason=gone}"] == 2
    assert all(found[f"claims_refused_total{{reason={reason.name.lower()}}}"] == 0 for reason in RefusalReason)
    assert found["recomputed_total{reason=deadline}"] == found["prefills_ended_total{reason=claim_timeout}"] == 1


async def test_its_activity_is_what_it_did():
    """Two prompts of three are remote."""
    async with cluster() as shared:
        prefill, decode, client = await shared.pair()
        for number, length in enumerate((300, 20, 400)):
            client.send(str(number), prompt(length), max_tokens=4)
            await client.answer(str(number))
        await shared.check_idle()
        here, there = (node.worker.activity(node.worker.stats().engine) for node in (decode, prefill))
        assert {place: count for place, count in here.places.items() if count} == {"remote": 2, "local_short": 1}
        assert (here.claims.num, here.handoffs.num, sum(here.prefills)) == (2, 2, 1)
        assert 0.0 < here.claims.seconds < here.handoffs.seconds
        assert (there.sends.num, sum(there.prefills), there.places) == (2, 2, {})
        assert samples(decode.worker)["handoff_queue_seconds_count"] == 2
        assert min(here.cpu_s, here.rss_bytes) > 0


async def test_every_metric_is_documented():
    page = PAGE.read_text(encoding="utf-8")
    async with cluster() as shared:
        node = await shared.join(WorkerRole.DECODE)
        names = {name.partition("{")[0] for name in samples(node.worker) if not name.startswith("process_")}
    names = {name.removesuffix("_bucket").removesuffix("_count").removesuffix("_sum") for name in names}
    names = {name for name in names if not re.match(r"cost_(seconds|error|samples)", name)}  # deprecated
    assert [name for name in sorted(names) if f"`{name}`" not in page] == []


async def test_every_series_exists_before_its_first_event_and_has_the_model():
    async with cluster() as shared:
        prefill, decode, client = await shared.pair()
        before = [set(samples(node.worker)) for node in (prefill, decode)]
        for number, length in enumerate((300, 20)):
            client.send(str(number), prompt(length), max_tokens=4)
            await client.answer(str(number))
        await shared.check_idle()
        await refuse(client, 1)
        for reason in EndReason:
            count_end(decode.ledger.counters.ends, reason)
        assert [set(samples(node.worker)) for node in (prefill, decode)] == before
        families = list(WorkerMetrics(decode.worker.stats).collect())
    for family in families:
        is_old = family.documentation.startswith("Deprecated")
        for sample in family.samples:
            assert sample.labels["model"] == "m" or (is_old and "_cost_" in sample.name), sample
