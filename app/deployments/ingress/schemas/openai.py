"""Request bodies of the OpenAI routes and of /generate; every field here has an effect unless marked inert."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, Self, TypeAlias, cast

from pydantic import Field, field_validator, model_validator

from app.deployments.ingress.preprocess.chat_template_kwargs import TemplateVariables
from app.deployments.ingress.schemas import ignored_fields
from app.deployments.ingress.schemas.request_model import Body, Items, union_by_type
from app.engine.adapters.combining.combination import MAX_PARTS

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
#: A number of tokens or answers. Bounded, because Python cannot print integers of thousands of digits in a message.
Count = Annotated[int, Field(ge=1, lt=2**31)]

#: Messages per conversation: checking 100,000 would block this process's streams for half a second.
MAX_MESSAGES = 16_384
#: Tools per request. Agents with several tool servers send hundreds.
MAX_TOOLS = 1024
#: One or more texts, as characters or token ids.
Texts = str | Items[str] | Items[TokenId] | Items[Items[TokenId]]


def entries(texts: Texts) -> list[str | list[int]]:
    """One entry per text: characters or token ids."""
    if isinstance(texts, str):
        return [texts]
    if texts and isinstance(texts[0], int):
        return [texts]  # validated: all entries are ints; there may be a million
    return cast(list[str | list[int]], texts)


class StreamOptions(Body):
    """`continuous_usage_stats`: vLLM's field; every event has the usage so far of its answer."""

    location = "stream_options"
    ignored = ignored_fields.STREAM_OPTIONS

    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonSchemaFormat(Body):
    """Without `strict: true` a keyword that cannot be enforced is left out and named in a response header."""

    location = "response_format.json_schema"
    ignored = ignored_fields.JSON_SCHEMA

    name: str = Field(min_length=1, max_length=64)
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool = False


class ResponseFormat(Body):
    location = "response_format"

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _schema_fits_type(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema is needed with type json_schema, and with no other")
        return self


class StructuredOutputs(Body):
    """vLLM's field of the same name."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Items[str] | None = None
    grammar: str | None = None
    json_object: bool = False


#: Tokens of an answer of /v1/completions and of /generate where nothing sets a limit.
DEFAULT_COMPLETION_TOKENS, DEFAULT_GENERATE_TOKENS = 16, 128
Temperature = Annotated[float, Field(ge=0, le=2)]
Fraction = Annotated[float, Field(ge=0, le=1)]
TopK = Annotated[int, Field(ge=-1, lt=2**31)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Field(gt=0, le=10)]


class SamplingFields(Body):
    """Fields of every generating route. Beyond OpenAI's: top_k, min_p, repetition_penalty, ignore_eos."""

    location = ""
    ignored = ignored_fields.REQUEST

    temperature: Temperature = 1.0
    top_p: Fraction = 1.0
    top_k: TopK = 0
    min_p: Fraction = 0.0
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**64)
    stop: str | Items[str] | None = None
    stop_token_ids: Items[TokenId] | None = Field(default=None, max_length=64)
    ignore_eos: bool = False
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    logit_bias: dict[str, float] | None = Field(default=None, max_length=1024)
    min_tokens: int = Field(default=0, ge=0, lt=2**31)
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Items[str] | None = None
    guided_grammar: str | None = None
    n: Count = 1

    @field_validator("logit_bias")
    @classmethod
    def _check_biases(cls, biases: dict[str, float] | None) -> dict[str, float] | None:
        for token, amount in (biases or {}).items():
            if not (token.isascii() and token.isdigit() and len(token) < 10):
                raise ValueError(f"{token[:40]!r} is not a token id")
            if not -100 <= amount <= 100:
                raise ValueError(f"token {token} has {amount}; a bias is a number from -100 to 100")
        return biases

    @field_validator("stop")
    @classmethod
    def _stop_is_not_empty(cls, stop: str | list[str] | None) -> str | list[str] | None:
        if stop == "" or (isinstance(stop, list) and "" in stop):
            raise ValueError("an empty stop string would end every answer at once")
        return stop

    @property
    def has_grammar(self) -> bool:
        """Whether a field asks for an answer that follows a grammar."""
        fields = (self.response_format, self.structured_outputs, self.guided_json, self.guided_regex)
        return any(field is not None for field in (*fields, self.guided_choice, self.guided_grammar))

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """(token id, amount) pairs."""
        return tuple((int(token), amount) for token, amount in (self.logit_bias or {}).items())

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class WeightedAdapter(Body):
    """One of several adapters in a request, and its weight."""

    name: str
    weight: float = 1.0


