"""The command line of the room: ``kvrelay bench ...``, one module per command.

Modules here load click only; what a command needs is imported when it runs, so that ``--help`` stays fast. Further
commands (engine, router, transfer, frontend) are added to ``bench_group`` by the rooms' owners.
"""

from __future__ import annotations

import click

from kvrelay.bench.commands.compare import compare_command
from kvrelay.bench.commands.interference import interference_command
from kvrelay.bench.commands.prefixes import prefixes_command
from kvrelay.bench.commands.serve import serve_command
from kvrelay.bench.commands.suite import all_command
from kvrelay.bench.commands.sweep import sweep_command


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
):
    bench_group.add_command(_command)
