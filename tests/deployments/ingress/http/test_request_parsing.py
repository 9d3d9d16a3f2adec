"""Names in queries: a route takes its own, and refuses others by name."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute
from openai.resources import batches, files, models, responses
from openai.resources.admin.organization import admin_api_keys, audit_logs, projects, usage
from openai.resources.admin.organization.projects import api_keys, rate_limits, service_accounts, spend_limit

from app.config import INFERENCE_PATHS
from app.deployments.ingress.http.app import make_app
from app.deployments.ingress.http.middleware.origin_check import HttpPolicy
from app.deployments.ingress.http.openapi import api_routes
from app.deployments.ingress.http.request_parsing import query_names
from tests.deployments.http_service import Service
from tests.deployments.ingress.http.routes.test_admin import ADMIN_KEY, client_with, transport

__all__ = ["transport"]

BODY = {"model": "base", "prompt": "hi", "max_tokens": 1, "temperature": 0}
MODULES = (
    batches, files, models, responses.responses, responses.input_items, admin_api_keys, audit_logs, usage,
    projects.projects, api_keys, rate_limits, service_accounts.service_accounts, spend_limit,
)  # fmt: skip


async def test_a_misspelt_name_is_refused_with_the_one_that_was_meant(http: httpx.AsyncClient) -> None:
    for path in ("/v1/loras", "/v1/aliases", "/v1/models", "/v1/files", "/v1/batches"):
        answer = await http.get(path, params={"afte": "r"})
        assert answer.status_code == 400, path
        error = answer.json()["error"]
        assert (error["param"], error["code"]) == ("afte", "invalid_request")
        assert error["message"].endswith("; did you mean 'after'?")
        assert f"GET {path} " in error["message"]
    error = (await http.get("/v1/events", params={"names": "sql"})).json()["error"]
    assert (error["param"], "did you mean 'name'?" in error["message"]) == ("names", True)
    assert (await http.post("/v1/loras", params={"wit": "true"}, json={"name": "a"})).json()["error"]["param"] == "wit"


async def test_a_route_with_only_a_body_needs_no_resolution_of_dependencies(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def resolve(*_: object, **__: object) -> None:
        raise AssertionError("FastAPI resolves dependencies")

    monkeypatch.setattr("fastapi.routing.solve_dependencies", resolve)
    app = make_app(service, HttpPolicy())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        for path in ("/v1/completions", "/generate"):
            body = BODY if path != "/generate" else {"text": "hi", "sampling_params": {"max_new_tokens": 1}}
            assert (await client.post(path, json=body)).status_code == 200
        assert (await client.post("/tokenize", json={"model": "base", "prompt": "hi"})).status_code == 200
        assert (await client.post("/v1/files?x=1")).json()["error"]["param"] == "x", "queries are checked as elsewhere"
        with pytest.raises(AssertionError, match="FastAPI resolves"):  # their routers check access in a dependency
            await client.get("/v1/events")


async def test_the_name_of_a_list_or_an_object_is_what_stands_before_its_bracket(transport: httpx.AsyncClient) -> None:
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    url = "http://test/v1/organization/audit_logs"
    for known in ("project_ids[]", "project_ids", "effective_at[gte]"):
        assert (await transport.get(url, params={known: "1"}, headers=headers)).status_code == 200, known
    for wrong in ("effective_at[after]", "effective_at", "limit[gte]", "actor_emails", "tenant_only"):
        answer = await transport.get(url, params={wrong: "1"}, headers=headers)
        assert (answer.status_code, wrong.startswith(answer.json()["error"]["param"].split(".")[0])) == (400, True)
    for unknown in ("project[]", "[]", "[project_ids]", ""):
        answer = await transport.get(f"{url}?{unknown}=1", headers=headers)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, unknown)


async def test_both_spellings_of_a_list_choose_the_same(transport: httpx.AsyncClient) -> None:
    admin = client_with(transport).admin.organization
    storage, other = [await admin.projects.create(name=name) for name in ("kept", "other")]
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    for spelling in ("project_ids[]", "project_ids"):
        url = "http://test/v1/organization/audit_logs"
        received = (await transport.get(url, params={spelling: storage.id}, headers=headers)).text
        assert storage.id in received
        assert other.id not in received


async def test_every_route_of_ours_refuses_what_it_does_not_know(service: Service, http: httpx.AsyncClient) -> None:
    for route in routes_of(service):
        for method in route.methods:
            path = re.sub(r"{\w+}", "x", route.path_format)
            answer = await http.request(method, path, params={"qzx": "1"}, json={})
            is_free = not path.startswith("/v1/") or (method == "POST" and path in INFERENCE_PATHS)
            is_refused = answer.status_code == 400 and answer.json()["error"].get("param") == "qzx"
            assert is_refused is not is_free, (method, path, answer.text)


def test_the_free_paths_are_routes(service: Service) -> None:
    assert {route.path_format for route in routes_of(service)} >= INFERENCE_PATHS


async def test_a_query_of_a_request_for_an_answer_changes_nothing(http: httpx.AsyncClient) -> None:
    plain = await http.post("/v1/completions", json=BODY)
    other = await http.post("/v1/completions", params={"api-version": "preview", "beta": "true"}, json=BODY)
    assert (plain.status_code, other.status_code) == (200, 200)
    assert other.json()["choices"] == plain.json()["choices"]


def test_everything_that_the_official_client_can_send_is_known(service: Service) -> None:
    routes = {route.path_format: route for route in routes_of(service) if "GET" in route.methods}
    sent = {(path, name) for path, names in _queries() for name in names}
    served = {(path, name) for path, name in sent if path in routes}
    assert {path for path, _ in served} >= {"/v1/files", "/v1/batches", "/v1/organization/costs"}
    assert {(path, name) for path, name in served if name not in query_names(routes[path])} == set()


@pytest.mark.parametrize(
    "asked",
    [
        {"group_by": ["project_id", "model"], "bucket_width": "1h", "limit": 3, "api_key_ids": ["k"], "batch": False},
        {"end_time": 2_000_000_000, "models": ["base"], "project_ids": ["p", "q"], "limit": 1},
    ],
)
async def test_what_the_official_client_writes_is_taken(transport: httpx.AsyncClient, asked: dict[str, Any]) -> None:
    admin = client_with(transport).admin.organization
    await admin.usage.completions(start_time=1_700_000_000, **asked)
    await admin.audit_logs.list(
        actor_ids=["a"], effective_at={"gte": 1, "lt": 2}, event_types=["api_key.created"], resource_ids=["b"]
    )
    project = await admin.projects.create(name="p")
    await admin.projects.list(include_archived=True, limit=1)
    await admin.projects.rate_limits.list_rate_limits(project.id, before="x", limit=1)
    await admin.projects.api_keys.list(project.id, owner_project_access="active", limit=1)


def routes_of(service: Service) -> list[APIRoute]:
    return list(api_routes(make_app(service, HttpPolicy()).routes))


def _queries() -> Iterator[tuple[str, list[str]]]:
    """(path, query names) of each reading call of the official client, from its source."""
    for module in MODULES:
        for call in ast.walk(ast.parse(inspect.getsource(module))):
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
                continue
            if call.func.attr not in ("_get", "_get_api_list"):
                continue
            where = call.args[0]
            path = where if isinstance(where, ast.Constant) else where.args[0] if isinstance(where, ast.Call) else None
            assert isinstance(path, ast.Constant)
            options = next(keyword.value for keyword in call.keywords if keyword.arg == "options")
            names = [
                key.value
                for keyword in ast.walk(options)
                if isinstance(keyword, ast.keyword) and keyword.arg == "query"
                for table in ast.walk(keyword.value)
                if isinstance(table, ast.Dict)
                for key in table.keys
                if isinstance(key, ast.Constant)
            ]
            yield f"/v1{path.value}", names
