"""``kvrelay bench frontend``: what the frontend alone can carry.

Other servers can be measured in the same run by URL (``--url dynamo=http://127.0.0.1:8001``), turn by turn.
"""

from __future__ import annotations

from typing import Any

import click

from kvrelay.bench.commands.options import serve_args_option
from kvrelay.cli.options import json_option, model_argument


@click.command("frontend")
@model_argument
@click.option("--workers", default=4, type=click.IntRange(1, 64), help="Mock workers behind the frontend.")
@click.option("--rounds", default=3, type=click.IntRange(1, 100), help="Turns; medians are reported.")
@click.option("--scale", default=1.0, type=click.FloatRange(0.01, 100), help="Multiplies the number of requests.")
@click.option("--url", "urls", multiple=True, help="NAME=URL of another server, measured in the same run.")
@click.option("--plain", is_flag=True, help="Send only fields that OpenAI's own API knows, to every server.")
@serve_args_option
@json_option
def bench_frontend(**given: Any) -> None:
    """Load a frontend with mock workers: requests/s, streamed tokens/s, time to the first token, CPU time of the
    process that answers, where its /metrics tell.

    Example: kvrelay bench frontend --workers 4 --rounds 3
    """
    from kvrelay.bench.frontend import measure_frontend

    measure_frontend(given)
