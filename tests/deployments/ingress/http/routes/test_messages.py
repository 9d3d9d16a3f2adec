"""/v1/messages, /v1/responses and tokens of a text, as the official clients of OpenAI and Anthropic use them."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx
import httpx2
import jsonschema
import openai
import pytest
import pytest_asyncio

from app.deployments.ingress.http.app import make_app
from app.deployments.ingress.http.middleware.origin_check import HttpPolicy
from app.deployments.ingress.preprocess import tokenizer_service
from app.deployments.ingress.preprocess.chat_template_kwargs import MAX_CHARS
from tests.deployments.http_service import Service, writing_text
from tests.deployments.ingress.conftest import as_described

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
USER: Any = [{"role": "user", "content": "hi"}]
CLAUDE: Any = {"model": "base", "max_tokens": 400, "messages": USER}
CLAUDE_TOOLS: Any = {"tools": [{"name": "weather", "input_schema": CITY}], "tool_choice": {"type": "any"}}
ONE_CALL: Any = {"type": "any", "disable_parallel_tool_use": True}
GPT: Any = {"model": "base", "input": "hi", "max_output_tokens": 400}
GPT_TOOLS: Any = {
    "tools": [{"type": "function", "name": "weather", "parameters": CITY, "strict": True}],
    "tool_choice": "required",
    "parallel_tool_calls": False,
}
FORMAT: Any = {"format": {"type": "json_schema", "name": "city", "schema": CITY, "strict": True}}


@pytest_asyncio.fixture
async def wire(writing: Service) -> AsyncIterator[httpx2.AsyncClient]:
    app = make_app(writing, HttpPolicy())
    transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
    hooks = {"response": [as_described(app)]}
    async with httpx2.AsyncClient(transport=transport, base_url="http://test", timeout=20, event_hooks=hooks) as client:
        yield client


@pytest.fixture
def claude(wire: httpx2.AsyncClient) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(auth_token="none", base_url="http://test", http_client=wire, max_retries=0)


@pytest.fixture
def gpt(wire: httpx2.AsyncClient) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(api_key="none", base_url="http://test/v1", http_client=wire, max_retries=0)


async def test_messages_with_words(claude: anthropic.AsyncAnthropic) -> None:
    fields: Any = CLAUDE | {"max_tokens": 12, "system": "be kind", "extra_body": {"temperature": 0}}
    message = await claude.messages.create(**fields)
    assert (message.role, message.type) == ("assistant", "message")
    assert re.fullmatch("msg_[0-9a-f]+", message.id)
    assert message.stop_reason in ("max_tokens", "end_turn")
    assert message.content[0].type == "text"
    assert message.usage.output_tokens == 12 or message.stop_reason == "end_turn"
    count = await claude.messages.count_tokens(model="base", messages=USER, system="be kind")
    assert count.input_tokens == message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)


async def test_messages_with_tools_and_their_results(claude: anthropic.AsyncAnthropic) -> None:
    message = await claude.messages.create(**CLAUDE | CLAUDE_TOOLS | {"tool_choice": ONE_CALL})
    assert message.stop_reason == "tool_use"
    (call,) = message.content
    assert call.type == "tool_use"
    jsonschema.validate(call.input, CITY)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "12"}]}
    received = [*USER, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    answer = await claude.messages.create(**CLAUDE | {"messages": received, "max_tokens": 5})
    assert answer.usage.output_tokens > 0


async def test_messages_follow_a_schema(claude: anthropic.AsyncAnthropic) -> None:
    format_: Any = {"type": "json_schema", "schema": CITY}
    message = await claude.messages.create(**CLAUDE, output_config={"format": format_})
    assert message.content[0].type == "text"
    jsonschema.validate(json.loads(message.content[0].text), CITY)
    with pytest.raises(anthropic.BadRequestError, match="contains"):
        await claude.messages.create(
            **CLAUDE, output_config={"format": format_ | {"schema": {"type": "array", "contains": {}}}}
        )
    answer = await claude.messages.with_raw_response.create(**CLAUDE, output_config={"effort": "low"})
    assert "output_config.effort" in answer.headers["X-Polylora-Ignored"]


async def test_a_stop_sequence_is_reported(claude: anthropic.AsyncAnthropic) -> None:
    fields: Any = CLAUDE | {"max_tokens": 12, "extra_body": {"temperature": 0}}
    (block,) = (await claude.messages.create(**fields)).content
    assert block.type == "text"
    stop, last = block.text[4:6], block.text[-1:]
    stops = {"stop_sequences": ["never met", stop]}
    message = await claude.messages.create(**fields | stops)
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert message.content[0].type == "text"
    assert message.content[0].text == block.text[: block.text.index(stop)]
    async with claude.messages.stream(**fields | stops) as stream:
        received = await stream.get_final_message()
    assert (received.stop_reason, received.stop_sequence) == ("stop_sequence", stop)
    assert received.content[0].type == "text"
    assert received.content[0].text == message.content[0].text
    other = await claude.messages.create(**fields | {"stop_sequences": [f"{last} and more"]})
    assert (other.stop_reason, other.stop_sequence) == ("max_tokens", None)


async def test_streamed_messages_come_together(claude: anthropic.AsyncAnthropic) -> None:
    async with claude.messages.stream(**CLAUDE | CLAUDE_TOOLS | {"tool_choice": ONE_CALL}) as stream:
        kinds = [event.type async for event in stream]
        message = await stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert message.stop_reason == "tool_use"
    assert message.content[0].type == "tool_use"
    jsonschema.validate(message.content[0].input, CITY)
    fields: Any = CLAUDE | {"max_tokens": 7, "extra_body": {"temperature": 0}}  # a drawn first token may end the answer
    async with claude.messages.stream(**fields) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        message = await stream.get_final_message()
    assert message.content[0].type == "text"
    assert message.content[0].text == text
    assert message.usage.output_tokens == 7 or message.stop_reason == "end_turn"


async def test_errors_are_anthropics(claude: anthropic.AsyncAnthropic, wire: httpx2.AsyncClient) -> None:
    with pytest.raises(anthropic.NotFoundError):
        await claude.messages.create(**CLAUDE | {"model": "nobody"})
    image = {"type": "image", "source": {"type": "url", "url": "http://x"}}
    with pytest.raises(anthropic.BadRequestError, match="messages"):
        await claude.messages.create(**CLAUDE | {"messages": [{"role": "user", "content": [image]}]})
    refused = {
        "not_found_error": await wire.post("/v1/messages", json=CLAUDE | {"model": "nobody"}),
        "permission_error": await wire.post("/v1/messages", json=CLAUDE, headers={"Origin": "https://evil.example"}),
        "invalid_request_error": await wire.post("/v1/messages", content="{"),
    }
    for kind, answer in refused.items():
        body = answer.json()
        assert (body["type"], body["error"]["type"], set(body["error"])) == ("error", kind, {"type", "message"})
    with pytest.raises(anthropic.NotFoundError) as caught:
        await claude.messages.batches.list()
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["error"]["type"] == "not_found_error"


async def test_responses_with_words_and_schemas(gpt: openai.AsyncOpenAI) -> None:
    for _ in range(20):  # one that draws the token which ends it is complete
        response = await gpt.responses.create(**GPT | {"max_output_tokens": 9, "instructions": "be kind"})
        if response.status != "completed":
            break
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.usage is not None
    assert response.usage.output_tokens == 9
    plain = await gpt.responses.create(**GPT, text={"verbosity": "low"})
    assert plain.text is not None
    assert plain.text.format is not None
    assert plain.text.format.type == "text"
    response = await gpt.responses.create(**GPT, text=FORMAT)
    assert response.status == "completed"
    jsonschema.validate(json.loads(response.output_text), CITY)


async def test_tokens_of_a_response_are_counted_before_it(gpt: openai.AsyncOpenAI) -> None:
    for fields in ({"instructions": "be kind"}, GPT_TOOLS):
        response = await gpt.responses.create(**GPT | fields)
        body = {name: GPT[name] for name in ("model", "input")} | fields
        count = await gpt.responses.input_tokens.count(**body)
        assert response.usage is not None
        assert (count.object, count.input_tokens) == ("response.input_tokens", response.usage.input_tokens)
    with pytest.raises(openai.BadRequestError) as caught:
        await gpt.responses.input_tokens.count(model="base", input="hi", previous_response_id="x")
    assert caught.value.param == "previous_response_id"
    with pytest.raises(openai.NotFoundError):
        await gpt.responses.input_tokens.count(model="nobody", input="hi")


async def test_responses_with_tools_and_their_results(gpt: openai.AsyncOpenAI) -> None:
    response = await gpt.responses.create(**GPT | GPT_TOOLS)
    (call,) = response.output
    assert call.type == "function_call"
    jsonschema.validate(json.loads(call.arguments), CITY)
    items: Any = [*USER, call.model_dump(), {"type": "function_call_output", "call_id": call.call_id, "output": "12"}]
    answer = await gpt.responses.create(**GPT | {"input": items, "max_output_tokens": 5})
    again: Any = [*items, *(item.model_dump() for item in answer.output), *USER]
    last = await gpt.responses.create(**GPT | {"input": again, "max_output_tokens": 3})
    assert last.usage is not None
    assert last.usage.output_tokens > 0, "maybe the one that ends it, and then there is no text"


@pytest.mark.parametrize("fields", [{"text": FORMAT}, GPT_TOOLS, {"max_output_tokens": 4}])
async def test_streamed_responses_come_together(gpt: openai.AsyncOpenAI, fields: Any) -> None:
    whole = await gpt.responses.create(**GPT | fields, extra_body={"seed": 4})
    events = [event async for event in await gpt.responses.create(**GPT | fields, stream=True, extra_body={"seed": 4})]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [events[0].type, events[1].type] == ["response.created", "response.in_progress"]
    last = events[-1]
    assert last.type in ("response.completed", "response.incomplete")
    assert last.response.output_text == whole.output_text
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == last.response.output, "an item that the limit cut says so, too"
    deltas = [event.delta for event in events if event.type.endswith(".delta")]
    (item,) = whole.output
    assert "".join(deltas) == (item.arguments if item.type == "function_call" else whole.output_text)


@pytest.mark.parametrize("field", ["conversation", "background", "prompt"])
async def test_what_is_not_here_is_refused_by_name(gpt: openai.AsyncOpenAI, field: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await gpt.responses.create(**GPT, extra_body={field: "x"})
    assert caught.value.param == field


async def test_answers_are_counted_and_metered_as_completions_are(writing: Service, writer: httpx.AsyncClient) -> None:
    for route, body in (("messages", CLAUDE | {"max_tokens": 5}), ("responses", GPT | {"max_output_tokens": 16})):
        for extra in ({}, {"stream": True}):
            assert (await writer.post(f"/v1/{route}", json=body | extra)).status_code == 200
            assert writing.observed[-1] == (route, 200)
            job, (usage,) = writing.counted[-1]
            assert job is not None
            assert usage is not None
            assert usage.completion_tokens > 0


async def test_many_tokens_delay_no_other_request(
    writing: Service, writer: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What takes as long as a text or a list of ids is long is done in a thread, and answers what it does inline."""
    threads: set[int] = set()
    model = writing.preprocessor.tokenizer

    def watched(name: str) -> None:
        method = getattr(model, name)

        def call(*given: Any) -> Any:
            threads.add(threading.get_ident())
            return method(*given)

        monkeypatch.setattr(model, name, call)

    few = (await writer.post("/tokenize", json={"model": "base", "prompt": "Hello you"})).json()["tokens"]
    copies = 1100 // len(few) + 1  # more than the context holds
    monkeypatch.setattr(tokenizer_service, "MAX_INLINE_CHARS", 1000)
    for name in ("encode", "decoder", "token_text"):
        watched(name)
    asked = {"model": "base", "prompt": "Hello you" * copies, "return_token_strs": True}
    found = (await writer.post("/tokenize", json=asked)).json()
    assert (found["tokens"], found["count"]) == (few * copies, len(few) * copies)
    assert "".join(found["token_strs"]) == asked["prompt"]
    back = await writer.post("/detokenize", json={"model": "base", "tokens": few * copies})
    assert back.json() == {"prompt": asked["prompt"]}
    refused = await writer.post("/detokenize", json={"model": "base", "tokens": [*few * copies, 999]})
    assert "token id 999" in refused.json()["error"]["message"]
    echo = {"model": "base", "prompt": few * copies, "echo": True, "max_tokens": 1}
    assert (await writer.post("/v1/completions", json=echo)).json()["error"]["code"] == "context_length_exceeded"
    assert threads
    assert threading.get_ident() not in threads


