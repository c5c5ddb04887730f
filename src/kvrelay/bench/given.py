"""Values made from command-line options: data sets, bodies, and the options of a serving run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvrelay.bench.client.connection import Target
from kvrelay.bench.client.driver import RunLimits
from kvrelay.bench.client.stream import BodyOptions, StreamEndpoint, parse_extra
from kvrelay.bench.commands.options import command_line
from kvrelay.bench.load.datasets import Dataset, DatasetKind
from kvrelay.bench.load.mix import ClassSpec, parse_mix
from kvrelay.bench.load.request import parse_length
from kvrelay.bench.report.metrics import parse_slo
from kvrelay.bench.serving import RunOptions
from kvrelay.errors import InvalidInputError

ANY_TARGET = Target("127.0.0.1", 0)
"""For runs whose servers are known later."""
_DEFAULT_PROMPTS = 100


def dataset(given: Mapping[str, Any]) -> Dataset:
    """The data set that the options describe."""
    kinds = list(DatasetKind)
    kind, separator, path = str(given["dataset_args"]).partition("=")
    if kind not in kinds:
        raise InvalidInputError(f"unknown data set {kind!r}: one of {', '.join(kinds)}", param="dataset")
    if DatasetKind(kind).needs_file != bool(separator):
        raise InvalidInputError(
            f"--dataset {kind} is given as {kind}{'=FILE' if not separator else ''}", param="dataset"
        )
    output_len = given["output_len"]
    return Dataset(
        kind=DatasetKind(kind),
        path=Path(path) if separator else None,
        prompt=parse_length(given["input_len"], "--input-len"),
        output=parse_length(output_len, "--output-len") if output_len else None,
        groups=given["groups"],
        per_group=given["per_group"],
        system=parse_length(given["system_len"], "--system-len"),
        vocab_size=given["vocab_size"],
        tokenizer=given["tokenizer"],
        block_tokens=given["mooncake_block"],
    )


def classes(given: Mapping[str, Any]) -> tuple[ClassSpec, ...]:
    """The classes of a mix, or the one class that the options describe."""
    prompts = dataset(given)
    if given["mix"]:
        return parse_mix(given["mix"], prompts)
    num_prompts = given["num_prompts"]
    if num_prompts is None and given["duration"] is None and prompts.kind is DatasetKind.RANDOM:
        num_prompts = _DEFAULT_PROMPTS
    spec = ClassSpec(
        "requests",
        prompts,
        rate=given["request_rate"],
        burstiness=given["burstiness"],
        max_concurrency=given["max_concurrency"],
        num_requests=num_prompts,
        time_scale=given["time_scale"],
    )
    return (spec,)


def run_options(
    given: Mapping[str, Any],
    target: Target,
    classes: tuple[ClassSpec, ...],
    *,
    backend: str = "openai",
    retokenize: bool = True,
) -> RunOptions:
    """The options of a run. If no model is given, the server is asked for one."""
    return RunOptions(
        target=msgspec.structs.replace(target, api_key=given["api_key"]),
        classes=classes,
        model=given["model"],
        body=BodyOptions(
            model="",
            endpoint=StreamEndpoint.CHAT if given["endpoint"] == "chat" else StreamEndpoint.COMPLETIONS,
            temperature=given["temperature"],
            ignore_eos=not given["stop_at_eos"],
            plain=given["plain"],
            extra=parse_extra(given["extra_body"]),
        ),
        backend=backend,
        limits=RunLimits(given["duration"], given["drain"], given.get("timeout", RunLimits().request_s)),
        slo=parse_slo(given["slo"]) if given["slo"] else None,
        warm_up=given["warm_up"],
        seed=given["seed"],
        retokenize=retokenize,
        tokenizer=given.get("tokenizer"),
        command=command_line(),
    )


def numbers(text: str, name: str) -> tuple[float, ...]:
    """Read ``1,2,4.5``, or nothing; raises InvalidInputError naming the option."""
    try:
        found = tuple(float(part) for part in text.split(",")) if text else ()
    except ValueError:
        found = (math.nan,)
    if not all(map(math.isfinite, found)):
        raise InvalidInputError(f"{name} {text!r} is not a list of numbers", param=name)
    return found
