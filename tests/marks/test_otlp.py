"""Traces for a collector: the spans of a waterfall, both protocols against a receiver, and collectors that fail."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span as OtlpSpan
from opentelemetry.proto.trace.v1.trace_pb2 import Status
from tests.contracts.waiting import eventually
from tests.frontend.doubles import Script, running, write_model_dir
from tests.frontend.raw_http import send

from kvrelay.config import FrontendConfig, MetricsConfig
from kvrelay.config.otlp import OtlpEndpoint, collector_of
from kvrelay.errors import ConfigError
from kvrelay.marks import otlp
from kvrelay.marks.otlp import EXPORT, HttpSender, TraceExporter, open_exporter
from kvrelay.marks.otlp_spans import resource_spans, span_attributes
from kvrelay.marks.phases import Phase, Role
from kvrelay.marks.run_queue import RunQueue
from kvrelay.marks.trace import Trace
from kvrelay.marks.trace_context import TraceContext, followed
from kvrelay.marks.travel import ProcessMarks, encode
from kvrelay.marks.waterfall import Drafts, Estimates, Moved, Process, Span, Waterfall, waterfall

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"
BODY = {"prompt": "Once upon a time", "max_tokens": 4}

SHOWN = Waterfall(
    id="chatcmpl-1",
    model="tiny",
    received_unix=1_700_000_000.0,
    latency_ms=500.0,
    ttft_ms=200.0,
    status="finished",
    place="remote",
    prompt_tokens=12,
    output_tokens=4,
    frontend="f",
    error=None,
    processes=[
        Process("f", "frontend", True, 0.0),
        Process("d", "decode", True, 0.1),
        Process("p", "prefill", True, None),
    ],
    spans=[
        Span("f", "received", 0.0, 0.0),
        Span("f", "tokenise", 0.0, 2.0),
        Span("d", "wait", 3.0, 13.0),
        Span("p", "queue", 13.0, 33.0),
        Span("p", "prefill", 33.0, 133.0),
        Span("d", "transfer", 134.0, 133.5, 4096.0, "negative: the clocks"),
        Span("f", "late_token", 400.0, 400.0, 0.2),
    ],
    unattributed_ms=5.0,
    estimates=Estimates(0.3, 0.2),
    transfer=Moved(4096, 8),
    drafts=Drafts(18, 5),
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_dir(tmp_path_factory.mktemp("tiny"))


def attributes_of(item: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in item.attributes}


def spans_by_service(request: Any) -> dict[str, list[Any]]:
    return {
        attributes_of(one.resource)["service.name"]: [span for scope in one.scope_spans for span in scope.spans]
        for one in request
    }


class Collector:
    """What a receiver got. ``url``: for ``--otlp-endpoint``."""

    def __init__(self) -> None:
        self.url = ""
        self.requests: list[ExportTraceServiceRequest] = []
        self.headers: list[dict[str, str]] = []
        self.answer = 200
        self.cookie = ""

    def take(self, data: bytes, headers: dict[str, str]) -> None:
        self.requests.append(ExportTraceServiceRequest.FromString(data))
        self.headers.append(headers)

    @property
    def roots(self) -> list[Any]:
        spans = (span for one in self.requests for each in one.resource_spans for span in each.scope_spans[0].spans)
        return [span for span in spans if span.kind == OtlpSpan.SPAN_KIND_SERVER]


@asynccontextmanager
async def http_collector() -> AsyncIterator[Collector]:
    collector = Collector()

    async def post(request: web.Request) -> web.Response:
        collector.take(await request.read(), dict(request.headers))
        return web.Response(status=collector.answer, headers={"set-cookie": collector.cookie})

    app = web.Application()
    app.router.add_post("/v1/traces", post)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    collector.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield collector
    finally:
        await runner.cleanup()


@asynccontextmanager
async def grpc_collector() -> AsyncIterator[Collector]:
    collector = Collector()

    async def export(data: bytes, context: Any) -> bytes:
        collector.take(data, dict(context.invocation_metadata()))
        return b""

    _, service, method = EXPORT.split("/")
    handler = grpc.unary_unary_rpc_method_handler(export)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    collector.url = f"grpc://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield collector
    finally:
        await server.stop(None)


# -- spans ------------------------------------------------------------------------------------------------------------


def test_a_request_becomes_a_span_with_its_phases_below_it_in_the_processes_that_they_were_in() -> None:
    context = TraceContext.of(TRACEPARENT)
    by_service = spans_by_service(resource_spans(SHOWN, context))
    root, tokenise = by_service["kvrelay-frontend"]
    assert (root.name, root.kind) == ("chat tiny", OtlpSpan.SPAN_KIND_SERVER)
    assert (root.trace_id.hex(), root.parent_span_id.hex(), root.span_id.hex()) == (
        TRACE_ID,
        PARENT_ID,
        context.span_id,
    )
    assert (root.start_time_unix_nano, root.end_time_unix_nano) == (
        1_700_000_000_000_000_000,
        1_700_000_000_500_000_000,
    )
    assert root.status.code == Status.STATUS_CODE_UNSET
    assert [(event.name, event.time_unix_nano - root.start_time_unix_nano) for event in root.events] == [
        ("received", 0),
        ("late_token", 400_000_000),
    ]
    phases = [tokenise, *by_service["kvrelay-decode"], *by_service["kvrelay-prefill"]]
    assert [span.name for span in phases] == ["tokenise", "wait", "transfer", "queue", "prefill"]
    assert {span.parent_span_id for span in phases} == {root.span_id}
    assert {span.trace_id for span in phases} == {root.trace_id}
    assert len({span.span_id for span in phases}) == 5
    queue = by_service["kvrelay-prefill"][0]
    assert (queue.start_time_unix_nano - root.start_time_unix_nano) == 13_000_000
    assert (queue.end_time_unix_nano - queue.start_time_unix_nano) == 20_000_000


def test_a_span_whose_clocks_disagree_says_so_and_does_not_end_before_it_begins() -> None:
    transfer = spans_by_service(resource_spans(SHOWN, TraceContext.of("")))["kvrelay-decode"][1]
    assert transfer.start_time_unix_nano == transfer.end_time_unix_nano
    assert attributes_of(transfer) == {
        "kvrelay.value": 4096.0,
        "kvrelay.note": "negative: the clocks",
        "kvrelay.duration": pytest.approx(-0.0005),
    }


def test_the_attributes_have_the_names_of_the_conventions_and_those_of_vllm() -> None:
    found = span_attributes(SHOWN)
    assert found == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "kvrelay",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.response.id": "chatcmpl-1",
        "gen_ai.request.id": "chatcmpl-1",
        "gen_ai.usage.input_tokens": 12,
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.usage.prompt_tokens": 12,
        "gen_ai.usage.completion_tokens": 4,
        "gen_ai.latency.e2e": 0.5,
        "gen_ai.latency.time_in_queue": pytest.approx(0.03),
        "gen_ai.latency.time_in_model_prefill": pytest.approx(0.1),
        "gen_ai.latency.time_to_first_token": 0.2,
        "gen_ai.latency.time_in_model_decode": pytest.approx(0.3),
        "kvrelay.status": "finished",
        "kvrelay.prefill_place": "remote",
        "kvrelay.unattributed": 0.005,
        "kvrelay.estimate.local": 0.3,
        "kvrelay.estimate.remote": 0.2,
        "kvrelay.transfer.bytes": 4096,
        "kvrelay.transfer.descriptors": 8,
        "kvrelay.speculation.drafted_tokens": 18,
        "kvrelay.speculation.accepted_tokens": 5,
    }
    assert {each.key for each in resource_spans(SHOWN, TraceContext.of(""))[0].scope_spans[0].spans[0].attributes} == (
        set(found)
    )


def test_what_is_not_known_is_left_out() -> None:
    bare = msgspec.structs.replace(
        SHOWN, id="cmpl-1", model="", ttft_ms=None, place=None, spans=[], estimates=None, transfer=None, error="bad"
    )
    found = span_attributes(bare)
    assert found["gen_ai.operation.name"] == "text_completion"
    assert not {name for name in found if "model" in name or "time_" in name or "estimate" in name or "place" in name}
    (only,) = resource_spans(bare, TraceContext.of(""))
    (root,) = only.scope_spans[0].spans
    assert (root.name, root.parent_span_id) == ("text_completion", b"")
    assert (root.status.code, root.status.message) == (Status.STATUS_CODE_ERROR, "bad")


def test_a_span_before_1970_begins_then() -> None:
    """Of a worker whose clock cannot be right: a time below 0 would cost the whole batch."""
    shown = msgspec.structs.replace(SHOWN, spans=[Span("d", "wait", -3e12, 13.0)])
    wait = spans_by_service(resource_spans(shown, TraceContext.of("")))["kvrelay-decode"][0]
    assert wait.start_time_unix_nano == 0


@pytest.mark.parametrize("number", [math.nan, math.inf, 1e300, 1e9 - 1])
def test_marks_that_are_no_times_cost_no_other_request_of_the_batch(number: float) -> None:
    trace = ended_trace()
    trace.routed("w")
    numbers = [each for phase in Phase for each in (phase, number, 1.0, phase, 5.0, number)]
    trace.heard(0, encode(ProcessMarks("w", Role.DECODE, numbers)))
    assert trace.context is not None
    spans = resource_spans(waterfall(trace, "f"), trace.context)
    assert all(each.SerializeToString() for each in spans)


@pytest.mark.parametrize(
    "header",
    [
        "",
        "nonsense",
        TRACEPARENT.upper(),
        TRACEPARENT + "-more",
        "ff" + TRACEPARENT[2:],
        f"00-{'0' * 32}-{PARENT_ID}-01",
        f"00-{TRACE_ID}-{'0' * 16}-01",
        f"00-{TRACE_ID}-{PARENT_ID}-1",
        f"00-{TRACE_ID[:-1]}-{PARENT_ID}-01",
    ],
)
def test_a_header_that_is_none_begins_a_new_trace(header: str) -> None:
    one, other = TraceContext.of(header), TraceContext.of(header)
    assert one.trace_id not in (TRACE_ID, other.trace_id)
    assert (one.parent_id, one.is_sampled) == ("", True)
    assert TraceContext.of(one.traceparent).trace_id == one.trace_id


def test_a_header_that_is_too_long_for_others_goes_no_further() -> None:
    assert followed("01" + TRACEPARENT[2:] + "-more") != ""
    assert followed("01" + TRACEPARENT[2:] + "-" + "x" * 1000) == ""


def test_a_header_is_followed_and_handed_on_with_a_span_of_our_own() -> None:
    one, other = TraceContext.of(TRACEPARENT), TraceContext.of(TRACEPARENT)
    assert (one.trace_id, one.parent_id, one.is_sampled) == (TRACE_ID, PARENT_ID, True)
    assert one.span_id not in (PARENT_ID, other.span_id)
    assert one.traceparent == f"00-{TRACE_ID}-{one.span_id}-01"
    later_version = TraceContext.of("cc" + TRACEPARENT[2:-2] + "00-more")
    assert (later_version.trace_id, later_version.is_sampled) == (TRACE_ID, False)
    assert later_version.traceparent.endswith("-00")


# -- the endpoint -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("configured", "variables", "expected"),
    [
        ("", {}, None),
        ("http://h:4318", {}, "http://h:4318/v1/traces"),
        ("https://h/v1/traces/", {}, "https://h/v1/traces"),
        ("https://h/other", {}, "https://h/other"),
        ("grpc://h:4317/", {}, "grpc://h:4317"),
        ("grpcs://[::1]:4317", {}, "grpcs://[::1]:4317"),
        ("", {"ENDPOINT": "http://h:4318/base/"}, "http://h:4318/base/v1/traces"),
        ("", {"ENDPOINT": "grpc://h:4317"}, "grpc://h:4317"),
        ("", {"ENDPOINT": "http://h:4317", "PROTOCOL": "grpc"}, "grpc://h:4317"),
        ("", {"ENDPOINT": "http://h:4317", "PROTOCOL": "grpc", "TRACES_PROTOCOL": "http/protobuf"}, None),
        ("", {"ENDPOINT": "http://a", "TRACES_ENDPOINT": "https://b/x"}, "https://b/x"),
        ("grpc://h:1", {"ENDPOINT": "http://a"}, "grpc://h:1"),
    ],
)
def test_the_flag_or_the_environment_names_the_collector(
    configured: str, variables: dict[str, str], expected: str | None
) -> None:
    found = collector_of(configured, {f"OTEL_EXPORTER_OTLP_{name}": value for name, value in variables.items()})
    if "TRACES_PROTOCOL" in variables:
        expected = "http://h:4317/v1/traces"
    assert (found.url if found is not None else None) == expected
    if found is not None:
        assert (found.is_required, found.is_grpc) == (bool(configured), found.url.startswith("grpc"))


def test_the_environments_headers_go_with_each_request_and_are_not_shown() -> None:
    variables = {"OTEL_EXPORTER_OTLP_HEADERS": "api-key=se%20cret, x=1,,broken"}
    found = collector_of("http://h", variables)
    assert found is not None
    assert found.headers == {"api-key": "se cret", "x": "1"}
    assert "cret" not in repr(found)


@pytest.mark.parametrize("url", ["h:4318", "tcp://h:1", "http://", "http://h:x", "grpc://h:1/path", "http://h:99999"])
def test_an_endpoint_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="OTLP endpoint"):
        FrontendConfig(otlp_endpoint=url)


def test_a_password_in_the_url_is_not_shown(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for url in ("grpc://user:s3cret@h:1", "tcp://user:s3cret@h:1"):
        with pytest.raises(ConfigError) as refused:
            collector_of(url, {})
        assert "s3cret" not in str(refused.value)
    found = collector_of("http://user:s3cret@h:1", {})
    assert found is not None
    assert found.url.startswith("http://user:s3cret@h")
    assert "s3cret" not in repr(found)
    monkeypatch.setitem(sys.modules, "opentelemetry.proto.collector.trace.v1.trace_service_pb2", None)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://user:s3cret@h:1")
    assert open_exporter("", "f") is None
    assert "h:1" in caplog.text
    assert "s3cret" not in caplog.text


def test_without_the_extra_the_flag_is_refused_and_the_environment_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "grpc", None)
    with pytest.raises(ConfigError, match=r"kvrelay\[otel\]"):
        open_exporter("grpc://h:1", "f")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "grpc://h:1")
    assert open_exporter("", "f") is None


# -- sending ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("opened", [http_collector, grpc_collector])
async def test_a_request_of_a_traced_client_arrives(opened: Callable[[], Any], model_dir: Path) -> None:
    async with opened() as collector:
        async with running(model_dir, Script((10,)), otlp_endpoint=collector.url) as cluster:
            port = cluster.frontend.port
            answer = await send(port, "POST", "/v1/completions", BODY, {"traceparent": TRACEPARENT})
            refused = await send(port, "POST", "/v1/completions", BODY | {"model": "other"})
            await eventually(lambda: len(collector.roots) == 2)
            root, failed = collector.roots
            assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)
            found = attributes_of(root)
            assert found["gen_ai.request.id"] == answer.headers["x-request-id"]
            assert found["gen_ai.usage.output_tokens"] == 4
            assert failed.status.code == Status.STATUS_CODE_ERROR
            assert failed.trace_id != root.trace_id
            assert refused.status == 404
            await eventually(lambda: b'otlp_traces_total{outcome="sent"} 2.0' in cluster.frontend.metrics.render())
        assert b'outcome="dropped"} 0.0' in cluster.frontend.metrics.render()


async def test_the_requests_that_a_shutdown_cuts_short_are_sent(model_dir: Path) -> None:
    async with http_collector() as collector:
        settings = {"otlp_endpoint": collector.url, "shutdown_timeout_s": 0.01}
        async with running(model_dir, Script((10,), hang=True), **settings) as cluster:
            asking = asyncio.create_task(send(cluster.frontend.port, "POST", "/v1/completions", BODY))
            await cluster.until(lambda: bool(cluster.workers["w0"].requests))
        assert (await asking).status == 503
        assert [root.status.message for root in collector.roots] == ["the frontend is shutting down"]


async def test_a_trace_that_its_client_does_not_sample_is_not_sent(model_dir: Path) -> None:
    async with http_collector() as collector:
        async with running(model_dir, Script((10,)), otlp_endpoint=collector.url) as cluster:
            unsampled = {"traceparent": TRACEPARENT[:-2] + "00"}
            await send(cluster.frontend.port, "POST", "/v1/completions", BODY, unsampled)
            await send(cluster.frontend.port, "POST", "/v1/completions", BODY)
        assert [span.parent_span_id for span in collector.roots] == [b""]


async def test_workers_get_the_traces_header(model_dir: Path) -> None:
    async def asked(**settings: str) -> list[str]:
        async with running(model_dir, Script((10,)), **settings) as cluster:
            for header in (TRACEPARENT, "nonsense", ""):
                await send(cluster.frontend.port, "POST", "/v1/completions", BODY, {"traceparent": header})
            return [request.traceparent for request in cluster.workers["w0"].requests]

    assert await asked() == [TRACEPARENT, "", ""]
    async with http_collector() as collector:
        sent = await asked(otlp_endpoint=collector.url)
    assert [(header[3:35], header[36:52]) for header in sent] == [
        (span.trace_id.hex(), span.span_id.hex()) for span in collector.roots
    ]
    assert sent[0][3:35] == TRACE_ID


async def test_without_a_collector_nothing_is_traced_or_counted(model_dir: Path) -> None:
    async with running(model_dir, Script((10,))) as cluster:
        await send(cluster.frontend.port, "POST", "/v1/completions", BODY, {"traceparent": TRACEPARENT})
        assert b"otlp" not in cluster.frontend.metrics.render()


async def test_traces_need_marks(model_dir: Path) -> None:
    with pytest.raises(ConfigError, match="request_marks"):
        async with running(model_dir, otlp_endpoint="http://h", monitoring=MetricsConfig(request_marks=False)):
            pass


def ended_trace(number: int = 0) -> Trace:
    trace = Trace(RunQueue(), f"cmpl-{number}", "")
    trace.context = TraceContext.of("")
    trace.end(None)
    return trace


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/v1/traces", "grpc://127.0.0.1:9"])
async def test_a_collector_that_is_down_costs_traces_and_says_so_once(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(otlp, "BATCH_S", 0.0)
    exporter = open_exporter(url, "f")
    assert exporter is not None
    async with exporter.running():
        for number in range(3):
            exporter.add(ended_trace(number))
            await eventually(lambda number=number: exporter.num_dropped == number + 1)
    assert (exporter.num_sent, exporter.num_dropped) == (0, 3)
    assert len([record for record in caplog.records if "collector of traces" in record.message]) == 1


async def test_a_collector_that_refuses_costs_traces_until_it_takes_them_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "BATCH_S", 0.0)
    async with http_collector() as collector:
        exporter = open_exporter(collector.url, "f")
        assert exporter is not None
        async with exporter.running():
            for answer, expected in ((503, (0, 1)), (302, (0, 2)), (200, (1, 2))):
                collector.answer = answer
                exporter.add(ended_trace())
                await eventually(lambda expected=expected: (exporter.num_sent, exporter.num_dropped) == expected)


async def test_a_collectors_cookies_are_not_kept() -> None:
    """One that sets another with each answer would fill the memory."""
    async with http_collector() as collector:
        collector.cookie = "session=1"
        sender = HttpSender(OtlpEndpoint(collector.url.replace("127.0.0.1", "localhost") + "/v1/traces", True))
        await sender.send(b"")
        await sender.send(b"")
        await sender.close()
        assert [headers.get("Cookie") for headers in collector.headers] == [None, None]


class SilentSender:
    """A collector that never answers."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.is_closed = False

    async def send(self, data: bytes) -> None:
        self.num_asked += 1
        await asyncio.Event().wait()

    async def close(self) -> None:
        self.is_closed = True


async def test_a_collector_that_never_answers_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "BATCH_S", 0.0)
    monkeypatch.setattr(otlp, "CLOSE_S", 0.05)
    monkeypatch.setattr(otlp, "MAX_WAITING", 10)
    sender = SilentSender()
    exporter = TraceExporter("f", lambda: sender)
    async with exporter.running():
        exporter.add(ended_trace())
        await eventually(lambda: sender.num_asked == 1)
        for number in range(25):
            exporter.add(ended_trace(number))
        assert exporter.num_dropped == 15
    assert sender.is_closed
    assert (exporter.num_sent, exporter.num_dropped) == (0, 26)


def test_repr_of_the_endpoint_hides_headers() -> None:
    assert "key" not in repr(OtlpEndpoint("http://h", True, {"authorization": "key"}))
