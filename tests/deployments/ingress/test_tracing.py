"""Spans of requests: they continue the client's trace and have a request's parts; nothing is made when off."""

from __future__ import annotations

import hashlib
import itertools
import subprocess
import sys

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from app.deployments.ingress.http.app import make_app
from app.deployments.ingress.http.middleware.origin_check import HttpPolicy
from app.deployments.ingress.tracing import RequestTracer, _parts, open_tracer
from app.deployments.registry.models import DEFAULT_TENANT
from app.engine.errors import ConfigError
from app.engine.request import RequestTiming
from tests.deployments.http_service import Service

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
ASK = {"model": "sql", "prompt": "hi", "max_tokens": 6, "ignore_eos": True}


@pytest.fixture
def spans(service: Service) -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    service.tracer = RequestTracer(provider, service.accounting.clock)
    return exporter


def client(service: Service) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(make_app(service, HttpPolicy(is_on_loopback=True)), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost")


def by_name(spans: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in spans.get_finished_spans()}


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_request_continues_the_client_s_trace(
    service: Service, spans: InMemorySpanExporter, is_stream: bool
) -> None:
    async with client(service) as http:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        answer = await http.post("/v1/completions", json=ASK | {"stream": is_stream}, headers=headers)
        assert answer.status_code == 200, answer.text
    found = by_name(spans)
    root = found["POST /v1/completions"]
    assert root.parent is not None
    assert (f"{root.context.trace_id:032x}", f"{root.parent.span_id:016x}") == (TRACE, PARENT)
    assert answer.headers["traceparent"] == f"00-{TRACE}-{root.context.span_id:016x}-01"
    assert {"admission", "queue", "prefill", "decode"} <= found.keys()
    for name, span in found.items():
        if name != root.name:
            assert span.parent is not None
            assert span.parent.span_id == root.context.span_id
    decode = dict(found["decode"].attributes or {})
    assert decode["polylora.adapter"] == "sql"
    assert len(str(decode["polylora.adapter.digest"])) == 64
    assert decode["polylora.tenant_sha256"] == hashlib.sha256(DEFAULT_TENANT.encode()).hexdigest()[:16]
    assert decode["gen_ai.usage.output_tokens"] == 6
    assert dict(root.attributes or {})["http.response.status_code"] == 200
    assert "hi" not in str([dict(span.attributes or {}) for span in found.values()])
    order = [found[name] for name in ("admission", "queue", "prefill", "decode")]
    ends = [(span.start_time or 0, span.end_time or 0) for span in order]
    assert all(before[1] <= after[0] + 1000 for before, after in itertools.pairwise(ends)), ends


async def test_an_unsampled_trace_and_probes_have_no_spans(service: Service, spans: InMemorySpanExporter) -> None:
    async with client(service) as http:
        await http.post("/v1/completions", json=ASK, headers={"traceparent": f"00-{TRACE}-{PARENT}-00"})
        await http.get("/health")
        await http.get("/console/")
        assert spans.get_finished_spans() == ()
        assert (await http.get("/nothing")).status_code == 404
    assert [*by_name(spans)] == ["GET"]


def test_the_parts_of_a_sequence_follow_each_other() -> None:
    timing = RequestTiming(1_000_000, 500_000, 0, 250_000, 2_000_000)
    assert [*_parts(100.0, timing, 101.0)] == [
        ("adapter load to host", 96.25, 97.25), ("queue", 97.25, 97.75), ("prefill", 97.75, 98.0),
        ("decode", 98.0, 100.0),
    ]  # fmt: skip
    cut = [*_parts(100.0, timing._replace(decode_us=0), 101.0)]
    assert cut[-1] == ("decode", 100.0, 101.0)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"},
        {"OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"},
    ],
)
def test_traces_are_off_unless_the_environment_asks_for_them(environ: dict[str, str]) -> None:
    assert open_tracer(environ, lambda: 0.0) is None


@pytest.mark.parametrize("wrong", [{"OTEL_TRACES_EXPORTER": "zipkin"}, {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}])
def test_an_exporter_that_does_not_exist_is_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="http/protobuf"):
        open_tracer({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"} | wrong, lambda: 0.0)


def test_nothing_of_opentelemetry_is_imported_when_off() -> None:
    code = (
        "import sys; from app.deployments.ingress import tracing; before = {*sys.modules}; "
        "assert tracing.open_tracer({}, float) is None; "
        "assert not [name for name in {*sys.modules} - before if name.startswith('opentelemetry')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
