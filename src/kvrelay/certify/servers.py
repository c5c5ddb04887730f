"""Servers that certify asks: clusters that it starts, and servers that run already. And one greedy question.

Prompts are token ids; answers come back with token ids and logprobs where the server tells them, else as text.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import psutil

from kvrelay.bench.client.connection import ConnectionPool, parse_target
from kvrelay.bench.client.service import answered_within, ask, first_model
from kvrelay.bench.client.stream import BodyOptions, StreamEndpoint, StreamRecorder, encode_body, run_stream
from kvrelay.bench.errors import BadResponseError
from kvrelay.bench.load.request import LoadRequest
from kvrelay.bench.report.metrics import Outcome, RequestRecord
from kvrelay.config import ControlConfig, WorkerRole
from kvrelay.control.base import Keys
from kvrelay.errors import FatalError, KvrelayError
from kvrelay.launch.admin import DISAGG_PREFIX, change_role, clear_caches, cluster_status
from kvrelay.launch.children import kvrelay_command, start_child, stop_children
from kvrelay.launch.clusters import RunningCluster, running_clusters
from kvrelay.launch.request_plane import connected

START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 60.0
ANSWER_TIMEOUT_S = 600.0
POLL_S = 0.1
HEAL_S = 120.0
LOG_TAIL = 800
RANK_MODULE = "kvrelay.executors.torch.parallel"

Prompt = tuple[int, ...]


class Answer(msgspec.Struct, frozen=True):
    """A greedy answer. ``tokens`` are ids, or pieces of text of a server that tells no ids. ``logprobs`` has one entry
    per token, and so has ``tops``, the best two tokens' logprobs by their text; both are empty if the server tells
    none."""

    tokens: tuple[str, ...]
    logprobs: tuple[float, ...] = ()
    tops: tuple[dict[str, float], ...] = ()


class _Logprobs(msgspec.Struct):
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] | None = None


class _Choice(msgspec.Struct):
    text: str = ""
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]


class Server:
    """One server, by its OpenAI API. An async context manager. ``order``: the header x-kvrelay-order."""

    def __init__(self, url: str, api_key: str | None = None, order: str | None = None) -> None:
        self.url = url
        self._pool = ConnectionPool(parse_target(url, api_key, order))
        self.model = ""
        self._is_plain = False
        """It refuses fields that OpenAI's own API does not have."""

    async def __aenter__(self) -> Server:
        self.model = await first_model(self._pool)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._pool.close()

    async def answer(self, prompt: Prompt, num_tokens: int) -> Answer:
        """Raises BenchError."""
        body: dict[str, object] = {"model": self.model, "prompt": list(prompt), "max_tokens": num_tokens}
        body |= {"temperature": 0, "logprobs": 2}
        extra = {} if self._is_plain else {"return_token_ids": True, "ignore_eos": True}
        try:
            completion = await ask(self._pool, "/v1/completions", _Completion, {**body, **extra}, ANSWER_TIMEOUT_S)
        except BadResponseError as exc:
            if self._is_plain or "HTTP 4" not in exc.message:
                raise
            self._is_plain = True
            return await self.answer(prompt, num_tokens)
        if not completion.choices:
            raise BadResponseError(f"{self.url} answered without a choice")
        return _read(completion.choices[0])

    async def answers(self, prompts: Sequence[Prompt], num_tokens: int, concurrency: int = 1) -> list[Answer]:
        """In the order of the prompts, ``concurrency`` at a time. Raises BenchError."""
        slots = asyncio.Semaphore(concurrency)

        async def one(prompt: Prompt) -> Answer:
            async with slots:
                return await self.answer(prompt, num_tokens)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(prompt)) for prompt in prompts]
        return [task.result() for task in tasks]

    async def stream(self, prompt: Prompt, num_tokens: int) -> RequestRecord:
        """A streamed answer, with the times of its tokens. Raises BadResponseError if it failed."""
        options = BodyOptions(self.model, plain=self._is_plain)
        recorder = StreamRecorder("certify", len(prompt))
        body = encode_body(LoadRequest(prompt, num_tokens, len(prompt)), options)
        async with answered_within(ANSWER_TIMEOUT_S, self.url):
            record = await run_stream(self._pool, StreamEndpoint.COMPLETIONS, body, recorder)
        if record.outcome is not Outcome.OK or record.ttft_s is None:
            raise BadResponseError(f"{self.url}: {record.error or 'an answer without a token'}")
        return record


def _read(choice: _Choice) -> Answer:
    logprobs = choice.logprobs or _Logprobs()
    texts = tuple(logprobs.tokens)
    values = tuple(value if value is not None else 0.0 for value in logprobs.token_logprobs)
    tops = tuple(top or {} for top in logprobs.top_logprobs or ())
    tokens = tuple(map(str, choice.token_ids)) if choice.token_ids else texts or tuple(choice.text)
    if len(texts) != len(tokens) or len(values) != len(tokens):
        return Answer(tokens)
    return Answer(tokens, values, tops if len(tops) == len(tokens) else ())


# -- clusters that certify starts -------------------------------------------------------------------------------------


