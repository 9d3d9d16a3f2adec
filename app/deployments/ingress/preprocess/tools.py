"""Tools in a conversation: values for the chat template, and the grammar of the answer.

Calls always follow their tools' schemas: a strict tool's schema completely, or the request is rejected; another's as
far as it can be enforced.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from app.deployments.ingress.error_responses import InvalidJson
from app.deployments.ingress.json_parser import parse_json
from app.deployments.ingress.preprocess.structured_output import RequestedGrammar, requested_grammar
from app.deployments.ingress.preprocess.tokenizer_service import TokenizerService
from app.deployments.ingress.schemas.openai import ChatCompletionRequest, ChatMessage, NamedTool, ToolBody
from app.deployments.ingress.serializers.tool_parser import ToolConfig
from app.engine.errors import InvalidRequest
from app.engine.models.chat.tool_call_formats import ToolCallFormat
from app.engine.structured_output.grammar_builder import (
    MAX_TOOL_GRAMMAR_CHARS,
    lark_grammar,
    quote,
    schema_rule,
)

#: Work per message, part, call, tool or value besides its text, in characters.
CHARS_PER_ITEM = 32
#: Any text. Where calls begin with a marker that is plain text, the first marker ends it.
_TEXT = r"TEXT: /(.|\n)*/"


class Tool(NamedTuple):
    """A function that may be called. `place` is the field of its parameters."""

    name: str
    parameters: Mapping[str, Any]
    is_strict: bool
    place: str


class ChatFields(Protocol):
    """A body with a conversation."""

    @property
    def messages(self) -> Sequence[ChatMessage]: ...

    @property
    def tools(self) -> Sequence[ToolBody] | None: ...

    @property
    def chat_template_kwargs(self) -> Mapping[str, Any]: ...

    @property
    def add_generation_prompt(self) -> bool: ...

    @property
    def continue_final_message(self) -> bool: ...


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Messages for the chat template: arguments become objects, and a tool's answer gets its function's name."""
    called: dict[str, str] = {}
    converted = []
    for message in messages:
        one: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
        one["content"] = message.text
        if message.name is not None:
            one["name"] = message.name
        if message.tool_calls:
            one["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.function.name,
                        "arguments": arguments_object(call.function.arguments),
                    },
                }
                for call in message.tool_calls
            ]
            called |= {call.id: call.function.name for call in message.tool_calls}
        if message.tool_call_id is not None:
            one["tool_call_id"] = message.tool_call_id
            if message.tool_call_id in called:
                one.setdefault("name", called[message.tool_call_id])
        converted.append(one)
    return converted


def num_chars_until(body: ChatFields, enough: int) -> int:
    """Characters of a conversation with its tools, as a measure of the work on it; not counted beyond `enough`."""
    num_chars = 0
    for size in _sizes(body):
        num_chars += size + CHARS_PER_ITEM
        if num_chars >= enough:
            break
    return num_chars


def _sizes(body: ChatFields) -> Iterator[int]:
    """Characters of every message, part, call, tool and value of a tool's parameters."""
    for message in body.messages:
        yield len(message.content) if isinstance(message.content, str) else 0
        for part in message.content if isinstance(message.content, list) else ():
            yield len(part.text)
        for call in message.tool_calls:
            yield len(call.function.arguments)
    for tool in body.tools or ():
        yield len(tool.function.description or "")
        stack: list[object] = [tool.function.parameters]
        while stack:
            value = stack.pop()
            yield len(value) if isinstance(value, str) else 0
            stack += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def template_tools(body: ChatFields) -> list[dict[str, Any]] | None:
    """Tools for the chat template; [] if only earlier messages call some, None if there are no tools at all."""
    if body.tools:
        return [{"type": "function", "function": _function_dict(tool)} for tool in body.tools]
    return [] if any(message.tool_calls or message.role == "tool" for message in body.messages) else None


