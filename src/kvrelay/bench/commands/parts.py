"""``kvrelay bench dp``, ``engine``, ``frontend``, ``router``, ``routing`` and ``transfer``: the parts of the system."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import click

from kvrelay.bench.commands.options import FILE, serve_args_option
from kvrelay.cli.options import SettingsSource, json_option, model_argument, settings_options
from kvrelay.config import EngineConfig, RunnerConfig, TransferConfig

SETTINGS = (EngineConfig, RunnerConfig)
ADMISSION = ("max_num_waiting", "kv_watermark")
"""Not to be set: the whole batch is there at once, and nothing of it may be refused."""


@click.command("engine")
@model_argument
@click.option("--num-prompts", default=128, type=click.IntRange(1, 100_000), help="Prompts in the batch.")
@click.option("--input-len", default=128, type=click.IntRange(1), help="Tokens per prompt.")
@click.option("--output-len", default=64, type=click.IntRange(1), help="Tokens per answer.")
@click.option("--runs", default=3, type=click.IntRange(1, 1000), help="Timed passes; the median is reported.")
@click.option("--load-seed", default=0, type=int, help="Seed of the prompts.")
@click.option("--structured", is_flag=True, help="Free and grammar-bound passes in turns; reports the cost.")
@click.option(
    "--beside-one-process", is_flag=True, help="With --tp or --pp: in turns with one process of as many threads."
)
@json_option
@settings_options(*SETTINGS, exclude=ADMISSION)
def bench_engine(
    model: str | None, structured: bool, beside_one_process: bool, as_json: bool, config_file: Path | None, **given: Any
) -> None:
    """Run a batch of random prompts through the engine, in this process, without any server.

    \b
    Example: kvrelay bench engine ./model --num-prompts 128 --input-len 128 --output-len 64
             kvrelay bench engine --tp 2 --num-threads 2 --beside-one-process
    """
    from kvrelay.bench.engine import (
        BatchLoad,
        engine_text,
        run_engine_benchmark,
        run_ranks_benchmark,
        run_structured_benchmark,
    )
    from kvrelay.bench.report.files import print_result
    from kvrelay.launch.models import resolve_model

    load = BatchLoad(*(given.pop(name) for name in ("num_prompts", "input_len", "output_len", "load_seed")))
    num_runs = given.pop("runs")
    source = SettingsSource(SETTINGS, config_file, given)
    runner = source.build(RunnerConfig)
    engine = source.build(EngineConfig, max_num_waiting=load.num_prompts, kv_watermark=0)
    path = resolve_model(model)
    run = run_ranks_benchmark if beside_one_process else run_engine_benchmark
    if structured:
        run = run_structured_benchmark
    report = run(path, runner, engine, load, num_runs)
    settings = {"model": path.name, "runner": dataclasses.asdict(runner), "engine": dataclasses.asdict(engine)}
    print_result(report | settings, engine_text(f"engine, {path.name}, {runner.dtype}", report), as_json)


@click.command("frontend")
@model_argument
@click.option("--workers", default=4, type=click.IntRange(1, 64), help="Mock workers behind the frontend.")
@click.option("--rounds", default=3, type=click.IntRange(1, 100), help="Turns; medians are reported.")
@click.option("--scale", default=1.0, type=click.FloatRange(0.01, 100), help="Multiplies the number of requests.")
@click.option(
    "--url", "urls", multiple=True, help="NAME=URL of another server, measured in the same run; default: none."
)
@click.option("--plain", is_flag=True, help="Send only fields that OpenAI's own API knows, to every server.")
@serve_args_option
@json_option
def bench_frontend(**given: Any) -> None:
    """Load a frontend with mock workers: requests/s, streamed tokens/s, time to the first token, CPU time of the
    process that answers, where its /metrics tell.

    Example: kvrelay bench frontend --workers 4 --rounds 3
    """
    from benchmarks.frontend import measure_frontend

    measure_frontend(given)


@click.command("router")
@click.option("--num-workers", type=click.IntRange(1, 4096), default=64, show_default=True, help="Workers indexed.")
@click.option(
    "--blocks-per-worker", type=click.IntRange(1024), default=2048, show_default=True, help="Blocks that each holds."
)
@click.option("--repeats", type=click.IntRange(10), default=1000, show_default=True, help="Calls per figure.")
@click.option(
    "--growth/--no-growth", default=True, show_default=True, help="Measure 8 to 1,024 workers and more blocks."
)
@click.option(
    "--max-blocks",
    type=click.IntRange(1),
    default=1_000_000,
    show_default=True,
    help="Most blocks of the growth table.",
)
@click.option(
    "--trace", "traces", type=FILE, multiple=True, help="Replay this Mooncake trace under every policy; default: none."
)
@click.option("--trace-workers", type=click.IntRange(1), default=16, show_default=True, help="Simulated workers.")
@click.option(
    "--cache-blocks", type=click.IntRange(1), default=2500, show_default=True, help="Their caches, in 512-token blocks."
)
@click.option("--trace-limit", type=click.IntRange(1), help="Replay only so many requests; default: none.")
@click.option("--time-scale", type=float, default=1.0, show_default=True, help="2: requests arrive twice as fast.")
@click.option(
    "--peer-python", type=FILE, help="An interpreter with ai-dynamo-runtime: measure its index too; default: none."
)
@json_option
def bench_router(as_json: bool, **given: Any) -> None:
    """How fast the router hashes, looks up, decides and takes in events, and how well its policies place a trace.

    \b
    Example: kvrelay bench router --trace conversation.jsonl --max-blocks 10000000
    """
    from benchmarks.router import measure_router
    from benchmarks.router_text import router_text

    from kvrelay.bench.report.files import print_result

    benchmark = measure_router(given)
    print_result(benchmark, router_text(benchmark), as_json)


@click.command("routing")
@model_argument
@click.option("--engine", default="mock", type=click.Choice(["mock", "torch"]), help="Engine; the defaults follow it.")
@click.option("--workers", type=click.IntRange(1, 64), help="Aggregated workers; default: 4 (torch: 2).")
@click.option("--policies", default="kv,round-robin", show_default=True, help="Policies, the first one is compared.")
@click.option("--pools", default="1.6,6", show_default=True, help="All KV pools over what all system prompts take.")
@click.option("--groups", type=click.IntRange(1), help="System prompts; default: 16 (torch: 8).")
@click.option("--per-group", type=click.IntRange(1), help="Prompts that share one; default: 64 (torch: 24).")
@click.option("--system", type=click.IntRange(1), help="Tokens of a system prompt; default: 2000 (torch: 1024).")
@click.option("--rate", type=click.FloatRange(0.01), help="Requests per second; default: 20 (torch: 8).")
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(1, 100), help="Turns; medians are shown.")
@serve_args_option
@json_option
def bench_routing(**given: Any) -> None:
    """Compare routing policies on a running cluster: time to first token, hit ratio, imbalance.

    Example: kvrelay bench routing --policies kv,round-robin,least-loaded --rounds 1
    """
    from benchmarks.routing import measure_routing

    measure_routing(given)


@click.command("burst")
@model_argument
@click.option("--engine", default="mock", type=click.Choice(["mock", "torch"]), help="Engine of the workers.")
@click.option("--num-prompts", default=200, show_default=True, type=click.IntRange(1, 10_000), help="Long prompts.")
@click.option("--prompt", default=8000, show_default=True, type=click.IntRange(1), help="Tokens of a long prompt.")
@click.option("--output", default=8, show_default=True, type=click.IntRange(1), help="Tokens of its answer.")
@click.option("--chat-prompt", default=30, show_default=True, type=click.IntRange(1), help="Tokens of a chat.")
@click.option("--chat-output", default=16, show_default=True, type=click.IntRange(1), help="Tokens of its answer.")
@click.option("--chat-rate", default=4.0, show_default=True, type=click.FloatRange(0.01), help="Chats per second.")
@click.option("--chat-s", default=24.0, show_default=True, type=click.FloatRange(0.01), help="Seconds of chats.")
@click.option("--rounds", default=1, show_default=True, type=click.IntRange(1, 100), help="Turns; medians are shown.")
@click.option("--drain", default=300.0, show_default=True, type=click.FloatRange(1), help="Seconds to end the burst.")
@click.option(
    "--variant",
    "variants",
    multiple=True,
    metavar="NAME=ARGS",
    help="1P1D with more arguments; repeatable; default: none.",
)
@click.option(
    "--case", "cases", multiple=True, metavar="NAME=COMMAND", help="Another server; repeatable; default: none."
)
@click.option("--only-given", is_flag=True, help="Leave out the built-in cases.")
@click.option("--warm", is_flag=True, help="Streams whose prefix one of two workers holds, by routing policy.")
@click.option("--warm-streams", default=16, show_default=True, type=click.IntRange(1, 1000), help="--warm: streams.")
@click.option("--warm-output", default=400, show_default=True, type=click.IntRange(1), help="--warm: tokens of each.")
@click.option("--warm-prefix", default=2000, show_default=True, type=click.IntRange(1), help="--warm: prefix tokens.")
@serve_args_option
@json_option
def bench_burst(**given: Any) -> None:
    """A burst of long prompts while chats arrive: the chats' first tokens, and the last long prompt's.

    With --warm: a burst of streams to two workers, one of which holds their prefix; the time to the last token.

    \b
    Example: kvrelay bench burst --rounds 3 --variant 'long queue=--max-prefill-queue-size 1000'
    """
    if given["warm"]:
        from benchmarks.warm_burst import measure_warm_burst

        measure_warm_burst(given)
        return
    from benchmarks.burst import measure_burst

    measure_burst(given)


BOUNDS = (16, 32, 64, 96, 144)
"""Of communicators per worker."""


@click.command("transfer")
@click.option("--total-mib", default=64, type=click.IntRange(8, 16384), help="MiB moved per round.")
@click.option("--rounds", default=7, type=click.IntRange(1, 1000), help="Rounds; the median is reported.")
@click.option("--beside-compute", is_flag=True, help="What hand-offs cost first tokens and decode steps, instead.")
@click.option("--stream-mib-s", default=256, type=click.IntRange(1, 65536), help="KV that streams in, MiB per second.")
@click.option("--peers", is_flag=True, help="p2p: costs per peer, and contacts among 96 P and 144 D, instead.")
@json_option
@settings_options(TransferConfig, exclude=("kv_checksums",))
def bench_transfer(
    total_mib: int,
    rounds: int,
    beside_compute: bool,
    stream_mib_s: int,
    peers: bool,
    as_json: bool,
    config_file: Path | None,
    **flags: object,
) -> None:
    """Read and write a pool of another process on this machine, in pieces of several sizes, beside a plain memcpy.

    With --transport p2p: its three send types beside nixl, shm and raw gloo, in turns. With --beside-compute: the first
    token of a long prompt with a hand-off and without, and decode steps while KV streams in and while none does.

    \b
    Example: kvrelay bench transfer --total-mib 256
             kvrelay bench transfer --beside-compute --transport shm --rounds 15
    """
    from kvrelay.bench.report.files import print_result
    from kvrelay.bench.transfer import run_transfer_benchmark, transfer_text

    config = SettingsSource((TransferConfig,), config_file, flags).build(TransferConfig)
    if peers:
        _print_peers(as_json)
        return
    if beside_compute:
        _print_beside_compute(config, rounds, stream_mib_s, as_json)
        return
    if config.transport == "p2p":
        # Imported only then: the module loads torch.
        from benchmarks.p2p import p2p_text, run_p2p_benchmark

        compared = run_p2p_benchmark(config, total_bytes=total_mib * 2**20, num_rounds=rounds)
        print_result(compared, p2p_text(compared), as_json)
        return
    result = run_transfer_benchmark(config, total_bytes=total_mib * 2**20, num_rounds=rounds)
    print_result(result, transfer_text(result), as_json)


@click.command("dp")
@click.option("--ranks", default="2,8,64", show_default=True, help="Sizes of the simulated groups.")
@click.option(
    "--duration", default=60.0, type=click.FloatRange(1.0), help="Simulated seconds in which requests arrive."
)
@click.option("--rate", default=2.0, type=click.FloatRange(0.01), help="Requests per second and rank, within a burst.")
@click.option("--output-len", default=32, type=click.IntRange(1), help="Steps of a request.")
@click.option("--step-ms", default=10.0, type=click.FloatRange(0.01), help="Milliseconds of a step.")
@click.option("--delay-ms", default=0.2, type=click.FloatRange(0.0), help="Average delay of a message.")
@click.option("--burst", default=1.0, type=click.FloatRange(0.01), help="Seconds of a burst.")
@click.option("--gap", default=2.0, type=click.FloatRange(0.0), help="Seconds between bursts.")
@click.option("--wakes", default=500, type=click.IntRange(1), help="Wake-ups measured with each carrier.")
@click.option("--pause-ms", default=10.0, type=click.FloatRange(0.0), help="Sleep before each wake-up.")
@click.option("--load-seed", default=0, type=int, help="Seed of the arrivals and delays.")
@click.option(
    "--group", "group_size", type=click.IntRange(2, 8), help="Measure a real group of this size instead; default: none."
)
@click.option("--requests", default=200, type=click.IntRange(1), help="Of each pattern, with --group.")
@click.option("--faults", is_flag=True, help="With --group: kill and stop its processes; how soon it has ended.")
@click.option("--rank-timeout-s", default=3.0, type=click.FloatRange(0.2), help="Of the group, with --faults.")
@click.option("--idle", "idle_s", default=10.0, type=click.FloatRange(0.1), help="Seconds of idleness, with --group.")
@json_option
def bench_dp(as_json: bool, **given: Any) -> None:
    """Data-parallel groups: messages and dummy steps by lookahead, beside waves (simulated); wake-up of an idle group.

    With --group: a real group with spread experts under load, every answer checked; its CPU time when idle. Ends with 1
    if an answer was wrong.

    \b
    Example: kvrelay bench dp --ranks 2,8,64
             kvrelay bench dp --group 2
             kvrelay bench dp --group 2 --faults
    """
    from benchmarks.dp import dp_text, run_dp_benchmark

    from kvrelay.bench.parts.dp_simulation import Load
    from kvrelay.bench.report.files import print_result

    if given["faults"] and given["group_size"]:
        _print_group_faults(given["group_size"], given["rank_timeout_s"], as_json)
        return
    if given["group_size"]:
        _print_group(given["group_size"], given["requests"], given["idle_s"], as_json)
        return
    sizes = [int(word) for word in given["ranks"].split(",") if word.strip().isdigit() and int(word) > 1]
    if not sizes:
        raise click.UsageError("--ranks: give numbers above 1, with commas between them")
    loads = [
        Load(
            num_ranks=size,
            duration_s=given["duration"],
            rate=given["rate"] * size,
            num_steps=given["output_len"],
            step_s=given["step_ms"] / 1e3,
            delay_s=given["delay_ms"] / 1e3,
            burst_s=given["burst"],
            gap_s=given["gap"],
            seed=given["load_seed"],
        )
        for size in sizes
    ]
    report = run_dp_benchmark(loads, given["wakes"], given["pause_ms"] / 1e3)
    print_result(report, dp_text(report), as_json)


def _print_group(size: int, num_requests: int, idle_s: float, as_json: bool) -> None:
    from benchmarks.dp_group import group_text, run_group_benchmark

    from kvrelay.bench.report.files import print_result
    from kvrelay.cli.processes import run_async

    report = run_async(run_group_benchmark(size, num_requests, idle_s))
    print_result(report, group_text(report), as_json)
    if any(row.num_right < row.num_requests for row in report.rows):
        sys.exit(1)


def _print_group_faults(size: int, rank_timeout_s: float, as_json: bool) -> None:
    from benchmarks.dp_faults import faults_text, run_fault_benchmark

    from kvrelay.bench.report.files import print_result
    from kvrelay.cli.processes import run_async

    report = run_async(run_fault_benchmark(size, rank_timeout_s))
    print_result(report, faults_text(report), as_json)


def _print_beside_compute(config: TransferConfig, num_turns: int, mib_per_s: int, as_json: bool) -> None:
    from benchmarks.beside_compute import beside_text, run_beside_compute

    from kvrelay.bench.report.files import print_result
    from kvrelay.data import bundled_checkpoint_path

    report = run_beside_compute(bundled_checkpoint_path(), config, num_turns, mib_per_s)
    print_result(report, beside_text(report), as_json)


def _print_peers(as_json: bool) -> None:
    from benchmarks.p2p_peers import peers_text, run_peers_benchmark

    from kvrelay.bench.parts.p2p_contacts import contacts_text, simulate_contacts
    from kvrelay.bench.report.files import print_result

    costs = run_peers_benchmark()
    contacts = [simulate_contacts(96, 144, bound, stickiness=share) for share in (0.0, 0.5) for bound in BOUNDS]
    text = f"{peers_text(costs)}\n\n{contacts_text(contacts, 96, 144)}"
    print_result({"peers": costs, "contacts": contacts}, text, as_json)