#: Adapters whose weighted sum answers (`app.engine.adapters.combining`).
WeightedAdapters = Annotated[Items[WeightedAdapter] | None, Field(min_length=1, max_length=MAX_PARTS)]


def as_fields(adapters: list[WeightedAdapter] | None) -> list[dict[str, Any]] | None:
    """The adapters as JSON."""
    return None if adapters is None else [adapter.model_dump() for adapter in adapters]


class RoutingFields(Body):
    """Settings of the semantic router for one request with model "auto"; None: as configured."""

    top_k: int | None = Field(default=None, ge=1, le=MAX_PARTS)
    threshold: float | None = Field(default=None, ge=-1, le=1)


class _OpenAIFields(SamplingFields):
    """`prompt_logprobs`: vLLM's field."""

    model: str
    prompt_logprobs: int | None = Field(default=None, ge=0, lt=2**31)
    stream: bool = False
    stream_options: StreamOptions | None = None
    lora_path: str | None = None
    adapters: WeightedAdapters = None
    routing: RoutingFields | None = None
    user: str | None = None  # an alias sends equal users to the same adapter; changes nothing else

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is allowed only with stream: true")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs are in no stream; leave out one of both")
        return self


class _HasText(Protocol):
    @property
    def text(self) -> str: ...


def joined_text(content: str | Sequence[_HasText]) -> str:
    """The text of a content, which is a string or a list of parts."""
    return content if isinstance(content, str) else "".join(part.text for part in content)


class TextPart(Body):
    location = "messages.content"
    ignored = ignored_fields.PART

    type: Literal["text"]
    text: str


class RefusalPart(Body):
    """A refusal of an earlier answer; the prompt contains it as text."""

    location = "messages.content"
    ignored = ignored_fields.PART

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


if TYPE_CHECKING:
    ContentPart: TypeAlias = TextPart | RefusalPart
else:
    ContentPart = union_by_type(TextPart, RefusalPart)

#: A function's name, as long as Anthropic and OpenAI's Responses API allow.
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
#: The same, or `namespace.name` of a function in a namespace of the Responses API.
FullFunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,257}$")]


class FunctionCall(Body):
    location = "messages.tool_calls.function"
    ignored = ignored_fields.FUNCTION_CALL

    name: FullFunctionName
    arguments: str


class ToolCallBody(Body):
    """A call made by the assistant."""

    location = "messages.tool_calls"
    ignored = ignored_fields.TOOL_CALL

    id: str = Field(max_length=256)
    type: Literal["function"] = "function"
    function: FunctionCall


class Function(Body):
    location = "tools.function"
    ignored = ignored_fields.TOOL

    name: FullFunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False


class ToolBody(Body):
    location = "tools"
    ignored = ignored_fields.TOOL

    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    name: FullFunctionName


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


class ChatMessage(Body):
    """`developer` is treated as `system`, a `refusal` as content; `name` is passed to the chat template."""

    location = "messages"
    ignored = ignored_fields.MESSAGE

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Items[ContentPart] | None = None
    refusal: str | None = None
    name: str | None = Field(default=None, max_length=256)
    tool_calls: Items[ToolCallBody] = Field(default_factory=list, max_length=128)
    tool_call_id: str | None = Field(default=None, max_length=256)

    @model_validator(mode="after")
    def _content_fits_role(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"content is null; only an assistant's message may be empty, not a {self.role}'s")
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"tool_calls are an assistant's, not a {self.role}'s")
        if self.refusal is not None and self.role != "assistant":
            raise ValueError(f"a refusal is an assistant's, not a {self.role}'s")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise ValueError("tool_call_id is needed in a message of role tool, and in no other")
        return self

    @property
    def text(self) -> str:
        if not self.content:
            return self.refusal or ""
        return joined_text(self.content)


class Prediction(Body):
    """Predicted output: text that the client expects in the answer."""

    type: Literal["content"]
    content: str | Items[TextPart]

    @property
    def text(self) -> str:
        return joined_text(self.content)


class ConversationEnd(Body):
    """vLLM's fields for the end of the prompt. continue_final_message: the answer continues the last message, and the
    prompt ends with its content; it needs `add_generation_prompt: false`.
    """

    add_generation_prompt: bool = True
    continue_final_message: bool = False

    def check_end(self, messages: Sequence[ChatMessage]) -> None:
        """Raises ValueError."""
        if not self.continue_final_message:
            return
        if self.add_generation_prompt:
            raise ValueError("continue_final_message needs add_generation_prompt: false")
        last = messages[-1] if messages else None
        if last is None or (last.content is None and last.refusal is None) or last.tool_calls:
            raise ValueError("continue_final_message needs a last message with content and without tool_calls")


