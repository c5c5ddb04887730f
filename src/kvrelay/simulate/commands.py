"""``kvrelay simulate``: a load on a cluster that need not exist, in virtual time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvrelay.cli.help import GroupedCommand
from kvrelay.cli.main import LazyGroup
from kvrelay.cli.options import SettingsSource, json_option, settings_options
from kvrelay.config import DisaggConfig, EngineConfig, RouterConfig, TiersConfig
from kvrelay.core.handoff import OrderPolicy
from kvrelay.errors import IntegrityError
from kvrelay.simulate.shipped import costs_help

if TYPE_CHECKING:
    from kvrelay.simulate.costs import Costs

SETTINGS = (EngineConfig, DisaggConfig, RouterConfig, TiersConfig)
COUNTS = ("prefill", "decode", "both", "frontends", "kv_buffer_size", "workers_per_host")
"""Options that are fields of ClusterSpec."""
COMMANDS = {"calibrate": ("kvrelay.simulate.calibrate_command:calibrate_command", "Fit costs from a running cluster.")}
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


class SimulateGroup(GroupedCommand, LazyGroup):
    """Simulates by itself, and has further commands."""


@click.group("simulate", cls=SimulateGroup, entries=COMMANDS, invoke_without_command=True)
@click.option(
    "--trace", type=_FILE, help="Load: a trace (Mooncake, Qwen-Bailian, Azure, BurstGPT) or recording; default: none."
)
@click.option("--load", help="Load: a generated one, e.g. agents:sessions=50; default: none. See docs/simulator.md.")
@click.option("--limit", type=click.IntRange(1), help="Requests of the trace; default: all.")
@click.option("--time-scale", type=click.FloatRange(0.0, min_open=True), default=1.0, help="2: twice as fast.")
@click.option("--prefill", type=click.IntRange(0), default=1, help="Prefill workers at the start.")
@click.option("--decode", type=click.IntRange(0), default=1, help="Decode workers at the start.")
@click.option("--both", type=click.IntRange(0), default=0, help="Aggregated workers at the start.")
@click.option("--frontends", type=click.IntRange(1), default=1, help="Frontends.")
@click.option(
    "--order",
    type=click.Choice([order.value for order in OrderPolicy]),
    default="auto",
    help="Who gets a request first.",
)
@click.option("--costs", "costs_name", help=f"Costs: {costs_help()}; default: a GPU of the middle class.")
@click.option("--kv-buffer-size", type=click.IntRange(0), default=64 * 2**20, help="Bytes of a worker's holding area.")
@click.option("--workers-per-host", type=click.IntRange(1), default=8, help="Workers that share KV tiers.")
@click.option("--event", "events", multiple=True, metavar="EVENT", help="E.g. 30s:kill:d1; default: none.")
@click.option(
    "--seed", type=click.IntRange(0), default=0, help="Seed of all draws: the same one gives the same output."
)
@click.option("--verify", "recording", type=_FILE, help="Recording (--record-steps) to compare with; default: none.")
@json_option
@settings_options(*SETTINGS)
@click.pass_context
def simulate_command(
    ctx: click.Context,
    /,
    costs_name: str | None,
    events: tuple[str, ...],
    order: str,
    recording: Path | None,
    seed: int,
    as_json: bool,
    config_file: Path | None,
    **given: Any,
) -> None:
    """Say what a cluster would do with a load: the real router, scheduler, placement and hand-offs, in virtual time.

    Example: kvrelay simulate --trace conversation.jsonl --prefill 2 --decode 3 --costs h100-llama-3.1-8b
    """
    if ctx.invoked_subcommand is not None:
        return
    from kvrelay.placement.cost import objectives_of
    from kvrelay.simulate.cluster import ClusterSpec, parse_event
    from kvrelay.simulate.costs import Costs, costs_of
    from kvrelay.simulate.learnt import learnt_by_serving
    from kvrelay.simulate.loads import load_of
    from kvrelay.simulate.simulation import simulate

    costs = None if costs_name is None else costs_of(costs_name)
    if recording is not None:
        _compare(recording, costs, seed, as_json=as_json)
        return
    if given["trace"] is None and given["load"] is None:
        raise click.UsageError("give a load (--trace FILE or --load SPEC) or a recording (--verify FILE)")
    source = SettingsSource(SETTINGS, config_file, given)
    engine = source.build(EngineConfig)
    spec = ClusterSpec(
        **{name: given[name] for name in COUNTS},
        engine=engine,
        max_model_len=engine.max_model_len or ClusterSpec().max_model_len,
        disagg=source.build(DisaggConfig),
        router=source.build(RouterConfig),
        order=OrderPolicy(order),
        events=tuple(map(parse_event, events)),
        tiers=source.build(TiersConfig),
    )
    learnt = None if costs is None else learnt_by_serving(costs, engine)
    costs = costs or Costs()
    arrivals = load_of(given["trace"], given["load"], limit=given["limit"], time_scale=given["time_scale"], seed=seed)
    result = simulate(spec, arrivals, costs, seed=seed, learnt=learnt)
    objectives = objectives_of(spec.disagg)
    num_blocks = costs.num_blocks(engine.block_size, engine.num_blocks)
    report = {
        "cluster": str(spec),
        "seed": seed,
        "kv_blocks": num_blocks,
        "have_served": learnt is not None,
        "max_model_len": spec.max_model_len,
        "num_too_long": sum(one.prompt_tokens >= spec.max_model_len for one in arrivals),
        "longest": max(one.prompt_tokens + one.answer_tokens for one in arrivals),
        **result.report(objectives),
    }
    click.echo(json.dumps(report) if as_json else _text(report, objectives.ttft_s, objectives.itl_s))


def _compare(recording: Path, costs: Costs | None, seed: int, *, as_json: bool) -> None:
    """Play a recording back, and say what differs. Raises IntegrityError if the schedule does."""
    from kvrelay.simulate import verify

    compared = verify.verify(recording, costs, seed=seed)
    click.echo(json.dumps(compared) if as_json else verify.text_of(compared))
    if compared["scheduler"]["difference"]:
        raise IntegrityError("the recorded schedule and the one played back differ")


def _text(report: dict[str, Any], ttft_s: float, itl_s: float) -> str:
    """The report for people."""
    from kvrelay.launch.admin import tiers_line

    lines = [
        f"{report['cluster']}: {report['num_done']} of {report['num_requests']} requests answered in "
        f"{report['end_s']:.2f} s of virtual time, {report['num_failed']} failed, {report['num_migrations']} moved",
        f"goodput {report['goodput']:.1%} (TTFT {ttft_s * 1e3:g} ms, ITL {itl_s * 1e3:g} ms at P99 of an answer), "
        f"{report['output_tokens_per_s']:.1f} tokens/s",
    ]
    lines.append(f"KV of a worker: {report['kv_blocks']:,} blocks")
    if report["num_prompt_tokens"]:
        share = report["num_computed_tokens"] / report["num_prompt_tokens"]
        lines.append(f"prompts: {report['num_prompt_tokens']:,} tokens, {share:.1%} computed")
    if report["have_served"]:
        lines.append("the first workers begin as ones that have served: they know the costs")
    if report["num_too_long"]:
        lines.append(
            f"prompts that fail, longer than the context of {report['max_model_len']:,} tokens: "
            f"{report['num_too_long']}; if the model takes them: --max-model-len {report['longest']}"
        )
    if report["first_error"]:
        lines.append(f"first failure: {report['first_error']}")
    for latency, figures in report["latencies"].items():
        values = ", ".join(f"{name} {seconds * 1e3:.2f}" for name, seconds in figures.items())
        lines.append(f"{latency[:-2].upper():4} ms: {values}")
    lines.append("prefills: " + (", ".join(f"{name} {count}" for name, count in report["places"].items()) or "none"))
    for worker in report["workers"]:
        share = worker["busy_s"] / report["end_s"] if report["end_s"] else 0.0
        lines.append(
            f"{worker['worker_id']:>5} {worker['role']:7} {worker['num_steps']:8} steps, busy {share:6.1%}, "
            f"{worker['num_prefill_tokens']} prefilled, {worker['num_generated_tokens']} generated"
        )
        if worker["kv_tiers"]:
            lines.append(f"      KV tiers: {tiers_line(worker['kv_tiers'])}")
    return "\n".join(lines)
