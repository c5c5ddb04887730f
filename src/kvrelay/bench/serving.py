"""One measured run against one server, from the first look at it to the report.

``bench serve``, ``sweep`` and ``interference`` consist of these runs.
"""

from __future__ import annotations

import itertools
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from msgspec.structs import replace

from kvrelay.bench.client.connection import ConnectionPool, Target
from kvrelay.bench.client.driver import WARM_UP_LIMIT_S, LoadDriver, RunLimits, warm_up
from kvrelay.bench.client.service import count_tokens, detokenize, first_model
from kvrelay.bench.client.stream import BodyOptions, StreamEndpoint
from kvrelay.bench.errors import BadResponseError, BenchError
from kvrelay.bench.load.datasets import DatasetKind
from kvrelay.bench.load.mix import ClassSpec, build_class
from kvrelay.bench.load.request import LoadClass, LoadRequest, LocalTokenizer
from kvrelay.bench.progress import ProgressBar
from kvrelay.bench.report.metrics import (
    OfferedLoad,
    Outcome,
    RequestRecord,
    RunInfo,
    RunResult,
    ServeReport,
    Slo,
    serve_report,
)
from kvrelay.errors import InvalidInputError

_DEFAULT_BODY = BodyOptions(model="")
_DEFAULT_LIMITS = RunLimits()
_WARM_CONNECTIONS = 64
_WARM_CONCURRENCY = 4
_WARM_SEED_SHIFT = 7919


class RunOptions(msgspec.Struct, frozen=True):
    """The run's options. ``model`` None: ask the server. ``warm_up`` is a number of requests of each class."""

    target: Target
    classes: tuple[ClassSpec, ...]
    model: str | None = None
    body: BodyOptions = _DEFAULT_BODY
    backend: str = "openai"
    limits: RunLimits = _DEFAULT_LIMITS
    slo: Slo | None = None
    warm_up: int = 4
    seed: int = 0
    retokenize: bool = True
    tokenizer: Path | None = None
    command: str = ""

    def __post_init__(self) -> None:
        endless = [spec.name for spec in self.classes if spec.endless]
        if self.limits.time_limit_s is not None and not self.limits.time_limit_s > 0:
            raise InvalidInputError("the duration must be above zero", param="duration")
        if self.limits.time_limit_s is None and endless:
            raise InvalidInputError(f"class {endless[0]} has no end: give a number of requests or a duration")
        if self.warm_up < 0 or self.seed < 0:
            raise InvalidInputError("warm-up and seed must not be negative")


class ServeRun(msgspec.Struct, frozen=True):
    """A finished run: the figures, and the records that plots need."""

    report: ServeReport
    result: RunResult


async def run_serve(options: RunOptions, bar: ProgressBar) -> ServeRun:
    """Check the server, warm it up, run the load, count tokens again. Raises BenchError if the load cannot run."""
    async with ConnectionPool(options.target) as pool:
        body = replace(options.body, model=options.model or await first_model(pool))
        classes = [build_class(spec, options.seed) for spec in options.classes]
        if body.endpoint is StreamEndpoint.CHAT:
            classes = [await _as_text(load, options, pool, body.model) for load in classes]
        await _warm(options, pool, body)
        started_at = datetime.now(UTC).isoformat(timespec="seconds")
        result = await LoadDriver(pool, body, options.limits, bar).run(tuple(classes))
        retokenized = await _retokenize(options, pool, body.model, result.records)
    info = RunInfo(options.backend, options.target.url, body.model, body.endpoint.value, options.command, started_at)
    offered = [OfferedLoad(spec.name, spec.finite_rate, spec.max_concurrency) for spec in options.classes]
    return ServeRun(serve_report(info, result, offered, options.slo, retokenized), result)


async def _warm(options: RunOptions, pool: ConnectionPool, body: BodyOptions) -> None:
    """Warm-up prompts come from another seed and never from a file, so that they help no prefix cache."""
    await pool.warm(min(_WARM_CONNECTIONS, max(spec.max_concurrency or 1 for spec in options.classes)))
    for spec in options.classes if options.warm_up else ():
        dataset = spec.dataset
        if dataset.path is not None:
            dataset = replace(dataset, kind=DatasetKind.READABLE_PREFIX, path=None)
        load = build_class(replace(spec, dataset=dataset), options.seed + _WARM_SEED_SHIFT)
        load = replace(load, num_requests=options.warm_up)
        if body.endpoint is StreamEndpoint.CHAT:
            load = await _as_text(load, options, pool, body.model)
        records = await warm_up(pool, body, load, options.warm_up, _WARM_CONCURRENCY)
        failed = [record for record in records if record.outcome is not Outcome.OK]
        if records and len(failed) == len(records):
            reason = failed[0].error or f"the server had not answered after {WARM_UP_LIMIT_S:g} s"
            raise BadResponseError(f"every warm-up request of {spec.name} failed: {reason}")


async def _as_text(load: LoadClass, options: RunOptions, pool: ConnectionPool, model: str) -> LoadClass:
    """Turn prompts of token ids into text for the chat endpoint, with the given tokenizer or the server's."""
    first = next(load.requests, None)
    if first is None:
        return load
    requests = itertools.chain([first], load.requests)
    if first.messages or isinstance(first.prompt, str):
        return replace(load, requests=requests)
    if options.tokenizer:
        tokenizer = LocalTokenizer(options.tokenizer)
        texts = (replace(request, prompt=_decoded(tokenizer, request)) for request in requests)
        return replace(load, requests=texts)
    if load.num_requests is None:
        raise InvalidInputError("chat prompts without an end need --tokenizer, or give a number of requests")
    found = [
        replace(request, prompt=await detokenize(pool, model, request.prompt))
        for request in itertools.islice(requests, load.num_requests)
        if isinstance(request.prompt, tuple)
    ]
    return replace(load, requests=iter(found))


def _decoded(tokenizer: LocalTokenizer, request: LoadRequest) -> str:
    return request.prompt if isinstance(request.prompt, str) else tokenizer.decode(request.prompt)


async def _retokenize(
    options: RunOptions, pool: ConnectionPool, model: str, records: tuple[RequestRecord, ...]
) -> int | None:
    """Tokens of all answers, counted again; None if no tokenizer was given and the server has none."""
    texts = [record.text for record in records if record.outcome is Outcome.OK]
    if not options.retokenize or not texts:
        return None
    if options.tokenizer:
        tokenizer = LocalTokenizer(options.tokenizer)
        return sum(map(tokenizer.count, texts))
    return await count_tokens(pool, model, texts)


def require_success(report: ServeReport) -> None:
    """Raise BenchError for a run whose figures are meaningless, or that ended early."""
    if not report.total.successful:
        silence = "no answer ended in time" if report.total.cut_off else "nothing was sent"
        reason = report.errors[0].message if report.errors else report.note or silence
        raise BenchError(f"no request succeeded: {reason}")
    if not report.complete:
        raise BenchError(f"the run is not complete: {report.note}; the results so far were kept")
