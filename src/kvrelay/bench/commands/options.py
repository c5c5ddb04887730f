"""Options that several commands share, and what is made of their values."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kvrelay.errors import InvalidInputError

if TYPE_CHECKING:
    from rich.console import Console

    from kvrelay.bench.client.payload import BodyOptions
    from kvrelay.bench.load.mix import Dataset

_F = TypeVar("_F", bound=Callable[..., Any])

DATASETS = ("random", "shared-prefix", "readable-prefix", "sharegpt", "jsonl", "mooncake", "trace")
_FILE_DATASETS = DATASETS[3:]
FILE = click.Path(path_type=Path)


def body_options(command: _F) -> _F:
    """What goes into each request's body."""
    for option in (
        click.option("--extra-body", metavar="JSON", default="{}", help="Fields added to every request's body."),
        click.option("--plain", is_flag=True, help="Send only fields that OpenAI's own API knows."),
        click.option("--stop-at-eos", is_flag=True, help="Let answers end early instead of ignoring end-of-sequence."),
        click.option("--temperature", type=float, default=0.0, show_default=True),
        click.option(
            "--endpoint", type=click.Choice(["completions", "chat"]), default="completions", show_default=True
        ),
        click.option("--api-key", envvar=None, help="Sent as a bearer token."),
        click.option("--model", help="Model name; asked from the server where it is not given."),
    ):
        command = option(command)
    return command


def dataset_options(command: _F) -> _F:
    """Which prompts are sent."""
    for option in (
        click.option("--mooncake-block", type=int, default=512, show_default=True, help="Tokens made per hash id."),
        click.option("--tokenizer", type=FILE, help="tokenizer.json or its directory, to count tokens exactly."),
        click.option(
            "--vocab-size", type=int, help="Random token ids stay below this.  [default: 512, or tokenizer's]"
        ),
        click.option("--system-len", default="256", show_default=True, help="Length of shared system prompts."),
        click.option("--per-group", type=int, default=16, show_default=True, help="Prompts per shared prefix."),
        click.option("--groups", type=int, default=8, show_default=True, help="Number of shared prefixes."),
        click.option("--output-len", help="Answers' length in tokens.  [default: 64, or as the file says]"),
        click.option(
            "--input-len",
            default="256",
            show_default=True,
            help="Prompt length in tokens: N, uniform~LOW~HIGH, normal~MEAN~DEVIATION. For prefix sets: the question.",
        ),
        click.option(
            "--dataset",
            "dataset_args",
            metavar="KIND",
            default="random",
            show_default=True,
            help=f"One of {', '.join(DATASETS)}; the last four as KIND=FILE.",
        ),
    ):
        command = option(command)
    return command


def make_dataset(given: Mapping[str, Any]) -> Dataset:
    """The data set that the options describe."""
    from kvrelay.bench.load.lengths import parse_length
    from kvrelay.bench.load.mix import Dataset, DatasetKind

    kind, separator, path = str(given["dataset_args"]).partition("=")
    if kind not in DATASETS:
        raise InvalidInputError(f"unknown data set {kind!r}: one of {', '.join(DATASETS)}", param="dataset")
    if (kind in _FILE_DATASETS) != bool(separator):
        raise InvalidInputError(
            f"--dataset {kind} is given as {kind}{'=FILE' if not separator else ''}", param="dataset"
        )
    output_len = given["output_len"]
    return Dataset(
        kind=DatasetKind(kind),
        path=Path(path) if separator else None,
        prompt=parse_length(given["input_len"], "--input-len"),
        output=parse_length(output_len, "--output-len") if output_len else None,
        groups=given["groups"],
        per_group=given["per_group"],
        system=parse_length(given["system_len"], "--system-len"),
        vocab_size=given["vocab_size"],
        tokenizer=given["tokenizer"],
        block_tokens=given["mooncake_block"],
    )


def make_body(given: Mapping[str, Any]) -> BodyOptions:
    """The body options; the model is filled in when it is known."""
    from kvrelay.bench.client.payload import BodyOptions, Endpoint, parse_extra

    return BodyOptions(
        model="",
        endpoint=Endpoint.CHAT if given["endpoint"] == "chat" else Endpoint.COMPLETIONS,
        temperature=given["temperature"],
        ignore_eos=not given["stop_at_eos"],
        plain=given["plain"],
        extra=parse_extra(given["extra_body"]),
    )


def numbers(text: str, name: str) -> tuple[float, ...]:
    """Read ``1,2,4.5``; raises InvalidInputError naming the option."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as exc:
        raise InvalidInputError(f"{name} {text!r} is not a list of numbers", param=name) from exc


def stdout_console() -> Console:
    """Tables to stdout, wide enough when it is no terminal."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 160)


def command_line() -> str:
    """The command as it was typed, for the report; a key is not repeated."""
    words = ["kvrelay", *sys.argv[1:]]
    return " ".join("***" if at and words[at - 1] == "--api-key" else word for at, word in enumerate(words))
