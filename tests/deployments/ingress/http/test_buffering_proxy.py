"""A proxy between client and service that holds answers back, or ends what is silent, changes no answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from app.deployments.ingress.dispatch import generation_task
from app.deployments.ingress.http import event_stream, request_lifecycle
from app.deployments.ingress.http.middleware.origin_check import HttpPolicy
from app.deployments.ingress.serializers.detokenizer import TextDelta, text_deltas
from tests.deployments.http_service import Service
from tests.deployments.ingress.dispatch.test_dispatcher import until
from tests.deployments.ingress.http.routes.test_apply_routes import served

BODY = {"model": "sql", "prompt": "hi", "max_tokens": 100, "ignore_eos": True, "stream": True, "temperature": 0}
#: The proxy's read timeout: so many rounds of its event loop, which the service shares, so that a busy machine is no
#: silence.
MAX_SILENT_ROUNDS, ROUND_S = 20, 0.05


@asynccontextmanager
async def proxy(url: str, hold_bytes: float) -> AsyncIterator[str]:
    """Passes connections on to `url`. It sends an answer in pieces of `hold_bytes` and at its end, and cuts a
    connection on which the service is silent for `MAX_SILENT_ROUNDS`.
    """

    async def requests(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = url.removeprefix("http://").rpartition(":")
        from_service, to_service = await asyncio.open_connection(host, int(port))
        sending, held = asyncio.create_task(requests(reader, to_service)), b""
        sending.add_done_callback(lambda _: to_service.close())  # the client has gone, and so does the proxy
        with contextlib.suppress(ConnectionError, TimeoutError):
            while data := await read_or_time_out(from_service):
                held += data
                if len(held) >= hold_bytes:
                    writer.write(held)
                    held = b""
        writer.write(held)
        sending.cancel()
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def read_or_time_out(reader: asyncio.StreamReader) -> bytes:
    reading = asyncio.create_task(reader.read(1 << 16))
    for _ in range(MAX_SILENT_ROUNDS):
        if (await asyncio.wait((reading,), timeout=ROUND_S))[0]:
            return reading.result()
    reading.cancel()
    raise TimeoutError


async def streamed(url: str) -> tuple[httpx.Response, list[str]]:
    """The answer's head and the data of its events."""
    headers = {"connection": "close"}
    async with (
        httpx.AsyncClient(timeout=60, headers=headers) as http,
        http.stream("POST", f"{url}/v1/completions", json=BODY) as answer,
    ):
        assert answer.status_code == 200, await answer.aread()
        lines = [line.removeprefix("data: ") async for line in answer.aiter_lines() if line.startswith("data: ")]
        return answer, lines


def texts(events: list[str]) -> list[str]:
    assert events[-1] == "[DONE]"
    return [json.loads(event)["choices"][0]["text"] for event in events[:-1]]


@pytest.mark.parametrize("hold_bytes", [1, 16 << 10, float("inf")], ids=["nothing", "16 kB", "everything"])
async def test_what_a_proxy_holds_back_is_late_and_the_same(service: Service, hold_bytes: float) -> None:
    async with served(service, HttpPolicy()) as direct, proxy(direct, hold_bytes) as url:
        expected = await streamed(direct)
        answer, events = await streamed(url)
    assert "".join(texts(events)) == "".join(texts(expected[1]))
    assert (answer.headers["x-accel-buffering"], answer.headers["cache-control"]) == ("no", "no-cache")
    assert service.observed == [("completions", 200)] * 2, "it was computed once for each request"


@pytest.mark.parametrize("has_comments", [True, False])
async def test_comments_keep_a_proxy_from_cutting_a_stream_before_its_first_token(
    service: Service, monkeypatch: pytest.MonkeyPatch, has_comments: bool
) -> None:
    monkeypatch.setattr(event_stream, "KEEP_ALIVE_S", ROUND_S if has_comments else 600.0)
    monkeypatch.setattr(request_lifecycle, "REFUSAL_S", 0.01)
    has_waited = False

    async def slow(*args: Any, **kwargs: Any) -> AsyncGenerator[TextDelta]:
        nonlocal has_waited
        async for delta in text_deltas(*args, **kwargs):
            for _ in range(0 if has_waited else 2 * MAX_SILENT_ROUNDS):
                await asyncio.sleep(ROUND_S)
            has_waited = True
            yield delta

    monkeypatch.setattr(generation_task, "text_deltas", slow)
    async with served(service, HttpPolicy()) as direct, proxy(direct, 1) as url:
        if has_comments:
            assert len("".join(texts((await streamed(url))[1]))) > 0
        else:
            with pytest.raises(httpx.RemoteProtocolError):
                await streamed(url)
    assert has_waited is has_comments


async def test_a_client_that_leaves_a_proxy_that_holds_everything_ends_its_request(service: Service) -> None:
    (replica,) = service.fleet.replicas.values()
    replica.backend.max_steps = 20
    async with served(service, HttpPolicy()) as direct, proxy(direct, float("inf")) as url:
        waiting = asyncio.create_task(streamed(url))
        await until(lambda: service.num_streams == 1)
        waiting.cancel()
        await until(lambda: len(replica.aborted) == 1)
        replica.backend.resumed.set()
        await until(lambda: not replica.engine.has_work)
    assert service.observed == [("completions", 499)]
