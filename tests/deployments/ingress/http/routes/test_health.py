"""What the service says of itself, and that its description is exact: every route, every field, nothing else."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute
from pydantic import TypeAdapter

from app.deployments.ingress.http.app import make_app
from app.deployments.ingress.http.middleware.origin_check import HttpPolicy
from app.deployments.ingress.http.openapi import api_routes
from app.deployments.ingress.http.request_parsing import body_model
from app.deployments.registry.jobs.failure_backoff import Failure
from app.version import version
from tests.cli.test_status import STATUS
from tests.deployments.http_service import Service

ROOT = Path(__file__).parents[5]


async def test_what_it_is_and_which_version(http: httpx.AsyncClient) -> None:
    root = (await http.get("/")).json()
    assert (root["name"], root["model"], root["version"]) == ("polylora", "base", version())
    for path in root["links"].values():
        assert (await http.get(path)).status_code == 200
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (await http.get("/version")).json() == {"version": project["version"]}


async def test_probes(http: httpx.AsyncClient, service: Service) -> None:
    for path in ("/health", "/readyz", "/livez"):
        assert (await http.get(path)).status_code == 200
    service.fleet.drop("replica-0")
    for path in ("/health", "/readyz"):
        answer = await http.get(path)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
        assert answer.json()["error"]["code"] == "not_ready"
    assert (await http.get("/livez")).status_code == 200


async def test_head_is_get_without_its_body(http: httpx.AsyncClient) -> None:
    for path in ("/", "/health", "/v1/models", "/v1/models/base", "/v1/loras", "/openapi.json", "/v1/models/nobody"):
        head, get = await http.head(path), await http.get(path)
        assert (head.status_code, head.content) == (get.status_code, b"")
        assert head.headers == get.headers
    assert (await http.head("/v1/completions")).status_code == 405


def routes_of(service: Service) -> list[APIRoute]:
    return list(api_routes(make_app(service, HttpPolicy()).routes))


async def test_every_route_is_described(service: Service, http: httpx.AsyncClient) -> None:
    described = (await http.get("/openapi.json")).json()
    routes = routes_of(service)
    there = {(route.path_format, method.lower()) for route in routes for method in route.methods}
    assert {(path, method) for path, item in described["paths"].items() for method in item} == there
    for path in ("/v1/loras/{name}", "/v1/aliases", "/v1/organization/projects", "/v1/chat/completions", "/health"):
        assert path in described["paths"], "of a router, of an included one, and of the application itself"
    ids = [operation["operationId"] for item in described["paths"].values() for operation in item.values()]
    assert len(set(ids)) == len(ids)
    for path, item in described["paths"].items():
        for operation in item.values():
            in_path = {parameter["name"] for parameter in operation.get("parameters", ()) if parameter["in"] == "path"}
            assert in_path == set(re.findall(r"{(\w+)}", path))
            assert operation.get("description"), f"{path}: the route's function has no docstring"


async def test_every_field_of_every_body_is_described_and_no_other(service: Service, http: httpx.AsyncClient) -> None:
    described = (await http.get("/openapi.json")).json()
    schemas = described["components"]["schemas"]
    for route in routes_of(service):
        kind = body_model(route)
        if not route.methods & {"POST", "PUT", "PATCH"}:
            assert kind is None, route.path_format
        if kind is None:
            continue
        schema = schemas[kind.__name__]
        in_vain = set(kind.ignored)
        assert set(schema["properties"]) == set(kind.model_fields) | in_vain
        assert schema["additionalProperties"] is False


async def test_what_is_described_is_accepted(http: httpx.AsyncClient) -> None:
    schemas = (await http.get("/openapi.json")).json()["components"]["schemas"]
    base: dict[str, Any] = {"model": "base", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    for name, field in schemas["ChatCompletionRequest"]["properties"].items():
        for value in field.get("enum", ["x"] if field.get("description") == "Accepted and ignored." else []):
            answer = await http.post("/v1/chat/completions", json=base | {name: value})
            assert answer.status_code == 200, (name, value, answer.text)


#: Routes whose request has no body.
BODILESS = {
    "/v1/batches/{batch_id}/cancel", "/v1/loras/{name}/load", "/v1/organization/projects/{project_id}/archive",
    "/v1/replicas/{replica_id}/drain", "/v1/tenants/{tenant_id}/rotate_salt",
}  # fmt: skip


def test_every_route_has_a_schema_for_its_body_and_its_answers(service: Service) -> None:
    document = make_app(service, HttpPolicy()).openapi()

    def is_empty(schema: dict[str, Any]) -> bool:
        if "$ref" in schema:
            schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        kinds = schema.get("anyOf", [schema])
        return any(kind in ({}, {"type": "object"}) or _is_object_without_fields(kind) for kind in kinds)

    for path, item in document["paths"].items():
        for method, operation in item.items():
            contents = [
                content
                for status, answer in operation["responses"].items()
                if status in ("200", "201", "202", "default")
                for content in answer["content"].values()
            ]
            assert "default" in operation["responses"], (method, path)
            assert len(operation["responses"]) > 1, (method, path)
            if method in ("post", "put", "patch") and path not in BODILESS:
                contents += operation["requestBody"]["content"].values()
            else:
                assert "requestBody" not in operation, (method, path)
            for content in contents:
                assert not is_empty(content["schema"]), (method, path, content)


def _is_object_without_fields(schema: dict[str, Any]) -> bool:
    return schema.get("type") == "object" and not schema.get("properties")


def test_models_have_names_of_their_own(service: Service) -> None:
    document = make_app(service, HttpPolicy()).openapi()
    assert not [name for name in document["components"]["schemas"] if "__" in name], "two models have the same name"
    bodies = {kind for route in routes_of(service) if (kind := body_model(route)) is not None}
    names = {name for kind in bodies for name in (kind.__name__, *kind.model_json_schema().get("$defs", {}))}
    answers = {
        name
        for route in routes_of(service)
        for field in (route.response_field, *route.response_fields.values())
        if field is not None
        for name in TypeAdapter(field.field_info.annotation).json_schema().get("$defs", {})
    }
    assert not names & answers


def test_references_lead_somewhere(service: Service) -> None:
    document = make_app(service, HttpPolicy()).openapi()
    names = set(re.findall(r"#/components/schemas/(\w+)", str(document)))
    assert names <= set(document["components"]["schemas"])
    assert "ChatMessage" in names


@pytest.mark.parametrize(("number", "limit"), [(0, None), (3, None), (1, 1)])
async def test_the_official_client_sees_every_model(
    http: httpx.AsyncClient, service: Service, monkeypatch: pytest.MonkeyPatch, number: int, limit: int | None
) -> None:
    monkeypatch.setattr("app.deployments.ingress.http.routes.models.MAX_PAGE", 2)  # pages behind one another
    for index in range(number):
        service.managed.store.contents[f"m{index}"] = f"{index:064}"
        body = {"name": f"m{index}", "path": f"m{index}"}
        assert (await http.post("/v1/loras?wait=true", json=body)).status_code == 201
    query = "" if limit is None else f"?limit={limit}"
    page = (await http.get(f"/v1/models{query}")).json()
    names = [item["id"] for item in page["data"]]
    everything = ["base", *(f"m{index}" for index in range(number)), "sql"]
    assert names == everything[:limit]
    assert (page["first_id"], page["last_id"], page["has_more"]) == (names[0], names[-1], limit is not None)
    rest = (await http.get(f"/v1/models?after={names[-1]}")).json()
    assert [item["id"] for item in rest["data"]] == everything[len(names) :]
    assert rest["has_more"] is False


async def test_the_status_says_what_the_command_shows(http: httpx.AsyncClient) -> None:
    status = (await http.get("/v1/status")).json()
    assert STATUS.keys() <= status.keys()
    assert (status["model"], status["num_adapters"], status["is_ready"]) == ("base", 1, True)
    assert [replica["replica_id"] for replica in status["replicas"]] == ["replica-0"]
    assert status["tiers"].keys() == {"host", "disk", "source"}
    assert status["failures"] == []
    assert (await http.post("/v1/loras?wait=true", json={"name": "gone", "path": "gone"})).status_code == 404
    (failure,) = (await http.get("/v1/status")).json()["failures"]
    assert (failure["event"], failure["name"]) == ("failed", "gone")
    assert (await http.delete("/v1/loras/gone")).json()["state"] == "REMOVED"
    assert (await http.get("/v1/status")).json()["failures"] == [], "it was dismissed"
    assert (await http.get("/v1/loras/gone")).status_code == 404


async def test_an_adapter_that_cannot_be_read_says_why_to_who_manages_it(
    http: httpx.AsyncClient, service: Service
) -> None:
    assert (await http.get("/v1/loras/sql")).json()["last_error"] is None
    service.managed.store.failures = {
        service.managed.store.contents["sql"]: Failure("no such file: /roots/sql", 1, 0.0)
    }
    assert (await http.get("/v1/loras/sql")).json()["last_error"] == "no such file: /roots/sql"
