"""KV between workers of any TP, PP and block size, in both orders, with real processes: the plain engine's tokens, the
plan's bytes."""

from __future__ import annotations

import json
import random
import subprocess
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import psutil
import pytest
from tests.patience import PATIENCE_S, stop
from tests.system.serving import Serve, by_threshold

from kvrelay import LLM, SamplingParams
from kvrelay.data import bundled_checkpoint_path
from kvrelay.executors.torch.parallel.processes import MODULE as RANK_MODULE

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(900)]

MAX_LOCAL = 64
NUM_OUTPUT = 8
BASE_LEN = 60
"""Prefilled locally; then a hit that the prefill worker reads."""
FLAGS = (
    *("--dtype", "float32", "--num-threads", "1", *by_threshold(MAX_LOCAL), "--num-blocks", "512"),
    # A rank of a busy machine must not count as hung.
    *("--rank-timeout-s", str(PATIENCE_S)),
)
LENGTHS = (65, 96, 127, 300, 401, 640, 1500)
PREFILL_FIRST_LENGTHS = (65, 127, 320, 700)
CONFIG = json.loads((bundled_checkpoint_path() / "config.json").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Side:
    """One kind of worker."""

    tp: int = 1
    pp: int = 1
    block: int = 16

    def flags(self, kind: str) -> tuple[str, ...]:
        names = {"tp": self.tp, "pp": self.pp, "block-size": self.block}
        return tuple(word for name, value in names.items() for word in (f"--{name}-{kind}", str(value)))

    @property
    def bytes_per_token(self) -> int:
        """Of float32, over all ranks: a head that several ranks hold counts for each."""
        heads = max(CONFIG["num_key_value_heads"], self.tp)
        head_dim = CONFIG.get("head_dim") or CONFIG["hidden_size"] // CONFIG["num_attention_heads"]
        return CONFIG["num_hidden_layers"] * 2 * heads * head_dim * 4


CASES = {
    "TP1-TP1": (Side(), Side()),
    "TP1-TP2": (Side(), Side(tp=2)),
    "TP2-TP1": (Side(tp=2), Side()),
    "TP2-TP2": (Side(tp=2), Side(tp=2)),
    "PP2-TP1": (Side(pp=2), Side()),
    "TP1-PP2": (Side(), Side(pp=2)),
    "TP2xPP2-TP1": (Side(tp=2, pp=2), Side()),
    "PP2-PP2": (Side(pp=2), Side(pp=2)),
    "PP2-TP2": (Side(pp=2), Side(tp=2)),
    "block16-32": (Side(), Side(block=32)),
    "block32-16": (Side(block=32), Side()),
}
PULL = ("nixl GET", "shm GET")
P2P = ("p2p PUT", "p2p PUT_ASYNC", "p2p GET")
THIN = (("TP1-TP2", "nixl GET"),)
"""Of p2p, ``test_prefill_first`` runs in the suite; of shm, the last test here and ``test_holding``."""
RANKED = {
    "TP1-TP2": ("nixl", "shm GET", "p2p PUT_ASYNC"),
    "TP2-TP1": ("nixl GET", "shm", "p2p GET"),
    "TP2-TP2": ("nixl", "shm", "p2p PUT_ASYNC"),
    "PP2-PP2": ("nixl", "shm"),
    "PP2-TP2": ("nixl", "shm GET", "p2p PUT_ASYNC"),
    "TP2xPP2-TP1": ("nixl",),
}
THIN_RANKED = (("PP2-TP2", "shm GET"),)
"""Each rank moves its own part; with NIXL in ``executors/torch/parallel/test_rank_transfers``."""
MATRIX = [
    pytest.param(
        case,
        transport,
        id=f"{case}-{transport.replace(' ', '-')}",
        marks=() if (case, transport) in THIN else pytest.mark.matrix,
    )
    for case in CASES
    for transport in ("nixl", "shm", *PULL, *(P2P if case in ("TP1-TP1", "TP1-TP2", "TP2-TP1") else ()))
    if case not in ("PP2-PP2", "PP2-TP2")
]
MATRIX += [
    pytest.param(
        case,
        f"{transport} per-rank" if " " in transport else f"{transport}  per-rank",
        id=f"{case}-{transport.replace(' ', '-')}-per-rank",
        marks=() if (case, transport) in THIN_RANKED else pytest.mark.matrix,
    )
    for case, transports in RANKED.items()
    for transport in transports
]


@dataclass(frozen=True)
class Prompts:
    """A short one, long ones that share nothing, and some that begin with the short one."""

    base: list[int]
    apart: list[list[int]]
    longer: list[list[int]]
    prefill_first: list[list[int]]
    """For the other order: none is known to any worker but for the short one's tokens, with which the last begins."""

    @property
    def remote(self) -> list[list[int]]:
        return [*self.longer, *self.apart, *self.prefill_first]


def make_prompts() -> Prompts:
    draw = random.Random(11)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(16, CONFIG["vocab_size"]) for _ in range(count)]

    base = tokens(BASE_LEN)
    apart = [tokens(length) for length in LENGTHS]
    longer = [base + tokens(length) for length in (100, 333)]
    return Prompts(base, apart, longer, [*map(tokens, PREFILL_FIRST_LENGTHS), base + tokens(200)])


@pytest.fixture(scope="module")
def expected() -> dict[tuple[int, ...], list[int]]:
    """What the plain engine answers."""
    made = make_prompts()
    prompts = [made.base, *made.remote]
    with LLM(dtype="float32", num_blocks=512, device="cpu") as llm:
        outputs = llm.generate(prompts, SamplingParams(max_tokens=NUM_OUTPUT, temperature=0.0, ignore_eos=True))
    return {tuple(prompt): list(output.token_ids) for prompt, output in zip(prompts, outputs, strict=True)}


