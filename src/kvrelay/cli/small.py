"""Commands that need no cluster: ``api-key``, ``completion`` and ``make-model``."""

from __future__ import annotations

from pathlib import Path

import click
from click.shell_completion import get_completion_class

from kvrelay.cli.options import field_options
from kvrelay.config import KeyLimits


@click.command("api-key")
@click.argument("name")
@click.option(
    "--append",
    "file",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Add the line to this file, which is made if there is none. Default: print the line.",
)
@field_options(KeyLimits)
def api_key(name: str, file: Path | None, **limits: int | None) -> None:
    """Print a new API key for NAME, and add its line to the --api-keys-file of the frontends, or print that too.

    The key is shown only once. The file holds its hash, and the client's limits besides the general ones.

    Example: kvrelay api-key alice --append api-keys --requests-per-minute 60
    """

    from kvrelay.http.api_keys import append_key, new_api_key

    key, line = new_api_key(name, KeyLimits(**limits))
    if file is not None:
        append_key(file, name, line)
    added = f"added {name} to {file}; who was started with this file admits it within a second or two"
    click.echo(f"key:  {key}")
    click.echo(f"line: {line}" if file is None else added)


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


@click.command("make-model")
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
@click.option("--arch", default="llama", help="Architecture: llama, mistral, qwen2, qwen3, mixtral or qwen3-moe.")
@click.option("--size", default="tiny", help="tiny, small or 400m.")
@click.option("--seed", default=0, type=int, help="Seed of the weights.")
@click.option("--shards", default=1, type=click.IntRange(1, 1000), help="Number of safetensors files.")
@click.option("--dtype", default="bfloat16", help="bfloat16 or float32.")
def make_model_command(directory: Path, arch: str, size: str, seed: int, shards: int, dtype: str) -> None:
    """Write a Hugging Face checkpoint with random weights, a tokenizer and a chat template into DIRECTORY.

    Example: kvrelay make-model /tmp/tiny --arch llama --size tiny
    """
    from kvrelay.executors.torch.checkpoints import make_model

    make_model(directory, arch, size, seed=seed, shards=shards, dtype=dtype)
    click.echo(f"wrote {arch} {size} to {directory}")
