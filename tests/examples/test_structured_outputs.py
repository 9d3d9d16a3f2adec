"""What the demo adapters' answers have to look like, and that they are asked as the server asks."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.engine.adapters.adapter_chat import encode_chat
from app.engine.adapters.adapter_tokenizer import AdapterTokenizer
from app.engine.models.chat.chat_template_sandbox import ChatTemplateSandbox
from app.engine.models.tokenizers.tokenizer import load_tokenizer
from examples.training import tools
from examples.training.recipes import RECIPES
from examples.training.structured_outputs import forms
from examples.training.task import examples
from tests.seeds import any_seed

CALL = '<tool_call>\n{"name": "set_timer", "arguments": %s}\n</tool_call>'


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_wanted_answers_have_their_form(name: str) -> None:
    form = forms()[name]
    for example in examples(RECIPES[name].task, "heldout", 60, any_seed()):
        assert form.is_well_formed(example.answer), example


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("extract", '{"name": "Ann"}'),
        ("extract", '{"name": 1, "item": null, "quantity": null, "city": null, "day": null}'),
        ("extract", "Sure!"),
        ("sql", "```sql\nSELECT 1;\n```"),
        ("sql", "SELECT 1"),
        ("support", "Hello Ann!"),
        ("tools", CALL % '{"minutes": "two"}'),
        ("tools", CALL % "{}"),
        ("tools", CALL % '{"minutes": 2, "more": 1}'),
        ("tools", CALL % '{"minutes": 2'),
        ("tools", (CALL % '{"minutes": 2}').replace("set_timer", "set_alarm")),
        ("tools", "Yes: " + CALL % '{"minutes": 2}'),
    ],
)
def test_what_no_program_could_read_is_malformed(name: str, text: str) -> None:
    assert not forms()[name].is_well_formed(text)


def test_words_are_an_answer_and_calls_are_right_by_name_and_arguments() -> None:
    assert forms()["tools"].is_well_formed("It rings in two minutes.")
    assert tools.read_call(CALL % '{"minutes": 2}') == {"tool": "set_timer", "minutes": 2}


def test_the_adapter_for_tools_is_asked_as_the_server_asks(demo_gguf: Path) -> None:
    tokenizer, templates = load_tokenizer(demo_gguf), ChatTemplateSandbox()
    user = {"role": "user", "content": "Set a timer for 5 minutes."}
    told = encode_chat(tokenizer, [user], AdapterTokenizer.from_json(""), templates, tools.TOOLS)
    text = tokenizer.render_chat([{"role": "system", "content": tools.SYSTEM}, user])
    assert list(told) == tokenizer.encode(text, add_special_tokens=False)
    templates.close()
