"""Stored responses, as the official client uses them: `store`, `previous_response_id`, looking up and forgetting."""

from __future__ import annotations

import itertools
import re
from collections.abc import AsyncIterator
from functools import wraps
from typing import Any

import httpx2
import openai
import pytest
import pytest_asyncio

from app.config import AppConfig
from app.deployments.ingress.http.app import make_app
from app.deployments.ingress.http.middleware.origin_check import HttpPolicy
from app.deployments.ingress.http.routes import responses as routes
from app.deployments.object_storage.service import StorageService
from app.engine.errors import NotReady
from tests.deployments.http_service import Service
from tests.deployments.ingress.http.middleware.test_auth import Org, org
from tests.deployments.ingress.http.routes.test_messages import GPT, GPT_TOOLS

__all__ = ["org"]

FIXED: Any = GPT | {"max_output_tokens": 16, "temperature": 0}
#: A call whose arguments are not longer than the context is for the next turn.
SEEDED: Any = GPT | GPT_TOOLS | {"extra_body": {"seed": 4}}


@pytest_asyncio.fixture
async def gpt(writing: Service) -> AsyncIterator[openai.AsyncOpenAI]:
    transport = httpx2.ASGITransport(make_app(writing, HttpPolicy()), raise_app_exceptions=False)
    async with httpx2.AsyncClient(transport=transport, base_url="http://test", timeout=20) as client:
        yield openai.AsyncOpenAI(api_key="none", base_url="http://test/v1", http_client=client, max_retries=0)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_conversation_goes_on_where_a_stored_response_ended(gpt: openai.AsyncOpenAI, is_streamed: bool) -> None:
    if is_streamed:
        events = [event async for event in await gpt.responses.create(**FIXED, store=True, stream=True)]
        (*_, last) = events
        assert last.type in ("response.completed", "response.incomplete")
        first = last.response
        assert events[0].type == "response.created"
        assert events[0].response.id == first.id
    else:
        first = await gpt.responses.create(**FIXED, store=True)
    assert first.store is True
    found = await gpt.responses.retrieve(first.id)
    assert found.to_dict() == first.to_dict()
    with pytest.raises(openai.BadRequestError) as refused:
        await gpt.responses.retrieve(first.id, stream=True)
    assert refused.value.param == "stream"
    second = await gpt.responses.create(**FIXED | {"input": "and?"}, previous_response_id=first.id, store=True)
    assert second.previous_response_id == first.id
    received: Any = [
        {"role": "user", "content": "hi"},
        *(item.to_dict() for item in first.output),
        {"role": "user", "content": "and?"},
    ]
    whole = await gpt.responses.create(**FIXED | {"input": received})
    assert whole.output_text == second.output_text
    assert whole.store is False
    assert whole.usage is not None
    assert second.usage is not None
    assert whole.usage.input_tokens == second.usage.input_tokens
    items = [item async for item in gpt.responses.input_items.list(second.id, order="asc", limit=2)]
    assert [getattr(item, "role", None) for item in items] == ["user", "assistant", "user"]
    latest = [item.id async for item in gpt.responses.input_items.list(second.id)]
    assert latest == [item.id for item in reversed(items)]
    third = await gpt.responses.create(**FIXED, previous_response_id=second.id)
    assert third.usage is not None
    assert third.usage.input_tokens > second.usage.input_tokens


