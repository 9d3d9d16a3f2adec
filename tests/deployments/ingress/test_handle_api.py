"""Calls of other Ray jobs: the answers of POST /generate, and every call is counted as what became of it."""

from __future__ import annotations

import json
from contextlib import aclosing
from typing import Any

import httpx
import pytest

from app.deployments.ingress import handle_api
from app.deployments.ingress.principal import handle_principal
from app.deployments.ingress.schemas.openai import ChatCompletionRequest, CompletionRequest, WeightedAdapter
from app.deployments.ingress.serializers.loras import adapter_body, job_body, unload_body
from app.engine.errors import InvalidRequest, NotFound, QueueFull
from tests.deployments.http_service import Service
from tests.deployments.ingress.dispatch.test_dispatcher import until
from tests.deployments.managed import ADA, wanted
from tests.fakes import fake_adapter

SAMPLING = {"max_new_tokens": 60, "temperature": 0, "ignore_eos": True}


async def test_results_are_those_of_the_route(service: Service, http: httpx.AsyncClient) -> None:
    for text, adapter in (("a", None), ("a", "sql"), (["a", "b"], [None, "sql"])):
        body = {"text": text, "sampling_params": SAMPLING, "lora_path": adapter}
        by_route = (await http.post("/generate", json=body)).json()
        by_call = await handle_api.generate(service, text, SAMPLING, adapter)
        assert texts(by_call) == texts(by_route)
    pieces = [piece async for piece in handle_api.stream(service, "a", SAMPLING, "sql")]
    assert len(pieces) > 1
    assert ["".join(pieces)] == texts(await handle_api.generate(service, "a", SAMPLING, "sql"))
    assert [item for item in service.observed if item[0] == "handle"] == [("handle", 200)] * 5
    assert [usage.completion_tokens for usage in service.counted[-2][1] if usage] == [60]


def texts(results: object) -> list[str]:
    return [result["text"] for result in (results if isinstance(results, list) else [results])]


