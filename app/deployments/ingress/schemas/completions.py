"""Responses of the routes that generate, embed or choose in OpenAI's format, and of the list of models."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from app.deployments.ingress.schemas.response_model import Omittable, ResponseModel, Seconds


class PromptTokensDetails(ResponseModel):
    cached_tokens: int


class CompletionTokensDetails(ResponseModel):
    """What became of predicted tokens."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class CompletionUsage(ResponseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: Omittable[CompletionTokensDetails] = None


class CalledFunction(ResponseModel):
    """`arguments` is JSON."""

    name: str
    arguments: str


class ToolCallResponse(ResponseModel):
    id: str
    type: Literal["function"]
    function: CalledFunction


class RoutedAdapter(ResponseModel):
    """`score`: the cosine of the request and the adapter's description."""

    name: str
    score: float


class RoutingDecision(ResponseModel):
    """How the service has chosen for model "auto"; no adapters: the base."""

    adapters: list[RoutedAdapter]
    num_candidates: int
    embedder: str
    threshold: float
    top_k: int


class RouteDecision(RoutingDecision):
    object: Literal["route"]


class AssistantMessage(ResponseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: Omittable[list[ToolCallResponse]] = None


class ChatChoice(ResponseModel):
    index: int
    message: AssistantMessage
    finish_reason: str
    logprobs: dict[str, Any] | None


class _Completion(ResponseModel):
    id: str
    created: Seconds
    model: str
    usage: CompletionUsage
    routing: Omittable[RoutingDecision] = None


class ChatCompletion(_Completion):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class CompletionChoice(ResponseModel):
    """`token_ids` and `prompt_token_ids`: where token ids are asked for."""

    index: int
    text: str
    finish_reason: str
    logprobs: dict[str, Any] | None
    token_ids: Omittable[list[int]] = None
    prompt_token_ids: Omittable[list[int]] = None


class AnsweringAdapter(ResponseModel):
    name: str
    generation: int
    digest: str


class Completion(_Completion):
    """`adapter`: where token ids are asked for, which contents drew them; null for the base."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    adapter: AnsweringAdapter | None = None


class Embedding(ResponseModel):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | Annotated[str, Field(description="base64 of little-endian float32.")]


class EmbeddingUsage(ResponseModel):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(ResponseModel):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class Model(ResponseModel):
    """`parent` is the base; `root` an alias's main target, or where an adapter comes from."""

    id: str
    object: Literal["model"]
    created: Seconds
    owned_by: str
    root: str
    parent: str | None
    max_model_len: Omittable[int] = None
    alora_invocation_tokens: Omittable[list[int]] = None


class GenerateInfo(ResponseModel):
    """`lora`: the adapter; null for the base."""

    id: str
    lora: str | None
    lora_generation: int | None
    lora_digest: str | None
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class GenerateResult(ResponseModel):
    """One answer of /generate."""

    text: str
    meta_info: GenerateInfo
