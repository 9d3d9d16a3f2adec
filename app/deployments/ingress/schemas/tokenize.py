"""Bodies of /tokenize and /detokenize, in vLLM's format."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from app.deployments.ingress.preprocess.chat_template_kwargs import TemplateVariables
from app.deployments.ingress.schemas.openai import ChatMessage, TokenId, ToolBody
from app.deployments.ingress.schemas.request_model import Body, Items
from app.deployments.ingress.schemas.response_model import ResponseModel


class TokenizeRequest(Body):
    """A text, or a conversation."""

    model: str
    prompt: str | None = None
    messages: Items[ChatMessage] = Field(default_factory=list)
    tools: Items[ToolBody] | None = Field(default=None, max_length=128)
    chat_template_kwargs: TemplateVariables = Field(default_factory=dict)
    return_token_strs: bool = False
    lora_path: str | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.prompt is None) == (not self.messages):
            raise ValueError("give a prompt or messages")
        if self.prompt is not None and self.chat_template_kwargs:
            raise ValueError("chat_template_kwargs are for messages; no template writes a prompt")
        return self


class DetokenizeRequest(Body):
    model: str
    tokens: Items[TokenId] = Field(max_length=1_000_000)


class TokenizeResponse(ResponseModel):
    """`token_strs`: where they are asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeResponse(ResponseModel):
    prompt: str
