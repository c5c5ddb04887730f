"""Real vLLM with adapters (LoRA) (``make test-vllm``): a request for one is answered as by vLLM by itself with it.

Two dozen starts of vLLM: of the matrix, not of ``.ci/vllm``."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from tests.adapters import write_adapter
from tests.patience import PATIENCE_S, until
from tests.system.real_vllm import NUM_TOKENS, Asking, PlainVllm, draw_prompts
from tests.system.serving import Serve

pytestmark = [pytest.mark.vllm, pytest.mark.matrix, pytest.mark.system, pytest.mark.timeout(1200)]

SPLIT = (
    *("--engine", "vllm", "--dtype", "float32", "--enforce-eager", "--kv-cache-memory", "256MiB"),
    *("--engine-args", '{"block_size": 32}', "--prefill", "1", "--decode", "1", "--disagg-policy", "always"),
)
OURS = ("--vllm-connector", "kvrelay", "--block-size", "32", "--kv-checksums", "--transport", "shm")
NUM_ASKED = 8
PROMPTS = [prompt for prompt in draw_prompts(7) if 32 < len(prompt) <= 300][:NUM_ASKED]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("sql", "chat")):
        write_adapter(folder / name, seed)
    return folder


@pytest.fixture(scope="module")
def expected(adapters: Path, plain_vllm: PlainVllm) -> dict[str, list[list[int]]]:
    """By adapter; the empty name is the model itself, from a vLLM without adapters. One request at a time."""
    own = {"": plain_vllm.ask(PROMPTS)[0].answers}
    found = own | {each.name: plain_vllm.ask(PROMPTS, adapter=str(each))[0].answers for each in adapters.iterdir()}
    assert len({str(answers) for answers in found.values()}) == len(found)
    return found


@pytest.mark.parametrize("way", [(), OURS], ids=["nixl", "kvrelay"])
@pytest.mark.usefixtures("vllm_files")
def test_two_adapters_and_their_model_share_a_pair(
    adapters: Path, expected: dict[str, list[list[int]]], way: tuple[str, ...]
) -> None:
    """The same prompts go to each, so a block of one in another's cache would change an answer. Their requests
    alternate, so that steps have rows of several adapters and of none."""
    with Serve((*SPLIT, *way, "--lora-dir", str(adapters))) as server:
        models = httpx.get(f"{server.url}/v1/models", timeout=PATIENCE_S).json()["data"]
        assert {each["id"]: each["parent"] for each in models} == {
            server.model: None,
            "sql": server.model,
            "chat": server.model,
        }
        for order in ("decode-first", "prefill-first"):
            with Asking(server, order) as asking:
                begun = [(name, asking.begin([prompt], name or None)) for prompt in PROMPTS for name in expected]
                answers = {name: [answer.result() for own, (answer,) in begun if own == name] for name in expected}
                assert answers == expected, order
        (decode,) = server.workers("decode")
        assert decode["decode"]["num_remote_done"] >= len(expected) * NUM_ASKED / 2, decode
        body = {"prompt": PROMPTS[-1], "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
        for name, status in (("chat", 200), ("none", 404)):
            whole = httpx.post(
                f"{server.url}/v1/completions",
                json=body | {"model": name, "return_token_ids": True},
                timeout=PATIENCE_S,
            )
            assert whole.status_code == status, whole.text
            if status == 200:
                assert whole.json()["model"] == name
                assert whole.json()["choices"][0]["token_ids"] == expected[name][-1]
        until(server.is_idle)


BODY = {"prompt": PROMPTS[0], "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
RUN_TIME = ("--max-loras", "2", "--max-cpu-loras", "3", "--max-lora-rank", "8")


@pytest.mark.usefixtures("vllm_files")
def test_adapters_are_loaded_and_unloaded_at_run_time(
    adapters: Path, expected: dict[str, list[list[int]]], tmp_path: Path
) -> None:
    """An answer that began before its adapter was unloaded ends with it. The same prompts under the same name and other
    contents are computed anew."""
    patience = 4 * PATIENCE_S
    with Serve((*SPLIT, *OURS, *RUN_TIME)) as server, httpx.Client(base_url=server.url, timeout=patience) as client:

        def change(what: str, **body: str) -> tuple[int, str]:
            answer = client.post(f"/v1/{what}_lora_adapter", json=body)
            return answer.status_code, answer.text

        def names() -> set[str]:
            return {each["id"] for each in client.get("/v1/models").json()["data"]}

        for name in ("sql", "chat"):
            assert change("load", lora_name=name, lora_path=str(adapters / name))[0] == 200
        assert names() == {server.model, "sql", "chat"}
        status, reason = change("load", lora_name="high", lora_path=str(write_adapter(tmp_path / "high", 3, rank=9)))
        assert (status, "rank 9" in reason) == (400, True)
        with Asking(server, "decode-first") as asking:
            begun = [(name, asking.begin([prompt], name or None)) for prompt in PROMPTS for name in expected]
            answers = {name: [answer.result() for own, (answer,) in begun if own == name] for name in expected}
            assert answers == expected
            with client.stream("POST", "/v1/completions", json=BODY | {"model": "sql", "stream": True}) as running:
                lines = running.iter_lines()
                told = [next(lines)]
                assert change("unload", lora_name="sql")[0] == 200
                assert names() == {server.model, "chat"}
                assert client.post("/v1/completions", json=BODY | {"model": "sql"}).status_code == 404
                told += lines
            events = [json.loads(line.removeprefix("data: ")) for line in told if line.startswith("data: {")]
            tokens = [
                token for event in events for choice in event["choices"] for token in choice.get("token_ids") or []
            ]
            assert tokens == expected["sql"][0]
            # From now on "sql" is what "chat" is.
            assert change("load", lora_name="sql", lora_path=str(adapters / "chat"))[0] == 200
            again = asking.begin(PROMPTS, "sql")
            assert [answer.result() for answer in again] == expected["chat"]
        (decode,) = server.workers("decode")
        assert decode["decode"]["num_remote_done"] >= len(expected) * NUM_ASKED / 2, decode
        until(server.is_idle)


NUM_MANY = 67


def test_two_pairs_answer_two_hundred_requests(adapters: Path, plain_vllm: PlainVllm) -> None:
    """Requests for two adapters and for the model alternate, eight at once, and any prefill worker goes with any decode
    worker."""
    prompts = [*draw_prompts(8), *draw_prompts(9)][:NUM_MANY]
    own = {each.name: {"adapter": str(each)} for each in adapters.iterdir()} | {"": {}}
    expected = {name: plain_vllm.ask(prompts, **more)[0].answers for name, more in own.items()}
    both = ("--prefill", "2", "--decode", "2", "--remote-prefill-timeout-s", "200")
    with Serve((*SPLIT, *both, *OURS, "--lora-dir", str(adapters))) as server, Asking(server) as asking:
        begun = [(name, asking.begin([prompt], name or None)) for prompt in prompts for name in own]
        answers = {name: [answer.result() for each, (answer,) in begun if each == name] for name in own}
        assert answers == expected
        decodes = [worker["decode"]["num_remote_done"] for worker in server.workers("decode")]
        assert min(decodes) > 0
        assert sum(decodes) >= 0.9 * NUM_MANY * len(own), decodes
        until(server.is_idle)


@pytest.mark.usefixtures("vllm_files")
def test_while_workers_are_killed_answers_are_those_of_the_contents_that_are_loaded(
    adapters: Path, expected: dict[str, list[list[int]]]
) -> None:
    """One name has two contents in turn. In each turn a worker is killed amid its answers, or while it loads; ``serve``
    starts it again, and it loads what is known by then. No answer is lost."""
    turns = (("sql", "decode", False), ("chat", "prefill", False), ("sql", "decode", True), ("chat", "decode", False))
    patience = 4 * PATIENCE_S
    with (
        Serve((*SPLIT, *OURS, *RUN_TIME, "--decode", "2")) as server,
        Asking(server) as asking,
        httpx.Client(base_url=server.url, timeout=patience) as client,
        ThreadPoolExecutor(1) as other,
    ):

        def change(what: str, **body: str) -> int:
            return client.post(f"/v1/{what}_lora_adapter", json={"lora_name": "own", **body}).status_code

        def are_all_there() -> bool:
            return len(server.workers("decode")) == 2 and len(server.workers("prefill")) == 1

        for contents, role, while_loading in turns:
            until(are_all_there, timeout_s=10 * PATIENCE_S)
            victim = int(server.workers(role)[0]["pid"])
            loading = other.submit(change, "load", lora_path=str(adapters / contents))
            if while_loading:
                os.kill(victim, signal.SIGKILL)
            assert loading.result() == 200
            before = asking.num_tokens
            begun = asking.begin(PROMPTS * 2, "own")
            if not while_loading:
                until(lambda before=before: asking.num_tokens > before + NUM_TOKENS)  # type: ignore[misc]
                os.kill(victim, signal.SIGKILL)
            assert [answer.result() for answer in begun] == expected[contents] * 2
            assert change("unload") == 200
        assert asking.ask(PROMPTS) == expected[""]
        until(are_all_there, timeout_s=10 * PATIENCE_S)
        until(server.is_idle)
