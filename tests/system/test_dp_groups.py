"""Data-parallel groups as processes: each rank is a worker, a group ends as one, spread experts answer alike."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.patience import PATIENCE_S, until
from tests.system.serving import Serve, by_threshold, kvrelay

from kvrelay.config import EngineConfig, RunnerConfig
from kvrelay.core.clock import MonotonicClock
from kvrelay.core.sampling import SamplingParams
from kvrelay.engine.core import EngineCore
from kvrelay.engine.request import Request
from kvrelay.executors.torch import build_executor
from kvrelay.executors.torch.checkpoints import make_model

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(600)]

NUM_OUTPUTS = 12
ROUND = 32
"""Prompts at once."""


def complete(server: Serve, prompt: list[int], num_tokens: int = NUM_OUTPUTS) -> list[int]:
    body: dict[str, Any] = {
        "model": server.model,
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=4 * PATIENCE_S) as answer:
        tokens: list[int] = json.load(answer)["choices"][0]["token_ids"]
    return tokens


def pids_of_workers(server: Serve) -> dict[int, list[int]]:
    """The pids of ranks by the pid of the process that started them."""
    found: dict[int, list[int]] = {}
    for child in psutil.Process(server.process.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it ends just now
            if "worker" in child.cmdline():
                found[child.pid] = [rank.pid for rank in child.children() if "worker" in rank.cmdline()]
    return found


def alone(model: Path, prompts: list[list[int]]) -> list[list[int]]:
    """What one engine answers, in this process."""
    config = EngineConfig(num_blocks=256, max_model_len=512)
    executor = build_executor(model, RunnerConfig(dtype="float32", device="cpu", num_threads=1), config)
    core = EngineCore(executor, config, MonotonicClock(), worker_id="one")
    sampling = SamplingParams(max_tokens=NUM_OUTPUTS, temperature=0.0, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        core.add_request(Request(str(number), prompt, sampling))
    tokens: dict[str, list[int]] = {}
    while core.has_unfinished():
        for output in core.step().outputs:
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    executor.shutdown()
    return [tokens[str(number)] for number in range(len(prompts))]


@pytest.mark.matrix
def test_a_group_answers_as_one_engine(record_property: Callable[[str, object], None]) -> None:
    """Requests on both ranks, in bursts with sleep between them, and on one rank while the other only steps along.

    The suite has the same with engines alone: ``test_expert_parallel``."""
    count = 200
    flags = ("--requests", str(count), "--idle", "1", "--json")
    done = kvrelay("dp-group", *flags, module="benchmarks", timeout_s=550)
    assert done.returncode == 0, f"{done.stderr}\n{done.stdout}"
    report = json.loads(done.stdout)
    rows = {row["pattern"]: row for row in report["rows"]}
    assert list(rows) == ["both ranks", "bursts", "one rank"]
    for row in rows.values():
        assert (row["num_requests"], row["num_right"], row["wrong"]) == (count, count, [])
        assert sum(row["requests_by_rank"].values()) == count
        # Figures of a busy machine fail no test.
        record_property(f"longest silence, {row['pattern']}, s", f"{row['silence_max_s']:.2f}")
    assert all(rows["both ranks"]["requests_by_rank"].values())
    assert rows["one rank"]["requests_by_rank"] == {"0": count}
    record_property("CPU of the idle group, share of a core", f"{report['idle_cpu_share']:.3f}")


def groups_of_two(tp_prefill: int, tp_decode: int) -> tuple[str, ...]:
    """A prefill group and a decode group with spread experts; ranks of a busy machine do not count as hung."""
    sizes = ("--tp-prefill", str(tp_prefill), "--tp-decode", str(tp_decode), "--num-threads", "1")
    limits = ("--num-blocks", "256", "--max-model-len", "512", "--rank-timeout-s", str(PATIENCE_S))
    groups = ("--prefill", "1", "--decode", "1", "--dp", "2", "--ep", *by_threshold(16))
    return (*groups, *sizes, *limits, "--dtype", "float32")


@pytest.mark.matrix
@pytest.mark.parametrize(("tp_prefill", "tp_decode"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_hand_offs_between_groups(tp_prefill: int, tp_decode: int, tmp_path: Path) -> None:
    """Prefill and decode are groups of two; hand-offs go from every rank to every rank."""
    model = tmp_path / "mixtral"
    make_model(model, "mixtral", "tiny", dtype="float32")
    draw = random.Random(3)
    prompts = [[draw.randrange(16, 1000) for _ in range(draw.choice((2, 20, 90, 200)))] for _ in range(4 + 4 * ROUND)]
    expected = alone(model, prompts)
    with Serve((str(model), *groups_of_two(tp_prefill, tp_decode))) as server, ThreadPoolExecutor(16) as pool:
        # One after the other: one rank has a request, the other ranks have none. Then many at once, until each prefill
        # rank has written to each decode rank.
        assert [complete(server, prompt) for prompt in prompts[:4]] == expected[:4]
        ranks = {worker["worker_id"]: worker["dp_rank"] for worker in server.workers("decode")}
        assert sorted(ranks.values()) == [0, 1]
        for start in range(4, len(prompts), ROUND):
            some = slice(start, start + ROUND)
            assert list(pool.map(lambda prompt: complete(server, prompt), prompts[some])) == expected[some]
            pairs = {
                (worker["dp_rank"], ranks[peer["worker_id"]])
                for worker in server.workers("prefill")
                for peer in worker["transfer"]["peers"]
                if peer["op"] == "write" and peer["num_bytes"]
            }
            if len(pairs) == 4:
                break
        assert pairs == {(0, 0), (0, 1), (1, 0), (1, 1)}
        assert sum(worker["prefill"]["num_failed"] for worker in server.workers("prefill")) == 0
        until(server.is_idle)


HUNG = pytest.mark.matrix


@pytest.mark.parametrize(
    ("rank", "number", "reason"),
    [
        (1, signal.SIGKILL, "rank 1 of the data-parallel group"),
        pytest.param(1, signal.SIGSTOP, r"rank 1 of the data-parallel group \(.*\) has sent nothing for", marks=HUNG),
        pytest.param(0, signal.SIGSTOP, "its coordinator, has sent nothing for", marks=HUNG),
    ],
    ids=["killed", "stopped", "coordinator-stopped"],
)
def test_a_rank_that_is_lost_ends_its_group_and_no_other(rank: int, number: signal.Signals, reason: str) -> None:
    flags = ("--prefill", "0", "--decode", "2", "--dp", "2", "--engine", "mock", "--decode-base-s", "0.02")
    # A rank of a busy machine does not count as hung unless one shall.
    limits = ("--num-blocks", "256", "--rank-timeout-s", "8" if number is signal.SIGSTOP else str(PATIENCE_S))
    with Serve((*flags, *limits)) as server, ThreadPoolExecutor(8) as pool:
        before = pids_of_workers(server)
        assert sorted(len(ranks) for ranks in before.values()) == [2, 2]
        expected = complete(server, [5, 6, 7], 200)
        answers = [pool.submit(complete, server, [5, 6, 7], 200) for _ in range(8)]
        until(lambda: sum(each["load"]["request_active_slots"] for each in server.workers("both")) >= 4)
        lost, spared = sorted(before)
        os.kill(before[lost][rank], number)
        # Requests of the whole group go on in the other one.
        assert all(answer.result(4 * PATIENCE_S) == expected for answer in answers)
        # The stopped one is killed, as it cannot end.
        until(lambda: not any(psutil.pid_exists(pid) for pid in before[lost]))
        until(lambda: sorted(len(ranks) for ranks in pids_of_workers(server).values()) == [2, 2])
        assert pids_of_workers(server)[spared] == before[spared]
        until(lambda: len(server.workers("both")) == 4)
        assert re.search(reason, server.read())
