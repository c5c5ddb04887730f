"""Settings of a router that change at run time: their names, their permitted values, and the values set so far.

This module does not know where the settings are stored. The frontend watches that place, calls ``put`` and ``remove``,
and passes the result of ``apply`` to ``Router.configure``.
"""

from __future__ import annotations

from dataclasses import asdict

from kvrelay.config import RouterConfig, load_settings
from kvrelay.config.loading import nearest
from kvrelay.errors import ConfigError

SETTABLE = ("router", "overlap_weight", "decode_weight", "temperature")
USE_WEIGHTS = ("kv", "kv-weights")
"""The policies under which the other settings decide something; ``kv`` uses each of them until costs are known."""


class RuntimeSettings:
    """Values set at run time. They override the values with which a router was started."""

    def __init__(self) -> None:
        self._values: dict[str, object] = {}

    def put(self, name: str, value: object) -> None:
        """Set a value, which may be text. Raises ConfigError and then changes nothing."""
        if name not in SETTABLE:
            raise ConfigError(f"router.{name} cannot be set at run time{nearest(name, SETTABLE)}", param=name)
        if value is None:
            raise ConfigError(f"{name} must have a value", param=name)
        checked = _with(RouterConfig(), {name: value})
        self._values[name] = getattr(checked, name)

    def get(self, name: str) -> object:
        """The value that was put, in the setting's own type. Raises KeyError."""
        return self._values[name]

    def remove(self, name: str) -> None:
        """Return to the value with which each router was started. Unknown names are ignored."""
        self._values.pop(name, None)

    def apply(self, config: RouterConfig) -> RouterConfig:
        """``config`` with the values that were set."""
        return _with(config, self._values) if self._values else config

    def __repr__(self) -> str:
        return f"RuntimeSettings({self._values})"


def _with(config: RouterConfig, values: dict[str, object]) -> RouterConfig:
    return load_settings(RouterConfig, environ={}, flags={**asdict(config), **values})
