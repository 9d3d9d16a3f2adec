"""Usage, costs and spend limits of OpenAI's admin API, computed from the usage ledger.

Groups of OpenAI's that do not exist here (users, batches, tiers) are null.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, NamedTuple

from fastapi import APIRouter, Query, Request
from pydantic import Field
from starlette.responses import JSONResponse, Response

from app.deployments.ingress.accounting import RequestAccounting
from app.deployments.ingress.http.request_parsing import JsonBody, QueryParams, UnixTime, WholeNumber
from app.deployments.ingress.principal import admin_principal
from app.deployments.ingress.schemas import admin as schemas
from app.deployments.ingress.schemas.admin import (
    BucketPage,
    CompletionsUsage,
    CostsResponse,
    DeletedSetting,
    EmbeddingsUsage,
    SpendLimit,
)
from app.deployments.ingress.serializers import admin as serializers
from app.deployments.tenancy.quota.limits import NANOS_PER_CENT
from app.deployments.tenancy.usage.flusher import RouteKind, UsageRecord
from app.deployments.tenancy.usage.queries import BUCKET_SIZES, BucketSize, UsageQuery, next_page, usage_query
from app.engine.errors import InvalidRequest, NotFound

#: A group's columns and its sum.
Sum = tuple[Mapping[str, str], UsageRecord]
#: Formats the sums of a bucket.
Results = Callable[[Sequence[Sum]], list[dict[str, Any]]]
#: Costs are per day: 7 buckets by default, at most 180.
_COST_BUCKET_SIZE = BucketSize(86_400, 7, 180)


class BucketQuery(QueryParams):
    """Parameters of usage and costs; times are Unix seconds."""

    start_time: UnixTime
    end_time: UnixTime | None = None
    limit: Annotated[int, WholeNumber(0, 10_000)] | None = None
    page: str | None = None
    group_by: list[str] = Field(default_factory=list)
    project_ids: list[str] = Field(default_factory=list)
    api_key_ids: list[str] = Field(default_factory=list)


class ModelUsageQuery(BucketQuery):
    """`user_ids` is rejected: usage is not counted by user."""

    bucket_width: Literal["1m", "1h", "1d"] = "1d"
    models: list[str] = Field(default_factory=list)
    user_ids: list[str] = Field(default_factory=list)


class CompletionsUsageQuery(ModelUsageQuery):
    """`batch` true is rejected: usage is not counted by batch."""

    batch: str | None = None


class CostQuery(BucketQuery):
    bucket_width: Literal["1d"] = "1d"
    line_items: list[str] = Field(default_factory=list)


def add_usage_routes(routes: APIRouter, accounting: RequestAccounting) -> None:
    """Register `/usage/completions`, `/usage/embeddings` and `/costs`."""

    @routes.get("/usage/completions", response_model=BucketPage[CompletionsUsage])
    async def completions(query: Annotated[CompletionsUsageQuery, Query()]) -> Response:
        """Tokens and requests of inference, in buckets of time."""
        return await _usage(query, accounting, "completions", _completions)

    @routes.get("/usage/embeddings", response_model=BucketPage[EmbeddingsUsage])
    async def embeddings(query: Annotated[ModelUsageQuery, Query()]) -> Response:
        """Tokens and requests of embeddings, in buckets of time."""
        return await _usage(query, accounting, "embeddings", _embeddings)

    @routes.get("/costs", response_model=BucketPage[CostsResponse])
    async def costs(query: Annotated[CostQuery, Query()]) -> Response:
        """Cost by day, from the configured prices."""
        group_by = query.group_by
        others = [name for name in group_by if name not in ("line_item", "model")]
        usage = _query(query, accounting, _COST_BUCKET_SIZE, None, [*others, "model"])  # prices are by model
        if query.line_items:
            usage = _with_only(usage, "model", query.line_items)
        return await _page(accounting, usage, lambda results: _costs(results, group_by))


def add_spend_routes(routes: APIRouter, accounting: RequestAccounting) -> None:
    """Register `/projects/{id}/spend_limit`."""
    tenants_service, path = accounting.tenants_service, "/projects/{project_id}/spend_limit"

    async def answer(project_id: str) -> Response:
        cents = (await tenants_service.project(project_id)).limits.spend_cents
        if cents is None:
            raise NotFound(f"project {project_id[:64]!r} has no spend limit")
        remaining = await tenants_service.remaining_spend(project_id)
        is_reached = remaining is not None and remaining < NANOS_PER_CENT
        return JSONResponse(serializers.spend_limit_body(cents, is_reached=is_reached))

    @routes.get(path, response_model=SpendLimit)
    async def retrieve(project_id: str) -> Response:
        """Show a project's monthly spend limit."""
        return await answer(project_id)

    @routes.post(path, response_model=SpendLimit)
    async def update(project_id: str, request: Request, body: JsonBody[schemas.SpendLimitBody]) -> Response:
        """Set a project's monthly spend limit."""
        await tenants_service.limit_spend(project_id, body.threshold_amount, actor=admin_principal(request).key_id)
        return await answer(project_id)

    @routes.delete(path, response_model=DeletedSetting)
    async def delete(project_id: str, request: Request) -> Response:
        """Remove a project's spend limit."""
        await tenants_service.limit_spend(project_id, None, actor=admin_principal(request).key_id)
        return JSONResponse({"object": "project.spend_limit.deleted", "deleted": True})