def comparable(value: Any) -> Any:
    """A result without what differs between two equal requests."""
    if isinstance(value, list):
        return [comparable(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {name: comparable(item) for name, item in value.items() if name not in ("id", "created", "cached_tokens")}


LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize(
    ("route", "fields"),
    [
        ("chat", {"model": "base", "logprobs": True, "top_logprobs": 2, "max_tokens": 4, "n": 2, "seed": 1}),
        (
            "chat",
            {"model": "base", "tools": [LOOK], "tool_choice": "required", "parallel_tool_calls": False, "seed": 1},
        ),
        ("chat", {"model": "auto", "max_tokens": 4}),
        ("complete", {"model": "sql", "max_tokens": 4, "return_token_ids": True, "logprobs": 1}),
        ("complete", {"model": "base", "adapters": [{"name": "sql"}], "max_tokens": 4}),
        ("complete", {"model": "base", "echo": True, "logprobs": 0, "max_tokens": 0}),
    ],
)
async def test_chats_and_completions_are_those_of_the_routes(
    writing: Service, writer: httpx.AsyncClient, route: str, fields: dict[str, Any]
) -> None:
    adapter = fake_adapter("sql", 8)
    writing.fleet.adapters[adapter.card.digest] = adapter
    writing.managed.store.contents["sql"] = adapter.card.digest
    await writing.managed.client.load_and_wait(wanted("sql", "sql"))
    given = {"messages": [{"role": "user", "content": "a"}]} if route == "chat" else {"prompt": "abc"}
    body = given | {"temperature": 0} | fields
    path = "/v1/chat/completions" if route == "chat" else "/v1/completions"
    answer = await writer.post(path, json=body)
    assert answer.status_code == 200, answer.text
    kind = ChatCompletionRequest if route == "chat" else CompletionRequest
    result = await handle_api.complete(writing, kind, body)
    assert comparable(result) == comparable(answer.json())
    assert {each.__module__ for each in classes(result)} == {"builtins"}
    if fields.get("n") or fields.get("max_tokens") == 0:
        return
    streamed = await writer.post(path, json=body | {"stream": True})
    events = [event async for event in handle_api.stream_events(writing, kind, body)]
    lines = [line.removeprefix("data: ") for line in streamed.text.split("\n\n") if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    assert comparable(events) == [comparable(json.loads(line)) for line in lines]
    assert len(events) > 1


async def test_without_a_model_the_base_answers(service: Service) -> None:
    messages = [{"role": "user", "content": "a"}]
    result = await handle_api.complete(service, ChatCompletionRequest, {"messages": messages, "max_tokens": 2})
    assert service.preprocessor.resolver.is_base(result["model"])
    assert service.counted[-1][0] is not None
    assert service.counted[-1][0].requests[0].adapter is None


@pytest.mark.parametrize("fields", [{"stream": True}, {"stream": False}, {"stream_options": {}, "stream": True}])
async def test_stream_is_no_field_of_a_call(service: Service, fields: dict[str, Any]) -> None:
    body = {"prompt": "a"} | fields
    with pytest.raises(InvalidRequest, match="stream_chat") as caught:
        await handle_api.complete(service, CompletionRequest, body)
    assert caught.value.param == "stream"
    assert service.observed == [("handle", 400)]


async def test_every_option_of_a_load(service: Service) -> None:
    lazy = await handle_api.load(service, "late", "new", {"lazy": True, "description": "d", "traffic_weight": 2.0})
    assert (lazy["id"], lazy["state"], lazy["description"], lazy["traffic_weight"]) == ("late", "REGISTERED", "d", 2.0)
    pinned = await handle_api.load(service, "kept", "two", {"pinned": True})
    assert (pinned["state"], pinned["pinned"]) == ("LOADED", True)
    parts = [{"name": "sql", "weight": 1.0}, {"name": "kept", "weight": -0.5}]
    weighted = [WeightedAdapter.model_validate(part) for part in parts]
    made = service.preprocessor.resolver.combine(weighted, handle_principal())
    service.managed.store.contents[made.source] = made.digest
    mixed = await handle_api.load(service, "mix", None, {"combine": {"adapters": parts}})
    assert mixed["state"] == "LOADED"
    for path, options, param in (
        (None, {}, "path"),
        ("new", {"combine": {"adapters": parts}}, "path"),
        ("new", {"pined": True}, "pined"),
        ("new", {"lazy": True, "pinned": True}, "pinned"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            await handle_api.load(service, "x", path, options)
        assert caught.value.param == param


async def test_a_caller_that_leaves_a_stream_is_counted(service: Service) -> None:
    (replica,) = service.fleet.replicas.values()
    replica.backend.max_steps = 20
    async with aclosing(handle_api.stream(service, "a", SAMPLING, "sql")) as pieces:
        await anext(pieces)
    assert service.observed == [("handle", 499)]
    assert service.counted[0][1]
    await until(lambda: len(replica.aborted) == 1)
    replica.backend.resumed.set()
    await until(lambda: not replica.engine.has_work)
    assert replica.thread.stats().num_aborted == 1


@pytest.mark.parametrize(
    ("text", "sampling", "param"), [("a", SAMPLING | {"n": 2}, "sampling_params.n"), (["a", "b"], SAMPLING, "text")]
)
async def test_a_stream_has_one_answer(service: Service, text: Any, sampling: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest, match="2 are requested") as caught:
        _ = [piece async for piece in handle_api.stream(service, text, sampling, None)]
    assert caught.value.param == param
    assert service.observed == [("handle", 400)]


def classes(value: object) -> set[type]:
    """Of a value and all within it."""
    inner = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
    return {type(value)}.union(*map(classes, inner))


async def test_what_other_jobs_get_is_made_of_python_s_own_types(service: Service) -> None:
    loading, entry = await service.managed.client.load_and_wait(wanted("new", "new"))
    unloading, _ = await service.adapter_admin.unload("new", **ADA)
    results = [
        await handle_api.generate(service, ["a", "b"], SAMPLING, ["sql", None]),
        adapter_body(entry) | {"job": job_body(loading)},
        unload_body(entry, unloading),
    ]
    assert unload_body(entry, unloading)["state"] == "REMOVED"
    assert {kind.__module__ for result in results for kind in classes(result)} == {"builtins"}


async def test_calls_that_fail_are_counted(service: Service) -> None:
    with pytest.raises(NotFound):
        await handle_api.generate(service, "a", None, "nobody")
    with pytest.raises(InvalidRequest):
        await handle_api.generate(service, "a", {"temperature": -1}, None)
    (replica,) = service.fleet.replicas.values()
    replica.engine._waiting.max_total = 0
    with pytest.raises(QueueFull):
        _ = [piece async for piece in handle_api.stream(service, "a", SAMPLING, "sql")]
    assert service.observed == [("handle", 404), ("handle", 400), ("handle", 429)]
    job, _ = service.counted[-1]
    assert job is not None
    assert job.requests[0].adapter is not None
