"""``kvrelay bench ...``, one module per command.

``bench_group`` is the room's door: the command line loads it by name, when a ``bench`` command is called. Modules here
load click and settings only; what a command measures with is imported when it runs, so that ``--help`` stays fast.
"""

from __future__ import annotations

import click

from kvrelay.bench.commands.parts import bench_engine, bench_transfer, prefixes_command
from kvrelay.bench.commands.servers import compare_command, interference_command, serve_command, sweep_command

COMMANDS = (
    serve_command,
    compare_command,
    sweep_command,
    interference_command,
    prefixes_command,
    bench_engine,
    bench_transfer,
)


@click.group("bench", commands=COMMANDS)
def bench_group() -> None:
    """Measure: servers under load, what separation buys, the engine, transfers, prefix repetition.

    \b
    Example: kvrelay bench serve --base-url http://127.0.0.1:8000 --num-prompts 200 --request-rate 10
    """