async def _usage(query: ModelUsageQuery, accounting: RequestAccounting, kind: RouteKind, results: Results) -> Response:
    if query.user_ids or (isinstance(query, CompletionsUsageQuery) and query.batch == "true"):
        raise InvalidRequest("usage is not counted by batch or user; ask by project, key or model", param="batch")
    usage = _query(query, accounting, BUCKET_SIZES[query.bucket_width], kind, query.group_by)
    if query.models:
        usage = _with_only(usage, "model", query.models)
    return await _page(accounting, usage, results)


async def _page(accounting: RequestAccounting, query: UsageQuery, results: Results) -> Response:
    await accounting.usage_flusher.flush()  # so that a caller sees the requests that it has sent to this ingress
    data = [
        {
            "object": "bucket",
            "start_time": bucket.start_s,
            "end_time": bucket.end_s,
            "results": results(bucket.results),
        }
        for bucket in await accounting.tenants_service.usage(query)
    ]
    page = next_page(query)
    return JSONResponse({"object": "page", "data": data, "has_more": page is not None, "next_page": page})


def _query(
    query: BucketQuery,
    accounting: RequestAccounting,
    bucket_size: BucketSize,
    kind: RouteKind | None,
    group_by: Sequence[str],
) -> UsageQuery:
    only = {"project_id": query.project_ids, "key_id": query.api_key_ids}
    return usage_query(
        query.start_time,
        int(accounting.clock()) + 1 if query.end_time is None else query.end_time,
        bucket_size,
        query.limit,
        query.page,
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
            "input_tokens": usage.prompt_tokens,
            "input_cached_tokens": usage.cached_tokens,
            "input_uncached_tokens": usage.prompt_tokens - usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
            "num_model_requests": usage.num_requests,
            "num_adapter_loads": usage.num_loads,
            "adapter_load_bytes": usage.load_bytes,
            "rank_row_seconds": usage.rank_row_ms / 1000,
            "kv_block_seconds": usage.kv_block_ms / 1000,
            "batch": None,
            "service_tier": None,
        }
        for group, usage in sums
    ]


def _embeddings(sums: Sequence[Sum]) -> list[dict[str, Any]]:
    return [
        _group(group)
        | {
            "object": "organization.usage.embeddings.result",
            "input_tokens": usage.prompt_tokens,
            "num_model_requests": usage.num_requests,
        }
        for group, usage in sums
    ]


class _Cost(NamedTuple):
    """The group of a cost; None for columns that are not grouped by."""

    project_id: str | None
    key_id: str | None
    model: str | None
    line_item: str | None


def _costs(sums: Sequence[Sum], group_by: Collection[str]) -> list[dict[str, Any]]:
    """Costs per group. A line item is a model's or an adapter's tokens, and only line items have a quantity."""
    totals: dict[_Cost, UsageRecord] = {}
    for group, usage in sums:
        model = group["model"]
        place = _Cost(
            group.get("project_id"),
            group.get("key_id"),
            model if "model" in group_by else None,
            model if "line_item" in group_by else None,
        )
        totals[place] = totals.get(place, UsageRecord()).plus(usage)
    return [_cost(place, total) for place, total in totals.items()]


def _cost(place: _Cost, total: UsageRecord) -> dict[str, Any]:
    is_line = place.line_item is not None
    return {
        "object": "organization.costs.result",
        "amount": {"value": total.cost_nanos / 10**9, "currency": "usd"},
        "line_item": place.line_item,
        "quantity": total.prompt_tokens + total.completion_tokens if is_line else None,
        "quantity_unit": "tokens" if is_line else None,
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