async def test_a_call_of_a_tool_is_answered_by_its_id_alone(gpt: openai.AsyncOpenAI) -> None:
    first = await gpt.responses.create(**GPT | GPT_TOOLS, store=True)
    (call,) = first.output
    assert call.type == "function_call"
    result: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "12"}]
    fields = GPT | {"input": result, "max_output_tokens": 16}
    second = await gpt.responses.create(**fields, previous_response_id=first.id, store=True)
    kinds = [item.type async for item in gpt.responses.input_items.list(second.id, order="asc")]
    assert kinds == ["message", "function_call", "function_call_output"]


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_items_of_stored_responses_are_referred_to_by_their_ids(
    gpt: openai.AsyncOpenAI, is_streamed: bool
) -> None:
    """The AI SDK sends the items that it has got so."""
    if is_streamed:
        stream = await gpt.responses.create(**SEEDED, store=True, stream=True)
        events = [event async for event in stream]
        assert events[-1].type in ("response.completed", "response.incomplete")
        first = events[-1].response
        assert {event.item_id for event in events if event.type.endswith(".delta")} == {first.output[0].id}
    else:
        first = await gpt.responses.create(**SEEDED, store=True)
    (call,) = first.output
    assert call.type == "function_call"
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "12"}
    asked = {"role": "user", "content": "hi"}

    def ask(*items: Any) -> Any:
        return gpt.responses.create(**FIXED | {"input": items}, store=True)

    second = await ask(asked, {"type": "item_reference", "id": call.id}, result)
    plain = await ask(asked, call.to_dict(), result)
    assert (second.output_text, second.usage.input_tokens) == (plain.output_text, plain.usage.input_tokens)
    references = [{"type": "item_reference", "id": item.id} for item in (call, second.output[0])]
    third: Any = [asked, references[0], result, references[1]]
    counted = await gpt.responses.input_tokens.count(model="base", input=third)
    answer = await ask(*third)
    assert answer.usage.input_tokens == counted.input_tokens > second.usage.input_tokens
    kinds = [item.type async for item in gpt.responses.input_items.list(answer.id, order="asc")]
    assert kinds == ["message", "function_call", "function_call_output", "message"]
    for unknown in ("msg_1_0", f"msg_{'0' * 32}_0", (call.id or "")[:-1] + "7"):
        with pytest.raises(openai.NotFoundError) as gone:
            await ask({"type": "item_reference", "id": unknown})
        assert "no item" in gone.value.message
        assert "store: true; otherwise send them" in gone.value.message


@pytest.mark.parametrize("store", [False, True])
async def test_ids_are_openai_s(gpt: openai.AsyncOpenAI, store: bool) -> None:
    plain = await gpt.responses.create(**FIXED, store=store)
    (*_, last) = [event async for event in await gpt.responses.create(**FIXED, store=store, stream=True)]
    assert last.type in ("response.completed", "response.incomplete")
    for response in (plain, last.response):
        assert re.fullmatch("resp_[0-9a-f]+", response.id)
        assert re.fullmatch("msg_[0-9a-f]+_0", response.output[0].id or "")


async def test_what_is_not_stored_is_not_there(gpt: openai.AsyncOpenAI, writing: Service) -> None:
    plain = await gpt.responses.create(**FIXED)
    stored = await gpt.responses.create(**FIXED, store=True)
    await gpt.responses.delete(stored.id)
    for gone in (plain.id, stored.id, "resp_none"):
        with pytest.raises(openai.NotFoundError) as unknown:
            await gpt.responses.retrieve(gone)
        assert unknown.value.code == "not_found"
        with pytest.raises(openai.NotFoundError):
            await gpt.responses.delete(gone)
        with pytest.raises(openai.BadRequestError) as refused:
            await gpt.responses.create(**FIXED, previous_response_id=gone)
        assert (refused.value.code, refused.value.param) == ("previous_response_not_found", "previous_response_id")
        with pytest.raises(openai.NotFoundError):
            await gpt.responses.input_items.list(gone)
    writing.storage_config = AppConfig.model_validate({"storage": {"store_responses": True}}).storage
    assert (await gpt.responses.create(**FIXED)).store is True
    assert (await gpt.responses.create(**FIXED, store=False)).store is False


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("num_failures", [1, 100])
async def test_an_answer_that_cannot_be_stored_is_delivered(
    gpt: openai.AsyncOpenAI,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    num_failures: int,
    is_streamed: bool,
) -> None:
    """A failed call may have stored it: only its answer was lost."""
    monkeypatch.setattr(routes, "STORE_TIMEOUT_S", 60.0 if num_failures == 1 else 0.1)
    keep, calls = StorageService.keep_response, itertools.count(1)

    @wraps(keep)
    async def failing(self: StorageService, *args: Any, **options: Any) -> None:
        if num_failures == 1:
            await keep(self, *args, **options)
        if next(calls) <= num_failures:
            raise NotReady("the store does not answer")

    monkeypatch.setattr(StorageService, "keep_response", failing)
    if is_streamed:
        last = [event async for event in await gpt.responses.create(**FIXED, store=True, stream=True)][-1]
        assert last.type in ("response.completed", "response.incomplete")
        answer = last.response
    else:
        answer = await gpt.responses.create(**FIXED, store=True)
    assert answer.output_text
    assert answer.store is (num_failures == 1)
    if answer.store:
        assert (await gpt.responses.retrieve(answer.id)).output_text == answer.output_text
    else:
        assert f"response {answer.id} is not stored: the store does not answer" in caplog.text


