"""Settings of a router that change while it runs: which ones, what they may be, and what was set.

What it does not know: where they are kept. Whoever watches that place calls ``put`` and ``remove`` and hands
``apply``'s result to ``Router.configure``.
"""

from __future__ import annotations

from dataclasses import asdict

from kvrelay.config import RouterConfig, load_settings
from kvrelay.config.loading import nearest
from kvrelay.errors import ConfigError

SETTABLE = ("router", "overlap_weight", "decode_weight", "temperature")


class RuntimeSettings:
    """What was set at run time, over whatever a router was started with."""

    def __init__(self) -> None:
        self._values: dict[str, object] = {}

    def put(self, name: str, value: object) -> None:
        """``value`` may be text. Raises ConfigError, which leaves everything as it was."""
        if name not in SETTABLE:
            raise ConfigError(f"router.{name} cannot be set at run time{nearest(name, SETTABLE)}", param=name)
        if value is None:
            raise ConfigError(f"{name} must have a value", param=name)
        checked = _with(RouterConfig(), {name: value})
        self._values[name] = getattr(checked, name)

    def get(self, name: str) -> object:
        """What was put, as the setting's own type. Raises KeyError."""
        return self._values[name]

    def remove(self, name: str) -> None:
        """Back to what each router was started with. Unknown names are none of ours."""
        self._values.pop(name, None)

    def apply(self, config: RouterConfig) -> RouterConfig:
        """``config`` with everything that was set."""
        return _with(config, self._values) if self._values else config

    def __repr__(self) -> str:
        return f"RuntimeSettings({self._values})"


def _with(config: RouterConfig, values: dict[str, object]) -> RouterConfig:
    return load_settings(RouterConfig, environ={}, flags={**asdict(config), **values})
