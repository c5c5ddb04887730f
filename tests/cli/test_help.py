"""Help, suggestions and completion: what a person at the terminal is told."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator

import click
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from kvrelay.cli.help import GroupedCommand
from kvrelay.cli.main import cli, run


def commands(group: click.Group = cli, path: str = "kvrelay") -> Iterator[tuple[str, click.Command]]:
    """Every command with its full name, those of groups included."""
    ctx = click.Context(group)
    for name in group.list_commands(ctx):
        command = group.get_command(ctx, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command, f"{path} {name}")
        else:
            yield f"{path} {name}", command


def serve() -> click.Command:
    return dict(commands())["kvrelay serve"]


def test_every_option_shows_what_holds_without_it() -> None:
    silent = []
    for path, command in commands():
        ctx = click.Context(command, show_default=True)
        for param in command.params:
            if not isinstance(param, click.Option) or param.required or (param.is_flag and not param.secondary_opts):
                continue
            record = param.get_help_record(ctx)
            if record is not None and "default" not in record[1].lower():
                silent.append(f"{path} {param.opts[0]}: {record[1]}")
    assert not silent


def test_the_whole_help_has_a_group_for_each_room() -> None:
    shown = CliRunner().invoke(cli, ["serve", "--help-all"]).output
    headings = [line.rstrip(":") for line in shown.splitlines() if line and not line.startswith(" ")]
    assert headings[1] == "Options"
    assert [line.split("[section ")[1].rstrip("]") for line in headings[2:]] == [
        *("frontend", "router", "control", "disagg", "metrics", "engine", "runner", "group", "transfer", "tiers"),
        *("mock", "upstream", "vllm"),
    ]
    own, http = shown.split("The HTTP service")
    assert "\n  --prefill " in own
    assert "\n  --port " in http
    for param in serve().params:
        if isinstance(param, click.Option):
            assert f"  {param.opts[0]}" in shown


@pytest.mark.parametrize("name", ["serve", "worker", "frontend"])
def test_help_is_one_everyday_page(name: str) -> None:
    shown = CliRunner().invoke(cli, [name, "--help"]).output
    command = dict(commands())[f"kvrelay {name}"]
    assert isinstance(command, GroupedCommand)
    assert len(shown.splitlines()) <= 80
    options = {param.name: param.opts[0] for param in command.params if isinstance(param, click.Option)}
    listed = {name for name, flag in options.items() if re.search(rf"^  {flag}[ /]", shown, re.MULTILINE)}
    assert listed == {*command.everyday, "help_all"}


@pytest.mark.parametrize(("written", "meant"), [("sever", "serve"), ("front-end", "frontend"), ("stauts", "status")])
def test_a_misspelt_command(written: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([written]) == 2
    assert f"Did you mean '{meant}'?" in capsys.readouterr().err


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_script_asks_for_completions(shell: str) -> None:
    result = CliRunner().invoke(cli, ["completion", shell], prog_name="kvrelay")
    assert result.exit_code == 0
    assert "_KVRELAY_COMPLETE" in result.output
    assert f"{shell}_complete" in result.output


def completed(*words: str) -> set[str]:
    found = ShellComplete(cli, {}, "kvrelay", "_KVRELAY_COMPLETE").get_completions(list(words[:-1]), words[-1])
    return {item.value for item in found}


def test_commands_options_and_choices_are_completed() -> None:
    assert completed("s") == {"serve", "simulate", "status"}
    assert completed("config", "") == {"get", "set", "unset"}
    assert completed("serve", "--max-num-s") == {"--max-num-seqs"}
    assert completed("worker", "--role", "p") == {"prefill"}


def test_completing_a_command_imports_no_command() -> None:
    program = (
        "import sys; from kvrelay.cli.main import cli; from click.shell_completion import ShellComplete;"
        "ShellComplete(cli, {}, 'kvrelay', 'X').get_completions([], 'se');"
        "assert not {'kvrelay.cli.serve', 'kvrelay.bench.commands', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_serve_knows_our_own_engines_without_importing_what_they_need_or_searching_for_others() -> None:
    program = (
        "import importlib.metadata, sys; from kvrelay.cli.options import EngineName;"
        "importlib.metadata.entry_points = None; EngineName().convert('torch', None, None);"
        "assert not {'kvrelay.transfer', 'kvrelay.engine.contract', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
