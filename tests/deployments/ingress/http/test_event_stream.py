"""Streams are counted as what became of them, and a client that leaves at any moment leaves nothing behind."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import AsyncGenerator, Iterator, MutableMapping
from typing import Any

import pytest

from app.deployments.ingress.dispatch import generation_task
from app.deployments.ingress.dispatch.generation_task import GenerationTask
from app.deployments.ingress.http import event_stream, request_lifecycle
from app.deployments.ingress.http.app import make_app
from app.deployments.ingress.http.middleware.origin_check import HttpPolicy
from app.deployments.ingress.principal import Principal
from app.deployments.ingress.schemas.openai import CompletionRequest
from app.deployments.ingress.serializers.detokenizer import TextDelta, text_deltas
from app.engine.errors import AdapterWriteFailed, QueueFull
from tests.deployments.http_service import Service
from tests.deployments.ingress.dispatch.test_dispatcher import until

BODY = {"model": "sql", "prompt": "hi", "max_tokens": 100, "ignore_eos": True}


@pytest.fixture
def _no_cycles_are_collected() -> Iterator[None]:
    """What is freed is freed on purpose."""
    gc.disable()
    yield
    gc.enable()


class Client:
    """One request as a server hands it to the application; it leaves when `leaves` is set."""

    def __init__(self, service: Service, route: str, content: bytes, *, is_cut: bool = False) -> None:
        self.status: int | None = None
        self.events: list[bytes] = []
        self.reads = asyncio.Event()  # cleared: it reads nothing more for now
        self.reads.set()
        self.leaves = asyncio.Event()
        self._messages = [{"type": "http.request", "body": content, "more_body": is_cut}]
        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "POST",
            "path": route, "raw_path": route.encode(), "query_string": b"", "root_path": "", "scheme": "http",
            "headers": [], "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2), "state": {},
        }  # fmt: skip
        self.answered = asyncio.ensure_future(make_app(service, HttpPolicy())(scope, self._receive, self._send))

    async def _receive(self) -> MutableMapping[str, Any]:
        if self._messages:
            return self._messages.pop()
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        self.status = message.get("status", self.status)
        if message.get("body"):
            self.events.append(message["body"])
            await self.reads.wait()


@pytest.mark.usefixtures("_no_cycles_are_collected")
@pytest.mark.parametrize("num_answers", [1, 2])
@pytest.mark.parametrize("reads", [True, False])
async def test_a_client_that_leaves_a_stream_is_counted_and_frees_its_blocks(
    service: Service, reads: bool, num_answers: int
) -> None:
    (replica,) = service.fleet.replicas.values()
    replica.backend.max_steps = 20
    client = Client(service, "/v1/completions", json.dumps(BODY | {"stream": True, "n": num_answers}).encode())
    await until(lambda: len(client.events) >= 4)
    if not reads:
        client.reads.clear()
        num_events = len(client.events)
        replica.backend.max_steps = 40
        await until(lambda: len(client.events) > num_events)  # it is being sent
    client.leaves.set()
    await client.answered
    assert service.observed == [("completions", 499)]
    ((job, usages),) = service.counted
    assert job is not None
    assert job.requests[0].adapter is not None
    assert all(usage is not None and 0 < usage.completion_tokens < 100 for usage in usages), "what it cost is known"
    await until(lambda: len(replica.aborted) == num_answers)
    replica.backend.resumed.set()
    await until(lambda: not replica.engine.has_work)
    stats = replica.thread.stats()
    assert stats.num_aborted == num_answers
    assert stats.num_blocks_free == stats.num_blocks
    assert not any(item.num_refs for item in stats.residents)
    assert service.num_streams == 0


async def test_a_whole_answer_without_a_reader_is_counted_with_its_cost(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs: list[GenerationTask] = []
    completion = service.preprocessor.completion

    async def seen(body: CompletionRequest, caller: Principal, request_id: str | None) -> GenerationTask:
        jobs.append(await completion(body, caller, request_id))
        return jobs[-1]

    monkeypatch.setattr(service.preprocessor, "completion", seen)
    (replica,) = service.fleet.replicas.values()
    replica.backend.max_steps = 20
    client = Client(service, "/v1/completions", json.dumps(BODY).encode())
    await until(lambda: bool(jobs) and None not in jobs[0].usages)
    client.leaves.set()
    await client.answered
    ((job, (usage,)),) = service.counted
    assert (service.observed, job) == ([("completions", 499)], jobs[0])
    assert usage is not None
    assert (usage.prompt_tokens, 0 < usage.completion_tokens < 100) == (2, True)
    replica.backend.resumed.set()
    await until(lambda: not replica.engine.has_work)


async def test_a_stream_that_serve_cancels_is_counted_once_and_ends(service: Service) -> None:
    (replica,) = service.fleet.replicas.values()
    replica.backend.max_steps = 20
    client = Client(service, "/v1/completions", json.dumps(BODY | {"stream": True}).encode())
    await until(lambda: len(client.events) >= 4)
    client.answered.cancel()
    with pytest.raises(asyncio.CancelledError):
        await client.answered
    assert service.observed == [("completions", 499)]
    await until(lambda: len(replica.aborted) == 1)
    replica.backend.resumed.set()
    await until(lambda: not replica.engine.has_work)


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_is_counted_with_its_cost_and_its_first_token(service: Service, stream: bool) -> None:
    client = Client(service, "/v1/completions", json.dumps(BODY | {"stream": stream}).encode())
    await client.answered
    assert not stream or client.events[-1] == b"data: [DONE]\n\n"
    assert service.observed == [("completions", 200)]
    ((job, usages),) = service.counted
    assert [usage.completion_tokens for usage in usages if usage] == [100]
    assert job is not None
    assert job.progress.first_s is not None
    assert job.requests[0].arrival_s <= job.progress.first_s <= time.time()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_that_fails_is_counted_with_what_it_was(
    service: Service, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    (replica,) = service.fleet.replicas.values()

    def fail(*_: object) -> None:
        raise AdapterWriteFailed("its rows did not reach the device")

    monkeypatch.setattr(request_lifecycle, "REFUSAL_S", 60.0)  # a busy engine may take longer than usual to refuse
    monkeypatch.setattr(replica.backend, "write_adapter", fail)
    messages = [{"role": "user", "content": "hi"}]
    body = {"model": "sql", "messages": messages, "stream": stream}
    client = Client(service, "/v1/chat/completions", json.dumps(body).encode())
    await client.answered
    assert client.status == 503
    assert service.observed == [("chat", 503)]
    ((job, _),) = service.counted
    assert job is not None
    assert job.requests[0].adapter is not None
    assert job.progress.first_s is None


async def test_a_client_that_leaves_while_it_asks_is_no_error_of_ours(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    client = Client(service, "/v1/completions", b'{"model": "ba', is_cut=True)
    client.leaves.set()
    await client.answered
    assert service.observed == [("completions", 499)]
    assert not caplog.records


@pytest.mark.parametrize(
    ("route", "label"), [("/v1/chat/completions", "chat"), ("/v1/loras", "loras"), ("/generate", "generate")]
)
async def test_errors_are_counted_under_the_route_of_answers(service: Service, route: str, label: str) -> None:
    await Client(service, route, b"{").answered
    assert service.observed == [(label, 400)]


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("fails", [False, True])
async def test_headers_and_comments_precede_a_first_token_that_takes_long(
    service: Service, monkeypatch: pytest.MonkeyPatch, route: str, fails: bool
) -> None:
    monkeypatch.setattr(event_stream, "KEEP_ALIVE_S", 0.01)
    monkeypatch.setattr(request_lifecycle, "REFUSAL_S", 0.01)
    goes_on = asyncio.Event()

    async def slow(*args: Any, **kwargs: Any) -> AsyncGenerator[TextDelta]:
        async for delta in text_deltas(*args, **kwargs):
            await goes_on.wait()
            if fails:
                raise AdapterWriteFailed("the device lost it")
            yield delta

    monkeypatch.setattr(generation_task, "text_deltas", slow)
    fields: dict[str, Any] = {
        "/v1/completions": {"prompt": "hi", "max_tokens": 2},
        "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    }.get(route, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2})
    client = Client(service, route, json.dumps({"model": "base", "stream": True} | fields).encode())
    try:
        await until(lambda: len(client.events) >= 3)
        assert client.status == 200
        if route in ("/v1/completions", "/v1/chat/completions"):
            assert set(client.events) == {event_stream.KEEP_ALIVE}
        goes_on.set()
        await client.answered
        text = b"".join(client.events).decode()
        assert ("error" in text and "the device lost it" in text) is fails
        if fails and route == "/v1/responses":  # the fields of the official client's event, and the object it raises
            last = json.loads(text.rpartition("event: error\ndata: ")[2])
            assert (last["type"], last["sequence_number"], last["message"]) == ("error", 0, last["error"]["message"])
            assert (last["code"], last["param"]) == (last["error"]["code"], None)
            assert last["error"]["type"] == "server_error"
        comments_end = text.rindex(": keep-alive") if ": keep-alive" in text else 0
        assert "data: " in text[comments_end:]
    finally:
        client.leaves.set()


async def test_a_refusal_before_admission_has_its_status(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(*_: Any, **__: Any) -> AsyncGenerator[TextDelta]:
        await asyncio.sleep(0.02)
        raise QueueFull("full")
        yield TextDelta("")

    monkeypatch.setattr(request_lifecycle, "REFUSAL_S", 60.0)
    monkeypatch.setattr(generation_task, "text_deltas", refused)
    client = Client(service, "/v1/completions", json.dumps(BODY | {"model": "base", "stream": True}).encode())
    await client.answered
    assert client.status == 429
    client.leaves.set()


@pytest.mark.parametrize("include_usage", [False, True])
async def test_every_event_may_have_the_usage_so_far(service: Service, include_usage: bool) -> None:
    options = {"include_usage": include_usage, "continuous_usage_stats": True}
    body = BODY | {"model": "base", "max_tokens": 4, "stream": True, "stream_options": options}
    client = Client(service, "/v1/completions", json.dumps(body).encode())
    await client.answered
    client.leaves.set()
    lines = [json.loads(event[6:]) for event in client.events if event.startswith(b"data: {")]  # no comment, and no end
    counts = [line["usage"]["completion_tokens"] for line in lines]
    assert counts == sorted(counts)
    assert counts[-1] == 4
    assert all(line["usage"]["prompt_tokens"] == 2 for line in lines)
    assert (not lines[-1]["choices"]) is include_usage