async def test_they_are_bounded_and_expire(gpt: openai.AsyncOpenAI, writing: Service) -> None:
    writing.storage_config = AppConfig.model_validate({"storage": {"max_responses": 2, "retention_days": 1}}).storage
    database, now_s = writing.managed.registry.database, [1000.0]
    database.clock = lambda: now_s[0]
    ids = []
    for _ in range(3):
        ids.append((await gpt.responses.create(**FIXED, store=True)).id)
        now_s[0] += 1
    with pytest.raises(openai.NotFoundError):
        await gpt.responses.retrieve(ids[0])
    assert (await gpt.responses.retrieve(ids[1])).id == ids[1]
    now_s[0] = 1001 + 86_400
    with pytest.raises(openai.NotFoundError):
        await gpt.responses.retrieve(ids[1])
    assert (await gpt.responses.retrieve(ids[2])).id == ids[2]
    small = writing.storage_config.model_copy(update={"max_response_bytes": 1024})
    writing.storage_config = small
    first = await gpt.responses.create(**FIXED | {"input": "x" * 100}, store=True)
    with pytest.raises(openai.NotFoundError):
        await gpt.responses.retrieve(first.id)


@pytest.mark.parametrize("store", [False, True])
async def test_a_response_s_metadata_holds_no_key(org: Org, store: bool) -> None:
    body = {"model": "base", "input": "hi", "max_output_tokens": 16, "store": store}
    key = org.keys["ada"]
    for metadata in ({"by": key}, {f"by {key}": "me"}):
        refused = await org.ask("ada", "POST", "/v1/responses", json=body | {"metadata": metadata})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "metadata")
        assert key not in refused.text
    answer = await org.ask("ada", "POST", "/v1/responses", json=body | {"metadata": {"by": "me"}})
    assert answer.json()["metadata"] == {"by": "me"}


async def test_a_project_s_responses_are_its_own(org: Org) -> None:
    body = {"model": "base", "input": "hi", "max_output_tokens": 16, "store": True}
    response_id = (await org.ask("ada", "POST", "/v1/responses", json=body)).json()["id"]
    path = f"/v1/responses/{response_id}"
    assert (await org.ask("ada", "GET", path)).status_code == 200
    asks: list[tuple[str, str, Any, int]] = [
        ("GET", path, {}, 404),
        ("DELETE", path, {}, 404),
        ("GET", f"{path}/input_items", {}, 404),
        ("POST", "/v1/responses", {"json": body | {"previous_response_id": response_id}}, 400),
    ]
    reference = {"type": "item_reference", "id": response_id.replace("resp_", "msg_") + "_0"}
    for name, status in (("ada", 200), ("bob", 404)):
        answer = await org.ask(name, "POST", "/v1/responses", json=body | {"input": [reference]})
        assert answer.status_code == status, answer.text
    for method, where, what, status in asks:
        answer = await org.ask("bob", method, where, **what)
        assert answer.status_code == status
        assert answer.json()["error"]["message"] == (
            f"there is no response {response_id!r}; a response is stored if its request has store: true"
        )
    assert (await org.ask("ada", "DELETE", path)).status_code == 200
