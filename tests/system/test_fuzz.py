"""Every listening port takes what nobody meant to send, and nothing crashes, hangs or grows.

Longer: ``python -m tests.system.test_fuzz --frames 100000 --seed 7``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest
from tests.patience import PATIENCE_S, until
from tests.system.fuzzing import CONNECT_TIMEOUT_S, PICKLE, fuzz_control, fuzz_http, fuzz_request_plane, known_callers
from tests.system.openapi_values import SchemaValues
from tests.system.serving import Serve, by_threshold, kvrelay
from tests.system.streams import CONFIG, EOS_IDS, prompt

import kvrelay as package
from kvrelay.config import ControlConfig
from kvrelay.control import connect_control
from kvrelay.control.base import Keys
from kvrelay.executors.mock import mock_generate
from kvrelay.launch.worker_calls import list_workers

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

NUM_FRAMES, NUM_FRAMES_OF_MATRIX = 6_000, 20_000
NUM_BODIES = 24
MAX_GROWTH_BYTES = 48 << 20
MAX_NEW_DESCRIPTORS = 40
MAX_LOG_BYTES = 100_000
SERVE = ("--engine", "mock", "--prefill", "1", "--decode", "1", "--speedup-ratio", "0", *by_threshold(64))


@pytest.fixture(scope="module")
def server() -> Iterator[Serve]:
    with Serve(SERVE) as running:
        yield running
    assert running.process.returncode == 0, running.output
    assert "Traceback" not in running.output
    assert "restart in" not in running.output
    assert "killed" not in running.output
    assert len(running.output) < MAX_LOG_BYTES


@dataclass(frozen=True)
class Footprint:
    """Memory and descriptors of every process of the cluster, by pid."""

    rss_bytes: dict[int, int]
    descriptors: dict[int, int]

    @classmethod
    def of(cls, server: Serve) -> Footprint:
        processes = psutil.Process(server.process.pid).children(recursive=True)
        return cls(
            {process.pid: process.memory_info().rss for process in processes},
            {process.pid: process.num_fds() for process in processes},
        )


def answers_right(server: Serve) -> bool:
    """Long prompts (prefilled remotely) and short ones give the tokens that they must."""
    for number in (0, 5):
        body = {"prompt": prompt(number), "max_tokens": 20, "temperature": 0, "return_token_ids": True}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S)
        assert answer.status_code == 200, answer.text
        wanted = mock_generate(prompt(number), 20, vocab_size=CONFIG["vocab_size"], eos_token_ids=EOS_IDS)
        assert answer.json()["choices"][0]["token_ids"] == wanted
    return True


def assert_well(server: Serve) -> None:
    """Every worker answers, has whole pools and nothing in use; the frontend answers rightly."""
    assert answers_right(server)
    until(server.is_idle)


def attack(server: Serve, num_frames: int, seed: int) -> None:
    """Half of the frames to the request planes, a third to the control plane, the rest to HTTP; all at once. The
    senders have credentials: without, none of their frames would get further than a handshake."""
    asyncio.run(attack_with_credentials(server, num_frames, seed))


async def attack_with_credentials(server: Serve, num_frames: int, seed: int) -> None:
    config = ControlConfig(control=server.control, connect_timeout_s=PATIENCE_S)
    keys = Keys(config.namespace)
    control = await connect_control(config)
    try:
        workers = await list_workers(control, keys)
        async with known_callers(control, keys, workers[0]) as callers, asyncio.TaskGroup() as senders:
            share = num_frames // (2 * len(workers))
            for n, worker in enumerate(workers):
                senders.create_task(asyncio.to_thread(fuzz_request_plane, worker, callers, share, seed + n))
                count = num_frames // (3 * len(workers))
                fuzzing = fuzz_control(server.control, config.namespace, worker, count, seed + n)
                senders.create_task(asyncio.to_thread(asyncio.run, fuzzing))
            senders.create_task(asyncio.to_thread(fuzz_http, server.url, num_frames // 6, seed))
    finally:
        await control.close()


@pytest.mark.parametrize("num_frames", [NUM_FRAMES, pytest.param(NUM_FRAMES_OF_MATRIX, marks=pytest.mark.matrix)])
def test_random_and_mutated_frames(server, num_frames: int) -> None:
    attack(server, 2000, seed=1)
    assert_well(server)
    before = Footprint.of(server)
    attack(server, num_frames - 2000, seed=100)
    assert_well(server)
    check_growth(before, Footprint.of(server))


def check_growth(before: Footprint, after: Footprint) -> None:
    assert after.rss_bytes.keys() == before.rss_bytes.keys(), "a process ended"
    grown = {pid: after.rss_bytes[pid] - size for pid, size in before.rss_bytes.items()}
    assert max(grown.values()) < MAX_GROWTH_BYTES, grown
    opened = {pid: after.descriptors[pid] - count for pid, count in before.descriptors.items()}
    assert max(opened.values()) < MAX_NEW_DESCRIPTORS, opened


def test_what_the_openapi_document_allows_is_never_an_internal_error(server):
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
        document = client.get("/openapi.json").json()
        values = SchemaValues(document, seed=3)
        for path, methods in document["paths"].items():
            if "post" not in methods:
                continue
            statuses = set(methods["post"]["responses"])
            schema = methods["post"]["requestBody"]["content"]["application/json"]["schema"]
            for _ in range(NUM_BODIES):
                body = values.make(schema)
                answer = client.post(path, json=body)
                assert str(answer.status_code) in statuses, (path, body, answer.text)
                if answer.status_code != 200:
                    # Anthropic's API has errors of its own shape.
                    extra = set() if path.startswith("/v1/messages") else {"param", "code"}
                    assert set(answer.json()["error"]) == {"message", "type"} | extra
    assert_well(server)


def listening_ports(server: Serve) -> set[tuple[str, int]]:
    processes = psutil.Process(server.process.pid).children(recursive=True)
    connections = [connection for process in processes for connection in process.net_connections("inet")]
    return {tuple(c.laddr) for c in connections if c.status == psutil.CONN_LISTEN}


def test_everything_listens_on_loopback(server):
    addresses = {host for host, _ in listening_ports(server)}
    assert addresses == {"127.0.0.1"}


def test_a_pickle_to_every_port(server):
    ports = listening_ports(server)
    assert len(ports) >= 4
    for address in ports:
        with socket.create_connection(address, timeout=CONNECT_TIMEOUT_S) as connection:
            connection.sendall(PICKLE)
            connection.settimeout(0.1)
            try:
                connection.recv(100)
            except OSError:
                pass
    assert_well(server)


def test_nobody_joins_without_the_token(server):
    login, address = re.fullmatch(r"nats://(\w+)@(\S+)", server.control).groups()
    refused = kvrelay("status", "--control", f"nats://{address}")
    assert refused.returncode == 69
    assert "uthorization" in refused.stderr
    processes = psutil.Process(server.process.pid).children(recursive=True)
    assert processes
    assert not [word for process in processes for word in process.cmdline() if login in word]


def test_the_source_unpickles_nothing():
    banned = re.compile(r"\b(pickle|cPickle|dill|cloudpickle|marshal|shelve|deserialize_descs)\b|torch\.load\b")
    allowed = re.compile(r"[Nn]othing is pickled")
    found = []
    for path in Path(package.__file__).parent.rglob("*.py"):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if banned.search(allowed.sub("", line)):
                found.append(f"{path.name}:{number}: {line.strip()}")
    assert found == []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frames", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with Serve(SERVE) as server:
        attack(server, 2000, arguments.seed)
        assert_well(server)
        before, start_s = Footprint.of(server), time.monotonic()
        attack(server, arguments.frames, arguments.seed + 1000)
        elapsed_s = time.monotonic() - start_s
        assert_well(server)
        after = Footprint.of(server)
    check_growth(before, after)
    assert "Traceback" not in server.output, server.output
    growth = max(after.rss_bytes[pid] - size for pid, size in before.rss_bytes.items())
    print(json.dumps({"frames": arguments.frames, "seconds": round(elapsed_s, 1), "most_grown_bytes": growth}))


if __name__ == "__main__":
    main()
