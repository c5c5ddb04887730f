"""Help in groups: a command's own options first, then the options of each room under a heading."""

from __future__ import annotations

from typing import Any

import click

from kvrelay.config.settings import Settings

OWN = "Options"


class GroupedOption(click.Option):
    """An option that is listed under ``group`` in the help of a GroupedCommand."""

    def __init__(self, *args: Any, group: str = OWN, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group


class GroupedCommand(click.Command):
    """A command whose help has one section per group, in the order of their first options."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {OWN: []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None and isinstance(param, click.Option):
                groups.setdefault(getattr(param, "group", OWN), []).append(record)
        for heading, records in groups.items():
            with formatter.section(heading):
                formatter.write_dl(records)


def heading(cls: type[Settings]) -> str:
    """The heading of a room's settings: the first sentence of their docstring, and their section of ``--config``."""
    about = (cls.__doc__ or "").split(".\n")[0].split(". ")[0].rstrip(".").replace("``", "")
    return f"{about} [section {cls.section}]" if cls.section else about
