"""Options that several commands share. What is made of their values stands in ``kvrelay.bench.given``."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import click

from kvrelay.cli.options import all_of

ORDERS = ("auto", "decode-first", "prefill-first")
DATASETS = ("random", "shared-prefix", "readable-prefix", "sharegpt", "jsonl", "mooncake", "trace")
KEY_OPTION = "--api-key"
FILE = click.Path(path_type=Path)
COUNT = click.IntRange(max=10**7)
"""More requests could not be interrupted before their list is made."""
SCALE, GRACE = click.FloatRange(0.0, min_open=True), click.FloatRange(0.0)


body_options = all_of(
    click.option("--model", help="Model name; default: the server's first."),
    click.option("--api-key", help="Sent as a bearer token; default: none."),
    click.option("--endpoint", type=click.Choice(["completions", "chat"]), default="completions"),
    click.option("--temperature", type=float, default=0.0),
    click.option("--stop-at-eos", is_flag=True, help="Let answers end early instead of ignoring end-of-sequence."),
    click.option("--plain", is_flag=True, help="Send only fields that OpenAI's own API knows."),
    click.option("--extra-body", metavar="JSON", default="{}", help="Fields added to every request's body."),
)
"""What goes into each request's body."""


dataset_options = all_of(
    click.option(
        "--dataset",
        "dataset_args",
        metavar="KIND",
        default="random",
        help=f"One of {', '.join(DATASETS)}; the last four as KIND=FILE.",
    ),
    click.option(
        "--input-len",
        default="256",
        help="Prompt length in tokens: N, uniform~LOW~HIGH, normal~MEAN~DEVIATION. For prefix sets: the question.",
    ),
    click.option("--output-len", help="Answers' length in tokens.  [default: 64, or as the file says]"),
    click.option("--groups", type=COUNT, default=8, help="Number of shared prefixes."),
    click.option("--per-group", type=COUNT, default=16, help="Prompts per shared prefix."),
    click.option("--system-len", default="256", help="Length of shared system prompts."),
    click.option("--vocab-size", type=COUNT, help="Random token ids stay below this.  [default: 512, or tokenizer's]"),
    click.option(
        "--tokenizer", type=FILE, help="tokenizer.json or its directory, to count tokens exactly; default: none."
    ),
    click.option("--mooncake-block", type=COUNT, default=512, help="Tokens made per hash id."),
)
"""Which prompts are sent."""


def command_line() -> str:
    """The command as it was typed, for reports; a key (``--api-key KEY`` or ``--api-key=KEY``) is not repeated."""
    words = ["kvrelay", *sys.argv[1:]]
    for at, word in enumerate(words):
        if at and words[at - 1] == KEY_OPTION:
            words[at] = "..."
        elif word.startswith(f"{KEY_OPTION}="):
            words[at] = f"{KEY_OPTION}=..."
    return shlex.join(words)
