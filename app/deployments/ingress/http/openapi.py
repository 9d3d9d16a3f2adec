"""The OpenAPI description of the routes, from the routes themselves.

In: the application's routes; those with a body say its kind, those with a query its names, and those that answer
anything but JSON how, in `takes`. Out: an OpenAPI 3.1 document. Rule: every route is in it, and every field that a body
may have; what it lacks is refused. Of answers it has the media types, the shape of errors, and for the routes that
clients are generated for what is always there (`answer_schemas`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from fastapi.routing import APIRoute, APIRouter
from pydantic import BaseModel
from starlette.routing import BaseRoute

from app.deployments.ingress.http.answer_schemas import ANSWERS, named
from app.deployments.ingress.schemas.request_model import Body, accepted_in_vain
from app.deployments.ingress.serializers.messages import is_messages
from app.release import version

JSON, EVENTS, TEXT, BYTES = "application/json", "text/event-stream", "text/plain", "application/octet-stream"
_BODY, _QUERY, _MEDIA, _ANSWERS, _TOLD = "x-body", "x-query", "x-media", "x-answers", "x-told"
_SCHEMAS = "#/components/schemas/{model}"
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}
#: The same as Anthropic tells them, on its routes.
_MESSAGES_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}


def takes(
    body: type[Body] | None = None, *query: str, answers: Sequence[str] = (JSON,), told: str | None = None
) -> dict[str, Any]:
    """For a route's `openapi_extra`: the kind of its body, the names that its query may have, the media types in which
    it does what it was asked for, and which of `ANSWERS` its JSON is."""
    return {_BODY: body, _QUERY: query, _ANSWERS: answers, _TOLD: told}


def takes_bytes(media_type: str, *query: str) -> dict[str, Any]:
    """The same for a route whose body is no JSON."""
    return {**takes(None, *query), _MEDIA: media_type}


def openapi(routes: Iterable[BaseRoute]) -> dict[str, Any]:
    """The document."""
    schemas: dict[str, Any] = {"Error": _ERROR, "MessagesError": _MESSAGES_ERROR, **ANSWERS}
    paths: dict[str, dict[str, Any]] = {}
    for route in api_routes(routes):
        for method in sorted(route.methods or ()):
            paths.setdefault(route.path, {})[method.lower()] = _operation(route, method, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "polylora", "version": version(), "license": {"name": "Apache-2.0"}},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{}, {"bearer": []}],
    }


def api_routes(routes: Iterable[BaseRoute]) -> Iterator[APIRoute]:
    """An application's routes, those of the routers that it includes among them.

    FastAPI of some versions keeps an included router as one route. Routers here have their prefixes themselves.
    """
    for route in routes:
        if isinstance(route, APIRoute):
            yield route
        elif isinstance(router := getattr(route, "original_router", None), APIRouter):
            yield from api_routes(router.routes)


def body_of(route: APIRoute) -> type[Body] | None:
    """The kind of a route's body, if it says one."""
    kind: type[Body] | None = (route.openapi_extra or {}).get(_BODY)
    return kind


def query_of(route: APIRoute) -> tuple[str, ...]:
    """The names that a route's query may have."""
    names: tuple[str, ...] = (route.openapi_extra or {}).get(_QUERY, ())
    return names


def says_its_body(route: APIRoute) -> bool:
    """Whether a route says which body it takes, or that it takes none."""
    return _BODY in (route.openapi_extra or {})


def _operation(route: APIRoute, method: str, schemas: dict[str, Any]) -> dict[str, Any]:
    in_path = [_parameter(name, "path") for name in re.findall(r"{(\w+)}", route.path)]
    in_query = [_parameter(name, "query") for name in query_of(route)]
    summary = (route.endpoint.__doc__ or route.name.replace("_", " ")).strip().partition("\n")[0]
    operation: dict[str, Any] = {
        "operationId": f"{method.lower()}{re.sub(r'[^A-Za-z0-9]+', '_', route.path).rstrip('_')}",
        "summary": summary,
        "parameters": [*in_path, *in_query],
        "responses": {
            "2XX": {"description": "What was asked for.", "content": _content(route)},
            "default": {
                "description": "Why not, as OpenAI tells errors.",
                "content": {JSON: {"schema": {"$ref": _SCHEMAS.format(model="Error")}}},
            },
        },
    }
    if is_messages(route.path):
        operation["responses"]["default"] = {
            "description": "Why not, as Anthropic tells errors.",
            "content": {JSON: {"schema": {"$ref": _SCHEMAS.format(model="MessagesError")}}},
        }
        operation["security"] = [{}, {"bearer": []}, {"x-api-key": []}]
    kind = body_of(route)
    if kind is not None:
        _add_schema(kind, schemas)
        schema = {"$ref": _SCHEMAS.format(model=kind.__name__)}
        operation["requestBody"] = {"required": True, "content": {JSON: {"schema": schema}}}
    media_type = (route.openapi_extra or {}).get(_MEDIA)
    if media_type is not None:
        content = {media_type: {"schema": {"type": "string", "format": "binary"}}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _content(route: APIRoute) -> dict[str, Any]:
    """What it answers who asks for what it does."""
    answers: Sequence[str] = (route.openapi_extra or {}).get(_ANSWERS, (JSON,))
    told: str | None = (route.openapi_extra or {}).get(_TOLD)
    schemas = {JSON: {"type": "object"} if told is None else named(told), BYTES: {"type": "string", "format": "binary"}}
    return {kind: {"schema": schemas.get(kind, {"type": "string"})} for kind in answers}


def _parameter(name: str, place: str) -> dict[str, Any]:
    return {"name": name, "in": place, "required": place == "path", "schema": {"type": "string"}}


def _add_schema(kind: type[BaseModel], schemas: dict[str, Any]) -> None:
    schema = kind.model_json_schema(ref_template=_SCHEMAS)
    inner: Mapping[str, Any] = schema.pop("$defs", {})
    if issubclass(kind, Body):
        schema["properties"] |= accepted_in_vain(kind)
    schemas |= {**inner, kind.__name__: schema}
