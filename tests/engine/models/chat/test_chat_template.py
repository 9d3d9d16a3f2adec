"""Chat templates: transformers' conventions, and no way out of the sandbox."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from app.engine.errors import CheckpointError, InvalidRequest
from app.engine.models.chat.chat_template import ChatTemplate, check_variables

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Sei kurz & <klar>"},
    {"role": "user", "content": "你好", "tool_calls": [{"function": {"name": "f", "arguments": {"b": 1, "a": "é<"}}}]},
    {"role": "assistant", "content": "ok"},
]
TEMPLATES = {
    "whitespace": "{{ bos_token }}\n  {% for m in messages %}\n    {{- m.content }}\n  {% endfor %}\n end",
    "loop controls": "{% for m in messages %}"
    "{% if m.role == 'user' %}{% continue %}{% endif %}{{ m.content }}{% break %}{% endfor %}",
    "tojson": "{{ messages | tojson }}{{ messages[1] | tojson(indent=2) }}"
    "{{ messages | tojson(sort_keys=true, ensure_ascii=true) }}",
    "tools": "{% if tools %}{{ tools | tojson }}{% endif %}{% if not documents %}none{% endif %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "namespace": "{% set ns = namespace(x=0, y='a') %}"
    "{% for m in messages %}{% set ns.x = ns.x + 1 %}{% endfor %}{{ ns.x }}{{ ns.y }}",
    "dict": "{{ dict(a=1, b=2) | tojson }}{{ dict([['k', 1]]) }}",
    "prompt": "{% if add_generation_prompt %}assistant:{% endif %}{{ eos_token }}",
    "macro": "{% macro line(m) %}{{ m.role }}={{ m.content | trim }}{% endmacro %}"
    "{% for m in messages %}{{ line(m) }};{% endfor %}",
    "extra": "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_text_equals_transformers(name: str) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    extra = {"enable_thinking": False}
    # A template without tools gets them in another form: test_tool_call_formats.py.
    of_template = tools if "tools" in TEMPLATES[name] else None
    ours = ChatTemplate(TEMPLATES[name], TOKENS).render(MESSAGES, tools=of_template, extra=extra)
    theirs, _ = render_jinja_template(
        [MESSAGES], tools=tools, chat_template=TEMPLATES[name], add_generation_prompt=True, **TOKENS, **extra
    )
    assert ours == theirs[0]
    assert ours


@pytest.mark.parametrize(
    "name",
    ["messages", "tools", "add_generation_prompt", "chat_template", "pad_token", "image_token", "dict", "range"],
)
def test_what_templates_find_set_is_not_a_requests_to_set(name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"chat_template_kwargs has '{name}'") as caught:
        check_variables(["enable_thinking", name], {"image_token": "<image>"})
    assert caught.value.param == "chat_template_kwargs"
    check_variables(["enable_thinking"], TOKENS)


def test_today_is_available() -> None:
    assert ChatTemplate("{{ strftime_now('%Y') }}", {}).render([]) == str(datetime.now().year)


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[7].content.foo }}",
        "{{ 'a' + messages[0].nothing }}",
        "{{ messages[0] + 1 }}",
        "{{ 1 // 0 }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ dict.__subclasses__() }}",
        "{{ namespace(__init__=1) }}",
        "{% set ns = namespace() %}{% set ns.__x__ = 1 %}",
        "{{ range(10000000) | list }}",
        "{% macro again(n) %}{{ again(n + 1) }}{% endmacro %}{{ again(0) }}",
    ],
)
def test_what_a_template_refuses_is_the_callers_mistake(template: str) -> None:
    with pytest.raises(InvalidRequest, match="refuses these messages") as caught:
        ChatTemplate(template, {}).render(MESSAGES)
    assert caught.value.param == "messages"


def test_the_templates_own_words_reach_the_caller() -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}", {}).render(MESSAGES)


def test_a_template_that_does_not_parse_is_the_models_mistake() -> None:
    with pytest.raises(CheckpointError, match="does not parse"):
        ChatTemplate("{% for %}", {})


CONTINUED = {
    "exact": "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>\n{% endfor %}",
    "trimmed": "{% for m in messages %}{{ '<|' + m['role'] + '|> ' + m['content'] | trim + ' </s>' }}{% endfor %}",
    "split": "{% for m in messages %}{{ m.content.split('</think>')[-1].lstrip('\n') }}</s>{% endfor %}",
}


@pytest.mark.parametrize("name", CONTINUED)
@pytest.mark.parametrize("content", ["The colours are", " two words ", "", "CONTINUE_FINAL_MESSAGE_TAG", "hi"])
def test_a_continued_message_ends_the_prompt_as_in_transformers(name: str, content: str) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": content}]
    options: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": False}
    ours = ChatTemplate(CONTINUED[name], TOKENS).render(messages, **options)
    theirs, _ = render_jinja_template([messages], chat_template=CONTINUED[name], **TOKENS, **options)
    assert ours == theirs[0]
    assert ours.rstrip().endswith(content.strip())


def test_a_message_that_the_template_leaves_out_is_not_continued() -> None:
    template = ChatTemplate("{{ messages[0].content }}", TOKENS)
    for last in ("ok", "Sei kurz & <klar>"):
        with pytest.raises(InvalidRequest, match="cannot be continued"):
            template.render([*MESSAGES, {"role": "assistant", "content": last}], continue_final_message=True)
