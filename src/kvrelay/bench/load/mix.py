"""Classes of requests as a user describes them, and the streams made from these descriptions.

A mix is written ``chat=64/128:closed=8,long=1024/8:rate=3``: per class the lengths of prompt and answer, then options.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
from msgspec.structs import replace

from kvrelay.bench.load.datasets import ANY_DATASET, Dataset, DatasetKind, requests_of
from kvrelay.bench.load.request import LoadClass, check_rate, parse_length, random_arrivals, trace_arrivals
from kvrelay.errors import InvalidInputError

_TIMED = {DatasetKind.MOONCAKE, DatasetKind.TRACE}


class ClassSpec(msgspec.Struct, frozen=True):
    """A class of requests. With ``max_concurrency`` and without ``rate`` it is a closed loop. With neither, it uses the
    trace's times if there are any, or else sends everything at once. ``priority`` is the requests' field of that name;
    0 is not sent, because not every server knows it."""

    name: str = "requests"
    dataset: Dataset = ANY_DATASET
    rate: float | None = None
    burstiness: float = 1.0
    max_concurrency: int | None = None
    num_requests: int | None = None
    time_scale: float = 1.0
    priority: int = 0

    def __post_init__(self) -> None:
        if self.rate is not None:
            check_rate(self.rate, f"request rate of {self.name}")
        for value, what in ((self.max_concurrency, "max concurrency"), (self.num_requests, "number of requests")):
            if value is not None and value < 1:
                raise InvalidInputError(f"{what} of {self.name} must be above zero, not {value}")
        if self.dataset.kind.needs_file and self.dataset.path is None:
            raise InvalidInputError(f"the data set {self.dataset.kind.value} needs a file", param="dataset")

    @property
    def endless(self) -> bool:
        """Whether the class never ends by itself."""
        return self.num_requests is None and self.dataset.kind is DatasetKind.RANDOM

    @property
    def finite_rate(self) -> float | None:
        """The offered rate for reports, or None."""
        return self.rate if self.rate is not None and math.isfinite(self.rate) else None


def build_class(spec: ClassSpec, seed: int) -> LoadClass:
    """The streams of a class; equal specs and seeds give equal streams. Files are opened, and refused, here."""
    rng = np.random.default_rng([seed, zlib.crc32(spec.name.encode())])
    requests = requests_of(spec.dataset, rng, seed)
    offsets: Iterator[float] | None = None
    if spec.rate is not None:
        offsets = random_arrivals(np.random.default_rng([seed, 1]), spec.rate, spec.burstiness)
    elif spec.max_concurrency is None and spec.dataset.kind in _TIMED:
        requests, timed = itertools.tee(requests)
        offsets = trace_arrivals((request.arrival_s or 0.0 for request in timed), spec.time_scale)
    elif spec.max_concurrency is None:
        offsets = itertools.repeat(0.0)
    if spec.priority:
        requests = (replace(request, priority=spec.priority) for request in requests)
    return LoadClass(spec.name, requests, offsets, spec.max_concurrency, spec.num_requests)


def parse_mix(text: str, base: Dataset) -> tuple[ClassSpec, ...]:
    """Read a mix; ``base`` gives the defaults of each class. Raises InvalidInputError naming the class."""
    specs = tuple(_parse_class(part.strip(), base) for part in text.split(","))
    names = [spec.name for spec in specs]
    if len(set(names)) != len(names):
        raise InvalidInputError(f"the mix names a class twice: {', '.join(names)}", param="mix")
    return specs


def _parse_class(text: str, base: Dataset) -> ClassSpec:
    name, _, description = text.partition("=")
    lengths, *options = description.split(":")
    prompt, slash, output = lengths.partition("/")
    if not (name.isidentifier() and slash):
        raise InvalidInputError(f"{text!r} in the mix is not NAME=PROMPT/OUTPUT[:closed=N|:rate=R]...", param="mix")
    dataset = replace(
        base,
        prompt=parse_length(prompt, f"prompt length of {name}"),
        output=parse_length(output, f"output length of {name}"),
    )
    spec = ClassSpec(name, dataset)
    fields = [_OPTIONS.get(key, (key,))[0] for key in (option.partition("=")[0] for option in options)]
    if len(set(fields)) < len(fields):
        raise InvalidInputError(f"class {name} of the mix gives an option twice: {text!r}", param="mix")
    for option in options:
        spec = _with_option(spec, option)
    if spec.rate is None and spec.max_concurrency is None:
        raise InvalidInputError(f"class {name} of the mix needs closed=N or rate=R", param="mix")
    return spec


_OPTIONS: dict[str, tuple[str, type[int] | type[float]]] = {
    "closed": ("max_concurrency", int),
    "max": ("max_concurrency", int),
    "rate": ("rate", float),
    "n": ("num_requests", int),
    "priority": ("priority", int),
    "burstiness": ("burstiness", float),
}
"""Of a class: the field of ClassSpec that an option sets."""
_DATASET_OPTIONS: dict[str, Callable[[str], dict[str, object]]] = {
    "groups": lambda value: {"kind": DatasetKind.SHARED_PREFIX, "groups": int(value)},
    "per-group": lambda value: {"per_group": int(value)},
    "system": lambda value: {"system": parse_length(value, "system length")},
}
"""The fields of its Dataset."""


def _with_option(spec: ClassSpec, option: str) -> ClassSpec:
    key, _, value = option.partition("=")
    try:
        if key in _OPTIONS:
            name, kind = _OPTIONS[key]
            return replace(spec, **{name: kind(value)})
        if key in _DATASET_OPTIONS:
            return replace(spec, dataset=replace(spec.dataset, **_DATASET_OPTIONS[key](value)))
    except ValueError as exc:
        raise InvalidInputError(f"class {spec.name} of the mix: {option!r} has no number", param="mix") from exc
    known = ", ".join((*_OPTIONS, *_DATASET_OPTIONS))
    raise InvalidInputError(f"class {spec.name} of the mix: {key!r} is none of {known}", param="mix")
