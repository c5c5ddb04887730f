"""``kvrelay api-key``: a fresh API key for a client."""

from __future__ import annotations

import click


@click.command("api-key")
@click.argument("name")
def api_key(name: str) -> None:
    """Print a fresh API key for NAME, and the line that admits it to put into the --api-keys-file of the frontends.

    The key is shown this once; the file holds only its hash.

    Example: kvrelay api-key alice
    """
    from kvrelay.frontend.api_keys import new_api_key

    key, line = new_api_key(name)
    click.echo(f"key:  {key}")
    click.echo(f"line: {line}")
