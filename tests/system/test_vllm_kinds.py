"""Real vLLM (``make test-vllm``): kinds of KV and numbers of ranks, from prefill to decode worker, by both ways.

Each answer must be the one of plain vLLM with one rank. One cell of each kind runs in ``.ci/vllm``; the others are in
the matrix.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tests.nursery import Forked
from tests.patience import until
from tests.system.random_models import write_model
from tests.system.real_vllm import NUM_TOKENS, Asked, Asking, PlainVllm, draw_prompts
from tests.system.serving import Serve, kvrelay, kvrelay_here

from kvrelay.data import bundled_checkpoint_path

pytestmark = [pytest.mark.vllm, pytest.mark.system, pytest.mark.timeout(1200)]
matrix = pytest.mark.matrix

SPLIT = (
    *("--engine", "vllm", "--kv-cache-memory", "256MiB", "--prefill", "1", "--decode", "1"),
    *("--disagg-policy", "always", "--remote-prefill-timeout-s", "200"),
)
"""More ranks than cores take their time, and what comes late is computed by the decode worker."""
OURS = ("--vllm-connector", "kvrelay", "--transport", "shm", "--kv-checksums")
WAYS = {"nixl": (), "kvrelay": OURS}
ORDERS = ("decode-first", "prefill-first")
NUM_ASKED = 12
PIPELINE = ("--pp", "2")
GROUPS = {
    "dp 2 to 1": ("--ep", "--dp-prefill", "2"),
    "dp 1 to 2": ("--ep", "--dp-decode", "2"),
    "dp 2 to 2, experts cut": ("--dp", "2"),
}
EAGER = ("--enforce-eager",)
RANKS = {
    "tp 1 to 2": ("--tp-decode", "2", *EAGER),
    "tp 2 to 1": ("--tp-prefill", "2", *EAGER),
    "tp 2 to 2": ("--tp", "2", *EAGER),
    "pp 2 to 2": PIPELINE,
}
CPU_MLA = {"attention_backend": "CPU_MLA", "block_size": 16}
"""Its kernels compute in float32, unlike those for AMX; they need blocks of 16. vLLM's own answers of this model differ
between one rank and two, without any hand-off, and with its NIXL connector, so neither has a cell."""
HAS_FP8 = torch.backends.cpu.get_cpu_capability() == "AVX512"


def _ask(
    model: Path | None,
    flags: tuple[str, ...],
    expected: Asked,
    *,
    at_once: bool,
    look: Callable[[Serve], None] = lambda server: None,
) -> dict[str, Any]:
    """Returns a decode worker's status, after a ``look`` at the idle cluster."""
    chosen = () if model is None else (str(model),)
    with Serve((*chosen, *SPLIT, *flags)) as server:
        assert isinstance(server.process, Forked), "something has changed the environment: each start imports vLLM"
        for number, order in enumerate(ORDERS, 1):
            with Asking(server, order) as asking:
                prompts = [expected.prompts] if at_once else [[prompt] for prompt in expected.prompts]
                answers = [answer for some in prompts for answer in asking.ask(some)]
            assert answers == expected.answers, order
            num_remote = sum(worker["decode"]["num_remote_done"] for worker in server.workers("decode"))
            # One may be overtaken by blocks that the decode worker has by then.
            assert num_remote >= number * NUM_ASKED - 2, server.workers("decode")
        until(server.is_idle)
        look(server)
        return server.workers("decode")[0]


@pytest.mark.parametrize(
    ("ranks", "way"),
    [
        pytest.param(ranks, way, marks=() if (ranks, way) == ("tp 1 to 2", "kvrelay") else matrix)
        for ranks in RANKS
        for way in WAYS
    ],
)
def test_ranks(asked: list[Asked], ranks: str, way: str) -> None:
    """vLLM calls pipeline stages at the decode worker unsupported with NIXL, and does not refuse them."""
    some = Asked(asked[0].prompts[:NUM_ASKED], asked[0].answers[:NUM_ASKED])
    block = ("--dtype", "float32", "--engine-args", '{"block_size": 32}')
    block_size = ("--block-size", "32") if way == "kvrelay" else ()
    _ask(None, (*block, *block_size, *RANKS[ranks], *WAYS[way]), some, at_once=True)


@pytest.fixture(scope="module")
def answers_of(
    tmp_path_factory: pytest.TempPathFactory, plain_vllm: PlainVllm
) -> Callable[..., tuple[Path | None, Asked]]:
    """By kind of model: where it is, and plain vLLM's answers."""

    @cache
    def computed(kind: str, arguments: str) -> tuple[Path | None, Asked]:
        path = None if kind in BUNDLED else write_model(kind, tmp_path_factory.mktemp(kind))
        (answers,) = plain_vllm.ask(draw_prompts(1)[:NUM_ASKED], model=path, **json.loads(arguments))
        assert len({token for answer in answers.answers for token in answer}) > NUM_TOKENS
        return path, answers

    return computed


