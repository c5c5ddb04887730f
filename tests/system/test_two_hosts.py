"""Prefill and decode on two hosts: a network namespace with a link of limited rate stands for the other machine.

Nothing but that link connects the two workers' addresses. It needs root, iproute2 and the kernel's token bucket filter;
where one of them is missing the tests are skipped with the command that failed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.lazily import openai
from tests.patience import PATIENCE_S, until
from tests.ports import free_ports
from tests.system.serving import Serve

from kvrelay.control.nats_process import find_binary
from kvrelay.data import bundled_checkpoint_path
from kvrelay.executors.checkpoint_facts import checkpoint_facts
from kvrelay.executors.mock import mock_generate
from kvrelay.executors.torch.checkpoints import make_model
from kvrelay.llm import LLM, SamplingParams

# Of the matrix: it gives this host an interface while it runs.
pytestmark = [pytest.mark.system, pytest.mark.matrix, pytest.mark.timeout(600)]

RATE = "100mbit"
TOKEN = "two-hosts"
ANSWER_LEN = 12
PROMPTS = [
    [32 + (number + at * 7) % 200 for at in range(length)] for number, length in enumerate((1500, 700, 41, 1601))
]


class Link(NamedTuple):
    """``name``: of the other host's namespace; addresses of this host and of the other one."""

    name: str
    here: str
    there: str


@pytest.fixture
def link() -> Iterator[Link]:
    if shutil.which("ip") is None or shutil.which("tc") is None:
        pytest.skip("no iproute2: apt-get install iproute2")
    number = os.getpid() % 60000
    name, net = f"kvr{number}", f"10.{number // 250}.{number % 250}"
    found = Link(name, f"{net}.1", f"{net}.2")
    shaped = ("root", "tbf", "rate", RATE, "burst", "64kb", "latency", "50ms")
    within = ("ip", "netns", "exec", name)
    commands = [
        ("ip", "netns", "add", name),
        ("ip", "link", "add", f"{name}a", "type", "veth", "peer", "name", f"{name}b", "netns", name),
        ("ip", "addr", "add", f"{found.here}/30", "dev", f"{name}a"),
        ("ip", "link", "set", f"{name}a", "up"),
        (*within, "ip", "addr", "add", f"{found.there}/30", "dev", f"{name}b"),
        (*within, "ip", "link", "set", f"{name}b", "up"),
        (*within, "ip", "link", "set", "lo", "up"),
        ("tc", "qdisc", "add", "dev", f"{name}a", *shaped),
        (*within, "tc", "qdisc", "add", "dev", f"{name}b", *shaped),
    ]
    try:
        for command in commands:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"{' '.join(command)}: {done.stderr.strip()}")
        yield found
    finally:
        # The pair of interfaces goes with the namespace.
        subprocess.run(("ip", "netns", "del", name), capture_output=True, check=False)


@pytest.fixture
def control(link: Link, tmp_path: Path) -> Iterator[str]:
    """A control server that both hosts reach."""
    (port,) = free_ports(1)
    command = [str(find_binary()), "-js", "--addr", link.here, "--port", str(port), "--store_dir", str(tmp_path)]
    command += ["--auth", TOKEN]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield f"nats://{TOKEN}@{link.here}:{port}"
    finally:
        server.terminate()
        server.wait()


