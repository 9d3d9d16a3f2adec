"""OpenAI's Responses API: request bodies, which convert to a `ChatCompletionRequest`, and responses.

The route resolves `previous_response_id` by putting the stored conversation before the input.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

from pydantic import ConfigDict, Field, ValidationInfo, model_validator

from app.deployments.ingress.schemas import ignored_fields
from app.deployments.ingress.schemas.openai import (
    MAX_TOOLS,
    ChatCompletionRequest,
    Count,
    FullFunctionName,
    FunctionName,
    RefusalPart,
    WeightedAdapters,
    as_fields,
    joined_text,
)
from app.deployments.ingress.schemas.request_model import Body, Items, Metadata, parse_body, union_by_type
from app.deployments.ingress.schemas.response_model import Omittable, ResponseModel, Seconds
from app.engine.errors import InvalidRequest

#: Values of `include`: what an answer with these tools would contain in addition, and answers here never have.
INCLUDABLE = (
    "reasoning.encrypted_content", "file_search_call.results", "web_search_call.results",
    "web_search_call.action.sources", "code_interpreter_call.outputs", "computer_call_output.output.image_url",
    "message.input_image.image_url",
)  # fmt: skip


class MessagePart(Body):
    location = "input.content"
    ignored = ignored_fields.PART

    type: Literal["input_text", "output_text"]
    text: str


class RefusedPart(RefusalPart):
    location = "input.content"


if TYPE_CHECKING:
    ContentPart: TypeAlias = MessagePart | RefusedPart
else:
    ContentPart = union_by_type(MessagePart, RefusedPart)


class InputMessage(Body):
    location = "input"
    ignored = ignored_fields.ITEM

    role: Literal["user", "assistant", "system", "developer"]
    content: str | Items[ContentPart]
    type: Literal["message"] = "message"


class FunctionCallItem(Body):
    location = "input"
    ignored = ignored_fields.ITEM

    type: Literal["function_call"]
    call_id: str = Field(max_length=256)
    name: FunctionName
    namespace: FunctionName | None = None
    arguments: str


class FunctionOutputItem(Body):
    location = "input"
    ignored = ignored_fields.ITEM

    type: Literal["function_call_output"]
    call_id: str = Field(max_length=256)
    output: str | Items[MessagePart]


class ReasoningItem(Body):
    """Reasoning of an earlier answer; the prompt does not contain it."""

    location = "input"
    ignored = ignored_fields.REASONING_ITEM

    type: Literal["reasoning"]


class ItemReference(Body):
    """An output item of a stored response; the route puts it in the place of the reference."""

    location = "input"

    type: Literal["item_reference"]
    id: str = Field(max_length=128)


if TYPE_CHECKING:
    InputItem: TypeAlias = InputMessage | FunctionCallItem | FunctionOutputItem | ReasoningItem | ItemReference
else:
    InputItem = union_by_type(
        InputMessage, FunctionCallItem, FunctionOutputItem, ReasoningItem, ItemReference, default=InputMessage
    )


class ResponsesTool(Body):
    location = "tools"
    ignored = ignored_fields.TOOL

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamespaceTool(Body):
    """Functions of one namespace. The prompt has them as `namespace.name`; calls have both names."""

    location = "tools"

    type: Literal["namespace"]
    name: FunctionName
    description: str | None = None
    tools: Items[ResponsesTool] = Field(max_length=MAX_TOOLS)


class WebSearchTool(Body):
    """A search that OpenAI's servers run. The model need not use it, so it is left out and reported as ignored."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["web_search", "web_search_2025_08_26"]

    @model_validator(mode="after")
    def _report(self, info: ValidationInfo) -> Self:
        if isinstance(info.context, set):
            info.context.add("tools.web_search")
        return self


if TYPE_CHECKING:
    AnyTool: TypeAlias = ResponsesTool | NamespaceTool | WebSearchTool
else:
    AnyTool = union_by_type(ResponsesTool, NamespaceTool, WebSearchTool)


class ChosenTool(Body):
    location = "tool_choice"

    type: Literal["function"]
    name: FullFunctionName


class TextFormat(Body):
    location = "text.format"
    ignored = ignored_fields.JSON_SCHEMA

    type: Literal["text", "json_object", "json_schema"]
    name: str = "answer"
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextField(Body):
    location = "text"
    ignored = ignored_fields.TEXT_FIELD

    format: TextFormat | None = None


