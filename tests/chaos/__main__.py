"""``python -m tests.chaos``: a cluster under load while its parts are killed, stopped and moved about."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
from tests.chaos.brokers import own_state_directory
from tests.chaos.plan import MIN_DURATION_S
from tests.chaos.report import chaos_text, is_clean
from tests.chaos.run import ChaosOptions, run_chaos

from kvrelay.bench.commands.options import ORDERS
from kvrelay.bench.report.files import print_result
from kvrelay.cli.main import run
from kvrelay.cli.options import SettingsSource, engine_option, field_options, json_option, model_argument
from kvrelay.cli.processes import run_async
from kvrelay.config import TiersConfig, TransferConfig
from kvrelay.config.loading import settings_to_flags
from kvrelay.launch.models import resolve_model

DURATION = click.FloatRange(MIN_DURATION_S, 86400.0)
UNUSED = ("kv_port", "ucx_tls", "ucx_net_devices", "poll_interval_s")
"""Settings of the data plane that decide nothing here."""


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@model_argument
@click.option("--duration", "duration_s", default=300.0, type=DURATION, help="Seconds of load.")
@click.option("--seed", default=0, type=click.IntRange(0), help="Of prompts, load and faults.")
@engine_option
@click.option("--prefill", "num_prefill", default=2, type=click.IntRange(2, 16), help="Prefill workers.")
@click.option("--decode", "num_decode", default=2, type=click.IntRange(2, 16), help="Decode workers.")
@click.option("--order", type=click.Choice(ORDERS), default=ORDERS[0], help="Of prefill and decode.")
@click.option("--tp", default=1, type=click.IntRange(1, 8), help="Tensor-parallel ranks of each worker (torch).")
@click.option("--pp", default=1, type=click.IntRange(1, 8), help="Pipeline stages of each worker (torch).")
@click.option("--frontends", "num_frontends", default=2, type=click.IntRange(1, 16), help="Frontend processes.")
@click.option("--clients", "num_clients", default=8, type=click.IntRange(1, 256), help="Clients that ask all the time.")
@click.option("--questions", "num_prompts", type=click.IntRange(12, 10_000), help="Prompts with known answers.")
@click.option("--sessions", "num_sessions", default=0, type=click.IntRange(0, 256), help="Agents; half of them lie.")
@click.option("--fault-interval", "fault_interval_s", default=3.0, type=click.FloatRange(0.2), help="Mean, in seconds.")
@click.option("--lease-ttl", "lease_ttl_s", default=2.0, type=click.FloatRange(0.5, 60.0), help="Lease time, seconds.")
@click.option(
    "--planner", type=click.Choice(["suggest", "act"]), default="suggest", help="act: it changes roles, and is killed."
)
@click.option(
    "--log", "log_path", type=click.Path(dir_okay=False, path_type=Path), help="Keep the cluster's log there."
)
@field_options(TransferConfig, exclude=UNUSED)
@field_options(TiersConfig)
@json_option
def chaos(model: str | None, as_json: bool, **given: Any) -> None:
    """Kill, stop, drain and switch workers, kill their ranks, kill frontends, kill and stop NATS, let clients leave,
    all at random, and compare every answer.

    Options of the KV data plane and its tiers, e.g. --transport, are passed to every worker. With tiers the
    broker of host memory is killed too.
    Ends with 1 if any answer was wrong, any request failed or hung, or any block leaked.

    Example: python -m tests.chaos --duration 60 --seed 7 --engine mock
    """
    sections = (TransferConfig, TiersConfig)
    names = {item.name for section in sections for item in fields(section)}
    source = SettingsSource(sections, None, {name: given.pop(name) for name in names & given.keys()})
    transfer, tiers = source.build(TransferConfig), source.build(TiersConfig)
    flags = (*settings_to_flags(transfer), *settings_to_flags(tiers))
    options = ChaosOptions(
        resolve_model(model), **given, transport=transfer.transport, data_flags=flags, has_tiers=tiers.is_on
    )
    with own_state_directory():
        report = run_async(run_chaos(options, lambda text: click.echo(text, err=True)))
    print_result(report, chaos_text(report), as_json)
    if not is_clean(report):
        sys.exit(1)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:], chaos, "python -m tests.chaos"))
