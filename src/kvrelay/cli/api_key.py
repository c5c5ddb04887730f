"""``kvrelay api-key``: a new API key for a client."""

from __future__ import annotations

import click

from kvrelay.cli.options import field_options
from kvrelay.config import KeyLimits


@click.command("api-key")
@click.argument("name")
@field_options(KeyLimits)
def api_key(name: str, **limits: int | None) -> None:
    """Print a new API key for NAME, and the line to add to the --api-keys-file of the frontends.

    The key is shown only once. The file holds its hash, and the client's limits besides the general ones.

    Example: kvrelay api-key alice --requests-per-minute 60 --max-output-tokens 1024
    """
    from kvrelay.frontend.access.api_keys import new_api_key

    key, line = new_api_key(name, KeyLimits(**limits))
    click.echo(f"key:  {key}")
    click.echo(f"line: {line}")
