"""Loads settings from a YAML file, then the environment (``KVRELAY_<FIELD>``), then flags; later ones win.

An unknown key is an error that names the nearest known one. Environment variables are read here and nowhere else.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import stat
import tempfile
import types
import typing
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import yaml

from kvrelay.config.files import read_file
from kvrelay.config.settings import Settings
from kvrelay.errors import ConfigError

S = TypeVar("S", bound=Settings)

ENV_PREFIX = "KVRELAY_"


class _TextLoader(yaml.SafeLoader):
    """Reads values as text, like flags and the environment: `off` is not a boolean there, nor `0123` a number. Only
    null stays null. A key that stands twice is refused: the library would drop what stands first."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag.endswith((":null", ":merge"))]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"{key.value} stands twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def load_settings(
    cls: type[S],
    *,
    file_values: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
) -> S:
    """Build ``cls`` from its section of a file, the environment and given flags. Raises ConfigError."""
    fields = {item.name: item for item in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for name in file_values or {}:
        if name not in fields:
            raise ConfigError(f"unknown setting {cls.section}.{name}{nearest(str(name), fields)}", param=str(name))
    env = os.environ if environ is None else environ
    from_env = {name: env.get(ENV_PREFIX + name.upper()) for name in fields}
    for name, value in (*(file_values or {}).items(), *from_env.items(), *(flags or {}).items()):
        if name in fields and value is not None:
            values[name] = convert(name, value, hints[name])
    return cls(**values)


def settings_to_flags(settings: Settings, *, skip: tuple[str, ...] = ()) -> list[str]:
    """The command line that rebuilds ``settings`` in a process with our environment: only values that it would not have
    without the flag."""
    words: list[str] = []
    for item in dataclasses.fields(settings):
        value = getattr(settings, item.name)
        if item.name in skip or (value == item.default and ENV_PREFIX + item.name.upper() not in os.environ):
            continue
        flag = "--" + item.name.replace("_", "-")
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag[2:]}")
        else:
            words += [flag, str(value)]
    return words


def environment_with(**values: str) -> dict[str, str]:
    """Our environment plus these settings, for a child process: secrets do not belong on a command line."""
    return {**os.environ, **{ENV_PREFIX + name.upper(): value for name, value in values.items()}}


def cache_directory() -> Path:
    """The directory for files that can be made again: ``$XDG_CACHE_HOME/kvrelay``, or ``~/.cache/kvrelay``. Raises
    ConfigError if there is none."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else _in_home(".cache")) / "kvrelay"


def state_directories() -> list[Path]:
    """The directories for what lives as long as a process: of the session (``$XDG_RUNTIME_DIR/kvrelay``), if there is
    one, and of the user (``$XDG_STATE_HOME/kvrelay``, or ``~/.local/state/kvrelay``). Raises ConfigError if there
    is none."""
    session, state = os.environ.get("XDG_RUNTIME_DIR", ""), os.environ.get("XDG_STATE_HOME", "")
    places = [Path(session)] if session and os.access(session, os.W_OK) else []
    return [place / "kvrelay" for place in (*places, Path(state) if state else _in_home(".local/state"))]


def own_temporary_directory() -> Path:
    """This user's, below the temporary one. Raises ConfigError if there is none, or another user has made it."""
    try:
        directory = Path(tempfile.gettempdir()) / f"kvrelay-{os.getuid()}"
        directory.mkdir(mode=0o700, exist_ok=True)
        found = directory.lstat()
    except OSError as exc:
        raise ConfigError(f"no temporary directory is writable ({exc}): set TMPDIR or HOME") from exc
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise ConfigError(f"{directory} is not a directory that only we can write to: remove it, or set HOME")
    return directory


def _in_home(below: str) -> Path:
    """Of a user without HOME and without an entry in passwd, or whose home is read-only, as in containers: below the
    temporary directory."""
    try:
        place = Path.home() / below
    except RuntimeError:
        return own_temporary_directory() / below
    if not os.access(next(filter(os.path.exists, (place, *place.parents))), os.W_OK):
        with suppress(ConfigError):
            return own_temporary_directory() / below
    return place


def read_config_file(path: Path, sections: list[type[Settings]]) -> dict[str, dict[str, object]]:
    """The sections of a YAML configuration file. Raises ConfigError for unknown sections and broken files."""
    try:
        loaded = yaml.load(read_file(path).decode(), _TextLoader) or {}
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as exc:
        raise ConfigError(f"cannot read configuration file {path}: {' '.join(str(exc).split())}") from exc
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path} does not hold sections of settings")
    known = {cls.section for cls in sections}
    for name, body in loaded.items():
        if name not in known:
            raise ConfigError(f"unknown section {name} in {path}{nearest(str(name), known)}", param=str(name))
        if body is not None and not isinstance(body, dict):
            raise ConfigError(f"section {name} in {path} is not a mapping", param=str(name))
    return {str(name): body or {} for name, body in loaded.items()}


def nearest(name: str, known: typing.Iterable[str]) -> str:
    """`` (did you mean X?)``, or nothing when no known name is near."""
    match = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {match[0]}?)" if match else ""


def convert(name: str, value: object, hint: Any) -> object:
    """``value`` (from YAML, environment or flags) as the field's type. Raises ConfigError."""
    if isinstance(hint, types.UnionType):
        if value is None:
            return None
        hint = next(arg for arg in typing.get_args(hint) if arg is not type(None))
    if typing.get_origin(hint) is typing.Literal:
        choices = typing.get_args(hint)
        if value not in choices:
            raise ConfigError(f"{name} must be one of {', '.join(map(str, choices))}, got {value}", param=name)
        return value
    if hint is bool:
        return _to_bool(name, value)
    try:
        if isinstance(value, bool | list | dict) or (hint is int and isinstance(value, float) and value % 1):
            raise ValueError
        return hint(value)
    except (TypeError, ValueError, OverflowError) as exc:
        raise ConfigError(f"{name} must be {hint.__name__}, got {value!r}", param=name) from exc


def _to_bool(name: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).lower()
    if text in ("1", "true", "yes", "on"):
        return True
    if text in ("0", "false", "no", "off"):
        return False
    raise ConfigError(f"{name} must be true or false, got {value!r}", param=name)
