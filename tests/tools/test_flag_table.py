"""docs/flags.md is current, and has every flag."""

from __future__ import annotations

import re

import click
import pytest

from kvrelay.cli.main import cli
from tools import flag_table


def test_the_page_is_current() -> None:
    assert flag_table.main(["--check"]) == 0, "run tools/flag_table.py"


@pytest.mark.parametrize("name", list(flag_table.COMMANDS))
def test_every_flag_is_on_the_page(name: str) -> None:
    listed = set(re.findall(r"`(--[a-z0-9-]+)`", flag_table.PAGE.read_text(encoding="utf-8")))
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    shown = [param for param in command.params if isinstance(param, click.Option) and not param.hidden]
    assert {flag for param in shown for flag in param.opts} <= listed
