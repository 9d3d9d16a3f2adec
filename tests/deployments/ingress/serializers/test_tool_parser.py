"""Calls in an answer's text, in every form, wherever pieces end; and the grammar that has made them."""

from __future__ import annotations

import json

import pytest

from app.deployments.ingress.preprocess.tools import Tool, tool_grammar
from app.deployments.ingress.serializers.tool_parser import ToolCallReader, ToolOutput
from app.engine.errors import InvalidRequest
from app.engine.models.chat.tool_call_formats import HERMES, LLAMA3, MISTRAL, ToolCallFormat
from app.engine.structured_output.backend_guidance import Vocabulary
from tests.engine.structured_output.tokens import ids_of, tiny_vocabulary
from tests.seeds import rng

FORMS = [HERMES, LLAMA3, MISTRAL]
TOOLS = [
    Tool("say", {"properties": {"x": {"type": "string"}}, "required": ["x"], "additionalProperties": False}, True, "t"),
    Tool("add", {"properties": {"a": {"type": "integer"}}, "additionalProperties": False}, False, "t"),
]


def call(form: ToolCallFormat, name: str, arguments: str) -> str:
    return f"{form.before}{name}{form.between}{arguments}{form.after}"


def read(form: ToolCallFormat, pieces: list[str]) -> ToolOutput:
    reader, answer = ToolCallReader(form, "id"), ToolOutput()
    for piece in pieces:
        answer.add(reader.push(piece))
    answer.add(reader.push("", is_last=True))
    return answer


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_where_pieces_end_changes_nothing(form: ToolCallFormat) -> None:
    generator = rng()
    tricky = json.dumps({"x": 'a "}{[\\" ' + form.before + form.after})
    calls = form.separator.join([call(form, "say", tricky), call(form, "add", '{"a": 1}'), call(form, "add", "{}")])
    for lead in ("", "Let me see. <tool\n\n") if form.marker else ("",):
        text = lead + form.opening + calls + form.closing
        whole = read(form, [text])
        assert whole.text == lead.rstrip("\n")
        assert [(c.name, c.arguments) for c in whole.calls] == [("say", tricky), ("add", '{"a": 1}'), ("add", "{}")]
        assert len({c.id for c in whole.calls}) == 3
        for _ in range(50):
            cuts = sorted(generator.integers(0, len(text) + 1, 12).tolist())
            pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
            assert read(form, pieces) == whole


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_an_answer_that_breaks_off_is_reported_as_far_as_it_came(form: ToolCallFormat) -> None:
    text = form.opening + call(form, "say", '{"x": "abc"}')
    for length in range(len(text)):
        answer = read(form, [text[:length]])
        if answer.calls:
            assert '{"x": "abc"}'.startswith(answer.calls[0].arguments)
        else:
            assert text[:length].startswith(answer.text)
    assert read(form, ["just words <tool_"]).text == "just words <tool_"


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return tiny_vocabulary()


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("is_forced", [True, False])
@pytest.mark.parametrize("is_parallel", [True, False])
def test_the_grammar_takes_valid_calls_and_nothing_else(
    form: ToolCallFormat, is_forced: bool, is_parallel: bool, vocabulary: Vocabulary
) -> None:
    grammar = tool_grammar(TOOLS, form, {}, is_forced=is_forced, is_parallel=is_parallel)

    def takes(text: str) -> bool:
        matcher = vocabulary.matcher(grammar, "t")
        try:
            matcher.consume(ids_of(text))
        except InvalidRequest:
            return False
        return matcher.is_complete()

    def calls(*some: str) -> str:
        return form.opening + form.separator.join(some) + form.closing

    say, add = call(form, "say", '{"x": "hi"}'), call(form, "add", '{"a": 7}')
    assert takes(calls(say))
    assert takes(calls(add))
    assert takes(calls(say, add, say)) == is_parallel
    assert not takes(calls(call(form, "say", '{"x": 1}')))
    assert not takes(calls(call(form, "say", "{}")))
    assert not takes(calls(call(form, "fly", "{}")))
    assert not takes(calls(say) + " bye")
    assert takes("Hello <there>.") != is_forced
    assert takes("Well,\n" + calls(say)) == (not is_forced and form.marker != "") or not form.marker
    assert takes("") != is_forced


def test_a_marker_that_is_one_token_is_asked_for_as_that_token(vocabulary: Vocabulary) -> None:
    grammar = tool_grammar(TOOLS, HERMES, {"<tool_call>": 1}, is_forced=False, is_parallel=True)
    assert vocabulary.complaint(grammar) == ""
    matcher = vocabulary.matcher(grammar, "t")
    rest = call(HERMES, "add", '{"a": 1}').removeprefix("<tool_call>")
    matcher.consume([*ids_of("Hm."), 1, *ids_of(rest)])
    assert matcher.is_complete()
