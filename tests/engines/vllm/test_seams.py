"""A vLLM that lacks something that is used is refused at start, and what it lacks is named."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import pytest

from kvrelay.engines.vllm.seams import KVRELAY, NIXL, Seam, first_missing, seams_of

ALL = (*seams_of("nixl"), *KVRELAY)


def _function(parameters: set[str]) -> Callable[..., None]:
    """One that takes these."""

    def call() -> None: ...

    kind = inspect.Parameter.KEYWORD_ONLY
    call.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in sorted(parameters)])  # type: ignore[attr-defined]
    return call


def _vllm(without: Seam | None = None, parameter: str | None = None) -> Callable[[str], ModuleType]:
    """A vLLM that has everything but ``without``, or but that parameter of it."""
    parameters: dict[tuple[str, str], set[str]] = {}
    for seam in ALL:
        is_without = without is not None and (seam.module, seam.name) == (without.module, without.name)
        names = {name for name in seam.parameters if not is_without or name != parameter}
        parameters.setdefault((seam.module, seam.name), set()).update(names)
    modules: dict[str, SimpleNamespace] = {}
    for (module, path), names in parameters.items():
        place = modules.setdefault(module, SimpleNamespace())
        is_inside = without is not None and f"{path}.".startswith(f"{without.name}.")
        if without is not None and parameter is None and module == without.module and is_inside:
            continue
        *outer, last = path.split(".")
        for part in outer:
            if not hasattr(place, part):
                setattr(place, part, _function(set()))
            place = getattr(place, part)
        if hasattr(place, last):
            getattr(place, last).__signature__ = _function(names).__signature__  # type: ignore[attr-defined]
        else:
            setattr(place, last, _function(names))

    def load(name: str) -> ModuleType:
        if name not in modules:
            raise ImportError(f"No module named {name!r}")
        return modules[name]  # type: ignore[return-value]

    return load


def test_one_that_has_everything_is_accepted() -> None:
    assert first_missing(ALL, _vllm()) is None
    assert first_missing((Seam("vllm.x", "f", ("any",)),), lambda name: SimpleNamespace(f=lambda **more: None)) is None  # type: ignore[arg-type, return-value]


NAMES = {(seam.module, seam.name): seam for seam in ALL}


@pytest.mark.parametrize("seam", NAMES.values(), ids=[name for _, name in NAMES])
def test_each_missing_name_is_named(seam: Seam) -> None:
    """With what is inside."""
    others = [each for each in ALL if not each.name.startswith(f"{seam.name}.")]
    lacking = f"{seam.name} in {seam.module}", f"the module {seam.module} (No module named {seam.module!r})"
    assert first_missing(others, _vllm(seam)) in lacking


PARAMETERS = [(seam, name) for seam in ALL for name in seam.parameters]


@pytest.mark.parametrize(("seam", "name"), PARAMETERS, ids=[f"{seam.name}-{name}" for seam, name in PARAMETERS])
def test_each_missing_parameter_is_named(seam: Seam, name: str) -> None:
    assert first_missing(ALL, _vllm(seam, name)) == f"the parameter {name} of {seam.name} in {seam.module}"


def test_only_what_is_used_is_looked_at() -> None:
    without = _vllm(NIXL[1])
    assert first_missing(seams_of(None), without) is None
    assert first_missing(seams_of("kvrelay"), without) is None
    assert first_missing(seams_of("nixl"), without) is not None
    assert first_missing((Seam("vllm.gone", "x"),), without) == "the module vllm.gone (No module named 'vllm.gone')"
