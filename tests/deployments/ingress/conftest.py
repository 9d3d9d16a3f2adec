"""An HTTP service under test and a client of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest_asyncio
from fastapi import FastAPI

from app.deployments.ingress.http.app import make_app
from app.deployments.ingress.http.middleware.origin_check import HttpPolicy
from app.deployments.ingress.http.openapi import api_routes
from tests.deployments.fleet import Fleet
from tests.deployments.http_service import WRITING_SPEC, Service, writing_text
from tests.deployments.managed import ManagedStore, wanted
from tests.engine.structured_output.tokens import tiny_vocabulary
from tests.fakes import fake_adapter

#: What `as_described` compares with, which takes a second to make: applications with the same routes describe the same.
_documents: dict[Any, dict[str, Any]] = {}
_validators: dict[Any, Any] = {}
#: What answers call their times, beside whatever ends with `_at`.
TIMES = ("created", "updated", "last_used", "since", "time", "start_time", "end_time")


@pytest_asyncio.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    fleet = Fleet(1)
    managed = ManagedStore.at(tmp_path)
    for name in ("sql", "new", "two"):
        adapter = fake_adapter(name, 8)
        fleet.adapters[adapter.card.digest] = adapter
        managed.store.contents[name] = adapter.card.digest
    await managed.client.load_and_wait(wanted("sql", "sql"))
    service = Service(fleet, managed)
    yield service
    await service.close()
    await managed.close()
    fleet.stop()


@pytest_asyncio.fixture
async def writing(tmp_path: Path) -> AsyncIterator[Service]:
    """A service whose model can write JSON, and follows grammars."""
    fleet = Fleet(1, spec=WRITING_SPEC, grammars=tiny_vocabulary)
    managed = ManagedStore.at(tmp_path)
    service = Service(fleet, managed, writing_text())
    yield service
    await service.close()
    await managed.close()
    fleet.stop()


@pytest_asyncio.fixture
async def writer(writing: Service) -> AsyncIterator[httpx.AsyncClient]:
    """A client of it, which looks at answers as `http` does."""
    app = make_app(writing, HttpPolicy())
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    hooks = {"response": [as_described(app)]}
    async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=20, event_hooks=hooks) as client:
        yield client


@pytest_asyncio.fixture
async def http(service: Service) -> AsyncIterator[httpx.AsyncClient]:
    """A client; what it is answered has to be as it is described."""
    app = make_app(service, HttpPolicy())
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    hooks = {"response": [as_described(app)]}
    async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=20, event_hooks=hooks) as client:
        yield client


def as_described(app: FastAPI) -> Callable[[Any], Awaitable[None]]:
    """Looks at each answer of a route that there is: its media type, its fields, the spelling of its times."""
    routes = list(api_routes(app.routes))
    described = tuple((route.path_format, *sorted(route.methods)) for route in routes)
    if described not in _documents:
        _documents[described] = closed(app.openapi())
    document = _documents[described]

    async def look(response: Any) -> None:
        request = response.request
        path, method = request.url.path, request.method
        found = next((item for item in routes if item.path_regex.match(path) and method in item.methods), None)
        if found is None:
            return
        told = document["paths"][found.path_format][method.lower()]["responses"]
        content = told[str(response.status_code) if response.is_success else "default"]["content"]
        media_type = response.headers.get("content-type", "").partition(";")[0]
        assert media_type in content, f"{method} {path}: {media_type} is not in /openapi.json"
        if media_type != "application/json":
            return
        await response.aread()
        answer = response.json()
        key = (described, found.path_format, method, response.status_code if response.is_success else "default")
        if key not in _validators:
            schema = {**content[media_type]["schema"], "components": document["components"]}
            _validators[key] = jsonschema.validators.validator_for(schema)(schema)
            _validators[key].check_schema(schema)
        _validators[key].validate(answer)
        for name, time_s in _times(answer):
            assert time_s is None or isinstance(time_s, int), f"{method} {path}: {name} is {time_s!r}, no whole second"

    return look


def closed(schema: Any) -> Any:
    """The same schemas without room for a field that they do not name."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    items = {name: closed(item) for name, item in schema.items()}
    return {"additionalProperties": False, **items} if isinstance(schema.get("properties"), dict) else items


def _times(value: Any) -> Iterator[tuple[str, Any]]:
    """What an answer calls by the name of a time, at any depth, but in what clients have said themselves."""
    if isinstance(value, list):
        for item in value:
            yield from _times(item)
    elif isinstance(value, dict):
        for name, item in value.items():
            if name in TIMES or name.endswith("_at"):
                yield name, item
            elif name not in ("metadata", "detail", "targets", "components"):
                yield from _times(item)
