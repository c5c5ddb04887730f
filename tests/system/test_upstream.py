"""Workers in front of running servers: routed to, and left without losing a token when a server dies."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.engines.openai.exchange import VllmExchange
from tests.engines.openai.scripted import Script, scripted_server
from tests.patience import until
from tests.system.serving import Serve, kvrelay_here
from tests.system.streams import CONFIG, EOS_IDS, NUM_STREAMS, Streams

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]


def _script() -> Script:
    return Script(vocab_size=CONFIG["vocab_size"], eos_token_ids=EOS_IDS, max_model_len=4096, delay_s=0.02)


def test_a_server_that_dies_loses_no_token() -> None:
    with scripted_server(_script()) as first, scripted_server(_script()) as second:
        with Serve(("--engine", "openai", "--upstream", f"{first.url},{second.url}")) as server:
            with Streams(server) as streams:
                streams.wait_for_tokens(30)
                # On a busy machine one of them may have measured as the faster one, and have all streams.
                dying, other = sorted((first, second), key=lambda each: -len(each.script.bodies))
                dying.close()
                streams.check()
            until(lambda: f"the server {dying.url} has failed" in server.read())
            assert other.script.num_ended >= NUM_STREAMS
        assert server.process.returncode == 0, server.output


@pytest.mark.parametrize("order", ["decode-first", "prefill-first"])
def test_servers_that_exchange_kv_are_prefill_and_decode_workers(order: str) -> None:
    exchange = VllmExchange()
    first, second = (replace(_script(), exchange=exchange) for _ in range(2))
    with scripted_server(first) as prefill, scripted_server(second) as decode:
        words = ("--engine", "openai", "--upstream", f"{prefill.url},{decode.url}", "--upstream-kv-transfer", "vllm")
        split = ("--prefill", "1", "--decode", "1", "--disagg-policy", "always", "--order", order)
        with Serve((*words, *split)) as server:
            with Streams(server) as streams:
                streams.check()
            until(lambda: not exchange.kept)
        assert server.process.returncode == 0, server.output
    assert exchange.errors == []
    assert exchange.num_fetched == exchange.num_prefilled > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--engine openai --upstream http://127.0.0.1:9 --upstream-kv-transfer vllm", "names 1 servers"),
        ("--engine openai", "--engine openai needs --upstream"),
        ("--engine mock --upstream http://127.0.0.1:9", "--upstream is for --engine openai"),
        ("--engine openai --upstream http://127.0.0.1:9 --prefill 1", "leave out --prefill 1"),
        ("--engine openai --upstream http://127.0.0.1:9 --decode 2", "leave out --prefill 1 --decode 2"),
    ],
)
def test_wrong_combinations_are_refused(words: str, message: str) -> None:
    done = kvrelay_here("serve", *words.split())
    assert done.returncode == 2
    assert message in done.stderr