async def test_variables_reach_the_chat_template(writing: Service, writer: httpx.AsyncClient) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if tone is defined %}{{ tone }}{% endif %}"
    writing.preprocessor.tokenizer._tokenizer = writing_text(template)._tokenizer
    body = {"model": "base", "messages": USER}

    async def tokens(**variables: Any) -> list[int]:
        asked = body | {"chat_template_kwargs": variables}
        found: list[int] = (await writer.post("/tokenize", json=asked)).json()["tokens"]
        answer = (await writer.post("/v1/chat/completions", json=asked | {"max_tokens": 1})).json()
        assert answer["usage"]["prompt_tokens"] == len(found)
        return found

    plain, prompt = await tokens(), {"model": "base", "prompt": "dry"}
    assert await tokens(tone="dry") == plain + (await writer.post("/tokenize", json=prompt)).json()["tokens"]
    assert await tokens(unheard_of=1) == plain
    for variables, message in (
        ({"messages": []}, "has 'messages', which is not a request's to set"),
        ({"eos_token": "x"}, "has 'eos_token'"),
        ({"a b": 1}, "'a b' is not a valid"),
        ({"tone": "x" * MAX_CHARS}, f"the limit is {MAX_CHARS}"),
        ([], "Input should be an object"),
    ):
        for route in ("/tokenize", "/v1/chat/completions"):
            refused = await writer.post(route, json=body | {"chat_template_kwargs": variables})
            error = refused.json()["error"]
            assert (refused.status_code, error["param"]) == (400, "chat_template_kwargs"), message
            assert message in error["message"]
    refused = await writer.post("/tokenize", json=prompt | {"chat_template_kwargs": {"tone": "dry"}})
    assert "are for messages" in refused.json()["error"]["message"]


async def test_tokens_of_texts_and_back(writer: httpx.AsyncClient) -> None:
    body = {"model": "base", "prompt": "Hello you", "return_token_strs": True}
    found = (await writer.post("/tokenize", json=body)).json()
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"]) > 3
    assert "".join(found["token_strs"]) == "Hello you"
    back = await writer.post("/detokenize", json={"model": "base", "tokens": found["tokens"]})
    assert back.json() == {"prompt": "Hello you"}
    chat = (await writer.post("/tokenize", json={"model": "base", "messages": USER})).json()
    answer = await writer.post("/v1/chat/completions", json={"model": "base", "messages": USER, "max_tokens": 1})
    assert chat["count"] == answer.json()["usage"]["prompt_tokens"]
    assert (await writer.post("/tokenize", json={"model": "base"})).status_code == 400
    assert (await writer.post("/tokenize", json={"model": "nobody", "prompt": "x"})).status_code == 404
    assert (await writer.post("/detokenize", json={"model": "base", "tokens": [999]})).status_code == 400
