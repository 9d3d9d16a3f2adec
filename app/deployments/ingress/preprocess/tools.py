"""Tools in a conversation: what the template is told of them, and what the answer has to follow.

In: a checked body with `tools`, `tool_choice` and messages that call tools or answer calls. Out: plain values for the
chat template, and the grammar of the answer. Rule: calls are valid by their tools' schemas; a tool
that is not strict is held to as much of its schema as can be enforced, a strict one to all of it or it is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from app.deployments.ingress.preprocess.structured_output import RequestedGrammar, requested_grammar
from app.deployments.ingress.preprocess.tokenizer_service import TokenizerService
from app.deployments.ingress.preprocess.tool_grammar import Tool, tool_grammar
from app.deployments.ingress.schemas.openai import ChatCompletionRequest, ChatMessage, NamedTool, ToolBody
from app.deployments.ingress.serializers.tool_parser import ToolConfig
from app.engine.errors import InvalidRequest


class ChatFields(Protocol):
    """A body with a conversation."""

    @property
    def messages(self) -> Sequence[ChatMessage]: ...

    @property
    def tools(self) -> Sequence[ToolBody] | None: ...

    @property
    def chat_template_kwargs(self) -> Mapping[str, Any]: ...


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as templates take them: arguments are objects, and an answer to a call has its function's name.

    Raises InvalidRequest for arguments that are no JSON object.
    """
    called: dict[str, str] = {}
    told = []
    for index, message in enumerate(messages):
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
                        "arguments": _arguments(
                            call.function.arguments, f"messages.{index}.tool_calls.{number}.function.arguments"
                        ),
                    },
                }
                for number, call in enumerate(message.tool_calls)
            ]
            called |= {call.id: call.function.name for call in message.tool_calls}
        if message.tool_call_id is not None:
            one["tool_call_id"] = message.tool_call_id
            if message.tool_call_id in called:
                one.setdefault("name", called[message.tool_call_id])
        told.append(one)
    return told


def template_tools(body: ChatFields) -> list[dict[str, Any]] | None:
    """Tools as templates take them; [] where only earlier messages call some, None where nobody speaks of any."""
    if body.tools:
        return [{"type": "function", "function": _told_function(tool)} for tool in body.tools]
    return [] if any(message.tool_calls or message.role == "tool" for message in body.messages) else None


def chat_grammar(
    body: ChatCompletionRequest, tokenizer: TokenizerService, text: str
) -> tuple[RequestedGrammar | None, ToolConfig | None]:
    """What the answer has to follow, and how it calls tools if it may. `text`: what the adapter says of its template.

    Raises InvalidRequest.
    """
    wanted, choice = requested_grammar(body), body.tool_choice
    if not body.tools or choice == "none":
        return wanted, None
    form = tokenizer.tool_format(text)
    specials = tokenizer.specials(form)
    tools = [
        Tool(
            tool.function.name,
            tool.function.parameters or {},
            tool.function.strict,
            f"tools.{index}.function.parameters",
        )
        for index, tool in enumerate(body.tools)
        if not isinstance(choice, NamedTool) or tool.function.name == choice.function.name
    ]
    is_forced = choice != "auto"
    if wanted is not None and not is_forced and not form.marker:
        raise InvalidRequest(
            f"{wanted.place}: this model's calls are JSON as well; let tool_choice be required or none",
            param=wanted.place,
        )
    grammar = tool_grammar(
        tools,
        form,
        specials,
        is_forced=is_forced,
        is_parallel=body.parallel_tool_calls and not isinstance(choice, NamedTool),
        answer=None if wanted is None or is_forced else wanted.rule,
    )
    schemas = [(tool.place, {"type": "object", **tool.parameters}) for tool in tools if tool.is_strict]
    return RequestedGrammar(grammar, "tools", tuple(schemas)), ToolConfig(form, frozenset(specials.values()))


def _told_function(tool: ToolBody) -> dict[str, Any]:
    function = tool.function
    return {
        "name": function.name,
        "description": function.description or "",
        "parameters": function.parameters or {"type": "object", "properties": {}},
    }


def _arguments(text: str, place: str) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise InvalidRequest(f"{place}: {text[:80]!r} is no JSON object", param=place)
    return found
