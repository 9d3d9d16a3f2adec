"""The OpenAPI document: FastAPI's, with the bodies that `JsonBody` reads.

FastAPI knows the responses, the query and the path of a route. It does not know of a body that a dependency reads, so
`openapi` adds those, from the same models that check them.
"""

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
#: For `responses` of a route that streams if its request says so.
EVENT_STREAM: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}
}
#: The same for a route that answers with bytes.
BYTES: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}
}

#: The errors of Anthropic's routes.
MESSAGES_ERROR: dict[int | str, dict[str, Any]] = {"default": {"model": MessagesErrorResponse}}

#: For a route that answers with anything but JSON: its errors are JSON all the same.
JSON_ERROR: dict[int | str, dict[str, Any]] = {
    "default": {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorResponse"}}}}
}


def takes_content(media_type: str, schema: dict[str, Any]) -> dict[str, Any]:
    """For `openapi_extra` of a route whose body is no JSON."""
    return {"requestBody": {"required": True, "content": {media_type: {"schema": schema}}}}


def openapi(app: FastAPI) -> dict[str, Any]:
    """The document."""
    document = get_openapi(
        title="polylora", version=version(), routes=app.routes, license_info={"name": "Apache-2.0"},
        separate_input_output_schemas=False,
    )  # fmt: skip
    components = document["components"]
    bodies = {(route.path, method): model for route in api_routes(app.routes) if (model := body_model(route))
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
    """The method and the path."""
    assert route.methods is not None, "an APIRoute has methods"
    (method,) = route.methods
    return f"{method.lower()}{re.sub(r'[^A-Za-z0-9]+', '_', route.path).rstrip('_')}"


def flat_routes(routes: Iterable[BaseRoute]) -> Iterator[Route]:
    """An application's routes, those of the routers that it includes among them.

    FastAPI of some versions keeps an included router as one route. Routers here have their prefixes themselves.
    """
    for route in routes:
        if isinstance(route, Route):
            yield route
        elif isinstance(router := getattr(route, "original_router", None), APIRouter):
            yield from flat_routes(router.routes)


def api_routes(routes: Iterable[BaseRoute]) -> Iterator[APIRoute]:
    """Those of an application's routes that the document describes."""
    return (route for route in flat_routes(routes) if isinstance(route, APIRoute))


def _body_schemas(models: list[type[Body]]) -> dict[str, Any]:
    _, found = models_json_schema([(model, "validation") for model in dict.fromkeys(models)], ref_template=_SCHEMAS)
    schemas: dict[str, Any] = found["$defs"]
    for model in models:
        schemas[model.__name__]["properties"] |= ignored_fields_schema(model)
    return schemas
