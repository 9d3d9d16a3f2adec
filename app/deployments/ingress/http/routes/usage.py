"""Usage, costs and spend limits, by which OpenAI's admin client accounts for tenants.

In: requests with an admin key, and the tenants' owner. Out: routes. Buckets, groups and pages are those of OpenAI's
specification; what it groups by that is not here (users, batches, tiers) is null. Sums are the ledger's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from app.deployments.ingress.http.openapi import takes
from app.deployments.ingress.http.request_parsing import list_query, read_json
from app.deployments.ingress.schemas import admin as bodies
from app.deployments.ingress.schemas.request_model import parse_body
from app.deployments.ingress.tenancy import Tenancy
from app.deployments.ingress.tenants import admin_caller
from app.deployments.tenants.limits import NANOS_PER_CENT
from app.deployments.tenants.memory_prices import GIBIBYTE_HOUR, MemoryPrices, model_of
from app.deployments.tenants.metering import Charge, RouteKind
from app.deployments.tenants.usage import WIDTHS, UsageQuery, Width, next_page, usage_query
from app.engine.errors import InvalidRequest, NotFound

#: What both usage and costs are asked for.
_QUERY = ("start_time", "end_time", "bucket_width", "limit", "page", "group_by", "project_ids", "api_key_ids")
#: One group's sum.
Sum = tuple[Mapping[str, str], Charge]
#: What is made of the sums of a bucket.
Results = Callable[[Sequence[Sum]], list[dict[str, Any]]]
#: Costs come by the day, and more of them at once than usage does.
_COST_WIDTH = Width(86_400, 7, 180)
#: What may be asked of a time: up to the year 5138.
_MAX_TIME_S = 10**11


def add_usage_routes(routes: APIRouter, tenancy: Tenancy) -> None:
    """`/usage/completions`, `/usage/embeddings`, `/costs`."""

    @routes.get("/usage/completions", openapi_extra=takes(None, *_QUERY, "models", "user_ids", "batch"))
    async def completions(request: Request) -> Response:
        return await _usage(request, tenancy, "completions", _completions)

    @routes.get("/usage/embeddings", openapi_extra=takes(None, *_QUERY, "models", "user_ids"))
    async def embeddings(request: Request) -> Response:
        return await _usage(request, tenancy, "embeddings", _embeddings)

    @routes.get("/costs", openapi_extra=takes(None, *_QUERY, "line_items"))
    async def costs(request: Request) -> Response:
        if request.query_params.get("bucket_width", "1d") != "1d":
            raise InvalidRequest("costs come in buckets of 1d only", param="bucket_width")
        asked = list_query(request, "group_by")
        others = [name for name in asked if name not in ("line_item", "model")]
        query = _query(request, tenancy, _COST_WIDTH, None, [*others, "model"])  # prices are by model
        lines = frozenset(list_query(request, "line_items"))
        if lines:
            query = _with_only(query, "model", sorted(lines | {model_of(line) for line in lines}))
        return await _page(tenancy, query, lambda results: _costs(results, tenancy.memory_prices, asked, lines))


def add_spend_routes(routes: APIRouter, tenancy: Tenancy, max_body_bytes: int) -> None:
    """`/projects/{id}/spend_limit`."""
    owner, path = tenancy.owner, "/projects/{project_id}/spend_limit"

    async def answer(project_id: str) -> Response:
        cents = (await owner.project(project_id)).limits.spend_cents
        if cents is None:
            raise NotFound(f"project {project_id[:64]!r} has no spend limit")
        remaining = await owner.remaining_spend(project_id)
        is_reached = remaining is not None and remaining < NANOS_PER_CENT
        return JSONResponse(bodies.spend_limit_body(cents, is_reached=is_reached))

    @routes.get(path)
    async def retrieve(project_id: str) -> Response:
        return await answer(project_id)

    @routes.post(path, openapi_extra=takes(bodies.SpendLimitBody))
    async def update(project_id: str, request: Request) -> Response:
        body = parse_body(bodies.SpendLimitBody, await read_json(request, max_body_bytes))
        await owner.limit_spend(project_id, body.threshold_amount, actor=admin_caller(request).key_id)
        return await answer(project_id)

    @routes.delete(path)
    async def delete(project_id: str, request: Request) -> Response:
        await owner.limit_spend(project_id, None, actor=admin_caller(request).key_id)
        return JSONResponse({"object": "project.spend_limit.deleted", "deleted": True})


async def _usage(request: Request, tenancy: Tenancy, kind: RouteKind, results: Results) -> Response:
    width = WIDTHS.get(request.query_params.get("bucket_width", "1d"))
    if width is None:
        raise InvalidRequest("bucket_width is 1m, 1h or 1d", param="bucket_width")
    if request.query_params.get("batch") == "true" or list_query(request, "user_ids"):
        raise InvalidRequest("usage is not counted by batch or user; ask by project, key or model", param="batch")
    query = _query(request, tenancy, width, kind, list_query(request, "group_by"))
    if models := list_query(request, "models"):
        query = _with_only(query, "model", models)
    return await _page(tenancy, query, results)


async def _page(tenancy: Tenancy, query: UsageQuery, results: Results) -> Response:
    await tenancy.metering.flush()  # so that whoever asks after a request sees it, if it was of this ingress
    data = [
        {
            "object": "bucket",
            "start_time": bucket.start_s,
            "end_time": bucket.end_s,
            "results": results(bucket.results),
        }
        for bucket in await tenancy.owner.usage(query)
    ]
    page = next_page(query)
    return JSONResponse({"object": "page", "data": data, "has_more": page is not None, "next_page": page})


def _query(
    request: Request, tenancy: Tenancy, width: Width, kind: RouteKind | None, group_by: Sequence[str]
) -> UsageQuery:
    start_s = _time(request, "start_time")
    if start_s is None:
        raise InvalidRequest("start_time is needed: Unix seconds", param="start_time")
    end_s = _time(request, "end_time")
    only = {"project_id": list_query(request, "project_ids"), "key_id": list_query(request, "api_key_ids")}
    return usage_query(
        start_s,
        int(tenancy.clock()) + 1 if end_s is None else end_s,
        width,
        _number(request, "limit"),
        request.query_params.get("page"),
        {column: values for column, values in only.items() if values},
        group_by,
        kind,
    )


def _with_only(query: UsageQuery, column: str, values: Sequence[str]) -> UsageQuery:
    return replace(query, only={**query.only, column: values})


def _completions(sums: Sequence[Sum]) -> list[dict[str, Any]]:
    return [
        _group(group)
        | {
            "object": "organization.usage.completions.result",
            "input_tokens": charge.prompt_tokens,
            "input_cached_tokens": charge.cached_tokens,
            "input_uncached_tokens": charge.prompt_tokens - charge.cached_tokens,
            "output_tokens": charge.completion_tokens,
            "num_model_requests": charge.num_requests,
            "batch": None,
            "service_tier": None,
        }
        for group, charge in sums
    ]


def _embeddings(sums: Sequence[Sum]) -> list[dict[str, Any]]:
    return [
        _group(group)
        | {
            "object": "organization.usage.embeddings.result",
            "input_tokens": charge.prompt_tokens,
            "num_model_requests": charge.num_requests,
        }
        for group, charge in sums
    ]


class _Paid(NamedTuple):
    """Of one line item: `cost` in nanos / GIBIBYTE_HOUR, `quantity` in tokens, or of memory in bytes times ms."""

    cost: int = 0
    quantity: int = 0
    is_memory: bool = False


class _Cost(NamedTuple):
    """What a result of costs is of; None of what is not grouped by."""

    project_id: str | None
    key_id: str | None
    model: str | None
    line_item: str | None


def _costs(
    sums: Sequence[Sum], memory_prices: MemoryPrices, asked: Collection[str], lines: Collection[str]
) -> list[dict[str, Any]]:
    """A line item is the tokens of a model or an adapter, or memory that its requests held.

    `asked`: what is grouped by; a quantity is said of line items. `lines`: those that count; all if there are none.
    """
    totals: dict[_Cost, _Paid] = {}
    for group, charge in sums:
        model = group["model"]
        tokens = _Paid(charge.cost_nanos * GIBIBYTE_HOUR, charge.prompt_tokens + charge.completion_tokens)
        paid = {model: tokens} | {
            line.name: _Paid(line.cost, line.byte_ms, is_memory=True) for line in memory_prices.lines(model, charge)
        }
        for name, more in paid.items():
            if lines and name not in lines:
                continue
            place = _Cost(
                group.get("project_id"),
                group.get("key_id"),
                model if "model" in asked else None,
                name if "line_item" in asked else None,
            )
            held = totals.get(place, _Paid())
            totals[place] = _Paid(held.cost + more.cost, held.quantity + more.quantity, more.is_memory)
    return [_cost(place, total) for place, total in totals.items()]


def _cost(place: _Cost, total: _Paid) -> dict[str, Any]:
    quantity = total.quantity / GIBIBYTE_HOUR if total.is_memory else total.quantity
    unit = "gibibyte_hours" if total.is_memory else "tokens"
    is_line = place.line_item is not None
    return {
        "object": "organization.costs.result",
        "amount": {"value": total.cost / (GIBIBYTE_HOUR * 10**9), "currency": "usd"},
        "line_item": place.line_item,
        "quantity": quantity if is_line else None,
        "quantity_unit": unit if is_line else None,
        "project_id": place.project_id,
        "api_key_id": place.key_id,
    }


def _group(group: Mapping[str, str]) -> dict[str, Any]:
    return {
        "project_id": group.get("project_id"),
        "api_key_id": group.get("key_id"),
        "model": group.get("model"),
        "user_id": None,
    }


def _time(request: Request, name: str) -> int | None:
    return _number(request, name, _MAX_TIME_S)


def _number(request: Request, name: str, highest: int = 10_000) -> int | None:
    text = request.query_params.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 13 and int(text) <= highest):
        raise InvalidRequest(f"{name} is {text[:40]!r}; it is a whole number up to {highest}", param=name)
    return int(text)
