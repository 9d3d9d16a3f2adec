"""The OpenAPI document: FastAPI's, plus the request bodies, which `JsonBody` reads in a dependency."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute, APIRouter
from pydantic.json_schema import models_json_schema
from starlette.routing import BaseRoute, Route

from app.deployments.ingress.http.request_parsing import body_model
from app.deployments.ingress.schemas.request_model import Body, ignored_fields_schema
from app.deployments.ingress.schemas.response_model import MessagesErrorResponse
from app.version import version

_SCHEMAS = "#/components/schemas/{model}"
#: For `responses` of a route that can stream.
EVENT_STREAM: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}
}
#: For `responses` of a route that returns bytes.
BYTES: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}
}

#: For `responses` of Anthropic's routes.
MESSAGES_ERROR: dict[int | str, dict[str, Any]] = {"default": {"model": MessagesErrorResponse}}

#: For a route whose success response is not JSON: its errors still are.
JSON_ERROR: dict[int | str, dict[str, Any]] = {
    "default": {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorResponse"}}}}
}


def takes_content(media_type: str, schema: dict[str, Any]) -> dict[str, Any]:
    """The `openapi_extra` of a route whose request body is not JSON."""
    return {"requestBody": {"required": True, "content": {media_type: {"schema": schema}}}}


def openapi(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document of the application."""
    document = get_openapi(
        title="polylora", version=version(), routes=app.routes, license_info={"name": "Apache-2.0"},
        separate_input_output_schemas=False,
    )  # fmt: skip
    components = document["components"]
    bodies = {(route.path_format, method): model for route in api_routes(app.routes) if (model := body_model(route))
              for method in route.methods or ()}  # fmt: skip
    for (path, method), model in bodies.items():
        schema = {"$ref": _SCHEMAS.format(model=model.__name__)}
        content = {"required": not model.may_be_empty, "content": {"application/json": {"schema": schema}}}
        document["paths"][path][method.lower()]["requestBody"] = content
    components["schemas"] |= _body_schemas(list(bodies.values()))
    components["securitySchemes"] = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    document["security"] = [{}, {"bearer": []}]
    return document


def operation_id(route: APIRoute) -> str:
    """An operation id made of method and path."""
    assert route.methods is not None, "an APIRoute has methods"
    (method,) = route.methods
    return f"{method.lower()}{re.sub(r'[^A-Za-z0-9]+', '_', route.path_format).rstrip('_')}"


def flat_routes(routes: Iterable[BaseRoute]) -> Iterator[Route]:
    """All routes, including those of included routers, which some FastAPI versions keep as a single route."""
    for route in routes:
        if isinstance(route, Route):
            yield route
        elif isinstance(router := getattr(route, "original_router", None), APIRouter):
            yield from flat_routes(router.routes)


def api_routes(routes: Iterable[BaseRoute]) -> Iterator[APIRoute]:
    """The routes that appear in the OpenAPI document."""
    return (route for route in flat_routes(routes) if isinstance(route, APIRoute))


def _body_schemas(models: list[type[Body]]) -> dict[str, Any]:
    _, found = models_json_schema([(model, "validation") for model in dict.fromkeys(models)], ref_template=_SCHEMAS)
    schemas: dict[str, Any] = found["$defs"]
    for model in models:
        schemas[model.__name__]["properties"] |= ignored_fields_schema(model)
    return schemas