def complete(server: Serve, prompt: list[int], order: str = "decode-first") -> list[int]:
    body = {"model": server.model, "prompt": prompt, "max_tokens": NUM_OUTPUT, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"{server.url}/v1/completions",
        data=json.dumps({**body, "return_token_ids": True}).encode(),
        headers={"Content-Type": "application/json", "x-kvrelay-order": order},
    )
    with urllib.request.urlopen(request, timeout=3 * PATIENCE_S) as answer:
        return json.load(answer)["choices"][0]["token_ids"]


def moved(worker: dict, op: str) -> int:
    """Bytes that a worker's transfers of one kind have moved."""
    return sum(peer["num_bytes"] for peer in worker["transfer"]["peers"] if peer["op"] == op)


def planned(prefill: Side, decode: Side) -> tuple[int, int]:
    """Bytes to move into the decode worker, and to read from it, for all prompts."""

    def end(length: int) -> int:
        """Whole blocks move, as far as both sides have them."""
        return min(-(-length // side.block) * side.block for side in (prefill, decode))

    hit = BASE_LEN // decode.block * decode.block
    prompts = make_prompts()
    hits = [hit if prompt[:BASE_LEN] == prompts.base else 0 for prompt in prompts.remote]
    written = sum(end(len(prompt)) - known for prompt, known in zip(prompts.remote, hits, strict=True))
    # The prefill worker has the first one's blocks when the next comes.
    read = hit // prefill.block * prefill.block
    return written * decode.bytes_per_token, read * prefill.bytes_per_token


@pytest.mark.parametrize(("case", "transport"), MATRIX)
def test_any_two_layouts_give_the_plain_engines_tokens(
    case: str, transport: str, expected: dict[tuple[int, ...], list[int]]
) -> None:
    prefill, decode = CASES[case]
    transport, send_type, how = (*transport.split(" "), "", "")[:3]
    flags = (*FLAGS, *prefill.flags("prefill"), *decode.flags("decode"), "--transport", transport)
    if send_type:
        flags = (*flags, "--send-type", send_type)
    if how:
        flags = (*flags, "--kv-transfer-per-rank")
    prompts = make_prompts()
    with Serve(flags) as server, ThreadPoolExecutor(4) as threads:
        assert complete(server, prompts.base) == expected[tuple(prompts.base)]
        for prompt in prompts.longer:
            assert complete(server, prompt) == expected[tuple(prompt)]
        for order, group in (("decode-first", prompts.apart), ("prefill-first", prompts.prefill_first)):
            answers = list(threads.map(lambda prompt, order=order: complete(server, prompt, order), group))
            assert answers == [expected[tuple(prompt)] for prompt in group]
        assert complete(server, prompts.base, "prefill-first") == expected[tuple(prompts.base)]
        (giver,), (taker,) = server.idle_workers("prefill"), server.workers("decode")
        # In this order the frontend decides, and only requests with a pair are remote.
        assert taker["decode"]["places"]["local_unpaired"] == 1
        assert taker["decode"]["places"]["remote"] == len(prompts.remote)
        assert taker["decode"]["num_remote_done"] == giver["prefill"]["num_prefills"] == len(prompts.remote)
        assert giver["prefill"]["num_failed"] == 0
        is_pull = f"{transport} {send_type}" in PULL
        brought, other = (moved(giver, "write"), moved(taker, "read"))[:: -1 if is_pull else 1]
        assert (brought, moved(giver, "read"), other) == (*planned(prefill, decode), 0)
        server.check_idle()


SMALL_SHM = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=4k tmpfs /dev/shm && exec "$0" "$@"')


@pytest.mark.matrix
@pytest.mark.parametrize("transport", ["nixl", "shm"])
def test_a_full_dev_shm_changes_nothing(transport: str, expected: dict[tuple[int, ...], list[int]]) -> None:
    """Pools and steps are in anonymous files, which it does not hold, and UCX has other ways."""
    if subprocess.run([*SMALL_SHM, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user cannot mount a small /dev/shm")
    flags = (*FLAGS, *Side(tp=2).flags("prefill"), *Side().flags("decode"), "--transport", transport)
    with Serve(flags, prefix=SMALL_SHM) as server:
        for prompt in make_prompts().apart[:3]:
            assert complete(server, prompt) == expected[tuple(prompt)]
        (taker,) = server.workers("decode")
        assert taker["decode"]["num_remote_done"] == 3
        server.check_idle()


@pytest.mark.parametrize("number", [pytest.param(0, marks=pytest.mark.matrix), 1])
def test_a_rank_that_stops_while_it_moves_kv_costs_a_prefill(
    number: int, expected: dict[tuple[int, ...], list[int]]
) -> None:
    """Of the prefill worker, whose other rank has moved its part. The worker ends, the answer is the plain engine's."""
    flags = (
        *FLAGS[:-2],
        *("--rank-timeout-s", "2", *Side(tp=2).flags("prefill"), *Side().flags("decode")),
        *("--transport", "shm", "--kv-transfer-per-rank"),
    )
    prompts = make_prompts()
    with Serve(flags) as server, ThreadPoolExecutor(1) as threads:
        assert complete(server, prompts.apart[0]) == expected[tuple(prompts.apart[0])]
        (giver,) = server.workers("prefill")
        ranks = [child for child in psutil.Process(giver["pid"]).children() if RANK_MODULE in child.cmdline()]
        assert len(ranks) == 2
        stop(ranks[number].pid)
        answer = threads.submit(complete, server, prompts.apart[-1])
        assert answer.result() == expected[tuple(prompts.apart[-1])]
        gone = psutil.wait_procs(ranks, timeout=PATIENCE_S)[0]
        assert len(gone) == 2
