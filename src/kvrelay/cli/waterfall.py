"""``kvrelay waterfall``: where the time of one request went."""

from __future__ import annotations

import json

import click

from kvrelay.cli.cluster import ClusterChoice, cluster_options
from kvrelay.cli.help import GroupedCommand
from kvrelay.cli.options import json_option
from kvrelay.cli.processes import run_async


@click.command(cls=GroupedCommand)
@click.argument("request_id", metavar="ID")
@json_option
@click.option("--url", help="Any frontend; default: one of the cluster.")
@click.option("--api-key", help="API key of the request, or an operator's; default: none.")
@cluster_options
def waterfall(request_id: str, as_json: bool, url: str | None, api_key: str | None, where: ClusterChoice) -> None:
    """Show where the time of request ID went. Answers and the header x-request-id have the id.

    Example: kvrelay waterfall cmpl-0123456789abcdef0123456789abcdef
    """
    import msgspec

    from kvrelay.launch.frontend_calls import request_waterfall, understood
    from kvrelay.marks.text import text_of
    from kvrelay.marks.waterfall import Waterfall

    frontend = where.frontend_url(url)
    found = run_async(request_waterfall(frontend, request_id, api_key))
    if as_json:
        click.echo(json.dumps(found))
    else:
        with understood(frontend):
            click.echo(text_of(msgspec.convert(found, Waterfall)))
