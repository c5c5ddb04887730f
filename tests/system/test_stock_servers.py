"""Two stock ``vllm serve`` with vLLM's NIXL connector behind kvrelay (``make test-vllm``): real KV moves between real
servers, and no answer is lost with one of them."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from tests.patience import until
from tests.system.real_vllm import BLOCK_SIZE, NUM_PROMPTS, NUM_TOKENS, Asked, Asking, StockServer, stock_servers
from tests.system.serving import Serve

pytestmark = [pytest.mark.vllm, pytest.mark.system, pytest.mark.timeout(1200)]

NUM_TRANSFERS = "vllm:nixl_xfer_time_seconds_count"


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[StockServer]]:
    with stock_servers(2, tmp_path_factory.mktemp("stock")) as found:
        yield found


@pytest.fixture(scope="module")
def pair(servers: list[StockServer]) -> Iterator[Serve]:
    """A prefill and a decode worker in front of the servers."""
    transfer = ("--upstream-kv-transfer", "vllm", "--prefill", "1", "--decode", "1", "--disagg-policy", "always")
    with Serve((*_upstream(servers), *transfer)) as kvrelay:
        yield kvrelay


def _upstream(servers: list[StockServer]) -> tuple[str, ...]:
    urls = ",".join(server.url for server in servers)
    return ("--engine", "openai", "--upstream", urls, "--block-size", str(BLOCK_SIZE))


@pytest.mark.parametrize("order", ["decode-first", "prefill-first"])
def test_servers_move_the_kv(servers: list[StockServer], pair: Serve, asked: list[Asked], order: str) -> None:
    chosen = asked[order == "prefill-first"]
    prefill, decode = servers
    num_transfers, num_remote = decode.count(NUM_TRANSFERS), _num_remote(pair)
    with Asking(pair, order) as asking:
        assert asking.ask(chosen.prompts) == chosen.answers
    # On a busy machine a prefill may come too late. A prompt that the decode server holds whole is only acknowledged.
    assert _num_remote(pair) - num_remote >= NUM_PROMPTS // 2
    assert decode.count(NUM_TRANSFERS) - num_transfers >= NUM_PROMPTS // 2
    until(lambda: prefill.count("vllm:kv_cache_usage_perc") == 0.0)


def _num_remote(kvrelay: Serve) -> int:
    (worker,) = kvrelay.workers("decode")
    return int(worker["decode"]["num_remote_done"])


def test_routed_servers_answer_as_one_and_a_killed_one_costs_no_answer(
    servers: list[StockServer], asked: list[Asked]
) -> None:
    """The last test of this file: one server is gone afterwards."""
    prompts, expected = asked[0].prompts, asked[0].answers
    with Serve(_upstream(servers)) as kvrelay, Asking(kvrelay) as asking:
        answers = asking.begin(prompts)
        until(lambda: asking.num_tokens > NUM_TOKENS)
        servers[0].end(signal.SIGKILL)
        assert [answer.result() for answer in answers] == expected
