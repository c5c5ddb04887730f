"""Command lines of deployment files, through the commands' own parsers and the rules that hold before they run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from kvrelay.cli.main import cli
from kvrelay.cli.options import SettingsSource
from kvrelay.cli.processes import FRONTEND_SETTINGS, WORKER_SETTINGS
from kvrelay.cli.serve import SERVE_SETTINGS
from kvrelay.config import ControlConfig, FrontendConfig, MetricsConfig
from kvrelay.control.credentials import require_credentials
from kvrelay.launch.request_plane import require_api_key, require_metrics_key

NEITHER_OPEN_NOR_SCRAPED = "planner"
SETTINGS = {
    "planner": (ControlConfig,),
    "serve": SERVE_SETTINGS,
    "frontend": FRONTEND_SETTINGS,
    "worker": WORKER_SETTINGS,
}


def checked(words: Sequence[str], control: str) -> dict[str, Any]:
    """The words after ``kvrelay``, as the command gets them.

    Raises what the command would: click's errors for words that it does not know, ConfigError for values and for what
    would be open to other machines.
    """
    name, *arguments = words
    command = cli.get_command(click.Context(cli), name)
    assert command is not None, name
    with command.make_context(name, list(arguments), parent=click.Context(cli, info_name="kvrelay")) as ctx:
        given = ctx.params
    source = SettingsSource(
        SETTINGS[name], None, {"control": control} | {k: v for k, v in given.items() if v is not None}
    )
    for cls in SETTINGS[name]:
        source.build(cls)
    settings = source.build(ControlConfig)
    require_credentials(settings)
    if name == NEITHER_OPEN_NOR_SCRAPED:
        return given
    if name != "worker":
        require_api_key(source.build(FrontendConfig), settings)
    if name != "frontend":
        require_metrics_key(source.build(MetricsConfig), settings)
    return given
