"""Calls of other Ray jobs: the answers of POST /generate, and every call is counted as what became of it."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

import httpx
import pytest

from app.deployments.ingress import handle_api
from app.deployments.ingress.serializers.loras import adapter_body, job_body, unload_body
from app.engine.errors import InvalidRequest, NotFound, QueueFull
from tests.deployments.http_service import Service
from tests.deployments.ingress.dispatch.test_dispatcher import until
from tests.deployments.managed import ADA, wanted

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