class InputTokensRequest(Body):
    """The fields that determine the prompt."""

    location = ""
    ignored = ignored_fields.RESPONSES_REQUEST

    model: str
    input: str | Items[InputItem]
    instructions: str | None = None
    text: TextField | None = None
    tools: Items[AnyTool] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | ChosenTool = "auto"
    parallel_tool_calls: bool = True
    truncation: Literal["disabled", "auto"] = "disabled"  # a conversation that is too long is an error either way
    include: Items[Literal[INCLUDABLE]] = Field(default_factory=list)  # type: ignore[valid-type]
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
        tools = [_tool(tool, namespace) for tool, namespace in self._functions()]
        if tools:
            fields["tools"] = tools
            fields["parallel_tool_calls"] = self.parallel_tool_calls
        choice = self.tool_choice
        if tools or choice != "auto":
            fields["tool_choice"] = (
                {"type": "function", "function": {"name": choice.name}} if isinstance(choice, ChosenTool) else choice
            )
        return fields

    def _functions(self) -> Iterator[tuple[ResponsesTool, str | None]]:
        """The functions among the tools, with their namespaces."""
        for tool in self.tools or ():
            if isinstance(tool, ResponsesTool):
                yield tool, None
            elif isinstance(tool, NamespaceTool):
                yield from ((each, tool.name) for each in tool.tools)

    def call_names(self, name: str) -> dict[str, str]:
        """The `name`, and the `namespace` if it has one, of a function that the model calls by this name."""
        for tool, namespace in self._functions():
            if namespace is not None and name == _full_name(tool.name, namespace):
                return {"name": tool.name, "namespace": namespace}
        return {"name": name}

    def _chat_messages(self) -> list[dict[str, Any]]:
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        messages: list[dict[str, Any]] = []
        for item in self.input:
            if isinstance(item, InputMessage):
                messages.append({"role": item.role, "content": joined_text(item.content)})
            elif isinstance(item, FunctionOutputItem):
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": joined_text(item.output)})
            elif isinstance(item, FunctionCallItem):
                function = {"name": _full_name(item.name, item.namespace), "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                if messages and messages[-1]["role"] == "assistant":  # text and calls of a turn are one message
                    messages[-1].setdefault("tool_calls", []).append(call)
                else:
                    messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            elif isinstance(item, ItemReference):  # the route has replaced all
                raise InvalidRequest("a batch cannot refer to items of stored responses; send the items", param="input")
        return messages

    def items(self) -> list[dict[str, Any]]:
        """The input as a list of JSON items."""
        if isinstance(self.input, str):
            text = {"type": "input_text", "text": self.input}
            return [{"type": "message", "role": "user", "content": [text]}]
        return [item.model_dump(mode="json", exclude_none=True) for item in self.input]

    def references(self) -> list[str]:
        """The ids of the items that the input refers to, each once."""
        if isinstance(self.input, str):
            return []
        return list(dict.fromkeys(item.id for item in self.input if isinstance(item, ItemReference)))

    def with_input(self, items: Sequence[Mapping[str, Any]]) -> Self:
        """The same request with another input. Raises InvalidRequest."""
        whole = parse_body(InputTokensRequest, {"model": self.model, "input": items})
        return self.model_copy(update={"input": whole.input})


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

    def chat(self) -> ChatCompletionRequest:
        """The request as a chat completion. Raises InvalidRequest."""
        fields: dict[str, Any] = {
            "max_tokens": self.max_output_tokens,
            "seed": self.seed,
            "user": self.user,
            "stream": self.stream,
        }
        fields |= self.model_dump(include={"temperature", "top_p"}, exclude_unset=True)
        return parse_body(ChatCompletionRequest, fields | self._conversation())


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
    namespace: Omittable[str] = None
    arguments: str


class InputTokensDetails(ResponseModel):
    """`cache_write_tokens` is 0: writing to the prefix cache costs nothing."""

    cached_tokens: int
    cache_write_tokens: int


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


class StoredItem(ResponseModel):
    """An item of a stored conversation, with more fields that depend on its type."""

    model_config = ConfigDict(extra="allow")

    id: str
    type: str


class InputTokens(ResponseModel):
    object: Literal["response.input_tokens"]
    input_tokens: int


def _full_name(name: str, namespace: str | None) -> str:
    return name if namespace is None else f"{namespace}.{name}"


def _tool(tool: ResponsesTool, namespace: str | None) -> dict[str, Any]:
    function: dict[str, Any] = {"name": _full_name(tool.name, namespace), "strict": tool.strict}
    if tool.parameters is not None:
        function["parameters"] = tool.parameters
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}
