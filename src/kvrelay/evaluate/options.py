"""What is evaluated, and what its results depend on."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import msgspec

from kvrelay.bench.report.machine import describe_machine
from kvrelay.bench.report.metrics import Slo
from kvrelay.evaluate.sections import SECTIONS
from kvrelay.placement.base import Objectives
from kvrelay.version import __version__

PACKAGES = ("torch", "vllm", "nixl-cu13", "numpy")
DEFAULT_LOAD = "poisson"
UNBOUND = ("output", "command", "price", "sections", "datasets", "certificate")
"""On which no case depends: a later run may have others."""


class Sizes(msgspec.Struct, frozen=True):
    """How much is measured. ``seconds``: of sending at each point. ``streams``: of each part of the calibration.
    ``requests``: of the load, for simulations."""

    rounds: int
    seconds: float
    streams: int
    requests: int


WHOLE, SHORT = Sizes(3, 10.0, 24, 1000), Sizes(2, 3.0, 6, 400)


class EvaluateOptions(msgspec.Struct, frozen=True):
    """``trace`` or ``load_spec`` tells the load. ``price``: of a slot's hour, None for none. ``serve_flags``: for each
    ``kvrelay serve``. ``datasets``: files of conversations whose prefixes are measured."""

    model: str
    model_path: Path
    output: Path
    slo_ttft_ms: float
    slo_itl_ms: float
    engine: str = "torch"
    trace: Path | None = None
    load_spec: str | None = None
    time_scale: float = 1.0
    slots: int = 2
    price: float | None = None
    datasets: tuple[Path, ...] = ()
    certificate: Path | None = None
    is_short: bool = False
    serve_flags: tuple[str, ...] = ()
    sections: tuple[str, ...] = SECTIONS
    seed: int = 0
    command: str = ""

    @property
    def sizes(self) -> Sizes:
        return SHORT if self.is_short else WHOLE

    @property
    def objectives(self) -> Objectives:
        return Objectives(self.slo_ttft_ms / 1e3, self.slo_itl_ms / 1e3)

    @property
    def slo(self) -> Slo:
        """The same for measured runs: the first token, and P99 of an answer's gaps."""
        return Slo(ttft_s=self.slo_ttft_ms / 1e3, itl_s=self.slo_itl_ms / 1e3)

    @property
    def load_text(self) -> str:
        return f"trace {self.trace}" if self.trace is not None else f"generated, {self.load_spec}"

    @property
    def settings(self) -> dict[str, str]:
        """All that results depend on, by name."""
        given = msgspec.structs.asdict(self)
        own = {name: str(value) for name, value in given.items() if name not in UNBOUND}
        return {**own, "sizes": str(self.sizes), "machine": describe_machine(), **versions()}


def versions() -> dict[str, str]:
    """Of this package, and of installed ones that results depend on."""
    found = {"kvrelay": __version__}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
