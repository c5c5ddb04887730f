"""A mypy plugin: no msgspec struct goes to a function of ``dataclasses``. mypy takes a struct for a dataclass, because
both declare their fields in the same way; at run time such a call raises TypeError."""

from __future__ import annotations

from collections.abc import Callable

from mypy.plugin import FunctionContext, Plugin
from mypy.types import Instance, Type, get_proper_type

FUNCTIONS = {f"dataclasses.{name}" for name in ("asdict", "astuple", "fields", "replace")}


class StructFunctions(Plugin):
    def get_function_hook(self, fullname: str) -> Callable[[FunctionContext], Type] | None:
        return _refuse_struct if fullname in FUNCTIONS else None


def _refuse_struct(call: FunctionContext) -> Type:
    given = get_proper_type(call.arg_types[0][0])
    if isinstance(given, Instance) and given.type.has_base("msgspec.Struct"):
        call.api.fail(f"{given.type.name} is a struct: use the function of msgspec.structs", call.context)
    return call.default_return_type


def plugin(version: str) -> type[Plugin]:
    return StructFunctions
