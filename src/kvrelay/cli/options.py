"""Options that commands share. The rooms' settings dataclasses become options here, so that a flag, its type, its range
and its help are written once, in ``kvrelay.config``."""

from __future__ import annotations

import dataclasses
import shlex
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from kvrelay.cli.help import GroupedOption, heading
from kvrelay.config import WorkerConfig, load_settings
from kvrelay.config.kv_transfer import read_kv_transfer_config
from kvrelay.config.loading import read_config_file
from kvrelay.config.settings import Settings
from kvrelay.config.worker import WORKER_SECTIONS
from kvrelay.errors import InvalidInputError

Command = TypeVar("Command", bound=Callable[..., Any])
S = TypeVar("S", bound=Settings)

model_argument = click.argument("model", required=False)


def all_of(*options: Callable[[Any], Any]) -> Callable[[Command], Command]:
    """A decorator that adds several options, in the order in which the help shows them."""

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


class EngineName(click.ParamType[str]):
    """The name of an installed engine. Packages are searched only for a name that is not our own."""

    name = "engine"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from kvrelay.engines.registry import OWN, engine_names

        if value not in OWN and value not in (names := engine_names()):
            self.fail(f"{value!r} is not one of {', '.join(names)}", param, ctx)
        return value


engine_option = click.option(
    "--engine",
    "engine_kind",
    type=EngineName(),
    default="torch",
    help="Engine of the workers: torch, mock, vllm, openai, or an installed one.",
)
served_name_option = click.option("--served-model-name", help="Name that clients use; default: the directory's.")
ready_line_option = click.option("--ready-line/--no-ready-line", "announces", default=True, hidden=True)
"""Off for the children of a command that announces them all."""


def _shell_words(_: click.Context, param: click.Parameter, text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as exc:
        raise InvalidInputError(f"{param.opts[0]}: {exc}", param=param.name) from exc


serve_flags_option = click.option(
    "--serve-flags",
    default="",
    callback=_shell_words,
    help="Further flags of each kvrelay serve, in one word, as of a shell. Default: none.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object.")


def kv_transfer_option(*, is_serve: bool) -> Callable[[Command], Command]:
    """``--kv-transfer-config JSON``: values of other options of the command, under the peer-to-peer design's names.
    An option that is given itself wins."""

    def spread(ctx: click.Context, param: click.Parameter, text: str | None) -> None:
        if text is not None:
            ctx.default_map = {**(ctx.default_map or {}), **read_kv_transfer_config(text, is_serve=is_serve)}

    return click.option(
        "--kv-transfer-config",
        metavar="JSON",
        callback=spread,
        is_eager=True,
        expose_value=False,
        help="Settings of transport p2p by the peer-to-peer design's names (kv_role, send_type, ...); default: none.",
    )


def settings_options(*classes: type[Settings], exclude: tuple[str, ...] = ()) -> Callable[[Command], Command]:
    """A decorator that adds ``--config FILE`` and one option per field of ``classes`` to a click command.

    An option that is not given is None, so that the values of file and environment apply.
    """

    def decorate(command: Command) -> Command:
        for cls in reversed(classes):
            command = field_options(cls, exclude=exclude)(command)
        help_text = "YAML file of settings by section; default: none."
        path = click.Path(exists=True, dir_okay=False, path_type=Path)
        return click.option("--config", "config_file", type=path, help=help_text)(command)

    return decorate


def field_options(cls: type[Settings], *, exclude: tuple[str, ...] = ()) -> Callable[[Command], Command]:
    """A decorator that adds one option per field of ``cls``; an option that is not given is None."""

    def decorate(command: Command) -> Command:
        hints = typing.get_type_hints(cls)
        for item in reversed(dataclasses.fields(cls)):
            if item.name not in exclude:
                command = _option(item, hints[item.name], heading(cls))(command)
        return command

    return decorate


def _option(item: dataclasses.Field[Any], hint: Any, group: str) -> Callable[[Command], Command]:
    flag = "--" + item.name.replace("_", "-")
    help_text = (
        f"{item.metadata.get('help', '')}  [default: {item.default if item.default not in ('', None) else 'none'}]"
    )
    if isinstance(hint, types.UnionType):
        hint = next(arg for arg in typing.get_args(hint) if arg is not type(None))
    if hint is bool:
        return click.option(
            f"{flag}/--no-{flag[2:]}", item.name, default=None, help=help_text, cls=GroupedOption, group=group
        )
    if typing.get_origin(hint) is typing.Literal:
        kind: click.ParamType[Any] | type = click.Choice([str(choice) for choice in typing.get_args(hint)])
    else:
        kind = hint
    return click.option(flag, item.name, type=kind, default=None, help=help_text, cls=GroupedOption, group=group)


class SettingsSource:
    """The configuration file and the flags of one command. Builds each room's settings from them."""

    def __init__(self, classes: tuple[type[Settings], ...], config_file: Path | None, flags: Mapping[str, Any]) -> None:
        self._file = read_config_file(config_file, list(classes)) if config_file else {}
        self._flags = {name: value for name, value in flags.items() if value is not None}

    def build(self, cls: type[S], **overrides: object) -> S:
        """``cls`` from file, environment, flags and ``overrides``, which win over all. Raises ConfigError."""
        return load_settings(cls, file_values=self._file.get(cls.section), flags={**self._flags, **overrides})

    def worker(self) -> WorkerConfig:
        """The configuration that the workers of one command share, its model, its name and its engine among the flags.
        Raises ConfigError, CheckpointError."""
        from kvrelay.launch.models import resolve_model, served_name

        sections: dict[str, Any] = {name: self.build(cls) for name, cls in WORKER_SECTIONS.items()}
        given, path = self._flags.get("model"), resolve_model(self._flags.get("model"))
        name = served_name(given, path, self._flags.get("served_model_name"))
        return WorkerConfig(model_path=path, model=name, engine_kind=self._flags["engine_kind"], **sections)
