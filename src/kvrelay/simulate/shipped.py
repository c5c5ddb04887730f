"""The costs that come with the package, by name. Light enough for the help of commands."""

from __future__ import annotations

from importlib import resources

SHIPPED = resources.files("kvrelay.data") / "costs"


def shipped_names() -> tuple[str, ...]:
    """In alphabetical order."""
    return tuple(sorted(file.name.removesuffix(".json") for file in SHIPPED.iterdir() if file.name.endswith(".json")))


def costs_help() -> str:
    """What ``--costs`` takes."""
    return f"{', '.join(shipped_names())} (estimates from data sheets), or a JSON file of costs"
