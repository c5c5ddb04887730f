"""A request's waterfall as OpenTelemetry spans.

A span of the request has those of its phases as children; points are its events; each process is a resource. Names are
those of OpenTelemetry's GenAI conventions, with vLLM's older ones beside them, so that dashboards for either find a
request. ``opentelemetry-proto`` has the messages (extra ``otel``); import this module only with it.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Status
from opentelemetry.proto.trace.v1.trace_pb2 import Span as OtlpSpan

from kvrelay.marks.phases import Role
from kvrelay.marks.trace_context import TraceContext
from kvrelay.marks.waterfall import Span, Waterfall

COMPLETION_PREFIX = "cmpl-"

Value = str | int | float


def span_attributes(shown: Waterfall) -> dict[str, Value]:
    """Of the request's own span. Seconds, as vLLM has them; what is not known is left out.

    Sources: OpenTelemetry's semantic conventions for GenAI; vLLM's ``SpanAttributes``.
    """
    tokens = {"input": shown.prompt_tokens, "output": shown.output_tokens}
    found: dict[str, Value | None] = {
        "gen_ai.operation.name": operation_of(shown),
        "gen_ai.provider.name": "kvrelay",
        "gen_ai.request.model": shown.model or None,
        "gen_ai.response.model": shown.model or None,
        "gen_ai.response.id": shown.id,
        "gen_ai.request.id": shown.id,
        "gen_ai.usage.input_tokens": tokens["input"],
        "gen_ai.usage.output_tokens": tokens["output"],
        "gen_ai.usage.prompt_tokens": tokens["input"],
        "gen_ai.usage.completion_tokens": tokens["output"],
        "gen_ai.latency.e2e": shown.latency_ms / 1e3,
        "gen_ai.latency.time_in_queue": _seconds_in(shown, "wait", "queue"),
        "gen_ai.latency.time_in_model_prefill": _seconds_in(shown, "prefill"),
        "kvrelay.status": shown.status,
        "kvrelay.prefill_place": shown.place,
        "kvrelay.unattributed": shown.unattributed_ms / 1e3,
    }
    if shown.ttft_ms is not None:
        found["gen_ai.latency.time_to_first_token"] = shown.ttft_ms / 1e3
        found["gen_ai.latency.time_in_model_decode"] = (shown.latency_ms - shown.ttft_ms) / 1e3
    if shown.estimates is not None:
        found["kvrelay.estimate.local"] = shown.estimates.local_s
        found["kvrelay.estimate.remote"] = shown.estimates.remote_s
    if shown.transfer is not None:
        found["kvrelay.transfer.bytes"] = shown.transfer.bytes
        found["kvrelay.transfer.descriptors"] = shown.transfer.descriptors
    if shown.drafts is not None:
        found["kvrelay.speculation.drafted_tokens"] = shown.drafts.drafted
        found["kvrelay.speculation.accepted_tokens"] = shown.drafts.accepted
    return {name: value for name, value in found.items() if value is not None}


def operation_of(shown: Waterfall) -> str:
    """By the request's id: its prefix names the API."""
    return "text_completion" if shown.id.startswith(COMPLETION_PREFIX) else "chat"


def _seconds_in(shown: Waterfall, *phases: str) -> float | None:
    """None if no process has told of these phases."""
    times = [span.end_ms - span.start_ms for span in shown.spans if span.phase in phases]
    return sum(times) / 1e3 if times else None


def resource_spans(shown: Waterfall, context: TraceContext) -> list[ResourceSpans]:
    """The request as OTLP's ``ResourceSpans``, one of each process. Pure but for the ids of the phases' spans."""
    origin_ns = int(shown.received_unix * 1e9)
    trace_id, own_id = bytes.fromhex(context.trace_id), bytes.fromhex(context.span_id)

    def at(ms: float) -> int:
        return max(origin_ns + int(ms * 1e6), 0)

    root = OtlpSpan(
        trace_id=trace_id,
        span_id=own_id,
        parent_span_id=bytes.fromhex(context.parent_id),
        name=f"{operation_of(shown)} {shown.model}".strip(),
        kind=OtlpSpan.SPAN_KIND_SERVER,
        start_time_unix_nano=origin_ns,
        end_time_unix_nano=at(shown.latency_ms),
        attributes=_key_values(span_attributes(shown)),
    )
    if shown.error is not None:
        root.status.code, root.status.message = Status.STATUS_CODE_ERROR, shown.error
    by_process: dict[str, list[OtlpSpan]] = defaultdict(list, {shown.frontend: [root]})
    for span in shown.spans:
        attributes = _key_values(_phase_attributes(span))
        if span.start_ms == span.end_ms:
            attributes += _key_values({"kvrelay.process": span.process})
            root.events.add(time_unix_nano=at(span.start_ms), name=span.phase, attributes=attributes)
            continue
        by_process[span.process].append(
            OtlpSpan(
                trace_id=trace_id,
                span_id=os.urandom(8),
                parent_span_id=own_id,
                name=span.phase,
                kind=OtlpSpan.SPAN_KIND_INTERNAL,
                start_time_unix_nano=at(span.start_ms),
                # A span cannot end before it begins; its attribute says by how much the clocks disagree.
                end_time_unix_nano=at(max(span.start_ms, span.end_ms)),
                attributes=attributes,
            )
        )
    roles = {process.name: process.role for process in shown.processes}
    return [_of_process(name, roles.get(name, Role.FRONTEND), spans) for name, spans in by_process.items()]


def _phase_attributes(span: Span) -> dict[str, Value]:
    found: dict[str, Value] = {}
    if span.value is not None:
        found["kvrelay.value"] = span.value
    if span.note is not None:
        found["kvrelay.note"] = span.note
    if span.end_ms < span.start_ms:
        found["kvrelay.duration"] = (span.end_ms - span.start_ms) / 1e3
    return found


def _of_process(name: str, role: str, spans: Sequence[OtlpSpan]) -> ResourceSpans:
    named = {"service.name": f"kvrelay-{role}", "service.namespace": "kvrelay", "service.instance.id": name}
    scope = ScopeSpans(scope=InstrumentationScope(name="kvrelay"), spans=spans)
    return ResourceSpans(resource=Resource(attributes=_key_values(named)), scope_spans=[scope])


def _key_values(attributes: Mapping[str, Value]) -> list[KeyValue]:
    def value_of(value: Value) -> AnyValue:
        if isinstance(value, str):
            return AnyValue(string_value=value)
        return AnyValue(int_value=value) if isinstance(value, int) else AnyValue(double_value=value)

    return [KeyValue(key=name, value=value_of(value)) for name, value in attributes.items()]
