"""``kvrelay make-model``: checkpoints with random weights, for experiments."""

from __future__ import annotations

from pathlib import Path

import click


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
