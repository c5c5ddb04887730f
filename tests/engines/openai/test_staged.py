"""Workers in front of servers with kvrelay's connector: KV goes through their staging pools, and no block twice."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from tests.engines.openai.exchange import ConnectorExchange
from tests.engines.openai.scripted import Script, ScriptedServer, scripted_server
from tests.engines.vllm.scripted import VOCAB_SIZE
from tests.engines.vllm.staged import STAGED_BLOCK_BYTES, StagedVllm
from tests.engines.vllm.test_staged import _host as vllm_host
from tests.engines.vllm.test_staged import _settings as vllm_settings
from tests.patience import PATIENCE_S
from tests.worker.cluster import Client, Cluster, Node, cluster, prompt

from kvrelay.config import EngineConfig, MockConfig, RunnerConfig, UpstreamConfig, VllmConfig
from kvrelay.core.workers import WorkerRole
from kvrelay.data import bundled_checkpoint_path
from kvrelay.engine.contract import EngineHost
from kvrelay.engines.registry import build_host
from kvrelay.errors import ConfigError
from kvrelay.executors.mock import mock_generate
from kvrelay.executors.settings import ExecutorSettings

HostOf = Callable[[str], EngineHost]


def _settings(url: str, staging: Path | str, *, num_staging_blocks: int = 64, **engine: int) -> ExecutorSettings:
    return ExecutorSettings(
        bundled_checkpoint_path(),
        EngineConfig(**{"max_model_len": 256, "max_num_seqs": 16, **engine}),
        RunnerConfig(),
        MockConfig(),
        upstream=UpstreamConfig(
            upstream=url,
            upstream_start_timeout_s=PATIENCE_S,
            upstream_kv_transfer="kvrelay",
            upstream_staging=str(staging),
        ),
        vllm=VllmConfig(vllm_staging=str(num_staging_blocks * STAGED_BLOCK_BYTES)),
    )


def _host(url: str, staging: Path, worker_id: str) -> EngineHost:
    host = build_host("openai", _settings(url, staging), worker_id)
    assert host is not None
    return host


@dataclass
class Server:
    """A scripted ``vllm serve`` with the connector."""

    http: ScriptedServer
    exchange: ConnectorExchange
    host: HostOf


@dataclass
class Pair:
    cluster: Cluster
    prefill: Node
    decode: Node
    client: Client

    def is_idle(self) -> bool:
        """No staging block is in use, on either side."""
        engines = [node.worker._engine._engine for node in (self.prefill, self.decode)]  # type: ignore[attr-defined]
        for engine in engines:
            engine.check_integrity()
        return all(engine._pool.num_free == engine._pool.num_blocks for engine in engines)


@pytest.fixture
def start(tmp_path: Path) -> AsyncIterator[Callable[[str], Server]]:
    with ExitStack() as stack:

        def start(name: str) -> Server:
            exchange = ConnectorExchange(tmp_path / name)
            stack.callback(exchange.close)
            script = Script(vocab_size=VOCAB_SIZE, max_model_len=1024, exchange=exchange)
            http = stack.enter_context(scripted_server(script))
            return Server(http, exchange, partial(_host, http.url, tmp_path / name))

        yield start


@asynccontextmanager
async def _pair(prefill_host: HostOf, decode_host: HostOf) -> AsyncIterator[Pair]:
    async with cluster(disagg_policy="always") as running:
        prefill = await running.join(WorkerRole.PREFILL, host=prefill_host)
        decode = await running.join(WorkerRole.DECODE, host=decode_host)
        await running.until(lambda: len(decode.worker.inspect().peers.prefill) == 1)
        pair = Pair(running, prefill, decode, await running.client(decode))
        yield pair
        await running.until(pair.is_idle)


LENGTHS = (1, 15, 16, 17, 100, 200)


def _expected(tokens: list[int], num_tokens: int) -> list[int]:
    return mock_generate(tokens, num_tokens, vocab_size=VOCAB_SIZE)


async def _ask_all(pair: Pair, name: str) -> None:
    prompts = {f"{name}{length}": prompt(length, start=length) for length in LENGTHS}
    for each, tokens in prompts.items():
        pair.client.send(each, tokens, 8, ignore_eos=True)
    for each, tokens in prompts.items():
        assert await pair.client.answer(each) == _expected(tokens, 8)


async def test_a_server_loads_what_a_worker_with_vllm_has_computed(start: Callable[[str], Server]) -> None:
    server = start("d")
    library = StagedVllm()
    async with _pair(partial(vllm_host, library, vllm_settings()), server.host) as pair:
        await _ask_all(pair, "r")
        assert pair.decode.worker._decode.stats.num_remote_done == len(LENGTHS)
    # The first request shows the form of the answers.
    assert sorted(server.exchange.num_loaded[1:]) == sorted(LENGTHS)
    assert server.exchange.errors == []


async def test_two_servers_exchange_kv_by_kvrelays_transport(start: Callable[[str], Server]) -> None:
    p, d = start("p"), start("d")
    async with _pair(p.host, d.host) as pair:
        await _ask_all(pair, "r")
        assert pair.prefill.worker.stats().prefill.num_prefills == len(LENGTHS)
    assert sorted(d.exchange.num_loaded[1:]) == sorted(LENGTHS)
    bodies = [body for body in p.http.script.bodies if "kv_transfer_params" in body]
    assert {(body["max_tokens"], body["stream"]) for body in bodies} == {(1, False)}
    assert p.exchange.errors == d.exchange.errors == []


async def test_a_late_save_of_a_cancelled_request_harms_no_other(start: Callable[[str], Server]) -> None:
    """The server begins the first request when its blocks are another's, and computes other KV for them."""
    p, d = start("p"), start("d")
    async with _pair(p.host, d.host) as pair:
        p.exchange.holds = True
        pair.client.send("cancelled", prompt(250, start=300), 4)
        await pair.cluster.until(lambda: any("kv_transfer_params" in body for body in p.http.script.bodies))
        pair.client.abort("cancelled")
        await pair.cluster.until(lambda: p.http.script.num_cut == 1 and pair.is_idle())
        pair.client.send("next", prompt(250, start=20), 4, ignore_eos=True)
        p.exchange.holds = False
        assert await pair.client.answer("next") == _expected(prompt(250, start=20), 4)
        await _ask_all(pair, "r")
    assert p.exchange.errors == d.exchange.errors == []


