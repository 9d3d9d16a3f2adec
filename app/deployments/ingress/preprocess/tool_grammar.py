"""An answer that may call tools, as a grammar: arguments are valid by construction.

In: tools, what is asked of the model (`tool_choice`) and the form of its calls. Out: the grammar's text. Where the
model is free to answer in words, text is anything up to where calls begin, or what the response format says. Rule:
behind the first call there are only calls.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from app.engine.models.chat.tool_call_formats import ToolCallFormat
from app.engine.structured_output.grammar_builder import lark_grammar, quote, schema_rule

#: Any text. Where calls begin with a marker that is text too, the first one ends it.
_TEXT = r"TEXT: /(.|\n)*/"


class Tool(NamedTuple):
    """A function that may be called. `place` is what the client calls its parameters."""

    name: str
    parameters: Mapping[str, Any]
    is_strict: bool
    place: str


def tool_grammar(
    tools: Sequence[Tool],
    form: ToolCallFormat,
    specials: Mapping[str, int],
    *,
    is_forced: bool,
    is_parallel: bool,
    answer: str | None = None,
) -> str:
    """`specials`: fixed texts that are special tokens of the model, with their ids. `is_forced`: nothing but calls.
    `answer`: the rule of an answer in words, None for any text. Raises InvalidRequest."""

    def fixed(text: str) -> str:
        pieces = re.split("(" + "|".join(map(re.escape, specials)) + ")", text) if specials else [text]
        return " ".join(f"<[{specials[piece]}]>" if piece in specials else quote(piece) for piece in pieces if piece)

    def call_rules(name: str, begin: str) -> list[str]:
        """One call of any tool, of which `begin` is there already."""
        rules = [
            f"{name}_{index}: {fixed((form.before + tool.name + form.between).removeprefix(begin))} args_{index} "
            f"{fixed(form.after)}"
            for index, tool in enumerate(tools)
        ]
        return [*rules, f"{name}: " + " | ".join(f"{name}_{index}" for index in range(len(tools)))]

    more = f" ({fixed(form.separator)} call)*" if is_parallel else ""
    lines = [f"args_{index}: {_arguments(tool)}" for index, tool in enumerate(tools)]
    lines += call_rules("call", "")
    lines.append(f"calls: {fixed(form.opening)} call{more} {fixed(form.closing)}")
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
            f"behind: {fixed(opening)} first{more} {fixed(form.closing)}",
            _TEXT,
        ]
    return lark_grammar("\n".join(lines), "tools")


def _arguments(tool: Tool) -> str:
    """The rule of a tool's arguments, which are an object whatever its schema leaves open."""
    return schema_rule({"type": "object", **tool.parameters}, tool.place, lenient=not tool.is_strict)
