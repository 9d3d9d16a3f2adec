"""Anthropic's Messages API: request bodies, which convert to a `ChatCompletionRequest`, and responses.

Fields that would change the answer and are not implemented (images, documents, Anthropic's own tools) are rejected.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

from pydantic import Field, ValidationInfo, model_validator

from app.deployments.ingress.schemas import ignored_fields
from app.deployments.ingress.schemas.openai import (
    MAX_TOOLS,
    ChatCompletionRequest,
    Count,
    FunctionName,
    WeightedAdapters,
    as_fields,
    joined_text,
)
from app.deployments.ingress.schemas.request_model import Body, Items, parse_body, union_by_type
from app.deployments.ingress.schemas.response_model import ResponseModel
from app.engine.errors import InvalidRequest


class TextBlock(Body):
    location = "messages.content"
    ignored = ignored_fields.PART

    type: Literal["text"]
    text: str


class ThinkingBlock(Body):
    """Reasoning of an earlier answer; the prompt does not contain it."""

    location = "messages.content"
    ignored = ignored_fields.REASONING_ITEM

    type: Literal["thinking", "redacted_thinking"]


class ToolUseBlock(Body):
    location = "messages.content"
    ignored = ignored_fields.TOOL_USE

    type: Literal["tool_use"]
    id: str = Field(max_length=256)
    name: FunctionName
    input: dict[str, Any]


class ToolResultBlock(Body):
    """`is_error` is reported as ignored: chat templates have no place for it, and the content says what failed."""

    location = "messages.content"
    ignored = ignored_fields.TOOL_RESULT

    type: Literal["tool_result"]
    tool_use_id: str = Field(max_length=256)
    content: str | Items[TextBlock] = ""
    is_error: bool = False

    @model_validator(mode="after")
    def _report(self, info: ValidationInfo) -> Self:
        if self.is_error and isinstance(info.context, set):
            info.context.add(f"{self.location}.is_error")
        return self


if TYPE_CHECKING:
    Block: TypeAlias = TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock
else:
    Block = union_by_type(TextBlock, ThinkingBlock, ToolUseBlock, ToolResultBlock)


class Message(Body):
    location = "messages"
    ignored = ignored_fields.MESSAGE

    role: Literal["user", "assistant", "system"]
    content: str | Items[Block]

    @model_validator(mode="after")
    def _blocks_fit_role(self) -> Self:
        allowed = {"user": ("text", "tool_result"), "assistant": ("text", "thinking", "redacted_thinking", "tool_use")}
        for block in () if isinstance(self.content, str) else self.content:
            if block.type not in allowed.get(self.role, ("text",)):
                raise ValueError(f"a message of role {self.role} has no block of type {block.type}")
        return self


class MessagesTool(Body):
    location = "tools"
    ignored = ignored_fields.TOOL

    name: FunctionName
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] = "custom"
    strict: bool = False


class ToolChoice(Body):
    location = "tool_choice"

    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    disable_parallel_tool_use: bool = False


class OutputSchema(Body):
    location = "output_config.format"

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """`format`: the schema that the answer follows."""

    location = "output_config"
    ignored = ignored_fields.OUTPUT_CONFIG

    format: OutputSchema | None = None


class CountTokensRequest(Body):
    """The fields that determine the prompt."""

    location = ""
    ignored = ignored_fields.MESSAGES_REQUEST

    model: str
    messages: Items[Message] = Field(min_length=1)
    system: str | Items[TextBlock] | None = None
    tools: Items[MessagesTool] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig | None = None
    adapters: WeightedAdapters = None

    def chat(self) -> ChatCompletionRequest:
        """The request as a chat completion. Raises InvalidRequest."""
        return parse_body(ChatCompletionRequest, {"model": self.model, **self._conversation()})

    def _conversation(self) -> dict[str, Any]:
        messages = [] if self.system is None else [{"role": "system", "content": joined_text(self.system)}]
        for message in self.messages:
            messages += _chat_messages(message)
        fields: dict[str, Any] = {"messages": messages, "adapters": as_fields(self.adapters)}
        if messages and messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]:
            if messages[-1]["content"] != messages[-1]["content"].rstrip():
                raise InvalidRequest(
                    "the last message, which the answer continues, ends in white space", param="messages"
                )
            fields |= {"add_generation_prompt": False, "continue_final_message": True}
        if self.tools:
            fields["tools"] = [_tool(tool) for tool in self.tools]
        if self.output_config is not None and self.output_config.format is not None:
            schema = {"name": "answer", "schema": self.output_config.format.schema_, "strict": True}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        choice = self.tool_choice
        if choice is not None:
            named = {"type": "function", "function": {"name": choice.name}}
            known = {"any": "required", "tool": named, "auto": "auto", "none": "none"}
            fields["tool_choice"] = known[choice.type]
            fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        return fields


class MessagesRequest(CountTokensRequest):
    max_tokens: Count
    temperature: float = Field(default=1.0, ge=0, le=1)
    top_p: float = Field(default=1.0, ge=0, le=1)
    top_k: int = Field(default=0, ge=-1, lt=2**31)
    stop_sequences: Items[str] | None = None
    stream: bool = False

    def chat(self) -> ChatCompletionRequest:
        """The request as a chat completion. Raises InvalidRequest."""
        fields: dict[str, Any] = {"model": self.model, "max_tokens": self.max_tokens, "stream": self.stream}
        fields |= self.model_dump(include={"temperature", "top_p", "top_k"}, exclude_unset=True)
        if self.stop_sequences:
            fields["stop"] = self.stop_sequences
        return parse_body(ChatCompletionRequest, fields | self._conversation())


class AnswerText(ResponseModel):
    type: Literal["text"]
    text: str


class AnswerToolUse(ResponseModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: Any


class MessagesUsage(ResponseModel):
    """`input_tokens` does not include cached tokens."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageResponse(ResponseModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnswerText | AnswerToolUse]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessagesUsage


class TokenCount(ResponseModel):
    input_tokens: int


def _chat_messages(message: Message) -> list[dict[str, Any]]:
    """A message in OpenAI's format: tool results become separate messages, before the user's text."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    results = [
        {"role": "tool", "tool_call_id": block.tool_use_id, "content": joined_text(block.content)}
        for block in message.content
        if isinstance(block, ToolResultBlock)
    ]
    text = "".join(block.text for block in message.content if isinstance(block, TextBlock))
    calls = [
        {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": json.dumps(block.input)}}
        for block in message.content
        if isinstance(block, ToolUseBlock)
    ]
    if message.role == "system":
        return [{"role": "system", "content": text}]
    if message.role == "assistant":
        return [{"role": "assistant", "content": text} | ({"tool_calls": calls} if calls else {})]
    return [*results, {"role": "user", "content": text}] if text or not results else list(results)


def _tool(tool: MessagesTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema, "strict": tool.strict}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}