def answers(
    link: Link, control: str, here: Sequence[str], there: Sequence[str], prompts: Sequence[list[int]] = PROMPTS
) -> tuple[list[list[int]], list[dict[str, Any]]]:
    """To the prompts, of a worker with the flags ``here`` and of one on the other host; and the workers' status."""
    (port,) = free_ports(1)
    processes: list[subprocess.Popen[bytes]] = []
    with ExitStack() as waits, ExitStack() as stack:

        def start(*words: str, within: tuple[str, ...] = ()) -> None:
            # UCX would find shared memory, since it is one machine after all.
            environment = {**os.environ, "KVRELAY_CONTROL": control, "UCX_TLS": "tcp"}
            process = subprocess.Popen([*within, sys.executable, "-m", "kvrelay", *words], env=environment)
            processes.append(process)
            # All are told to end before the first one is waited for: a rank ends with its group.
            waits.callback(process.wait)
            stack.callback(process.terminate)

        start("frontend", "--port", str(port))
        start("worker", *here, "--worker-host", link.here)
        within = ("ip", "netns", "exec", link.name)
        start("worker", *there, "--worker-host", link.there, within=within)
        cluster = Serve((), control=control)

        def both_answer() -> bool:
            assert all(process.poll() is None for process in processes), "one has ended, and said why"
            return sum("error" not in one for one in cluster.status()["workers"]) == 2

        until(both_answer)
        client = stack.enter_context(openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="-", max_retries=0))

        def models() -> list[str]:
            with suppress(openai.APIConnectionError):
                return [model.id for model in client.models.list().data]
            return []

        until(lambda: bool(models()))
        body = {"ignore_eos": True, "return_token_ids": True}
        found = [
            client.completions.create(
                model=models()[0],
                prompt=prompt,
                max_tokens=ANSWER_LEN,
                temperature=0,
                extra_body=body,
                timeout=PATIENCE_S,
            )
            for prompt in prompts
        ]
        until(cluster.is_idle)
        workers = cluster.status()["workers"]
    return [answer.choices[0].model_dump()["token_ids"] for answer in found], workers


def remote_answers(link: Link, control: str, prefill: Sequence[str], decode: Sequence[str]) -> list[list[int]]:
    """With the prefill worker on the other host; each prefill is remote."""
    always = ("--disagg-policy", "always")
    found, workers = answers(link, control, ("--role", "decode", *always, *decode), ("--role", "prefill", *prefill))
    (worker,) = (one for one in workers if one["role"] == "decode")
    assert worker["decode"]["places"]["remote"] == len(PROMPTS)
    return found


def own_answers(model: Path, prompts: Sequence[list[int]]) -> list[list[int]]:
    """Of one engine in this process."""
    sampling = SamplingParams(max_tokens=ANSWER_LEN, temperature=0.0, ignore_eos=True, detokenize=False)
    with LLM(model, dtype="float32", device="cpu", num_threads=1) as llm:
        return [list(output.token_ids) for output in llm.generate(list(prompts), sampling)]


@pytest.mark.parametrize("way", [("p2p", "PUT"), ("p2p", "PUT_ASYNC"), ("p2p", "GET"), ("nixl", "PUT")], ids="-".join)
def test_a_prefill_worker_of_another_host_gives_equal_answers(link: Link, control: str, way: tuple[str, str]) -> None:
    flags = ("--engine", "mock", "--transport", way[0], "--send-type", way[1])
    facts = checkpoint_facts(bundled_checkpoint_path())
    expected = [
        mock_generate(prompt, ANSWER_LEN, vocab_size=facts.vocab_size, eos_token_ids=facts.eos_token_ids)
        for prompt in PROMPTS
    ]
    assert remote_answers(link, control, flags, flags) == expected


@pytest.mark.parametrize("transport", ["p2p", "nixl"])
def test_a_prefill_worker_of_two_ranks_on_another_host_gives_equal_answers(
    link: Link, control: str, transport: str
) -> None:
    flags = ("--dtype", "float32", "--num-threads", "1", "--transport", transport)
    expected = own_answers(bundled_checkpoint_path(), PROMPTS)
    assert remote_answers(link, control, (*flags, "--tp", "2"), flags) == expected


def test_ranks_of_a_group_with_spread_experts_on_two_hosts_give_equal_answers(
    link: Link, control: str, tmp_path: Path
) -> None:
    model = tmp_path / "mixtral"
    make_model(model, "mixtral", "tiny", dtype="float32")
    prompts = [prompt[:200] for prompt in PROMPTS]
    flags = (str(model), "--dp", "2", "--ep", "--dtype", "float32", "--num-threads", "1", "--max-model-len", "512")
    flags += ("--insecure", "--dp-address", f"{link.here}:{free_ports(1)[0]}", "--rank-timeout-s", f"{PATIENCE_S:g}")
    found, workers = answers(link, control, (*flags, "--dp-rank", "0"), (*flags, "--dp-rank", "1"), prompts)
    assert found == own_answers(model, prompts)
    assert sorted(worker["dp_rank"] for worker in workers) == [0, 1]
