"""``kvrelay bench frontend``: what the frontend alone can carry, in front of mock engines that take no time.

Other servers can be measured in the same run by URL (``--url dynamo=http://127.0.0.1:8001``), turn by turn.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import click

from kvrelay.bench.commands.own_cluster import medians, serve_args_option, serve_command
from kvrelay.cli.options import json_option, model_argument

LOADS = (
    # name, prompt tokens, output tokens, requests at once, requests per turn
    ("requests", 32, 8, 64, 2000),
    ("streams", 32, 64, 64, 1000),
    ("long prompts", 2460, 8, 16, 400),
    ("one at a time", 32, 1, 1, 300),
)


@click.command("frontend")
@model_argument
@click.option("--workers", default=4, type=click.IntRange(1, 64), help="Mock workers behind the frontend.")
@click.option("--rounds", default=3, type=click.IntRange(1, 100), help="Turns; medians are reported.")
@click.option("--scale", default=1.0, type=click.FloatRange(0.01, 100), help="Multiplies the number of requests.")
@click.option("--url", "urls", multiple=True, help="NAME=URL of another server, measured in the same run.")
@click.option("--plain", is_flag=True, help="Send only fields that OpenAI's own API knows, to every server.")
@serve_args_option
@json_option
def bench_frontend(
    model: str | None,
    workers: int,
    rounds: int,
    scale: float,
    urls: tuple[str, ...],
    plain: bool,
    serve_args: str,
    as_json: bool,
) -> None:
    """Load a frontend with mock workers: requests/s, streamed tokens/s, time to the first token, CPU time of the
    process that answers, where its /metrics tell.

    Example: kvrelay bench frontend --workers 4 --rounds 3
    """
    import msgspec

    from kvrelay.bench.cases import Case, check_names, parse_case
    from kvrelay.bench.serving import run_on_loop

    own = serve_command(model, f"--engine mock --speedup-ratio 0 --prefill 0 --decode {workers}", serve_args)
    cases = (Case("kvrelay", command=own), *(parse_case(text) for text in urls))
    check_names(cases)
    turns = [
        {"case": case.name, **run_on_loop(_turn(case, scale, seed, plain))} for seed in range(rounds) for case in cases
    ]
    report: dict[str, Any] = {"workers": workers, "rounds": rounds, "cases": _summarise(turns)}
    if as_json:
        click.echo(msgspec.json.encode(report).decode())
    else:
        _print(report["cases"])


async def _turn(case: Any, scale: float, seed: int, plain: bool) -> dict[str, dict[str, float]]:
    """All loads against one server."""
    from kvrelay.bench.cases import CaseTimes, running

    with tempfile.TemporaryDirectory() as folder:
        async with running(case, Path(folder), CaseTimes()) as target:
            return {
                name: await _measure(target, name, (prompt, output), (at_once, round(count * scale)), seed, plain)
                for name, prompt, output, at_once, count in LOADS
            }


async def _measure(
    target: Any, name: str, lengths: tuple[int, int], requests: tuple[int, int], seed: int, plain: bool
) -> dict[str, float]:
    """One load. ``lengths``: prompt and answer in tokens; ``requests``: at once and in all."""
    from kvrelay.bench.client.payload import BodyOptions
    from kvrelay.bench.client.service import cpu_seconds
    from kvrelay.bench.load.lengths import Length
    from kvrelay.bench.load.mix import ClassSpec, Dataset
    from kvrelay.bench.progress import ProgressBar
    from kvrelay.bench.serving import ServeOptions, require_success, run_serve

    prompt, output = (Length("fixed", length) for length in lengths)
    at_once, count = requests
    dataset = Dataset(prompt=prompt, output=output, vocab_size=400)
    spec = ClassSpec(name.replace(" ", "_"), dataset, max_concurrency=at_once, num_requests=max(at_once, count))
    cpu_before_s = await cpu_seconds(target)
    body = BodyOptions(model="", plain=plain)
    options = ServeOptions(target=target, classes=(spec,), body=body, seed=seed, retokenize=False)
    report = (await run_serve(options, ProgressBar(None))).report
    cpu_after_s = await cpu_seconds(target)
    require_success(report)
    total = report.total
    return {
        "requests_per_s": total.requests_per_s,
        "output_tokens_per_s": total.output_tokens_per_s,
        "ttft_p50_s": total.ttft_s.median if total.ttft_s else 0.0,
        "ttft_p99_s": total.ttft_s.p99 if total.ttft_s else 0.0,
        "failed": float(total.failed),
        "cpu_per_request_s": (cpu_after_s - cpu_before_s) / total.successful,
    }


def _summarise(turns: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """Medians of each case and load."""
    turns_of: dict[str, list[dict[str, Any]]] = {}
    for turn in turns:
        turns_of.setdefault(turn["case"], []).append(turn)
    return {name: {load: medians([turn[load] for turn in own]) for load, *_ in LOADS} for name, own in turns_of.items()}


def _print(cases: dict[str, dict[str, dict[str, float]]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title="frontend with mock workers, medians; TTFT and CPU time a request in ms",
        title_justify="left",
        box=box.SIMPLE,
        padding=(0, 1, 0, 0),
    )
    for column in ("server", "load", "req/s", "tok/s", "TTFT p50", "p99", "CPU", "failed"):
        table.add_column(column, justify="left" if column in ("server", "load") else "right", no_wrap=True)
    for name, loads in cases.items():
        for load, prompt, output, at_once, _ in LOADS:
            figures = loads[load]
            table.add_row(
                name,
                f"{prompt}/{output}, {at_once} at once",
                f"{figures['requests_per_s']:,.0f}",
                f"{figures['output_tokens_per_s']:,.0f}",
                f"{figures['ttft_p50_s'] * 1e3:.2f}",
                f"{figures['ttft_p99_s'] * 1e3:.2f}",
                f"{figures['cpu_per_request_s'] * 1e3:.2f}",
                f"{figures['failed']:.0f}",
            )
    Console().print(table)
