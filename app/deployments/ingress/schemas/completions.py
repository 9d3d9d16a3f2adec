"""Responses of the inference routes and of /v1/models; bodies of /v1/embeddings, /tokenize and /detokenize."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from app.deployments.ingress.preprocess.chat_template_kwargs import TemplateVariables
from app.deployments.ingress.schemas import ignored_fields
from app.deployments.ingress.schemas.openai import (
    MAX_TOOLS,
    ChatMessage,
    ConversationEnd,
    Count,
    Texts,
    TokenId,
    ToolBody,
    WeightedAdapters,
    entries,
)
from app.deployments.ingress.schemas.request_model import Body, Items
from app.deployments.ingress.schemas.response_model import Omittable, ResponseModel, Seconds
from app.engine.models.spec import Pooling


class PromptTokensDetails(ResponseModel):
    cached_tokens: int


class CompletionTokensDetails(ResponseModel):
    """Accepted and rejected tokens of a predicted output."""

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
    """`score`: the cosine of the prompt and the adapter's description."""

    name: str
    score: float


class RoutingDecision(ResponseModel):
    """The semantic router's decision for model "auto"; no adapters: the base model."""

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


class PromptLogprob(ResponseModel):
    """`rank`: 1 for the most likely token."""

    logprob: float
    rank: int
    decoded_token: str


class _Completion(ResponseModel):
    id: str
    created: Seconds
    model: str
    usage: CompletionUsage
    routing: Omittable[RoutingDecision] = None


class ChatCompletion(_Completion):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_logprobs: Omittable[list[dict[str, PromptLogprob] | None]] = None


class CompletionChoice(ResponseModel):
    """`token_ids` and `prompt_token_ids`: if the request asks for token ids."""

    index: int
    text: str
    finish_reason: str
    logprobs: dict[str, Any] | None
    token_ids: Omittable[list[int]] = None
    prompt_token_ids: Omittable[list[int]] = None
    prompt_logprobs: Omittable[list[dict[str, PromptLogprob] | None]] = None


class AnsweringAdapter(ResponseModel):
    name: str
    generation: int
    digest: str


class Completion(_Completion):
    """`adapter`: the adapter that answered, if the request asks for token ids; null for the base model."""

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
    """`parent` is the base model; `root` an alias's main target or an adapter's source."""

    id: str
    object: Literal["model"]
    created: Seconds
    owned_by: str
    root: str
    parent: str | None
    max_model_len: Omittable[int] = None
    alora_invocation_tokens: Omittable[list[int]] = None


class GenerateInfo(ResponseModel):
    """`lora`: the adapter; null for the base model."""

    id: str
    lora: str | None
    lora_generation: int | None
    lora_digest: str | None
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class GenerateResult(ResponseModel):
    text: str
    meta_info: GenerateInfo


class EmbeddingsRequest(Body):
    """OpenAI's body plus `pooling` (default: the model's own), `lora_path` and `adapters`."""

    location = ""
    ignored = ignored_fields.EMBEDDINGS_REQUEST

    model: str
    input: Texts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Count | None = None
    pooling: Pooling | None = None
    lora_path: str | None = None
    adapters: WeightedAdapters = None
    user: str | None = None  # an alias sends equal users to the same adapter; changes nothing else

    @property
    def texts(self) -> list[str | list[int]]:
        """One entry per text: characters or token ids."""
        return entries(self.input)


class TokenizeRequest(ConversationEnd):
    """vLLM's format: a text or a conversation."""

    location = ""
    ignored = ignored_fields.TOKENIZE_REQUEST

    model: str
    prompt: str | None = None
    messages: Items[ChatMessage] = Field(default_factory=list)
    tools: Items[ToolBody] | None = Field(default=None, max_length=MAX_TOOLS)
    chat_template_kwargs: TemplateVariables = Field(default_factory=dict)
    return_token_strs: bool = False
    lora_path: str | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.prompt is None) == (not self.messages):
            raise ValueError("give a prompt or messages")
        if self.prompt is not None and self.chat_template_kwargs:
            raise ValueError("chat_template_kwargs are for messages; a prompt has no template")
        self.check_end(self.messages)
        return self


class DetokenizeRequest(Body):
    model: str
    tokens: Items[TokenId] = Field(max_length=1_000_000)


class TokenizeResponse(ResponseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeResponse(ResponseModel):
    prompt: str
