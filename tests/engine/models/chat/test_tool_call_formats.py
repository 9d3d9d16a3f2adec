"""Which form a chat template's model writes calls in, and what a template that knows no tools is told."""

from __future__ import annotations

import pytest

from app.engine.errors import InvalidRequest
from app.engine.models.chat.chat_template import ChatTemplate
from app.engine.models.chat.tool_call_formats import HERMES, LLAMA3, MISTRAL, call_text, tool_format, with_tools

QWEN = "{% if tools %}<tool_call>{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "form"),
    [
        (None, HERMES),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", HERMES),
        (QWEN, HERMES),
        ("{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS] [", MISTRAL),
        ("{% if tools %}<|python_tag|>{% endif %}", LLAMA3),
        ('{% if tools %}{"name": "x", "parameters": {}}{% endif %}', LLAMA3),
    ],
)
def test_a_template_says_its_form(template: str | None, form: object) -> None:
    assert tool_format(template) is form


@pytest.mark.parametrize(
    "call",
    [
        "<function={{ tool.name }}>",
        "<tool_call>\n<function={{ tool.name }}>\n<parameter=a>",
        "<tool_call>{{ tool.name }}\n<arg_key>a</arg_key>",
        "[TOOL_CALLS]{{ tool.name }}[ARGS]{}",
    ],
)
def test_a_form_that_is_not_known_is_refused(call: str) -> None:
    with pytest.raises(InvalidRequest, match="format is unknown"):
        tool_format("{% for tool in tools %}" + call + "{% endfor %}")


def test_a_template_without_tools_is_told_in_plain_messages() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "c"},
    ]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    told = with_tools(messages, tools)
    assert [message["role"] for message in told] == ["system", "user", "assistant", "user"]
    assert told[0]["content"].startswith("Be kind.\n\n# Tools")
    assert '"name": "add"' in told[0]["content"]
    assert told[2]["content"] == call_text(call) == '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    assert told[3]["content"] == "<tool_response>\n2\n</tool_response>"
    assert with_tools(messages[1:], tools)[0]["role"] == "system"
    assert with_tools(messages[1:], [])[0] == messages[1]
    assert ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {}).render(told).count("<tool_call>") == 3