async def test_a_prompt_whose_kv_is_not_saved_is_computed_by_the_decode_server(start: Callable[[str], Server]) -> None:
    p, d = start("p"), start("d")
    async with _pair(p.host, d.host) as pair:
        p.exchange.is_plain = True
        await _ask_all(pair, "r")
        assert pair.decode.worker._decode.stats.num_remote_done == 0
    assert set(d.exchange.num_loaded) == {0}


async def test_a_server_that_loads_nothing_computes(start: Callable[[str], Server]) -> None:
    """For example because it was restarted without the connector."""
    p, d = start("p"), start("d")
    async with _pair(p.host, d.host) as pair:
        d.exchange.is_plain = True
        await _ask_all(pair, "r")
    assert set(d.exchange.num_loaded) == {0}


async def test_requests_without_kv_transfer_params_are_plain(start: Callable[[str], Server]) -> None:
    p, d = start("p"), start("d")
    async with _pair(p.host, d.host) as pair:
        pair.prefill.worker.request_drain()
        await pair.cluster.until(lambda: len(pair.decode.worker.inspect().peers.prefill) == 0)
        await _ask_all(pair, "r")
        assert not any("kv_transfer_params" in body for body in d.http.script.bodies)
        assert await pair.cluster.gone(pair.prefill) is None
        pair.prefill = pair.decode


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_staging_blocks": 15}, "holds no prompt of 256 tokens"),
        ({"block_size": 32}, "blocks of http://.* have 16 tokens: set --block-size 16"),
    ],
)
def test_a_worker_that_cannot_work_says_so_at_start(
    start: Callable[[str], Server], tmp_path: Path, settings: dict[str, int], message: str
) -> None:
    server = start("d")
    with pytest.raises(ConfigError, match=message):
        build_host("openai", _settings(server.http.url, tmp_path / "d", **settings), "w")
    host = server.host("w")  # the directory is free again
    assert host.close()


@pytest.mark.parametrize("staging", ["", "elsewhere"])
def test_a_directory_without_a_server_is_one_line(start: Callable[[str], Server], tmp_path: Path, staging: str) -> None:
    server = start("d")
    with pytest.raises(ConfigError, match=r"needs --upstream-staging|no vLLM with kvrelay's connector") as caught:
        build_host("openai", _settings(server.http.url, staging and tmp_path / staging), "w")
    assert "\n" not in caught.value.message
