"""/v1/files and /v1/batches, as the official client uses them: every line once, whoever dies."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import httpx
import httpx2
import openai
import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import to_json

from app.config import AppConfig
from app.deployments.ingress.batches import runner as runner_module
from app.deployments.ingress.batches.batch_file import (
    BatchLine,
    LineSplitter,
    NumberedBatchLine,
    TooManyLines,
    result_line,
)
from app.deployments.ingress.batches.runner import MAX_TIMEOUTS, AnswerLine, BatchRunner
from app.deployments.ingress.http.app import make_app
from app.deployments.ingress.http.batch_executor import BatchExecutor
from app.deployments.ingress.http.middleware.origin_check import HttpPolicy
from app.deployments.ingress.http.routes import files as file_routes
from app.deployments.ingress.principal import Principal
from app.deployments.object_storage.batches import LEASE_S
from app.deployments.object_storage.models import Batch, LeaseLost, LineResult
from app.deployments.tenancy.auth.key_crypto import new_key
from app.engine.errors import DeadlineExceeded, QueueFull
from app.engine.request import GenerateRequest, TokenChunk
from tests.deployments.http_service import Service
from tests.deployments.ingress.http.middleware.test_auth import Org, org

__all__ = ["org"]

CHAT = "/v1/chat/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "base", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 0},
    "/v1/completions": {"model": "base", "prompt": "hi", "max_tokens": 4, "temperature": 0},
    "/v1/embeddings": {"model": "base", "input": "hi"},
    "/v1/responses": {"model": "base", "input": "hi", "max_output_tokens": 16, "temperature": 0},
}


def jsonl(bodies: Sequence[Mapping[str, Any]], url: str = CHAT) -> bytes:
    lines = [{"custom_id": f"c{i}", "method": "POST", "url": url, "body": body} for i, body in enumerate(bodies)]
    return "\n".join(map(json.dumps, lines)).encode()


#: States of a batch that has not ended.
RUNNING = ("validating", "in_progress")


@pytest_asyncio.fixture
async def gpt(writing: Service) -> AsyncIterator[openai.AsyncOpenAI]:
    transport = httpx2.ASGITransport(make_app(writing, HttpPolicy()), raise_app_exceptions=False)
    async with httpx2.AsyncClient(transport=transport, base_url="http://test", timeout=20) as client:
        yield openai.AsyncOpenAI(api_key="none", base_url="http://test/v1", http_client=client, max_retries=0)


@pytest_asyncio.fixture
async def works(writing: Service) -> AsyncIterator[None]:
    """The service works on batches."""
    runner = writing.batch_runner(BatchExecutor(writing).answer, "here", write_s=0.01)
    task = asyncio.create_task(runner.run())
    yield
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def upload(gpt: openai.AsyncOpenAI, content: bytes) -> str:
    return (await gpt.files.create(file=("in.jsonl", io.BytesIO(content)), purpose="batch")).id


async def ended(gpt: openai.AsyncOpenAI, batch_id: str) -> openai.types.Batch:
    while True:
        batch = await gpt.batches.retrieve(batch_id)
        if batch.status not in ("validating", "in_progress", "cancelling"):
            return batch
        await asyncio.sleep(0.01)


async def lines_of(gpt: openai.AsyncOpenAI, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    return [json.loads(line) for line in (await gpt.files.content(file_id)).text.splitlines()]


@given(content=st.lists(st.sampled_from([b"\n", b"a", b"bc", b"  "]), max_size=40).map(b"".join), data=st.data())
def test_lines_are_the_same_whatever_parts_a_file_comes_in(content: bytes, data: st.DataObject) -> None:
    places = sorted(data.draw(st.lists(st.integers(0, len(content)), max_size=6)))
    splitter, found = LineSplitter(4, 50), list[NumberedBatchLine]()
    for begin, end in itertools.pairwise([0, *places, len(content)]):
        found += splitter.push(content[begin:end])
    lines = enumerate(content.split(b"\n"))
    whole = [NumberedBatchLine(number, text[:5]) for number, text in lines if text[:5].strip()]
    assert found + splitter.end() == whole


def test_line_breaks_are_counted_before_they_are_split() -> None:
    splitter = LineSplitter(4, 10)
    assert splitter.push(b"\n" * 20 + b"ab") == []
    assert splitter.end() == [NumberedBatchLine(20, b"ab")]
    with pytest.raises(TooManyLines, match="more than 20 lines"):
        splitter.push(b"\n")


async def test_a_file_of_line_breaks_is_refused(writing: Service, gpt: openai.AsyncOpenAI) -> None:
    content = b"\n" * (2 * writing.storage_config.max_batch_lines + 1) + jsonl([BODIES[CHAT]])
    runner = writing.batch_runner(BatchExecutor(writing).answer, "here", write_s=0.01)
    task = asyncio.create_task(runner.run())
    fields: Any = {"endpoint": CHAT, "input_file_id": await upload(gpt, content), "completion_window": "24h"}
    batch = await ended(gpt, (await gpt.batches.create(**fields)).id)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert batch.status == "failed"
    assert [error["code"] for error in batch.to_dict()["errors"]["data"]] == ["too_many_tasks"]  # type: ignore[index]


def test_an_answer_becomes_ascii_without_being_parsed() -> None:
    body = {"text": 'é漢😀\n"body": null', "none": None}
    line = result_line(BatchLine(3, '"body": null', {}), "r", to_json(body)).line
    assert line.isascii()
    found = json.loads(line)
    assert (found["response"]["body"], found["custom_id"], found["error"]) == (body, '"body": null', None)


async def test_a_file_is_read_as_its_lines_are_wanted(
    writing: Service, gpt: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once part by part to check it, and once more no further than requests have come."""
    monkeypatch.setattr(file_routes, "PART_BYTES", 300)
    content = jsonl([BODIES[CHAT]] * 120)
    num_parts, line_bytes = -(-len(content) // 300), len(content) // 120
    reads: list[int] = []
    file_part = writing.storage.file_part

    async def read(file_id: str, number: int, *, tenant_id: str) -> bytes | None:
        reads.append(number)
        return await file_part(file_id, number, tenant_id=tenant_id)

    async def answer(*given: Any) -> bytes:
        wanted = int(given[3].rpartition("-")[2]) + runner.num_streams
        ahead.append(reads[num_parts + 1 :][-1] * 300 - (wanted + 1) * (line_bytes + 8))
        return b"{}"

    ahead: list[int] = []
    fields: Any = {"endpoint": CHAT, "input_file_id": await upload(gpt, content), "completion_window": "24h"}
    batch = await gpt.batches.create(**fields)
    monkeypatch.setattr(writing.storage, "file_part", read)
    runner = writing.batch_runner(answer, "here", write_s=0.01)
    task = asyncio.create_task(runner.run())
    batch = await ended(gpt, batch.id)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    received = await lines_of(gpt, batch.output_file_id)
    assert [one["custom_id"] for one in received] == [f"c{i}" for i in range(120)]
    assert reads[: num_parts + 1] == list(range(num_parts + 1))
    assert len(ahead) == 120
    assert max(ahead) <= 0, "bytes beyond what the requests that have come and their workers can have asked for"


@pytest.mark.usefixtures("works")
@pytest.mark.parametrize("endpoint", BODIES)
async def test_a_batch_answers_as_its_route_does(gpt: openai.AsyncOpenAI, endpoint: Any) -> None:
    wrong = BODIES[endpoint] | {"model": "nobody"}
    file_id = await upload(gpt, jsonl([BODIES[endpoint], wrong, BODIES[endpoint]], endpoint))
    fields: Any = {"input_file_id": file_id, "completion_window": "24h", "metadata": {"job": "mine"}}
    batch = await gpt.batches.create(endpoint=endpoint, **fields)
    assert (batch.object, batch.status, batch.metadata) == ("batch", "validating", {"job": "mine"})
    batch = await ended(gpt, batch.id)
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert batch.request_counts.to_dict() == {"total": 3, "completed": 2, "failed": 1}
    good, bad = await lines_of(gpt, batch.output_file_id), await lines_of(gpt, batch.error_file_id)
    assert [line["custom_id"] for line in good] == ["c0", "c2"]
    assert [(line["custom_id"], line["response"]["status_code"]) for line in bad] == [("c1", 404)]
    direct = await gpt.post(endpoint.removeprefix("/v1"), body=BODIES[endpoint], cast_to=object)
    received, changing = good[0]["response"]["body"], {"id", "created", "created_at", "output", "usage"}
    assert isinstance(direct, dict)
    assert received.keys() == direct.keys()
    assert {k: v for k, v in received.items() if k not in changing} == {
        k: v for k, v in direct.items() if k not in changing
    }
    assert received["usage"]["total_tokens"] == direct["usage"]["total_tokens"]
    listed = [each.id async for each in gpt.batches.list(limit=1)]
    assert listed == [batch.id]
    names = [each.filename async for each in gpt.files.list(purpose="batch_output")]
    assert sorted(names) == [f"{batch.id}_error.jsonl", f"{batch.id}_output.jsonl"]


@pytest.mark.usefixtures("works")
@pytest.mark.parametrize(
    ("endpoint", "changes"),
    [
        (CHAT, {"n": 10_000}),
        (CHAT, {"n": 64, "logprobs": True, "top_logprobs": 20, "max_tokens": 900}),
        (CHAT, {"stop": ["a"] * 1000}),
        (CHAT, {"structured_outputs": {"regex": "(a"}}),
        (CHAT, {"max_tokens": 1 << 30}),
        ("/v1/completions", {"prompt": [[5]] * 3000}),
        ("/v1/completions", {"n": 0}),
        ("/v1/embeddings", {"input": [[5]] * 3000}),
        ("/v1/embeddings", {"encoding_format": "hex"}),
        ("/v1/responses", {"max_output_tokens": 1 << 30}),
    ],
)
async def test_a_line_has_the_bounds_of_its_route(
    gpt: openai.AsyncOpenAI, endpoint: Any, changes: dict[str, Any]
) -> None:
    body = BODIES[endpoint] | changes
    with pytest.raises(openai.BadRequestError) as refused:
        await gpt.post(endpoint.removeprefix("/v1"), body=body, cast_to=object)
    file_id = await upload(gpt, jsonl([body], endpoint))
    batch = await gpt.batches.create(input_file_id=file_id, endpoint=endpoint, completion_window="24h")
    batch = await ended(gpt, batch.id)
    assert batch.output_file_id is None
    (line,) = await lines_of(gpt, batch.error_file_id)
    assert line["response"]["status_code"] == 400
    assert line["response"]["body"]["error"] == refused.value.body


@pytest.mark.usefixtures("works")
async def test_a_line_s_embedding_has_the_format_that_it_asks_for(gpt: openai.AsyncOpenAI) -> None:
    bodies = [BODIES["/v1/embeddings"] | {"encoding_format": form} for form in ("float", "base64")]
    file_id = await upload(gpt, jsonl(bodies, "/v1/embeddings"))
    batch = await gpt.batches.create(input_file_id=file_id, endpoint="/v1/embeddings", completion_window="24h")
    lines = await lines_of(gpt, (await ended(gpt, batch.id)).output_file_id)
    assert [type(line["response"]["body"]["data"][0]["embedding"]) for line in lines] == [list, str]


async def test_files_are_listed_read_and_deleted(gpt: openai.AsyncOpenAI) -> None:
    content = jsonl([BODIES[CHAT]] * 3)
    expires: Any = {"anchor": "created_at", "seconds": 3600}
    first = await gpt.files.create(file=("a.jsonl", io.BytesIO(content)), purpose="batch", expires_after=expires)
    assert first.expires_at == first.created_at + 3600
    ids = [first.id] + [await upload(gpt, content + b"\n" * i) for i in range(4)]
    assert [each.id async for each in gpt.files.list(limit=2, order="asc")] == ids
    assert [each.id async for each in gpt.files.list(limit=2)] == ids[::-1]
    assert [each.id async for each in gpt.files.list(limit=10_000)] == ids[::-1], "OpenAI's largest page"
    found = await gpt.files.retrieve(ids[0])
    assert (found.bytes, found.filename, found.purpose, found.status) == (len(content), "a.jsonl", "batch", "processed")
    assert (await gpt.files.content(ids[0])).content == content
    assert (await gpt.files.delete(ids[0])).deleted
    for ask in (gpt.files.retrieve(ids[0]), gpt.files.delete(ids[0]), gpt.batches.retrieve(ids[0])):
        with pytest.raises(openai.NotFoundError):
            await ask


async def test_large_files_go_and_come_in_parts(gpt: openai.AsyncOpenAI) -> None:
    content = bytes(range(256)) * (10 << 10)
    assert (await gpt.files.content(await upload(gpt, content))).content == content


@pytest.mark.usefixtures("works")
@pytest.mark.parametrize(
    ("content", "code", "line"),
    [
        (b"\n\n", "empty_file", None),
        (b"{}x", "invalid_json_line", 1),
        (jsonl([BODIES[CHAT]], "/v1/embeddings"), "mismatched_endpoint", 1),
        (jsonl([BODIES[CHAT]]) + b"\n" + jsonl([BODIES[CHAT]]), "duplicate_custom_id", 2),
        (jsonl([BODIES[CHAT] | {"stream": True}]), "invalid_request", 1),
        (jsonl([BODIES[CHAT]]).replace(b"POST", b"GET"), "invalid_method", 1),
        (jsonl([BODIES[CHAT]]).replace(b'"custom_id"', b'"name"'), "invalid_request", 1),
        (jsonl([BODIES[CHAT] | {"x": "y" * 21_000}]), "line_too_long", 1),
    ],
)
async def test_errors_of_a_file_are_reported_by_line(
    gpt: openai.AsyncOpenAI, content: bytes, code: str, line: int | None
) -> None:
    fields: Any = {"endpoint": CHAT, "completion_window": "24h"}
    batch = await gpt.batches.create(input_file_id=await upload(gpt, content), **fields)
    batch = await ended(gpt, batch.id)
    assert (batch.status, batch.output_file_id) == ("failed", None)
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert [(each.code, each.line) for each in batch.errors.data] == [(code, line)]


async def test_what_cannot_be_is_refused_when_it_is_asked_for(
    gpt: openai.AsyncOpenAI, writer: httpx.AsyncClient
) -> None:
    fields: Any = {"endpoint": CHAT, "completion_window": "24h"}
    with pytest.raises(openai.NotFoundError):
        await gpt.batches.create(input_file_id="file-none", **fields)
    file_id = await upload(gpt, b"{}")
    for wrong in ({"endpoint": "/v1/moderations"}, {"completion_window": "1h"}):
        with pytest.raises(openai.BadRequestError):
            await gpt.batches.create(**{"input_file_id": file_id} | fields | wrong)
    with pytest.raises(openai.BadRequestError) as caught:
        await gpt.files.create(file=io.BytesIO(b"{}"), purpose="fine-tune")
    assert caught.value.param == "purpose"
    with pytest.raises(openai.BadRequestError):
        await gpt.files.create(file=io.BytesIO(b""), purpose="batch")
    assert (await writer.post("/v1/files", json={})).status_code == 415
    form = {"files": {"file": b"{}"}, "data": {"purpose": "batch"}}
    foreign = await writer.post("/v1/files", **form, headers={"Origin": "http://evil.example"})
    assert foreign.status_code == 403, "no page of another site"
    assert (await writer.post("/v1/route", **form)).status_code == 415, "and no form anywhere else"


async def test_bytes_and_batches_are_bounded(gpt: openai.AsyncOpenAI, writing: Service) -> None:
    small = {"max_file_bytes": 2000, "max_tenant_bytes": 3000, "max_open_batches": 2}
    writing.storage_config = AppConfig.model_validate({"storage": small}).storage
    file_id = await upload(gpt, bytes(2000))
    with pytest.raises(openai.APIStatusError) as caught:
        await upload(gpt, bytes(2001))
    assert caught.value.status_code == 413
    with pytest.raises(openai.PermissionDeniedError) as denied:
        await upload(gpt, bytes(1001))
    assert denied.value.code == "storage_quota_reached"
    await upload(gpt, bytes(900))
    fields: Any = {"endpoint": CHAT, "completion_window": "24h", "input_file_id": file_id}
    batches = [await gpt.batches.create(**fields) for _ in range(2)]
    with pytest.raises(openai.PermissionDeniedError):
        await gpt.batches.create(**fields)
    with pytest.raises(openai.BadRequestError, match=batches[0].id):
        await gpt.files.delete(file_id)


class Held:
    """Answers lines when released, and counts the requests."""

    def __init__(self, service: Service) -> None:
        self._answers = BatchExecutor(service)
        self.asked: list[str] = []
        self.num_open = 0  # lines that may be answered
        self.errors: list[Exception] = []  # raised first

    async def answer(self, endpoint: str, body: Mapping[str, Any], caller: Any, request_id: str) -> bytes:
        assert caller.is_batch
        while self.num_open == 0:
            await asyncio.sleep(0.001)
        self.num_open -= 1
        if self.errors:
            raise self.errors.pop()
        self.asked.append(request_id)
        return await self._answers.answer(endpoint, body, caller, request_id)


def runner_of(service: Service, held: Held, holder: str, now_s: list[float]) -> BatchRunner:
    service.managed.registry.database.clock = service.managed.monotonic = lambda: now_s[0]
    return BatchRunner(
        service.storage, held.answer, service._caller_of, holder, service._config, lambda: now_s[0], write_s=0.005
    )


async def begun(
    gpt: openai.AsyncOpenAI, runner: BatchRunner, num_lines: int
) -> tuple[asyncio.Task[None], openai.types.Batch]:
    """The runner's task, and a new batch of so many requests that it has been told of."""
    task = asyncio.create_task(runner.run())
    file_id = await upload(gpt, jsonl([BODIES[CHAT]] * num_lines))
    batch = await gpt.batches.create(input_file_id=file_id, endpoint=CHAT, completion_window="24h")
    runner.wake()
    return task, batch


async def stop(runner: BatchRunner, task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await runner.close()


async def counted(gpt: openai.AsyncOpenAI, batch_id: str, num_completed: int) -> None:
    while (counts := (await gpt.batches.retrieve(batch_id)).request_counts) is None or counts.completed < num_completed:
        await asyncio.sleep(0.005)


async def test_a_batch_beyond_its_project_s_storage_fails_and_keeps_what_was_written(
    gpt: openai.AsyncOpenAI, writing: Service
) -> None:
    held, now_s = Held(writing), [1000.0]
    runner = runner_of(writing, held, "only", now_s)
    content = jsonl([BODIES[CHAT]] * 10)
    fields: Any = {"endpoint": CHAT, "completion_window": "24h"}
    batch = await gpt.batches.create(input_file_id=await upload(gpt, content), **fields)
    runner.max_tenant_bytes = len(content) + 1500
    task = asyncio.create_task(runner.run())
    held.num_open = 1
    await counted(gpt, batch.id, 1)
    held.num_open = 100
    batch = await ended(gpt, batch.id)
    task.cancel()
    await runner.close()
    assert batch.status == "failed"
    assert [error.code for error in batch.errors.data or []] == ["storage_quota_reached"]
    assert len(await lines_of(gpt, batch.output_file_id)) == batch.request_counts.completed >= 1


async def test_another_goes_on_with_what_a_dead_ingress_left(gpt: openai.AsyncOpenAI, writing: Service) -> None:
    held, now_s = Held(writing), [1000.0]
    first = runner_of(writing, held, "first", now_s)
    task = asyncio.create_task(first.run())
    fields: Any = {"endpoint": CHAT, "completion_window": "24h"}
    batch = await gpt.batches.create(input_file_id=await upload(gpt, jsonl([BODIES[CHAT]] * 10)), **fields)
    first.wake()
    held.num_open = 4
    await counted(gpt, batch.id, 4)
    task.cancel()
    await first._tasks.close()  # it is gone, and has released nothing
    second = runner_of(writing, held, "second", now_s)
    assert await second.storage.claim("second") is None, "its lease holds"
    now_s[0] += LEASE_S
    task = asyncio.create_task(second.run())
    held.num_open = 100
    batch = await ended(gpt, batch.id)
    task.cancel()
    good = await lines_of(gpt, batch.output_file_id)
    assert [line["custom_id"] for line in good] == [f"c{i}" for i in range(10)], "each line once"
    assert len(held.asked) == 10
    await asyncio.gather(task, return_exceptions=True)
    await second.close()


async def test_what_two_write_is_kept_once(gpt: openai.AsyncOpenAI, writing: Service) -> None:
    """The first process was only slow: what it writes after its lease has ended is refused."""
    held, now_s = Held(writing), [1000.0]
    runner_of(writing, held, "x", now_s)
    fields: Any = {"endpoint": CHAT, "completion_window": "24h"}
    batch = await gpt.batches.create(input_file_id=await upload(gpt, jsonl([BODIES[CHAT]])), **fields)
    storage = writing.storage
    assert await storage.claim("slow") is not None
    await storage.begin_batch(batch.id, "slow", 1)
    assert await storage.claim("fast") is None, "its lease holds"
    now_s[0] += LEASE_S
    assert await storage.claim("fast") is not None
    with pytest.raises(LeaseLost):
        await storage.answer(batch.id, "slow", [LineResult(0, False, "slow")], 1 << 20)
    for text in ("first", "second"):
        received = await storage.answer(batch.id, "fast", [LineResult(0, False, text)], 1 << 20)
        assert received.num_completed == 1
    done = await storage.finish(batch.id, "fast", "completed")
    assert done.output_file_id is not None
    assert await storage.file_part(done.output_file_id, 0, tenant_id="default") == b"first\n"


async def test_a_batch_that_waits_for_room_begins_when_another_ends(
    gpt: openai.AsyncOpenAI, writing: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "MAX_BATCHES", 1)
    monkeypatch.setattr(runner_module, "POLL_S", 3600.0)
    file_id = await upload(gpt, jsonl([BODIES[CHAT]]))
    batches = [
        await gpt.batches.create(input_file_id=file_id, endpoint=CHAT, completion_window="24h") for _ in range(3)
    ]
    runner = writing.batch_runner(BatchExecutor(writing).answer, "here", write_s=0.01)
    task = asyncio.create_task(runner.run())
    async with asyncio.timeout(60.0):
        assert [(await ended(gpt, batch.id)).status for batch in batches] == ["completed"] * 3
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_cancelled_batch_keeps_what_was_answered(gpt: openai.AsyncOpenAI, writing: Service) -> None:
    held, now_s = Held(writing), [1000.0]
    runner = runner_of(writing, held, "here", now_s)
    task, batch = await begun(gpt, runner, 6)
    held.num_open = 2
    await counted(gpt, batch.id, 2)
    assert (await gpt.batches.cancel(batch.id)).status == "cancelling"
    batch = await ended(gpt, batch.id)
    assert (batch.status, batch.error_file_id) == ("cancelled", None)
    assert len(await lines_of(gpt, batch.output_file_id)) == 2
    assert (await gpt.batches.cancel(batch.id)).status == "cancelled", "it has ended"
    await stop(runner, task)


async def test_what_is_not_answered_in_time_is_reported(gpt: openai.AsyncOpenAI, writing: Service) -> None:
    held, now_s = Held(writing), [1000.0]
    runner = runner_of(writing, held, "here", now_s)
    task, batch = await begun(gpt, runner, 4)
    held.num_open = 1
    await counted(gpt, batch.id, 1)
    now_s[0] += 86_400
    batch = await ended(gpt, batch.id)
    assert batch.status == "expired"
    late = await lines_of(gpt, batch.error_file_id)
    assert [line["error"]["code"] for line in late] == ["batch_expired"] * 3
    assert all(line["response"] is None for line in late)
    await stop(runner, task)
    now_s[0] += 31 * 86_400
    with pytest.raises(openai.NotFoundError):
        await gpt.files.retrieve(batch.error_file_id or "")
    await asyncio.to_thread(writing.storage._actor._callee._storage.sweep)  # type: ignore[attr-defined]
    assert await asyncio.to_thread(_num_rows, writing, "file_parts") == 0


def _num_rows(service: Service, table: str) -> int:
    with service.managed.registry.database.read() as connection:
        return int(connection.exec_driver_sql(f"SELECT count(*) FROM {table}").scalar_one())


async def test_what_is_refused_for_now_is_tried_again(gpt: openai.AsyncOpenAI, writing: Service) -> None:
    held, now_s = Held(writing), [1000.0]
    held.num_open, held.errors = 100, [QueueFull("full", retry_after_s=0.01)] * 2
    runner = runner_of(writing, held, "here", now_s)
    task, batch = await begun(gpt, runner, 2)
    batch = await ended(gpt, batch.id)
    assert batch.request_counts is not None
    assert batch.request_counts.completed == 2
    await stop(runner, task)


@pytest.mark.parametrize("num_tokens", [0, 3])
async def test_what_computes_until_its_time_is_over_is_not_tried_for_ever(
    gpt: openai.AsyncOpenAI, writing: Service, monkeypatch: pytest.MonkeyPatch, num_tokens: int
) -> None:
    monkeypatch.setattr(runner_module, "FIRST_PAUSE_S", 0.001)
    held, now_s = Held(writing), [1000.0]
    held.num_open, held.errors = 100, [DeadlineExceeded("late", num_tokens)] * (MAX_TIMEOUTS + 1)
    runner = runner_of(writing, held, "here", now_s)
    task, batch = await begun(gpt, runner, 1)
    batch = await ended(gpt, batch.id)
    statuses = [line["response"]["status_code"] for line in await lines_of(gpt, batch.error_file_id)]
    assert (statuses, len(held.errors)) == (([504], 1) if num_tokens else ([], 0))
    await stop(runner, task)


async def test_a_lease_is_renewed_while_a_file_is_validated(
    gpt: openai.AsyncOpenAI, writing: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, now_s = Held(writing), [1000.0]
    runner = runner_of(writing, held, "slow", now_s)
    claimed_by_others: list[Batch | None] = []

    async def slow_part(_: Batch, number: int) -> bytes | None:
        if number < 3:
            now_s[0] += 0.6 * LEASE_S
            await asyncio.sleep(0.2)
            claimed_by_others.append(await writing.storage.claim("other"))
        return jsonl([BODIES[CHAT]]) if number == 0 else b"\n" if number < 3 else None

    monkeypatch.setattr(runner, "_part", slow_part)
    held.num_open = 1
    task, batch = await begun(gpt, runner, 1)
    assert (await ended(gpt, batch.id)).status == "completed"
    assert len(claimed_by_others) >= 3
    assert not any(claimed_by_others)
    await stop(runner, task)


async def test_a_batch_in_work_is_not_begun_a_second_time(
    gpt: openai.AsyncOpenAI, writing: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, now_s = Held(writing), [1000.0]
    runner, claim, again = runner_of(writing, held, "here", now_s), writing.storage.claim, list[Batch]()

    async def claim_twice(holder: str) -> Batch | None:
        if (batch := await claim(holder)) is not None:
            again.append(batch)
            return batch
        return again.pop() if again else None

    monkeypatch.setattr(writing.storage, "claim", claim_twice, raising=False)
    task, batch = await begun(gpt, runner, 2)
    while (await gpt.batches.retrieve(batch.id)).status != "in_progress" or again:
        await asyncio.sleep(0.005)
    held.num_open = 100
    assert (await ended(gpt, batch.id)).status == "completed"
    assert sorted(held.asked) == [f"{batch.id}-0", f"{batch.id}-1"]
    await stop(runner, task)


@pytest.mark.usefixtures("works")
async def test_batches_are_of_the_lowest_class_and_metered(gpt: openai.AsyncOpenAI, writing: Service) -> None:
    fields: Any = {"endpoint": CHAT, "completion_window": "24h"}
    batch = await gpt.batches.create(input_file_id=await upload(gpt, jsonl([BODIES[CHAT]] * 3)), **fields)
    await ended(gpt, batch.id)
    (replica,) = writing.fleet.replicas.values()
    assert len(replica.submitted) == 3
    assert all(request.is_batch for request in replica.submitted)
    assert writing.observed.count(("chat", 200)) == 3
    assert all(job is not None and job.reservation.is_settled for job, _ in writing.counted)
    await gpt.chat.completions.create(**BODIES[CHAT])
    assert not replica.submitted[-1].is_batch


async def test_what_a_project_keeps_is_its_own(org: Org) -> None:
    form: Any = {"files": {"file": ("f.jsonl", jsonl([BODIES[CHAT]]))}, "data": {"purpose": "batch"}}
    sent = await org.ask("ada", "POST", "/v1/files", **form)
    assert sent.status_code == 200, sent.text
    file_id = sent.json()["id"]
    wanted = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
    batch_id = (await org.ask("ada", "POST", "/v1/batches", json=wanted)).json()["id"]
    asked = [
        ("GET", f"/v1/files/{file_id}"),
        ("GET", f"/v1/files/{file_id}/content"),
        ("DELETE", f"/v1/files/{file_id}"),
        ("GET", f"/v1/batches/{batch_id}"),
        ("POST", f"/v1/batches/{batch_id}/cancel"),
        ("GET", f"/v1/files?after={file_id}"),
        ("GET", f"/v1/batches?after={batch_id}"),
    ]
    for method, path in asked:
        theirs = await org.ask("bob", method, path)
        nobodys = await org.ask("bob", method, path.replace(file_id, "file-0").replace(batch_id, "batch_0"))
        assert theirs.status_code == nobodys.status_code == 404
        received = theirs.json()["error"]["message"].replace(file_id, "file-0").replace(batch_id, "batch_0")
        assert received == nobodys.json()["error"]["message"]
    assert (await org.ask("bob", "POST", "/v1/batches", json=wanted)).status_code == 404
    assert (await org.ask("bob", "GET", "/v1/files")).json()["data"] == []
    assert (await org.ask("bob", "GET", "/v1/batches")).json()["data"] == []
    assert (await org.ask("ada", "GET", f"/v1/batches/{batch_id}")).json()["status"] == "validating"


async def test_a_file_s_name_and_a_batch_s_metadata_hold_no_key(org: Org) -> None:
    key = org.keys["ada"]
    for name in (f"{key}.jsonl", f"{key}{'x' * 250}.jsonl"):  # of the longer, only its end would be kept
        form: Any = {"files": {"file": (name, jsonl([BODIES[CHAT]]))}, "data": {"purpose": "batch"}}
        refused = await org.ask("ada", "POST", "/v1/files", **form)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "file")
        assert key not in refused.text
    assert (await org.ask("ada", "GET", "/v1/files")).json()["data"] == []
    form = {"files": {"file": ("in.jsonl", jsonl([BODIES[CHAT]]))}, "data": {"purpose": "batch"}}
    file_id = (await org.ask("ada", "POST", "/v1/files", **form)).json()["id"]
    wanted = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
    for metadata in ({"job": f"with {key}"}, {key: "job"}):
        refused = await org.ask("ada", "POST", "/v1/batches", json=wanted | {"metadata": metadata})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "metadata")
        assert "contains an API key" in refused.json()["error"]["message"]
        assert key not in refused.text
    assert (await org.ask("ada", "GET", "/v1/batches")).json()["data"] == []


@pytest.mark.usefixtures("works")
async def test_errors_of_a_file_s_lines_contain_no_key(gpt: openai.AsyncOpenAI, writing: Service) -> None:
    key, fields = new_key(is_admin=False).value, {"endpoint": CHAT, "completion_window": "24h"}
    for field, param in (("custom_id", "custom_id"), (key, "sk-poly-...")):
        line = json.loads(jsonl([BODIES[CHAT]])) | {field: key}
        batch: Any = await gpt.batches.create(input_file_id=await upload(gpt, json.dumps(line).encode()), **fields)  # type: ignore[call-overload]
        batch = await ended(gpt, batch.id)
        assert batch.status == "failed"
        assert [each.param for each in batch.errors.data] == [param]
        storage = await writing.storage.batch(batch.id, tenant_id="default")
        assert key not in repr(storage)


async def org_batch(org: Org, num_lines: int, model: str = "base") -> dict[str, Any]:
    uploaded = await org.ask(
        "ada",
        "POST",
        "/v1/files",
        files={"file": ("in.jsonl", jsonl([BODIES[CHAT] | {"model": model}] * num_lines))},
        data={"purpose": "batch"},
    )
    wanted = {"input_file_id": uploaded.json()["id"], "endpoint": CHAT, "completion_window": "24h"}
    made: dict[str, Any] = (await org.ask("ada", "POST", "/v1/batches", json=wanted)).json()
    return made


async def run_line_by_line(org: Org, answer: AnswerLine) -> Batch:
    """A batch of ada's with five lines, run to its end by a runner that answers one line at a time."""
    runner = org.service.batch_runner(answer, "here", write_s=0.01)
    runner.num_streams = 1
    batch_id = (await org_batch(org, 5))["id"]
    task = asyncio.create_task(runner.run())
    while (batch := await org.service.storage.batch(batch_id, tenant_id=org.ids["ada"])).status in RUNNING:
        await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return batch


async def org_ended(org: Org, batch_id: str) -> dict[str, Any]:
    async with asyncio.timeout(60):
        while True:
            batch: dict[str, Any] = (await org.ask("ada", "GET", f"/v1/batches/{batch_id}")).json()
            if batch["status"] not in ("validating", "in_progress", "cancelling"):
                return batch
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("model", ["base", "auto"])
@pytest.mark.parametrize("is_admitted", [True, False])
async def test_a_line_is_one_request_however_often_it_is_tried(
    org: Org, monkeypatch: pytest.MonkeyPatch, is_admitted: bool, model: str
) -> None:
    """Nor does a try that came to nothing take of the day's requests."""
    monkeypatch.setattr(runner_module, "FIRST_PAUSE_S", 0.01)
    owner, service = org.service.accounting.tenants_service, org.service
    await owner.limit_rates(org.ids["ada"], "base", {"requests_per_day": 2}, actor="test")
    dispatcher, num_refused = service.preprocessor._dispatcher, 0
    stream = dispatcher.stream

    async def check(_: Sequence[GenerateRequest]) -> None:
        nonlocal num_refused
        if not is_admitted and num_refused < 5:
            num_refused += 1
            raise QueueFull("full", retry_after_s=0.01)

    async def full(
        request: GenerateRequest, deadline_s: float, on_assigned: Callable[[], None], num_sequences: int
    ) -> AsyncGenerator[TokenChunk]:
        nonlocal num_refused
        if is_admitted and num_refused < 5:
            num_refused += 1
            raise QueueFull("full", retry_after_s=0.01)
        async for chunk in stream(request, deadline_s, on_assigned, num_sequences):
            yield chunk

    monkeypatch.setattr(dispatcher, "stream", full)
    monkeypatch.setattr(dispatcher.refusals, "check", check)
    runner = service.batch_runner(BatchExecutor(service).answer, "here", write_s=0.01)
    task = asyncio.create_task(runner.run())
    batch = await org_ended(org, (await org_batch(org, 2, model))["id"])
    assert batch["request_counts"] == {"total": 2, "completed": 2, "failed": 0}
    assert num_refused == 5
    assert await service.accounting.usage_flusher.flush()
    assert (await asyncio.to_thread(service.managed.books.ledger.total)).num_requests == 2
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_batch_goes_by_what_its_project_may_now(org: Org) -> None:
    """Rights and limits that change while a batch runs are in force for the lines that follow."""
    owner, service, ada = org.service.accounting.tenants_service, org.service, org.ids["ada"]
    answers, asked = BatchExecutor(service), list[Principal]()

    async def answer(endpoint: str, body: Mapping[str, Any], caller: Principal, request_id: str) -> bytes:
        asked.append(caller)
        if len(asked) == 2:
            await owner.permit_models(ada, "deny_list", ["base"], actor="test")
        elif len(asked) == 3:
            await owner.archive_project(ada, actor="test")
        while service.accounting.view.tenant(ada) != await owner.project(ada):
            await asyncio.sleep(0.001)
        return await answers.answer(endpoint, body, caller, request_id)

    batch = await run_line_by_line(org, answer)
    assert (batch.num_completed, batch.num_failed, len(asked)) == (2, 3, 3)
    assert batch.error_file_id is not None
    received = await service.storage.file_part(batch.error_file_id, 0, tenant_id=ada)
    assert received is not None
    lines = [json.loads(line) for line in received.splitlines()]
    assert lines[0]["response"]["status_code"] == 404
    assert [line["error"]["code"] for line in lines[1:]] == ["project_archived"] * 2


@pytest.mark.parametrize("how", ["revoked", "expired", "account deleted", "management only"])
async def test_a_batch_ends_with_its_key(org: Org, how: str) -> None:
    """Its remaining lines go to the error file, and the answer to the revocation names it."""
    owner, service, ada = org.service.accounting.tenants_service, org.service, org.ids["ada"]
    (key,) = await owner.keys(ada, 10, None)
    project, account = f"/v1/organization/projects/{ada}", f"service_accounts/{key.service_account_id}"
    answers, num_asked, said = BatchExecutor(service), 0, list[Any]()

    async def answer(endpoint: str, body: Mapping[str, Any], caller: Principal, request_id: str) -> Mapping[str, Any]:
        nonlocal num_asked
        num_asked += 1
        found = await answers.answer(endpoint, body, caller, request_id)
        if num_asked == 2:
            if how == "revoked":
                said.append((await org.ask("admin", "DELETE", f"{project}/api_keys/{key.id}")).json())
            elif how == "account deleted":
                said.append((await org.ask("admin", "DELETE", f"{project}/{account}")).json())
            elif how == "management only":
                answer = await org.ask("admin", "POST", f"{project}/{account}", json={"role": "management"})
                assert answer.status_code == 200, answer.text
            else:
                await owner.expire_key(ada, key.id, 1, actor="test")
                service.accounting.clock = lambda: time.time() + 2
            while service.accounting.view.key(key.id) == key:
                await asyncio.sleep(0.001)
        return found

    batch = await run_line_by_line(org, answer)
    assert (batch.status, batch.num_completed, batch.num_failed) == ("completed", 2, 3)
    assert batch.error_file_id is not None
    received = await service.storage.file_part(batch.error_file_id, 0, tenant_id=ada)
    assert received is not None
    assert {json.loads(line)["error"]["code"] for line in received.splitlines()} == {"key_revoked"}
    if said:
        assert said[0]["ended_batches"] == [batch.id]
        assert said[0]["deleted"]


async def test_a_batch_of_a_revoked_key_does_not_begin(org: Org) -> None:
    service, ada = org.service, org.ids["ada"]
    (key,) = await service.accounting.tenants_service.keys(ada, 10, None)
    batch_id = (await org_batch(org, 2))["id"]
    path = f"/v1/organization/projects/{ada}/api_keys/{key.id}"
    assert (await org.ask("admin", "DELETE", path)).json()["ended_batches"] == [batch_id]
    runner = service.batch_runner(BatchExecutor(service).answer, "here", write_s=0.01)
    task = asyncio.create_task(runner.run())
    while (batch := await service.storage.batch(batch_id, tenant_id=ada)).status != "failed":
        await asyncio.sleep(0.01)
    assert json.loads(batch.errors)[0]["code"] == "key_revoked"
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
