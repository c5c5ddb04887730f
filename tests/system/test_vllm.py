"""Real vLLM in the workers (``make test-vllm``): answers are those of vLLM by itself, also if a process
is killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from tests.lazily import openai
from tests.patience import PATIENCE_S, until
from tests.system.real_vllm import NUM_PROMPTS, NUM_TOKENS, Asked, Asking, count
from tests.system.serving import Serve

from kvrelay.data import bundled_checkpoint_path

pytestmark = [pytest.mark.vllm, pytest.mark.system, pytest.mark.timeout(1200)]

VLLM = (
    *("--engine", "vllm", "--dtype", "float32", "--enforce-eager", "--kv-cache-memory", "512MiB"),
    *("--engine-args", '{"block_size": 32}'),
)
SPLIT = (*VLLM, "--prefill", "1", "--decode", "1", "--disagg-policy", "always")
STAGED = ("--vllm-connector", "kvrelay", "--block-size", "32", "--kv-checksums")
NUM_P2P = 20
NUM_RANKS = 20
"""Prompts to a worker of two ranks, which take their time on two cores."""
CONNECTORS = {"nixl": (), "kvrelay": (*STAGED, "--transport", "shm")}


def test_killed_processes_lose_no_token(asked: list[Asked]) -> None:
    """A worker, and another one's engine process: each takes the other one of the two with it."""
    prompts, expected = asked[0].prompts, asked[0].answers
    with Serve((*VLLM, "--prefill", "0", "--decode", "3"), is_real=True) as server, Asking(server) as asking:
        first, second, third = (int(worker["pid"]) for worker in server.workers("both"))
        engines = {pid: _engine_process(pid) for pid in (first, second)}
        answers = asking.begin(prompts)
        for victim in (first, engines[second]):
            told = asking.num_tokens
            until(lambda: asking.num_tokens > told + NUM_TOKENS)  # noqa: B023
            os.kill(victim, signal.SIGKILL)
        assert [answer.result() for answer in answers] == expected
        until(lambda: not any(map(psutil.pid_exists, (*engines, *engines.values()))))
        left = {int(worker["pid"]) for worker in server.workers("both")}
        # ``serve`` may have replaced them by now.
        assert third in left
        assert not {first, second} & left


def _engine_process(worker: int) -> int:
    children = psutil.Process(worker).children()
    (found,) = (child.pid for child in children if "EngineCore" in " ".join(child.cmdline()))
    return found


def test_every_end_that_the_files_name_ends_an_answer(asked: list[Asked], tmp_path: Path) -> None:
    """One that the model does not have is none: vLLM refuses a request with such a stop token."""
    prompt, tokens = next(each for each in zip(asked[0].prompts, asked[0].answers) if len(set(each[1][:6])) == 6)
    model = Path(shutil.copytree(bundled_checkpoint_path(), tmp_path / "model"))
    vocab = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    (piece,) = (piece for piece, token in vocab.items() if token == tokens[4])
    for name, change in (
        ("generation_config.json", {"eos_token_id": [tokens[2], 5000]}),
        ("tokenizer_config.json", {"eos_token": piece}),
    ):
        (model / name).write_text(json.dumps(json.loads((model / name).read_text()) | change))
    asking: dict[str, Any] = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    with Serve((str(model), *VLLM, "--prefill", "0", "--decode", "1")) as server:
        assert server.output.count("5000 (generation_config.json)") == 1, server.output
        for more, length in (({}, 3), ({"ignore_eos": True}, 8), ({"min_tokens": 4}, None)):
            answer = httpx.post(f"{server.url}/v1/completions", json=asking | more, timeout=PATIENCE_S)
            assert answer.status_code == 200, answer.text
            (choice,) = answer.json()["choices"]
            if length is None:
                assert not {tokens[2], tokens[4], 1} & set(choice["token_ids"][:3])
            else:
                assert choice["token_ids"] == tokens[:length]
                assert (choice["finish_reason"], choice["stop_reason"]) == ("stop" if length == 3 else "length", None)


@pytest.fixture(scope="module", params=CONNECTORS.values(), ids=CONNECTORS)
def split(request: pytest.FixtureRequest) -> Iterator[Serve]:
    """One prefill and one decode worker."""
    with Serve((*SPLIT, *request.param)) as server:
        yield server


@pytest.mark.parametrize("order", ["decode-first", "prefill-first"])
def test_prefill_and_decode_apart(split: Serve, asked: list[Asked], order: str) -> None:
    # Other prompts for each order: those of the first one are cached.
    chosen = asked[order == "prefill-first"]
    before = _num_remote(split)
    with Asking(split, order) as asking:
        assert asking.ask(chosen.prompts) == chosen.answers
    # On a busy machine a prefill may come too late.
    assert _num_remote(split) - before >= NUM_PROMPTS // 2, _whereabouts(split)
    (decode,) = split.workers("decode")
    is_nixl = "--vllm-connector" not in split.arguments
    # vLLM's own connector moves KV that kvrelay does not see.
    assert is_nixl or decode["decode"]["num_received_bytes"] > 0
    until(split.is_idle)


