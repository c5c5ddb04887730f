"""Real vLLM with adapters (LoRA) (``make test-vllm``): a request for one is answered as by vLLM by itself with it.

Seven starts of vLLM: of the matrix, not of ``.ci/vllm``."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from tests.adapters import write_adapter
from tests.patience import PATIENCE_S, until
from tests.system.real_vllm import NUM_TOKENS, Asking, ask_plain_vllm, draw_prompts
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
def expected(adapters: Path) -> dict[str, list[list[int]]]:
    """By adapter; the empty name is the model itself, from a vLLM without adapters. One request at a time."""
    own = {"": ask_plain_vllm(PROMPTS)[0].answers}
    found = own | {each.name: ask_plain_vllm(PROMPTS, adapter=str(each))[0].answers for each in adapters.iterdir()}
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
