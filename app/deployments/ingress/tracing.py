"""OpenTelemetry traces of requests, exported by OTLP where the standard environment variables ask for it.

A request's span continues the client's `traceparent`. Its children (admission, adapter load, queue, prefill, decode)
are made when it ends, from the times that the replica sent with the tokens, so no other process traces. Without the
variables nothing here is imported but this module. Names follow OpenTelemetry's conventions for HTTP and generative AI.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.deployments.ingress.dispatch.generation_task import GenerationTask
from app.engine.errors import ConfigError
from app.engine.request import GenerateRequest, RequestTiming
from app.version import version

if TYPE_CHECKING:  # imported only where traces are exported
    from opentelemetry.sdk.trace import TracerProvider

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


def open_tracer(environ: Mapping[str, str], clock: Callable[[], float]) -> RequestTracer | None:
    """The tracer that the environment asks for, None without an endpoint. `clock` gives Unix time.

    Raises ConfigError for an exporter that is not installed or does not exist here.
    """
    kind = environ.get("OTEL_TRACES_EXPORTER", "otlp" if any(map(environ.get, _ENDPOINTS)) else "none")
    if kind == "none" or environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    protocol = next(filter(None, map(environ.get, _PROTOCOLS)), "http/protobuf")
    if kind != "otlp" or protocol != "http/protobuf":
        raise ConfigError(
            f"OTEL_TRACES_EXPORTER is {kind!r} with the protocol {protocol!r}; traces are exported by otlp with "
            "http/protobuf only"
        )
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ModuleNotFoundError as error:
        raise ConfigError(
            "OTEL_ variables ask for traces; install their exporter: pip install 'polylora[otlp]'"
        ) from error
    from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    named = {} if environ.get("OTEL_SERVICE_NAME") else {SERVICE_NAME: "polylora"}
    provider = TracerProvider(resource=Resource.create(named | {SERVICE_VERSION: version()}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return RequestTracer(provider, clock)


class RequestTracer:
    """Makes the spans of one ingress, on its event loop. `clock` gives Unix time."""

    def __init__(self, provider: TracerProvider, clock: Callable[[], float]) -> None:
        from opentelemetry import context, trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._context, self._trace = context, trace
        self._provider, self._clock = provider, clock
        self._tracer = provider.get_tracer("polylora", version())
        self._propagator = TraceContextTextMapPropagator()

    async def follow(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Run `app` for one HTTP request inside the request's span."""
        carrier = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in scope["headers"]
            if name in (b"traceparent", b"tracestate")
        }
        span = self._tracer.start_span(
            scope["method"],
            self._propagator.extract(carrier),
            self._trace.SpanKind.SERVER,
            {"http.request.method": scope["method"]},
        )
        token = self._context.attach(self._trace.set_span_in_context(span))
        answered: dict[str, str] = {}
        self._propagator.inject(answered)
        status = 0  # stays if the client leaves before the response

        async def send_with_trace(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"traceparent", answered["traceparent"].encode())]
            await send(message)

        try:
            await app(scope, receive, send_with_trace)
        finally:
            route: str = getattr(scope.get("route"), "path", "")  # the template, without values
            span.update_name(f"{scope['method']} {route}".rstrip())
            span.set_attributes({"http.route": route} if route else {})
            if status:
                span.set_attribute("http.response.status_code", status)
            if status >= 500:
                span.set_status(self._trace.StatusCode.ERROR)
            span.end()
            self._context.detach(token)

    def record(self, task: GenerationTask) -> None:
        """Add a finished task's spans to its request's; does nothing if that is not sampled, or for a batch's line."""
        parent = self._trace.get_current_span()
        if not parent.is_recording():
            return
        request = task.requests[0]
        about = _about(request)
        parent.set_attributes(about)
        ended_s = self._clock()
        began_s = [task_s - sum(timing) / 1e6 for task_s, timing in task.progress.timings.values()]
        self._add("admission", request.arrival_s, min(began_s, default=ended_s), {})
        for index, (at_s, timing) in sorted(task.progress.timings.items()):
            usage = task.progress.usages[index]
            tokens = {
                "gen_ai.usage.input_tokens": usage.prompt_tokens,
                "polylora.cached_tokens": usage.cached_tokens,
                "gen_ai.usage.output_tokens": usage.completion_tokens,
            }
            for name, start_s, end_s in _parts(at_s, timing, ended_s):
                more = tokens if name in ("prefill", "decode") else {}
                self._add(name, start_s, end_s, about | more | {"polylora.sequence": index})

    def close(self) -> None:
        """Export what is not exported yet."""
        self._provider.shutdown()

    def _add(self, name: str, start_s: float, end_s: float, attributes: Mapping[str, Any]) -> None:
        span = self._tracer.start_span(name, attributes=attributes, start_time=_nanos(start_s))
        span.end(_nanos(max(start_s, end_s)))


def _parts(at_s: float, timing: RequestTiming, ended_s: float) -> Iterator[tuple[str, float, float]]:
    """(name, start, end) of a sequence's spans, in Unix time. `at_s`: when its timing arrived, the last of it if the
    sequence has ended."""
    start_s = at_s - sum(timing) / 1e6
    named = ("adapter load to host", "queue", "adapter load to device", "prefill")
    for name, part_us in zip(named, timing, strict=False):
        if part_us or not name.startswith("adapter"):
            yield name, start_s, start_s + part_us / 1e6
        start_s += part_us / 1e6
    yield "decode", start_s, at_s if timing.decode_us else ended_s


def _about(request: GenerateRequest) -> dict[str, Any]:
    """What computed a request, and a hash of its tenant's id."""
    adapter = request.requested_adapter
    tenant = hashlib.sha256(request.tenant_id.encode()).hexdigest()[:16]
    named = {} if adapter is None else {"polylora.adapter": adapter.name, "polylora.adapter.digest": adapter.digest}
    return {"polylora.tenant_sha256": tenant, "gen_ai.request.max_tokens": request.sampling.max_tokens} | named


def _nanos(time_s: float) -> int:
    return round(time_s * 1e9)
