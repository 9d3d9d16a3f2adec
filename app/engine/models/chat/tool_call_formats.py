"""How a model writes that it calls a tool: a format per family, found by the chat template.

In: a chat template's source. Out: a `ToolCallFormat`: the fixed text around a call's name and arguments. Where a template
does not know tools at all, `with_tools` tells the model of them in words, in Hermes' form. Sources: the templates of
Qwen2.5, Hermes 2 Pro, Llama 3.1 and Mistral 7B v0.3.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.engine.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """An answer's calls are: `opening`, then `before` name `between` arguments `after` for each, `separator`s between
    them, and `closing`. `marker` is what calls begin with wherever text may stand before them; without one an answer is
    calls or text, and text does not begin with a brace."""

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

_PREAMBLE = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def fixed_texts(form: ToolCallFormat) -> tuple[str, ...]:
    """Texts in a call that models may have as one special token."""
    return (form.marker, "</tool_call>") if form.marker == "<tool_call>" else (form.marker,) if form.marker else ()


def knows_tools(template: str) -> bool:
    """Whether a chat template writes tools itself."""
    return "tools" in template


def tool_format(template: str | None) -> ToolCallFormat:
    """The form of calls that a chat template's model has learnt. Raises InvalidRequest for one that is not known."""
    source = template or ""
    if "[TOOL_CALLS]" in source:
        return MISTRAL
    if "<tool_call>" in source or not knows_tools(source):
        return HERMES
    if '"parameters": ' in source or "python_tag" in source:
        return LLAMA3
    raise InvalidRequest(
        "the chat template writes tools in a form that is not known here (known: Hermes and Qwen, Llama 3, Mistral); "
        "leave tools out, or register an adapter whose template has one of these",
        param="tools",
    )


def with_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A conversation with tools for a template that knows neither tools nor their messages."""
    told = [_plain(message) for message in messages]
    if tools:
        preamble = _PREAMBLE.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
        if told and told[0]["role"] == "system":
            told[0] = told[0] | {"content": f"{told[0]['content']}\n\n{preamble}"}
        else:
            told.insert(0, {"role": "system", "content": preamble})
    return told


def call_text(call: Mapping[str, Any]) -> str:
    """One call as Hermes writes it. call: {"function": {"name", "arguments": object}}."""
    function = call["function"]
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return f"{HERMES.before}{function['name']}{HERMES.between}{arguments}{HERMES.after}"


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message in a role that every template knows."""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    if message.get("tool_calls"):
        parts = [message["content"]] if message.get("content") else []
        return {"role": message["role"], "content": "\n".join([*parts, *map(call_text, message["tool_calls"])])}
    return dict(message)
