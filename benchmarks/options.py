"""Options that several scripts share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from kvrelay.bench.cases import Case, parse_case
from kvrelay.bench.compare import serve_case
from kvrelay.cli.options import all_of, json_option, model_argument

MOCK = "mock"

serve_args_option = click.option("--serve-args", default="", help="More arguments for kvrelay serve.")
rounds_option = click.option("--rounds", default=3, type=click.IntRange(1, 1000), help="Turns; medians are reported.")


experiment_options = all_of(
    model_argument,
    click.option("--engine", default=MOCK, type=click.Choice([MOCK, "torch"]), help="Engine of the workers."),
    rounds_option,
    click.option("--case", "others", multiple=True, metavar="NAME=URL|COMMAND", help="Another server; repeatable."),
    click.option("--only-given", is_flag=True, help="Leave out the built-in cases."),
    serve_args_option,
    json_option,
)
"""Of a script that starts its own servers and takes others beside them."""


def all_cases(given: dict[str, Any], mock_arguments: str, arrangements: dict[str, str]) -> list[Case]:
    """``arrangements``: names to flags of ``kvrelay serve``; then the cases that were given. ``mock_arguments`` go with
    the mock engine."""
    engine = given["engine"]
    arguments = f"--engine {engine} {mock_arguments if engine == MOCK else ''} {given['serve_args']}"
    own = {} if given["only_given"] else arrangements
    started = [serve_case(name, given["model"], arguments, flags) for name, flags in own.items()]
    return started + parsed(given["others"])


def parsed(texts: Sequence[str]) -> list[Case]:
    """Cases written as NAME=URL or NAME=COMMAND. Raises InvalidInputError."""
    return [parse_case(text) for text in texts]
