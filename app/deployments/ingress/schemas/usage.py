"""Responses of the routes for usage and costs, as OpenAI's admin client reads them."""

from __future__ import annotations

from typing import Generic, Literal, TypeVar

from app.deployments.ingress.schemas.response_model import ResponseModel, Seconds

ResultT = TypeVar("ResultT", bound=ResponseModel)


class CompletionsUsage(ResponseModel):
    """Null for what the results are not grouped by."""

    object: Literal["organization.usage.completions.result"]
    project_id: str | None
    api_key_id: str | None
    model: str | None
    user_id: None
    input_tokens: int
    input_cached_tokens: int
    input_uncached_tokens: int
    output_tokens: int
    num_model_requests: int
    batch: None
    service_tier: None


class EmbeddingsUsage(ResponseModel):
    """Null for what the results are not grouped by."""

    object: Literal["organization.usage.embeddings.result"]
    project_id: str | None
    api_key_id: str | None
    model: str | None
    user_id: None
    input_tokens: int
    num_model_requests: int


class Amount(ResponseModel):
    value: float
    currency: Literal["usd"]


class CostsResponse(ResponseModel):
    """`quantity` is a line item's."""

    object: Literal["organization.costs.result"]
    amount: Amount
    line_item: str | None
    quantity: float | None
    quantity_unit: Literal["tokens"] | None
    project_id: str | None
    api_key_id: str | None


class UsageBucketResponse(ResponseModel, Generic[ResultT]):
    object: Literal["bucket"]
    start_time: Seconds
    end_time: Seconds
    results: list[ResultT]


class BucketPage(ResponseModel, Generic[ResultT]):
    """Part of a list of buckets; `next_page` is what `page` of the next request is."""

    object: Literal["page"]
    data: list[UsageBucketResponse[ResultT]]
    has_more: bool
    next_page: str | None