class Cluster:
    """A ``kvrelay serve`` that is ours, and operators' commands to it."""

    def __init__(self, pid: int, found: RunningCluster) -> None:
        self.pid, self.url = pid, found.url
        self.control = ControlConfig(control=found.control, discovery=found.discovery, namespace=found.namespace)

    async def workers(self, *, check: bool = False) -> list[dict[str, Any]]:
        """The status of each worker that answers; none if the control plane does not."""
        try:
            report = await cluster_status(replace(self.control, connect_timeout_s=1.0), check=check)
        except KvrelayError:
            return []
        return [status for status in report["workers"] if "error" not in status]

    async def worker(self, role: str) -> dict[str, Any]:
        """Raises FatalError if none of this role answers."""
        for status in await self.workers():
            if status["role"] == role:
                return status
        raise FatalError(f"no {role} worker answers")

    async def set(self, **settings: object) -> None:
        """Settings of placement, in force when this returns. Raises FatalError, ControlUnavailableError."""
        keys = Keys(self.control.namespace)
        async with connected(self.control) as control:
            for name, value in settings.items():
                place = keys.config_value(f"{DISAGG_PREFIX}{name}")
                await control.discovery.put(place, json.dumps(value).encode())

        def is_in_force(workers: list[dict[str, Any]]) -> bool:
            return bool(workers) and all(
                status["disagg"][name] == value for status in workers for name, value in settings.items()
            )

        await self.until(is_in_force, 30.0, f"the workers did not take over {settings}")

    async def forget(self) -> None:
        """Each worker forgets its prefixes: the next prompts are handed over whole. One that was killed a moment ago is
        still in discovery. Raises KvrelayError."""
        await clear_caches(self.control, skips_gone=True)

    async def change_role(self, old: WorkerRole, new: WorkerRole) -> None:
        """Let a worker of role ``old`` go on as ``new``; it has that role when this returns. Raises KvrelayError."""
        changed = (await self.worker(old.value))["worker_id"]
        await change_role(self.control, changed, new, force=False)

        def has_changed(workers: list[dict[str, Any]]) -> bool:
            return any(one["worker_id"] == changed and one["role"] == new.value for one in workers)

        await self.until(has_changed, 30.0, f"{changed} did not become a {new.value} worker")

    async def until(
        self,
        condition: Callable[[list[dict[str, Any]]], bool],
        timeout_s: float,
        complaint: str,
        *,
        check: bool = False,
    ) -> float:
        """Seconds until the workers' status is so. Raises FatalError with the complaint."""
        began_s = time.monotonic()
        while not condition(await self.workers(check=check)):
            if time.monotonic() - began_s > timeout_s:
                raise FatalError(f"{complaint} within {timeout_s:g} s")
            await asyncio.sleep(POLL_S)
        return time.monotonic() - began_s

    async def until_idle(self, num_workers: int, timeout_s: float = HEAL_S) -> float:
        """Seconds until all workers are there and no block is in use. Raises FatalError."""
        return await self.until(
            lambda workers: len(workers) >= num_workers and blocks_in_use(workers) == 0,
            timeout_s,
            f"not all of {num_workers} workers were there with all blocks free",
            check=True,
        )

    def control_pid(self) -> int | None:
        """Of its NATS server, if it has started one."""
        return child_pid(self.pid, "nats-server")


def child_pid(pid: int, word: str) -> int | None:
    """Of a child of this process that has ``word`` in its command line, such as RANK_MODULE."""
    with suppress(psutil.Error):
        for process in psutil.Process(pid).children():
            with suppress(psutil.Error):  # it has just ended; the others count
                if any(word in each for each in process.cmdline()):
                    return int(process.pid)
    return None


def blocks_in_use(workers: Sequence[dict[str, Any]]) -> int:
    """In pools and holding areas; the status must have been asked with ``check``. Unknown counts as in use."""
    return sum(
        status.get("integrity", {}).get("blocks_in_use", 1)
        + (status.get("kv_holding") or {}).get("num_blocks_in_use", 0)
        for status in workers
    )


class NotStartedError(FatalError):
    """``kvrelay serve`` ended before it was ready. ``output``: all that it printed. ``why``: its first complaint,
    in its own words; without a complaint, the message."""

    def __init__(self, flags: Sequence[str], output: str) -> None:
        printed = " ".join(output.split())
        super().__init__(f"kvrelay serve {' '.join(flags)} did not start: {printed[-LOG_TAIL:]}")
        said = f" {printed}".split(" kvrelay: ")
        self.why = said[1][:LOG_TAIL] if len(said) > 1 else self.message


@asynccontextmanager
async def running_cluster(flags: Sequence[str], log: Path, ucx_log: Path | None = None) -> AsyncIterator[Cluster]:
    """``kvrelay serve`` with these flags, ready; its end ends it. ``ucx_log``: a pattern for what UCX of each process
    says that it used. Raises NotStartedError."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    if ucx_log is not None:
        environment |= {"UCX_PROTO_INFO": "used", "UCX_LOG_FILE": str(ucx_log)}
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        limit = ("--start-timeout", str(START_TIMEOUT_S))
        command = kvrelay_command("serve", *flags, "--port", "0", "--planner", "off", *limit)
        child = start_child("serve", command, output=output, environment=environment)
        try:
            deadline_s = time.monotonic() + START_TIMEOUT_S + STOP_TIMEOUT_S
            while (found := _running(child.pid)) is None:
                if child.exit_code is not None or time.monotonic() > deadline_s:
                    raise NotStartedError(flags, _printed(log))
                await asyncio.sleep(POLL_S)
            yield Cluster(child.pid, found)
        finally:
            await asyncio.shield(stop_children([child], STOP_TIMEOUT_S))


def _printed(log: Path) -> str:
    return log.read_text(errors="replace")


def _running(pid: int) -> RunningCluster | None:
    return next((cluster for cluster in running_clusters() if cluster.pid == pid), None)


def tell_process(pid: int, number: signal.Signals) -> None:
    """Nothing if it has ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)
