"""/v1/models: base models, adapters and aliases, in vLLM's format."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from pydantic_core import to_json
from starlette.responses import JSONResponse, Response, StreamingResponse

from app.deployments.ingress.base_models import BaseModels
from app.deployments.ingress.http.request_parsing import MAX_PAGE, Limit, PageQuery, QueryParams, page_body
from app.deployments.ingress.principal import Principal, http_principal, visible, visible_page
from app.deployments.ingress.schemas.completions import Model
from app.deployments.ingress.schemas.response_model import PageResponse
from app.deployments.ingress.service import IngressService
from app.deployments.registry.feed.view import Entry
from app.deployments.registry.models import DEFAULT_TENANT, AliasEntry
from app.engine.adapters.combining.combination import is_combination
from app.engine.errors import ModelNotFound
from app.model_names import ModelVersion, split_version


class ModelQuery(QueryParams):
    """Without `limit` all models are listed."""

    limit: Limit | None = None
    after: str | None = None


def add_model_routes(app: FastAPI, bases: BaseModels) -> None:
    @app.get("/v1/models", response_model=PageResponse[Model])
    async def models(request: Request, query: Annotated[ModelQuery, Query()]) -> Response:
        """List base models, each with its adapters and aliases: all of them, or a page."""
        caller = http_principal(request)
        if query.limit is not None:
            return JSONResponse(model_page(bases, PageQuery(limit=query.limit, after=query.after), caller))
        pages = all_models(bases, query.after, caller)
        return StreamingResponse(pages, media_type="application/json")

    @app.get("/v1/models/{name:model}", response_model=Model)
    async def model(request: Request, name: str) -> Response:
        """Retrieve a model."""
        caller = http_principal(request)
        service = bases.serving(name, caller) or bases.first
        is_base = service.preprocessor.resolver.is_base
        base, colon, adapter_name = name.partition(":")
        plain, version = split_version(adapter_name if colon and is_base(base) else name)
        entry = visible(service.registry, caller, plain)
        if entry is not None and (version is None or _means(service, entry, version)):
            return JSONResponse(model_of(bases, service, entry, caller))
        if is_base(name) and caller.tenant.may_use(service.base_name):
            return JSONResponse(base_model(service))
        raise ModelNotFound(f"there is no model or adapter {name[:80]!r}; GET /v1/models lists what there is")


def model_page(bases: BaseModels, page: PageQuery, caller: Principal) -> dict[str, Any]:
    """The models that the caller may use: each base model, then its adapters and aliases by name."""
    start, after = 0, page.after
    if after is not None and (found := bases.serving(after, caller)) is not None:
        start = bases.services.index(found)
    data: list[dict[str, Any]] = []
    has_more = False
    for service in bases.services[start:]:
        base = base_model(service)
        if after is None and caller.tenant.may_use(service.base_name):
            data.append(base)
        last = None if after in (None, base["id"]) else after.rpartition(":")[2]
        entries = visible_page(service.registry, caller, limit=max(page.limit - len(data), 0), after=last)
        data += [model_of(bases, service, entry, caller) for entry in entries.entries]
        after, has_more = None, entries.has_more or len(data) > page.limit
        if has_more:
            break
    return page_body(data[: page.limit], has_more=has_more)


async def all_models(bases: BaseModels, after: str | None, caller: Principal) -> AsyncGenerator[bytes]:
    """The JSON of all models as one list, because OpenAI's client does not paginate; yields to other requests."""
    prefix, last_id, first_id = b'{"object":"list","data":[', None, None
    while True:
        page = model_page(bases, PageQuery(limit=MAX_PAGE, after=after), caller)
        if page["data"]:
            first_id, last_id = first_id or page["first_id"], page["last_id"]
            yield prefix + to_json(page["data"])[1:-1]
            prefix = b","
        if not page["has_more"]:
            break
        after = last_id
        await asyncio.sleep(0)
    yield (b"" if last_id else prefix) + b'],"first_id":%b,"last_id":%b,"has_more":false}' % (
        to_json(first_id),
        to_json(last_id),
    )


def _means(service: IngressService, entry: Entry, version: ModelVersion) -> bool:
    """Whether an adapter's contents, or those of one of an alias's targets, are this version."""
    if not isinstance(entry, AliasEntry):
        return _is_served(service, entry.name, version, entry.tenant_id)
    return any(_is_served(service, target.name, version, entry.tenant_id) for target in entry.targets)


def _is_served(service: IngressService, name: str, version: ModelVersion, owner_id: str) -> bool:
    if service.preprocessor.resolver.is_base(name):
        return version.is_of(service.preprocessor.tokenizer.spec.digest)
    plain, own_version = split_version(name)
    ref = service.registry.resolve(plain, "", owner_id)
    return ref is not None and all(
        each.is_of(ref.digest, ref.generation) for each in (version, own_version) if each is not None
    )


def base_model(service: IngressService) -> dict[str, Any]:
    """The base in vLLM's format; its id has its version while an alias has its name."""
    is_alias = service.registry.alias(service.base_name, DEFAULT_TENANT) is not None
    return {
        "id": service.exact_base_name if is_alias else service.base_name,
        "object": "model",
        "created": 0,
        "owned_by": "polylora",
        "root": service.base_name,
        "parent": None,
        "max_model_len": service.preprocessor.max_model_len,
    }


def model_of(bases: BaseModels, service: IngressService, entry: Entry, caller: Principal) -> dict[str, Any]:
    """An entry in vLLM's format: `parent` is the base, `root` an alias's main target or an adapter's source.

    Paths on this server, sources of another tenant's adapters and targets of its aliases are not disclosed: there
    `root` is the entry's own name. Where another base model has the same name, `id` begins with this one's.
    """
    activation = {}
    if isinstance(entry, AliasEntry):
        created, root = entry.updated_s, entry.name
        if entry.tenant_id in (caller.tenant_id, DEFAULT_TENANT):
            root = max(entry.targets, key=lambda target: target.weight).name
    else:
        is_public = "://" in entry.source and not is_combination(entry.source) and entry.tenant_id == caller.tenant_id
        created, root = entry.registered_s, entry.source if is_public else entry.name
        if entry.invocation_tokens:
            activation = {"alora_invocation_tokens": [*entry.invocation_tokens]}
    return {
        "id": bases.model_id(service, entry.name, caller),
        "object": "model",
        "created": int(created),
        "owned_by": "polylora",
        "root": root,
        "parent": service.base_name,
        "max_model_len": service.preprocessor.max_model_len,
        **activation,
    }
