"""How models write tool calls: one format per family, recognised by the chat template.

A `ToolCallFormat` is the fixed text around a call's name and arguments. For a template that does not support tools,
`with_tools` describes them in the system message, in Hermes' format. Sources: the templates of Qwen2.5, Hermes 2 Pro,
Llama 3.1 and Mistral 7B v0.3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.engine.errors import InvalidRequest
from app.engine.models.chat.user_text import UserText, concat, to_json


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """Calls are written as `opening`, then `before` name `between` arguments `after` for each, joined by `separator`,
    then `closing`. `marker` begins calls where text may precede them; without one an answer is either calls or text,
    and text does not begin with a brace.
    """

    name: str
    opening: str
    before: str
    between: str
    after: str
    separator: str
    closing: str
    marker: str
    id_chars: int = 24


HERMES = ToolCallFormat(
    "hermes", "", '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", "\n", "", "<tool_call>"
)
LLAMA3 = ToolCallFormat("llama3", "", '{"name": "', '", "parameters": ', "}", "; ", "", "")
MISTRAL = ToolCallFormat(
    "mistral", "[TOOL_CALLS] [", '{"name": "', '", "arguments": ', "}", ", ", "]", "[TOOL_CALLS]", id_chars=9
)

#: What only templates with other formats contain, whose calls may begin with the same marker: Qwen3-Coder, GLM-4.5 and
#: Mistral since version 11.
_OTHER_FORMATS = ("<function=", "<arg_key>", "[ARGS]")

_PREAMBLE = (
    """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
""",
    """
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>""",
)


def fixed_texts(form: ToolCallFormat) -> tuple[str, ...]:
    """Texts within a call that models may have as one special token."""
    return (form.marker, "</tool_call>") if form.marker == "<tool_call>" else (form.marker,) if form.marker else ()


def supports_tools(template: str) -> bool:
    """Whether a chat template renders tools itself."""
    return "tools" in template


def tool_format(template: str | None) -> ToolCallFormat:
    """The call format that the chat template's model was trained with. InvalidRequest if it is unknown."""
    source = template or ""
    if not any(text in source for text in _OTHER_FORMATS):
        if "[TOOL_CALLS]" in source:
            return MISTRAL
        if "<tool_call>" in source or not supports_tools(source):
            return HERMES
        if '"parameters": ' in source or "python_tag" in source:
            return LLAMA3
    raise InvalidRequest(
        "the chat template's tool call format is unknown (supported: Hermes and Qwen, Llama 3, Mistral); "
        "leave tools out, or register an adapter whose template uses one of these",
        param="tools",
    )


def with_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A conversation with tools, rewritten for a template that supports neither tools nor tool messages."""
    rewritten = [_plain(message) for message in messages]
    if tools:
        before, behind = _PREAMBLE
        preamble = concat((before, UserText("\n", ()).join(map(to_json, tools)), behind))
        if rewritten and rewritten[0]["role"] == "system":
            rewritten[0] = rewritten[0] | {"content": concat((rewritten[0]["content"], "\n\n", preamble))}
        else:
            rewritten.insert(0, {"role": "system", "content": preamble})
    return rewritten


def call_text(call: Mapping[str, Any]) -> str:
    """One call in Hermes' format. call: {"function": {"name", "arguments": object}}."""
    function = call["function"]
    parts = (HERMES.before, function["name"], HERMES.between, to_json(function["arguments"]), HERMES.after)
    return concat(parts)


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message in a role that every template supports."""
    if message["role"] == "tool":
        return {"role": "user", "content": concat(("<tool_response>\n", message["content"], "\n</tool_response>"))}
    if message.get("tool_calls"):
        parts = [message["content"]] if message.get("content") else []
        content = UserText("\n", ()).join([*parts, *map(call_text, message["tool_calls"])])
        return {"role": message["role"], "content": content}
    return dict(message)
