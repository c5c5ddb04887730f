"""``kvrelay completion``: the script with which a shell completes commands and options."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

VARIABLE = "_KVRELAY_COMPLETE"
"""Set by the script when it asks ``kvrelay`` for completions; click derives the name from the program's."""


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the completion script of SHELL.

    \b
    bash: eval "$(kvrelay completion bash)"            in ~/.bashrc
    zsh:  eval "$(kvrelay completion zsh)"             in ~/.zshrc, after compinit
    fish: kvrelay completion fish > ~/.config/fish/completions/kvrelay.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None, "the choices above are click's own"
    click.echo(kind(ctx.find_root().command, {}, "kvrelay", VARIABLE).source())
