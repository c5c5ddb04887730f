"""Prefill and decode workers in front of running servers: the servers exchange KV, the hand-off says from where."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from unittest import mock

import pytest
from msgspec.structs import replace
from tests.engines.openai.exchange import SglangExchange, VllmExchange
from tests.engines.openai.scripted import Exchange, Script, ScriptedServer, scripted_server
from tests.patience import PATIENCE_S
from tests.worker.cluster import VOCAB_SIZE, Client, Cluster, Node, cluster, expected, prompt
from tests.worker.test_prefill_first import PairedClient

from kvrelay.config import EngineConfig, UpstreamConfig, WorkerConfig, WorkerRole
from kvrelay.core.handoff import HandoffId
from kvrelay.core.layout import paged_kv
from kvrelay.core.sampling import SamplingParams
from kvrelay.core.step_cost import CostSource
from kvrelay.data import bundled_checkpoint_path
from kvrelay.engine.contract import EngineHost, require
from kvrelay.engine.request import PrefillMode, Request
from kvrelay.engine.step import HandoffChunk
from kvrelay.engines.openai import backend
from kvrelay.engines.registry import build_host
from kvrelay.handoff.messages import HandoffReleased
from kvrelay.placement.base import PrefillPlace
from kvrelay.transfer.values import TransferOp

CONFIG = EngineConfig(num_blocks=512, max_num_seqs=16)


VLLM = {"upstream_kv_transfer": "vllm"}
SGLANG = {"upstream_kv_transfer": "sglang", "upstream_bootstrap": "127.0.0.1:9001"}


def _host(url: str, upstream: dict[str, str], worker_id: str) -> EngineHost:
    config = UpstreamConfig(upstream=url, upstream_start_timeout_s=PATIENCE_S, **upstream)
    settings = WorkerConfig(model_path=bundled_checkpoint_path(), engine=CONFIG, upstream=config)
    host = build_host("openai", settings, worker_id)
    assert host is not None
    return host


@dataclass
class Pair:
    cluster: Cluster
    prefill: Node
    decode: Node
    client: Client
    servers: tuple[ScriptedServer, ScriptedServer]

    async def settled(self) -> None:
        """No request and no hand-off is left on either side."""

        def is_idle() -> bool:
            running = [node.engine.stats().load.num_admitted for node in (self.prefill, self.decode)]
            return not (any(running) or self.decode.ledger.handoffs or self.prefill.worker.inspect().queue.num_held)

        await self.cluster.until(is_idle)


@asynccontextmanager
async def _pair(exchange: Exchange, upstream: dict[str, str], **disagg: object) -> AsyncIterator[Pair]:
    def script() -> Script:
        return Script(vocab_size=VOCAB_SIZE, max_model_len=1024, exchange=exchange)

    with ExitStack() as stack:
        servers = stack.enter_context(scripted_server(script())), stack.enter_context(scripted_server(script()))
        async with cluster(**disagg) as running:
            prefill = await running.join(WorkerRole.PREFILL, host=partial(_host, servers[0].url, upstream))
            decode = await running.join(WorkerRole.DECODE, host=partial(_host, servers[1].url, upstream))
            await running.acquainted(prefill, decode)
            for server in servers:
                server.script.bodies.clear()
            pair = Pair(running, prefill, decode, await running.client(decode), servers)
            yield pair
            await pair.settled()


async def test_the_prefill_server_computes_and_the_decode_server_fetches() -> None:
    exchange = VllmExchange()
    async with _pair(exchange, VLLM) as pair:
        prompts = {f"r{number}": prompt(100 + number, start=number) for number in range(6)}
        for name, tokens in prompts.items():
            pair.client.send(name, tokens, 8)
        for name, tokens in prompts.items():
            assert await pair.client.answer(name) == expected(tokens, 8)
        await pair.settled()
        assert (exchange.num_prefilled, exchange.num_fetched, exchange.num_local) == (6, 6, 0)
        assert exchange.kept == {}
        assert exchange.errors == []
        # Counted once the engine has heard, which may be later than the ledger.
        await pair.cluster.until(lambda: pair.decode.worker.stats().decode.num_remote_done == 6)
        assert pair.prefill.worker.stats().prefill.num_prefills == 6
        # Each request has a connection of its own, so they may reach the two servers in different orders.
        computed, decoded = ([body["prompt"] for body in server.script.bodies] for server in pair.servers)
        assert sorted(computed) == sorted(decoded) == sorted(map(list, prompts.values()))
        assert all(body["stream"] for body in pair.servers[1].script.bodies)


async def test_kv_that_the_servers_move_counts_as_moved() -> None:
    """Its bytes are those of the prompts, and its time is that from the parameters to the first token."""

    def host(url: str, worker_id: str) -> EngineHost:
        found = _host(url, VLLM, worker_id)
        found.facts = replace(found.facts, moved=paged_kv(1, 1, 16, 125, "float32"))  # type: ignore[misc]
        return found

    with ExitStack() as stack:
        script = Script(vocab_size=VOCAB_SIZE, max_model_len=1024, exchange=VllmExchange())
        urls = [stack.enter_context(scripted_server(script)).url for _ in range(2)]
        async with cluster() as running:
            prefill = await running.join(WorkerRole.PREFILL, host=partial(host, urls[0]))
            decode = await running.join(WorkerRole.DECODE, host=partial(host, urls[1]))
            await running.acquainted(prefill, decode)
            client = await running.client(decode)
            for number in range(3):
                client.send(f"r{number}", prompt(100, start=number), 8)
                assert await client.answer(f"r{number}") == expected(prompt(100, start=number), 8)
            await running.until(lambda: decode.worker.stats().decode.num_remote_done == 3)
            (moved,) = decode.worker.stats().transfer.peers
            assert (moved.worker_id, moved.op) == (prefill.worker.identity.worker_id, TransferOp.READ)
            assert (moved.num_transfers, moved.num_bytes) == (3, 300_000)
            assert moved.seconds > 0.0
            await running.until(lambda: not decode.ledger.handoffs and not prefill.worker.inspect().queue.num_held)


async def test_policy_cost_decides_by_what_answers_show() -> None:
    """Policy auto leaves it to the thresholds: these costs are estimates."""
    exchange = VllmExchange()
    async with _pair(exchange, VLLM, disagg_policy="cost") as pair:
        for number in range(4):
            pair.client.send(f"r{number}", prompt(100, start=number), 8)
            assert await pair.client.answer(f"r{number}") == expected(prompt(100, start=number), 8)
        await pair.settled()
        load = await pair.decode.engine.call(lambda core: core.metrics())
        assert load.step_cost_source is CostSource.ESTIMATED
        places = pair.decode.worker.stats().decode.places
        assert sum(places.values()) == 4
        assert set(places) <= {PrefillPlace.REMOTE, PrefillPlace.LOCAL_CHEAPER}
        assert pair.decode.worker.stats().remote.num_samples == places.get(PrefillPlace.REMOTE, 0)


async def test_both_servers_hear_of_the_clients_trace() -> None:
    traceparent = f"00-{'ab' * 16}-{'cd' * 8}-01"
    async with _pair(VllmExchange(), VLLM) as pair:
        for server in pair.servers:
            server.script.traceparents.clear()
        pair.client.send_message("traced", prompt(100), traceparent=traceparent)
        await pair.client.answer("traced")
        await pair.settled()
        assert [set(server.script.traceparents) for server in pair.servers] == [{traceparent}, {traceparent}]
        for server in pair.servers:
            server.script.traceparents.clear()
        for name, header in (("none", ""), ("malformed", "00-x\r\nx: y")):
            pair.client.send_message(name, prompt(40), traceparent=header)
            await pair.client.answer(name)
        assert pair.servers[1].script.traceparents == [None, None]


async def test_short_prompts_are_computed_where_they_are_answered() -> None:
    exchange = VllmExchange()
    async with _pair(exchange, VLLM) as pair:
        pair.client.send("r", prompt(40), 8)
        assert await pair.client.answer("r") == expected(prompt(40), 8)
        assert (exchange.num_prefilled, exchange.num_local) == (0, 1)


@pytest.mark.parametrize("fault", ["loses_kv", "keeps_nothing"])
async def test_kv_that_does_not_come_is_computed_where_it_is_needed(fault: str) -> None:
    exchange = VllmExchange(**{fault: True})
    async with _pair(exchange, VLLM) as pair:
        pair.client.send("r", prompt(100), 8)
        assert await pair.client.answer("r") == expected(prompt(100), 8)
        await pair.settled()
        assert (exchange.num_fetched, exchange.num_local) == (0, 1)


async def test_a_prefill_server_that_is_gone_costs_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "MAX_HEALTH_FAILURES", 10**6)  # else its worker ends within three seconds
    async with _pair(VllmExchange(), VLLM) as pair:
        pair.servers[0].close()
        pair.client.send("r", prompt(100), 8)
        assert await pair.client.answer("r") == expected(prompt(100), 8)


async def test_a_cancelled_request_stops_its_prefill() -> None:
    exchange = VllmExchange(is_held=True)
    async with _pair(exchange, VLLM) as pair:
        pair.client.send("r", prompt(100), 8)
        await pair.cluster.until(lambda: pair.servers[0].script.bodies)
        pair.client.abort("r")
        await pair.cluster.until(lambda: pair.servers[0].script.num_cut == 1)
        await pair.settled()
        assert exchange.kept == {}
        assert pair.servers[1].script.bodies == []


@pytest.mark.parametrize("tail", [0, 1, 3])
async def test_the_first_token_of_a_prefill_that_stops_short_is_not_told(tail: int) -> None:
    """Prefill first. It stands for a token of the prompt."""
    exchange = VllmExchange(tail=tail)
    async with _pair(exchange, VLLM) as pair:
        await pair.cluster.until(lambda: pair.decode.id in pair.prefill.worker.inspect().peers.addresses)
        to_prefill = await pair.cluster.client(pair.prefill)
        both = PairedClient(pair.cluster, pair.prefill, pair.decode, to_prefill, pair.client)
        tokens = prompt(100)
        request_id = both.send(tokens, 8)
        assert await both.answer(request_id) == expected(tokens, 8)
        assert to_prefill.tokens.get(request_id, []) == ([] if tail else expected(tokens, 1))
        assert not to_prefill.refused
        await pair.settled()
        assert (exchange.num_prefilled, exchange.num_fetched, exchange.errors) == (1, 1, [])


async def test_kv_that_no_request_needs_any_more_is_freed_through_the_decode_server() -> None:
    """The prefill server has computed it; then the request ended, or its claim was refused."""
    exchange = VllmExchange()
    async with _pair(exchange, VLLM) as pair:
        chunks: list[HandoffChunk] = []
        request = Request("r", prompt(100), SamplingParams(max_tokens=8), mode=PrefillMode.HANDOFF)
        outgoing = pair.prefill.worker.prefill.handoffs
        with mock.patch.object(outgoing, "on_step", lambda step: chunks.extend(step.handoff_chunks)):
            await pair.prefill.engine.call(lambda engine: engine.add_request(request))
            await pair.cluster.until(lambda: chunks)
        assert exchange.kept == {"cmpl-1": list(prompt(100))}
        params = chunks[0].kv_transfer_params
        released = HandoffReleased(HandoffId(pair.decode.id, 77), pair.prefill.id, None, params)
        for _ in range(3):
            pair.decode.worker.decode.handoffs.handle(released)
        await pair.cluster.until(lambda: not exchange.kept)
        await pair.decode.engine.call(lambda engine: require(engine.moves).discard_kv(b"nonsense"))
        await pair.prefill.engine.call(lambda engine: engine.sending_finished("r"))
        pair.client.send("next", prompt(100), 8)
        assert await pair.client.answer("next") == expected(prompt(100), 8)
        assert (exchange.num_discarded, exchange.errors) == (1, [])


async def test_sglang_servers_are_asked_at_once_for_one_room() -> None:
    exchange = SglangExchange()
    async with _pair(exchange, SGLANG, disagg_policy="always") as pair:
        prompts = {f"r{number}": prompt(40 + number, start=number) for number in range(4)}
        for name, tokens in prompts.items():
            pair.client.send(name, tokens, 8)
        for name, tokens in prompts.items():
            assert await pair.client.answer(name) == expected(tokens, 8)
        await pair.settled()
        assert exchange.errors == []
        assert len(exchange.rooms) == 4
        assert exchange.num_without_peer == 2, "each server was asked once for the form of its answers"


async def test_a_decode_server_without_prefill_server_takes_no_request() -> None:
    async with _pair(SglangExchange(), SGLANG) as pair:
        pair.prefill.worker.request_drain()
        await pair.cluster.until(lambda: len(pair.decode.worker.inspect().peers.prefill) == 0)
        pair.client.send("r", prompt(40), 8)
        await pair.client.until(lambda: "r" in pair.client.refused)
        assert pair.client.refused["r"].retryable
        assert "computes no prompts" in pair.client.refused["r"].reason
        # Its engine has ended with it, so there is nothing to check at the end.
        assert await pair.cluster.gone(pair.prefill) is None
