"""OpenAI's Responses API: request bodies, which convert to a `ChatCompletionRequest`, and responses.

The route resolves `previous_response_id` by putting the stored conversation before the input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

from pydantic import ConfigDict, Field

from app.deployments.ingress.schemas.openai import (
    ChatCompletionRequest,
    Count,
    FunctionName,
    WeightedAdapters,
    as_fields,
)
from app.deployments.ingress.schemas.request_model import Body, Items, Metadata, parse_body
from app.deployments.ingress.schemas.response_model import ResponseModel, Seconds


class MessagePart(Body):
    """A part of a message; `annotations` and `logprobs` of earlier answers are ignored."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] = Field(default_factory=list)
    logprobs: list[Any] = Field(default_factory=list)


class InputMessage(Body):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Items[MessagePart]
    type: Literal["message"] = "message"
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class FunctionCallItem(Body):
    type: Literal["function_call"]
    call_id: str = Field(max_length=256)
    name: FunctionName
    arguments: str
    id: str | None = None
    status: str | None = None
    namespace: None = None


class FunctionOutputItem(Body):
    type: Literal["function_call_output"]
    call_id: str = Field(max_length=256)
    output: str
    id: str | None = None
    status: str | None = None


class ResponsesTool(Body):
    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = True


class ChosenTool(Body):
    type: Literal["function"]
    name: FunctionName


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: str = "answer"
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool = True


class TextField(Body):
    format: TextFormat | None = None


class InputTokensRequest(Body):
    """The fields that determine the prompt."""

    model: str
    input: str | Items[InputMessage | FunctionCallItem | FunctionOutputItem]
    instructions: str | None = None
    text: TextField | None = None
    tools: Items[ResponsesTool] | None = Field(default=None, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | ChosenTool = "auto"
    parallel_tool_calls: bool = True
    truncation: Literal["disabled"] = "disabled"
    lora_path: str | None = None
    adapters: WeightedAdapters = None

    def chat(self) -> ChatCompletionRequest:
        """The request as a chat completion. Raises InvalidRequest."""
        return parse_body(ChatCompletionRequest, self._conversation())

    def _conversation(self) -> dict[str, Any]:
        messages = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        fields: dict[str, Any] = {
            "model": self.model,
            "messages": messages + self._chat_messages(),
            "lora_path": self.lora_path,
            "adapters": as_fields(self.adapters),
        }
        if self.text is not None and self.text.format is not None:
            form = self.text.format
            schema = {"name": form.name, "schema": form.schema_, "strict": form.strict}
            fields["response_format"] = {"type": form.type} | (
                {"json_schema": schema} if form.type == "json_schema" else {}
            )
        if self.tools:
            fields["tools"] = [_tool(tool) for tool in self.tools]
            fields["parallel_tool_calls"] = self.parallel_tool_calls
        choice = self.tool_choice
        if self.tools or choice != "auto":
            fields["tool_choice"] = (
                {"type": "function", "function": {"name": choice.name}} if isinstance(choice, ChosenTool) else choice
            )
        return fields

    def _chat_messages(self) -> list[dict[str, Any]]:
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        messages: list[dict[str, Any]] = []
        for item in self.input:
            if isinstance(item, InputMessage):
                parts = item.content
                text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
                messages.append({"role": item.role, "content": text})
            elif isinstance(item, FunctionOutputItem):
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": item.output})
            else:
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                if messages and messages[-1]["role"] == "assistant":  # text and calls of a turn are one message
                    messages[-1].setdefault("tool_calls", []).append(call)
                else:
                    messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        return messages


class ResponsesRequest(InputTokensRequest):
    max_output_tokens: Count | None = None
    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, ge=0, le=1)
    stream: bool = False
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**64)
    user: str | None = None
    store: bool | None = None  # None: as configured
    previous_response_id: str | None = Field(default=None, max_length=128)
    metadata: Metadata | None = None  # inert, and returned
    service_tier: str | None = None  # inert
    prompt_cache_key: str | None = None  # inert
    safety_identifier: str | None = None  # inert

    def chat(self) -> ChatCompletionRequest:
        """The request as a chat completion. Raises InvalidRequest."""
        fields: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "max_tokens": self.max_output_tokens,
            "seed": self.seed,
            "user": self.user,
            "stream": self.stream,
        }
        return parse_body(ChatCompletionRequest, fields | self._conversation())

    def items(self) -> list[dict[str, Any]]:
        """The input as a list of JSON items."""
        if isinstance(self.input, str):
            text = {"type": "input_text", "text": self.input}
            return [{"type": "message", "role": "user", "content": [text]}]
        return [item.model_dump(mode="json", exclude_none=True) for item in self.input]

    def after(self, items: Sequence[Mapping[str, Any]]) -> Self:
        """The same request with a conversation before its input. Raises InvalidRequest."""
        whole = parse_body(InputTokensRequest, {"model": self.model, "input": [*items, *self.items()]})
        return self.model_copy(update={"input": whole.input})


class IncompleteDetails(ResponseModel):
    reason: str


class OutputText(ResponseModel):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[Any]


class OutputMessage(ResponseModel):
    type: Literal["message"]
    id: str
    status: str
    role: Literal["assistant"]
    content: list[OutputText]


class OutputFunctionCall(ResponseModel):
    """`arguments` is JSON."""

    type: Literal["function_call"]
    id: str
    status: str
    call_id: str
    name: str
    arguments: str


class InputTokensDetails(ResponseModel):
    cached_tokens: int


class OutputTokensDetails(ResponseModel):
    reasoning_tokens: int


class ResponseUsage(ResponseModel):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class Response(ResponseModel):
    """An answer, and the fields of its request that OpenAI repeats."""

    id: str
    object: Literal["response"]
    created_at: Seconds
    status: Literal["in_progress", "incomplete", "completed"]
    error: None
    incomplete_details: IncompleteDetails | None
    model: str
    instructions: str | None
    max_output_tokens: int | None
    temperature: float
    top_p: float
    parallel_tool_calls: bool
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    output: list[OutputMessage | OutputFunctionCall]
    previous_response_id: str | None
    reasoning: dict[str, None]
    store: bool
    text: dict[str, Any]
    truncation: Literal["disabled"]
    metadata: dict[str, str]
    usage: ResponseUsage | None


class InputItem(ResponseModel):
    """An item of a stored conversation, with more fields that depend on its type."""

    model_config = ConfigDict(extra="allow")

    id: str
    type: str


class InputTokens(ResponseModel):
    object: Literal["response.input_tokens"]
    input_tokens: int


def _tool(tool: ResponsesTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "strict": tool.strict}
    if tool.parameters is not None:
        function["parameters"] = tool.parameters
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}