class ChatCompletionRequest(_OpenAIFields, ConversationEnd):
    ignored = ignored_fields.CHAT_REQUEST

    messages: Items[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, lt=2**31)
    tools: Items[ToolBody] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: TemplateVariables = Field(default_factory=dict)
    prediction: Prediction | None = None

    @model_validator(mode="after")
    def _tools_agree(self) -> Self:
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise ValueError("two tools have the same name")
        choice = self.tool_choice
        if isinstance(choice, NamedTool) and choice.function.name not in names:
            raise ValueError(f"tool_choice names {choice.function.name!r}, which is not among the tools")
        if choice == "required" and not names:
            raise ValueError("tool_choice is required, and there are no tools")
        return self

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        self.check_end(self.messages)
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is allowed only with logprobs: true")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError(
                f"max_tokens {self.max_tokens} and max_completion_tokens {self.max_completion_tokens} disagree"
            )
        return self

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def limit_field(self) -> str:
        """The name of the field that the client used."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"


class CompletionRequest(_OpenAIFields):
    prompt: Texts
    max_tokens: int = Field(default=DEFAULT_COMPLETION_TOKENS, ge=0, lt=2**31)
    logprobs: int | None = Field(default=None, ge=0, lt=2**31)
    echo: bool = False

    return_token_ids: bool = False
    detokenize: bool = True

    @model_validator(mode="after")
    def _echo_fits_output(self) -> Self:
        if not self.max_tokens and not self.echo and self.prompt_logprobs is None:
            raise ValueError("max_tokens is 0, which needs echo or prompt_logprobs")
        if self.echo and self.wants_token_ids:
            raise ValueError("echo returns the prompt as text; with token ids read prompt_token_ids")
        if self.stop_strings and not self.detokenize:
            raise ValueError("stop strings need text, which detokenize: false leaves out; use stop_token_ids")
        return self

    @property
    def token_limit(self) -> int | None:
        """The limit that the client has set."""
        return self.max_tokens if "max_tokens" in self.model_fields_set else None

    @property
    def wants_token_ids(self) -> bool:
        return self.return_token_ids or not self.detokenize

    @property
    def prompts(self) -> list[str | list[int]]:
        """One entry per prompt: text or token ids."""
        return entries(self.prompt)


class RouteBody(Body):
    """A conversation or a prompt."""

    messages: Items[ChatMessage] | None = Field(default=None, min_length=1)
    prompt: str | None = None
    routing: RoutingFields | None = None


class GenerateSampling(SamplingFields):
    max_new_tokens: Count | None = None
    max_tokens: Count | None = None

    @model_validator(mode="after")
    def _limits_agree(self) -> Self:
        if None not in (self.max_tokens, self.max_new_tokens) and self.max_tokens != self.max_new_tokens:
            raise ValueError(f"max_tokens {self.max_tokens} and max_new_tokens {self.max_new_tokens} disagree")
        return self

    @property
    def token_limit(self) -> int | None:
        return self.max_new_tokens or self.max_tokens

    @property
    def limit_field(self) -> str:
        """The name of the field that the client used."""
        return f"sampling_params.{'max_new_tokens' if self.max_tokens is None else 'max_tokens'}"


class GenerateBody(Body):
    """`lora_path` is one name for all texts or one per text; `adapters` replaces it for all texts."""

    location = ""

    text: str | Items[str]
    sampling_params: GenerateSampling = Field(default_factory=GenerateSampling)
    lora_path: str | Items[str | None] | None = None
    adapters: WeightedAdapters = None
    stream: bool = False

    @field_validator("stream")
    @classmethod
    def _no_stream(cls, stream: bool) -> bool:
        if stream:
            raise ValueError("/generate does not stream; POST /v1/completions does")
        return stream

    @model_validator(mode="after")
    def _lengths_match(self) -> Self:
        if isinstance(self.lora_path, list):
            num_texts = len(self.text) if isinstance(self.text, list) else 1
            if len(self.lora_path) != num_texts:
                raise ValueError(
                    f"lora_path has {len(self.lora_path)} entries but text has {num_texts}; give one per text"
                )
        return self

    @property
    def texts(self) -> list[str]:
        return [self.text] if isinstance(self.text, str) else self.text

    @property
    def names(self) -> list[str | None]:
        """The adapter of each text."""
        return self.lora_path if isinstance(self.lora_path, list) else [self.lora_path] * len(self.texts)
