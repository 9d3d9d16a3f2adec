"""The grammar of an answer that may call tools; arguments are valid by construction.

Where the model may answer in words, text is anything up to the start of a call, or follows the response format. After
the first call only calls may follow.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from app.engine.models.chat.tool_call_formats import ToolCallFormat
from app.engine.structured_output.grammar_builder import lark_grammar, quoted, schema_rule

#: Any text. Where calls begin with a marker that is plain text, the first marker ends it.
_TEXT = r"TEXT: /(.|\n)*/"


class Tool(NamedTuple):
    """A function that may be called. `place` is the field of its parameters."""

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
    """The grammar as text. Raises InvalidRequest.

    specials: the model's special tokens among the format's fixed texts, with their ids. is_forced: only calls. answer:
    the rule of an answer in words; None for any text.
    """

    def literal(text: str) -> str:
        pieces = re.split("(" + "|".join(map(re.escape, specials)) + ")", text) if specials else [text]
        return " ".join(f"<[{specials[piece]}]>" if piece in specials else quoted(piece) for piece in pieces if piece)

    def call_rules(name: str, begin: str) -> list[str]:
        """One call of any tool, after `begin` was generated."""
        rules = [
            f"{name}_{index}: {literal((form.before + tool.name + form.between).removeprefix(begin))} args_{index} "
            f"{literal(form.after)}"
            for index, tool in enumerate(tools)
        ]
        return [*rules, f"{name}: " + " | ".join(f"{name}_{index}" for index in range(len(tools)))]

    more = f" ({literal(form.separator)} call)*" if is_parallel else ""
    lines = [f"args_{index}: {_arguments(tool)}" for index, tool in enumerate(tools)]
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
            f"trigger[lazy]: TEXT {quoted(form.marker)}",
            f"behind: {literal(opening)} first{more} {literal(form.closing)}",
            _TEXT,
        ]
    return lark_grammar("\n".join(lines), "tools")


def _arguments(tool: Tool) -> str:
    """The rule of a tool's arguments, always an object even if its schema does not say so."""
    return schema_rule({"type": "object", **tool.parameters}, tool.place, lenient=not tool.is_strict)
