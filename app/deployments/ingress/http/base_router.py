"""Requests to the application of the base model that they are for, where an ingress has several.

Inference is routed by the names in its body, which is read first: with several base models it is charged to the limits
of its own one. Management is routed by the name in its path or body, or by `?base_model=`; everything else belongs to
the first base model. The body is passed on as it was read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlencode

from fastapi import Request
from starlette.types import ASGIApp, Message, Receive, Scope

from app.config import INFERENCE_PATHS
from app.deployments.ingress.base_models import BaseModels, names_in
from app.deployments.ingress.http.request_parsing import read_bytes
from app.deployments.ingress.json_parser import parse_json
from app.deployments.ingress.preprocess.tokenizer_service import in_worker_if_long
from app.deployments.ingress.principal import Principal
from app.deployments.ingress.service import IngressService
from app.engine.errors import PolyloraError
from app.model_names import ROUTE_SUFFIXES

#: The query parameter that names a base model.
BASE_MODEL = "base_model"
#: Routes that register an adapter, by the fields that may have its name.
_LOADS: Mapping[str, Sequence[str]] = {
    "/v1/loras": ("name", "lora_name"),
    "/v1/load_lora": ("lora_model",),
    "/v1/load_lora_adapter": ("lora_name",),
    "/load_lora_adapter": ("lora_name",),
}
_UNLOADS = {
    "/v1/unload_lora": "lora_model",
    "/v1/unload_lora_adapter": "lora_name",
    "/unload_lora_adapter": "lora_name",
}
_MANIFEST = "/v1/loras/manifest"
#: Routes with the name of one of the caller's adapters or aliases.
_NAMED = ("/v1/loras/", "/v1/aliases/")


class Target(NamedTuple):
    """Where a request goes. `scope` has no `base_model` in its query; `receive` begins with the body again."""

    service: IngressService
    app: ASGIApp
    scope: Scope
    receive: Receive


class BaseRouter:
    """`others`: the applications of all base models but the first, in order."""

    def __init__(self, bases: BaseModels, others: Sequence[ASGIApp]) -> None:
        self._bases = bases
        self._others = dict(zip(bases.services[1:], others, strict=True))

    async def route(self, request: Target, caller: Principal) -> Target:
        """Where a request goes that has arrived at the first base model. Raises NotFound, InvalidRequest.

        A body that cannot be read or parsed is the first application's, which answers with the same error.
        """
        _, first, scope, receive = request
        path, method = scope["path"], scope["method"]
        if path in INFERENCE_PATHS and method == "POST":
            body, receive = await self._body(scope, receive)
            return self._to(self._bases.of_body(body, caller), first, scope, receive)
        base_name, scope = _without_base_model(scope)
        name, suffix = _name_in(path)
        if method == "POST" and (path in _LOADS or path in _UNLOADS or path == _MANIFEST):
            body, receive = await self._body(scope, receive)
            if isinstance(body, Mapping):
                return self._to(self._managing(path, body, base_name, caller), first, scope, receive)
        elif method == "PUT" and name is not None:
            parts: list[str] = []
            if not suffix:
                body, receive = await self._body(scope, receive)
                targets = body.get("targets") if isinstance(body, Mapping) else None
                parts = [*targets] if isinstance(targets, Mapping) else []
            return self._to(self._bases.registering([name], base_name, caller, parts), first, scope, receive)
        service = self._bases.first
        if base_name is not None:
            service = self._bases.with_base_name(base_name)
        elif name is not None:
            service = self._bases.having(name, caller.tenant_id) or service
        elif path.startswith("/v1/models/"):
            service = self._bases.serving(path.removeprefix("/v1/models/"), caller) or service
        return self._to(service, first, scope, receive)

    def _to(self, service: IngressService, first: ASGIApp, scope: Scope, receive: Receive) -> Target:
        return Target(service, self._others.get(service, first), scope, receive)

    def _managing(self, path: str, body: Mapping[str, Any], base_name: str | None, caller: Principal) -> IngressService:
        if isinstance(body.get(BASE_MODEL), str):  # Dynamo's format
            base_name = base_name or body[BASE_MODEL]
        if path == _MANIFEST:
            names = [*names_in(body.get("adapters"))]
            return self._bases.registering(names, base_name, caller) if names else self._bases.first
        if path in _UNLOADS:
            name = body.get(_UNLOADS[path])
            found = self._bases.having(name, caller.tenant_id) if isinstance(name, str) else None
            return self._bases.with_base_name(base_name) if base_name is not None else found or self._bases.first
        given = [value for field in _LOADS[path] if isinstance(value := body.get(field), str)]
        if not given:  # the route says what is missing
            return self._bases.first
        combine = body.get("combine")
        parts = names_in(combine.get("adapters")) if isinstance(combine, Mapping) else ()
        return self._bases.registering(given, base_name, caller, parts)

    async def _body(self, scope: Scope, receive: Receive) -> tuple[object, Receive]:
        """The parsed body, None if it cannot be parsed, and what passes it on."""
        max_bytes = self._bases.first.preprocessor.limits.max_body_bytes
        try:
            content = await read_bytes(Request(scope, receive), max_bytes)
        except PolyloraError as error:
            return None, _raising(error)
        try:
            body = await in_worker_if_long(len(content), lambda: parse_json(content))
        except PolyloraError:
            body = None
        return body, _replaying(content, receive)


def _without_base_model(scope: Scope) -> tuple[str | None, Scope]:
    pairs = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
    given = [value for name, value in pairs if name == BASE_MODEL]
    if not given:
        return None, scope
    query = urlencode([(name, value) for name, value in pairs if name != BASE_MODEL])
    return given[-1], {**scope, "query_string": query.encode("latin-1")}


def _name_in(path: str) -> tuple[str | None, str]:
    """The name in a path below `_NAMED`, and the suffix after it."""
    prefix = next((each for each in _NAMED if path.startswith(each)), None)
    if prefix is None:
        return None, ""
    name = path.removeprefix(prefix)
    stem, slash, suffix = name.rpartition("/")
    return (stem, suffix) if slash and suffix in ROUTE_SUFFIXES else (name, "")


def _replaying(content: bytes, receive: Receive) -> Receive:
    is_sent = False

    async def again() -> Message:
        nonlocal is_sent
        if is_sent:
            return await receive()
        is_sent = True
        return {"type": "http.request", "body": content, "more_body": False}

    return again


def _raising(error: PolyloraError) -> Receive:
    async def fail() -> Message:
        raise error

    return fail