def test_kvrelays_connector_moves_kv_from_peer_to_peer(asked: list[Asked]) -> None:
    prompts, expected = asked[0].prompts[:NUM_P2P], asked[0].answers[:NUM_P2P]
    with Serve((*SPLIT, *STAGED, "--transport", "p2p")) as server, Asking(server) as asking:
        assert asking.ask(prompts) == expected
        (decode,) = server.workers("decode")
        assert decode["decode"]["num_remote_done"] >= NUM_P2P // 2, _whereabouts(server)
        assert decode["decode"]["num_received_bytes"] > 0
        until(server.is_idle)


@pytest.mark.parametrize(
    ("role", "way", "rank", "fault", "is_real"),
    [
        ("prefill", "kvrelay", 1, signal.SIGKILL, False),
        pytest.param("prefill", "kvrelay", 0, signal.SIGKILL, True, marks=pytest.mark.matrix),
        pytest.param("prefill", "kvrelay", 1, signal.SIGSTOP, True, marks=pytest.mark.matrix),
        pytest.param("prefill", "nixl", 1, signal.SIGKILL, True, marks=pytest.mark.matrix),
        pytest.param("prefill", "nixl", 0, signal.SIGSTOP, True, marks=pytest.mark.matrix),
        pytest.param("decode", "kvrelay", 1, signal.SIGKILL, True, marks=pytest.mark.matrix),
        pytest.param("decode", "nixl", 1, signal.SIGKILL, True, marks=pytest.mark.matrix),
    ],
)
def test_a_rank_of_a_worker_is_lost(
    asked: list[Asked], role: str, way: str, rank: int, fault: signal.Signals, is_real: bool
) -> None:
    """Killed, or stopped so that it never reports: the worker ends with all its ranks, and no answer with it."""
    prompts, expected = asked[0].prompts[:NUM_RANKS], asked[0].answers[:NUM_RANKS]
    # The first step of two ranks compiles, which has taken more than a minute on a busy machine.
    hang = ("--step-timeout-s", "150") if fault is signal.SIGSTOP else ()
    # What a decode worker has begun goes on at another one.
    num_workers = {"prefill": "1", "decode": "2"}[role]
    flags = (f"--{role}", num_workers, f"--tp-{role}", "2", "--remote-prefill-timeout-s", "200", *hang)
    with Serve((*SPLIT, *CONNECTORS[way], *flags), is_real=is_real) as server, Asking(server) as asking:
        worker = server.workers(role)[0]
        victim, processes = _rank(worker, rank)
        answers = asking.begin(prompts)
        at = worker["worker_id"] if role == "decode" else None
        until(lambda: _num_remote(server, at) > 0, timeout_s=3 * PATIENCE_S)
        victim.send_signal(fault)
        assert [answer.result() for answer in answers] == expected
        assert role == "prefill" or count(server.url, "kvrelay_migrations_total") > 0
        until(lambda: not any(process.is_running() for process in processes))


@pytest.mark.matrix
@pytest.mark.parametrize("way", CONNECTORS)
def test_a_rank_of_the_only_decode_worker_is_lost(asked: list[Asked], way: str) -> None:
    """Each stream that it does not finish ends with an error that says why, soon; so do new requests."""
    prompts, expected = asked[0].prompts[:NUM_RANKS], asked[0].answers[:NUM_RANKS]
    flags = ("--tp-decode", "2", "--remote-prefill-timeout-s", "200")
    with Serve((*SPLIT, *CONNECTORS[way], *flags)) as server, Asking(server) as asking:
        (worker,) = server.workers("decode")
        victim, processes = _rank(worker, 1)
        answers = asking.begin(prompts)
        until(lambda: asking.num_tokens > NUM_TOKENS, timeout_s=3 * PATIENCE_S)
        victim.kill()
        until(lambda: not any(process.is_running() for process in processes))
        # ``serve`` starts another one, which is not there for a while.
        until(lambda: all(answer.done() for answer in answers))
        errors = [answer.exception() for answer in answers]
        assert any(errors)
        for answer, error, tokens in zip(answers, errors, expected, strict=True):
            if error is None:
                assert answer.result() == tokens
            else:
                assert isinstance(error, openai.APIError)
                assert "could not be continued" in error.message or "no worker" in error.message


def _rank(worker: dict[str, Any], rank: int) -> tuple[psutil.Process, list[psutil.Process]]:
    """This rank of vLLM in the worker, and all processes of vLLM there."""
    processes = psutil.Process(int(worker["pid"])).children(recursive=True)
    (found,) = (process for process in processes if f"TP{rank}" in process.name())
    return found, processes


def _num_remote(server: Serve, worker_id: str | None = None) -> int:
    """At all decode workers, or one."""
    chosen = (each for each in server.workers("decode") if worker_id in (None, each["worker_id"]))
    return sum(int(each["decode"]["num_remote_done"]) for each in chosen)


def _whereabouts(server: Serve) -> list[dict[str, Any]]:
    """Where prompts were computed, and why: for the message of a test that fails."""
    workers = server.workers("decode") + server.workers("prefill")
    return [
        {name: worker[name] for name in ("decode", "recomputed", "prefill", "prefills_ended")} for worker in workers
    ]