BUNDLED = ("llama", "fp8")
KINDS: dict[str, dict[str, Any]] = {
    "moe": {"block_size": 32},
    "sliding-window": {"block_size": 32},
    "interleaved": {"block_size": 32},
    "short-convolution": {"block_size": 32},
    "many-heads": {"block_size": 32},
    "mla": CPU_MLA,
    "fp8": {"block_size": 32, "kv_cache_dtype": "fp8"},
}
NOT_BY_NIXL = ("mla", "short-convolution")
UNLIKE = ("interleaved", "short-convolution", "mla", "fp8")
"""Several groups of layers, states beside keys and values, one vector for all heads, one byte a value. The others are
laid out as the bundled model, and for experts there are data-parallel ranks below."""
HALF = "bfloat16"
"""The bundled checkpoint's own type. One request at a time is computed by the same products as in vLLM by itself."""
NO_PREFIX_CACHE = ("--no-enable-prefix-caching",)
MAMBA = ("--dtype", "float32", "--engine-args", '{"block_size": 64}', *EAGER)
"""With its prefix cache vLLM's CPU build does not get through a prompt of two blocks."""


@pytest.mark.parametrize(
    ("kind", "way", "ranks", "dtype"),
    [
        pytest.param(kind, "kvrelay", (), "float32", marks=() if kind in UNLIKE else matrix, id=f"{kind}-kvrelay")
        for kind in KINDS
    ]
    + [
        pytest.param(kind, "nixl", (), "float32", marks=matrix, id=f"{kind}-nixl")
        for kind in KINDS
        if kind not in NOT_BY_NIXL
    ]
    + [
        pytest.param("fp8", "kvrelay", RANKS[ranks], "float32", marks=matrix, id=f"fp8-kvrelay-{ranks}")
        for ranks in ("tp 1 to 2", "tp 2 to 1")
    ]
    + [
        pytest.param(
            kind, way, (), HALF, marks=() if (kind, way) == ("llama", "kvrelay") else matrix, id=f"{kind}-{way}-{HALF}"
        )
        for kind in ("llama", *KINDS)
        for way in WAYS
        if way == "kvrelay" or kind not in NOT_BY_NIXL
    ],
)
def test_kinds_of_kv(
    answers_of: Callable[..., tuple[Path | None, Asked]], kind: str, way: str, ranks: tuple[str, ...], dtype: str
) -> None:
    """The first prompt has one token, and each decode worker's first step follows loaded KV: on a CPU with AMX vLLM's
    attention for bfloat16 then needs what no product has asked the kernel for."""
    if kind == "fp8" and not HAS_FP8:
        pytest.skip("vLLM's fp8 KV on a CPU needs AVX-512")
    arguments = KINDS.get(kind, {"block_size": 32})
    path, expected = answers_of(kind, json.dumps(arguments | {"dtype": dtype}))
    flags = ("--dtype", dtype, "--engine-args", json.dumps(arguments), *(ranks or EAGER))
    block_size = ("--block-size", str(arguments["block_size"])) if way == "kvrelay" else ()
    decode = _ask(path, (*flags, *block_size, *WAYS[way]), expected, at_once=False)
    assert decode["decode"]["num_received_bytes"] > 0


@pytest.mark.matrix
def test_states_of_mamba_by_nixl(answers_of: Callable[..., tuple[Path | None, Asked]]) -> None:
    path, expected = answers_of("mamba", '{"block_size": 64, "enable_prefix_caching": false}')
    decode = _ask(path, (*MAMBA, *NO_PREFIX_CACHE), expected, at_once=False)
    assert decode["decode"]["num_received_bytes"] > 0


def test_states_that_are_not_at_the_ends_of_blocks_are_refused(tmp_path: Path, vllm_files: None) -> None:
    path = str(write_model("mamba", tmp_path))
    split = ("serve", path, "--port", "0", *SPLIT, *OURS, *MAMBA)
    done = kvrelay(*split, "--block-size", "64", *NO_PREFIX_CACHE)
    assert (done.returncode, "leave out --no-enable-prefix-caching, or use nixl" in done.stderr) == (2, True), done
    done = kvrelay(*split, "--block-size", "32", "--engine-args", '{"block_size": 32}')
    assert (done.returncode, "set --block-size 64" in done.stderr) == (2, True), done


@pytest.mark.parametrize(
    ("group", "way"),
    [
        pytest.param(group, way, marks=() if (group, way) == ("dp 2 to 1", "kvrelay") else matrix)
        for group in GROUPS
        for way in WAYS
    ],
)
def test_data_parallel_ranks_with_experts_in_common(
    answers_of: Callable[..., tuple[Path | None, Asked]], group: str, way: str
) -> None:
    """Some ranks have a request, the others only its experts: prompts come one at a time."""
    path, expected = answers_of("moe", '{"block_size": 32, "dtype": "float32"}')
    block_size = ("--block-size", "32") if way == "kvrelay" else ()
    flags = ("--dtype", "float32", "--engine-args", '{"block_size": 32}', *EAGER, *block_size, *WAYS[way])
    _ask(path, (*flags, *GROUPS[group]), expected, at_once=False)