def chat_grammar(
    body: ChatCompletionRequest, tokenizer: TokenizerService, text: str
) -> tuple[RequestedGrammar | None, ToolConfig | None]:
    """The answer's grammar, and how it may call tools. `text` is the adapter's own chat text. Raises InvalidRequest."""
    requested, choice = requested_grammar(body, tokenizer.enforceable), body.tool_choice
    if not body.tools or choice == "none":
        return requested, None
    form = tokenizer.tool_format(text)
    specials = tokenizer.specials(form)
    unenforced = [] if requested is None else list(requested.unenforced)
    tools = []
    for index, tool in enumerate(body.tools):
        if isinstance(choice, NamedTool) and tool.function.name != choice.function.name:
            continue
        place = f"tools.{index}.function.parameters"
        parameters: Mapping[str, Any] = tool.function.parameters or {}
        if not tool.function.strict:
            parameters, left_out = tokenizer.enforceable({"type": "object", **parameters}, place)
            unenforced += left_out
        tools.append(Tool(tool.function.name, parameters, tool.function.strict, place))
    is_forced = choice != "auto"
    if requested is not None and not is_forced and not form.marker:
        raise InvalidRequest(
            f"{requested.place}: this model's tool calls are JSON too; set tool_choice to required or none",
            param=requested.place,
        )
    grammar = tool_grammar(
        tools,
        form,
        specials,
        is_forced=is_forced,
        is_parallel=body.parallel_tool_calls and not isinstance(choice, NamedTool),
        answer=None if requested is None or is_forced else requested.rule,
    )
    schemas = [(tool.place, {"type": "object", **tool.parameters}) for tool in tools if tool.is_strict]
    return RequestedGrammar(grammar, "tools", tuple(schemas), unenforced=tuple(unenforced)), ToolConfig(
        form, frozenset(specials.values())
    )


def tool_grammar(
    tools: Sequence[Tool],
    form: ToolCallFormat,
    specials: Mapping[str, int],
    *,
    is_forced: bool,
    is_parallel: bool,
    answer: str | None = None,
) -> str:
    """The grammar as text. Raises InvalidRequest.

    specials: the model's special tokens among the format's fixed texts, with their ids. is_forced: only calls. answer:
    the rule of an answer in words; None for any text.
    """

    def literal(text: str) -> str:
        pieces = re.split("(" + "|".join(map(re.escape, specials)) + ")", text) if specials else [text]
        return " ".join(f"<[{specials[piece]}]>" if piece in specials else quote(piece) for piece in pieces if piece)

    def call_rules(name: str, begin: str) -> list[str]:
        """One call of any tool, after `begin` was generated."""
        rules = [
            f"{name}_{index}: {literal((form.before + tool.name + form.between).removeprefix(begin))} args_{index} "
            f"{literal(form.after)}"
            for index, tool in enumerate(tools)
        ]
        return [*rules, f"{name}: " + " | ".join(f"{name}_{index}" for index in range(len(tools)))]

    more = f" ({literal(form.separator)} call)*" if is_parallel else ""
    lines = [f"args_{index}: {_arguments_rule(tool)}" for index, tool in enumerate(tools)]
    lines += call_rules("call", "")
    lines.append(f"calls: {literal(form.opening)} call{more} {literal(form.closing)}")
    if is_forced:
        lines.append("start: calls")
    elif answer is not None:
        lines += ["start: answer | calls", f"answer: {answer}"]
    elif not form.marker:
        lines += ["start: words | calls", r"words: /([^{](.|\n)*)?/"]
    elif form.marker in specials:
        lines += ["start: TEXT | TEXT calls", _TEXT]
    else:
        opening = form.opening.removeprefix(form.marker)
        lines += call_rules("first", "" if form.opening else form.marker)
        lines += [
            "start: TEXT | trigger behind",
            f"trigger[lazy]: TEXT {quote(form.marker)}",
            f"behind: {literal(opening)} first{more} {literal(form.closing)}",
            _TEXT,
        ]
    return lark_grammar("\n".join(lines), "tools", MAX_TOOL_GRAMMAR_CHARS)


def _arguments_rule(tool: Tool) -> str:
    """The rule of a tool's arguments, always an object even if its schema does not say so."""
    return schema_rule({"type": "object", **tool.parameters}, tool.place, lenient=not tool.is_strict)


def _function_dict(tool: ToolBody) -> dict[str, Any]:
    function = tool.function
    return {
        "name": function.name,
        "description": function.description or "",
        "parameters": function.parameters or {"type": "object", "properties": {}},
    }


def arguments_object(text: str) -> dict[str, Any]:
    """A call's arguments as an object. If the text is not one, because `max_tokens` ended the call or a model wrote it
    badly, it becomes the value `INVALID_JSON`, which is how Anthropic's clients send such arguments back.
    """
    try:
        arguments = parse_json(text.encode() or b"{}", "the call's arguments")
    except InvalidJson:
        return {"INVALID_JSON": text}
    return arguments if isinstance(arguments, dict) else {"INVALID_JSON": text}
