"""The help of a command with many flags: an everyday page, and ``--help-all`` with every flag under its section."""

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
    """A command whose whole help has one section per group, in the order of their first options. With ``everyday``,
    names of options, ``--help`` lists only these, and ``--help-all`` is added."""

    def __init__(self, *args: Any, everyday: tuple[str, ...] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.everyday = everyday
        self._lists_all = not everyday
        if everyday:
            about = "Show every flag, by section, and exit."
            self.params.append(
                click.Option(
                    ["--help-all"], is_flag=True, is_eager=True, expose_value=False, callback=self._show_all, help=about
                )
            )

    def _show_all(self, ctx: click.Context, param: click.Parameter, value: bool) -> None:
        if value and not ctx.resilient_parsing:
            self._lists_all = True
            click.echo(self.get_help(ctx))
            self._lists_all = False
            ctx.exit()

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {OWN: []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is None or not isinstance(param, click.Option):
                continue
            if self._lists_all:
                groups.setdefault(getattr(param, "group", OWN), []).append(record)
            elif param.name in (*self.everyday, "help_all", "help"):
                groups[OWN].append(record)
        for heading, records in groups.items():
            with formatter.section(heading):
                formatter.write_dl(records)


def heading(cls: type[Settings]) -> str:
    """The heading of a room's settings: the first sentence of their docstring, and their section of ``--config``."""
    about = (cls.__doc__ or "").split(".\n")[0].split(". ")[0].rstrip(".").replace("``", "")
    return f"{about} [section {cls.section}]" if cls.section else about