DRAFTERS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    "draft model": {"method": "draft_model", "model": str(bundled_checkpoint_path()), "num_speculative_tokens": 3},
}
"""The model itself as its drafter: what it drafts is accepted, if its own KV is right."""


@pytest.mark.parametrize(
    ("drafter", "way", "dtype"),
    [
        ("ngram", "kvrelay", "float32"),
        *(pytest.param(drafter, "nixl", "float32", marks=matrix) for drafter in DRAFTERS),
        *(pytest.param("ngram", way, HALF, marks=matrix) for way in WAYS),
    ],
)
def test_speculation(
    asked: list[Asked], answers_of: Callable[..., tuple[Path | None, Asked]], drafter: str, way: str, dtype: str
) -> None:
    """Answers are those without, and what was drafted and accepted is told."""
    some = Asked(asked[0].prompts[:NUM_ASKED], asked[0].answers[:NUM_ASKED])
    if dtype == HALF:
        _, some = answers_of("llama", json.dumps({"block_size": 32, "dtype": dtype}))
    arguments = json.dumps({"block_size": 32, "speculative_config": DRAFTERS[drafter]})
    block_size = ("--block-size", "32") if way == "kvrelay" else ()
    flags = ("--dtype", dtype, "--engine-args", arguments, *EAGER, *block_size, *WAYS[way])
    num_answers = len(ORDERS) * NUM_ASKED
    told: list[dict[str, int]] = []

    def look(server: Serve) -> None:
        """Each answer has 23 or 24 tokens from decode steps, and up to three that its end cuts off. The last steps are
        taken in within a second."""
        accepted = server.workers("decode")[0]["drafts"]["num_accepted_tokens"]
        least, most = num_answers * (NUM_TOKENS - 1) - accepted, num_answers * (NUM_TOKENS + 4) - accepted

        def per_step() -> float:
            found: float = server.workers("decode")[0]["load"]["step_cost"]["tokens_per_step"]
            return found

        until(lambda: 1.0 + accepted / most <= per_step() <= 1.0 + accepted / least)
        listed = httpx.get(f"{server.url}/debug/requests", params={"limit": 100}).json()["requests"]
        shown = (httpx.get(f"{server.url}/debug/requests/{each['id']}").json() for each in listed)
        told.extend(each["drafts"] for each in shown if each["drafts"])

    drafts = _ask(None, flags, some, at_once=False, look=look)["drafts"]
    assert 0 < drafts["num_accepted_tokens"] <= drafts["num_draft_tokens"] <= 3 * drafts["num_drafts"]
    assert sum(each["drafted"] for each in told) == drafts["num_draft_tokens"]
    assert sum(each["accepted"] for each in told) == drafts["num_accepted_tokens"]


def test_a_drafters_own_kv_is_refused_by_the_connector_that_does_not_copy_it(vllm_files: None) -> None:
    arguments = json.dumps({"block_size": 32, "speculative_config": DRAFTERS["draft model"]})
    done = kvrelay("serve", "--port", "0", *SPLIT, *OURS, "--block-size", "32", "--engine-args", arguments, *EAGER)
    assert done.returncode == 2, done
    assert "does not copy the KV of a drafter (draft_model): use nixl" in done.stderr


@pytest.mark.matrix
@pytest.mark.parametrize("way", WAYS)
def test_workers_of_both_roles_narrow_and_widen(asked: list[Asked], way: str) -> None:
    """They start with the connector that is named: vLLM cannot get one later."""
    some = Asked(asked[0].prompts[:NUM_ASKED], asked[0].answers[:NUM_ASKED])
    others = Asked(asked[1].prompts[:NUM_ASKED], asked[1].answers[:NUM_ASKED])
    flags = ("--dtype", "float32", "--engine-args", '{"block_size": 32}', *EAGER, "--block-size", "32")
    named = WAYS[way] or ("--vllm-connector", "nixl")
    with Serve((*SPLIT, *flags, "--prefill", "0", "--decode", "2", *named)) as server, Asking(server) as asking:
        first, second = (worker["worker_id"] for worker in server.workers("both"))
        for worker_id, role in ((first, "prefill"), (second, "decode")):
            done = kvrelay_here("role", worker_id, role, "--control", server.control)
            assert done.returncode == 0, done.stderr
        assert asking.ask(some.prompts) == some.answers
        (decode,) = server.workers("decode")
        assert decode["decode"]["num_remote_done"] >= NUM_ASKED - 2, decode
        assert kvrelay_here("role", first, "both", "--control", server.control).returncode == 0
        assert asking.ask(others.prompts) == others.answers
        until(server.is_idle)


def test_stages_that_are_not_compiled_are_refused(vllm_files: None) -> None:
    done = kvrelay("serve", "--engine", "vllm", "--port", "0", *PIPELINE, *EAGER)
    assert done.returncode == 2, done
    assert "must be compiled on a CPU: leave out --enforce-eager" in done.stderr
