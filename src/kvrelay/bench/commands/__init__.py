"""``kvrelay bench ...``, one module per command.

``bench_group`` is the room's door: the command line loads it by name, when a ``bench`` command is called. Modules here
load click and settings only; what a command measures with is imported when it runs, so that ``--help`` stays fast.
"""

from __future__ import annotations

import click

from kvrelay.bench.commands.options import now_at
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
MOVED = {
    "all": "python -m benchmarks all",
    "burst": "python -m benchmarks burst, or warm-burst",
    "chaos": "python -m tests.chaos",
    "dp": "python -m benchmarks dp-group, dp-faults, or dp-wake",
    "frontend": "python -m benchmarks frontend",
    "router": "python -m benchmarks router",
    "routing": "python -m benchmarks routing",
}
"""Until the next release: commands that only a checkout of the project has now."""


class BenchGroup(click.Group):
    """A group that says where a command is that it no longer has."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] in MOVED:
            raise click.UsageError(now_at(f"kvrelay bench {args[0]}", MOVED[args[0]]), ctx)
        return super().resolve_command(ctx, args)


@click.group("bench", cls=BenchGroup, commands=COMMANDS)
def bench_group() -> None:
    """Measure: servers under load, what separation buys, the engine, transfers, prefix repetition.

    \b
    Example: kvrelay bench serve --base-url http://127.0.0.1:8000 --num-prompts 200 --request-rate 10
    """
