"""``kvrelay bench ...``, one module per command.

``bench_group`` is the room's door: the command line loads it by name, when a ``bench`` command is called. Modules here
load click and settings only; what a command measures with is imported when it runs, so that ``--help`` stays fast.
"""

from __future__ import annotations

import click

from kvrelay.bench.commands.chaos import bench_chaos
from kvrelay.bench.commands.parts import (
    bench_burst,
    bench_dp,
    bench_engine,
    bench_frontend,
    bench_router,
    bench_routing,
    bench_transfer,
)
from kvrelay.bench.commands.prefixes import prefixes_command
from kvrelay.bench.commands.servers import compare_command, interference_command, serve_command, sweep_command
from kvrelay.bench.commands.suite import all_command


@click.group("bench")
def bench_group() -> None:
    """Measure: prefix repetition, serving under load, what separation buys.

    \b
    Example: kvrelay bench serve --base-url http://127.0.0.1:8000 --num-prompts 200 --request-rate 10
    """


for _command in (
    serve_command,
    compare_command,
    sweep_command,
    interference_command,
    prefixes_command,
    all_command,
    bench_burst,
    bench_chaos,
    bench_dp,
    bench_engine,
    bench_frontend,
    bench_router,
    bench_routing,
    bench_transfer,
):
    bench_group.add_command(_command)
