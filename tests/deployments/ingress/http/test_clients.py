"""Requests as common clients send them: each is answered, and the fields that change nothing are named in a header."""

from __future__ import annotations

import json
from typing import Any, get_args, get_type_hints

import anthropic.types
import anthropic.types.beta
import httpx
import openai.types.chat
import openai.types.responses
import pytest
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params as responses_params
from pydantic import BaseModel

from app.deployments.ingress.preprocess import sequence_builder
from app.deployments.ingress.preprocess.tools import arguments_object
from app.deployments.ingress.schemas import messages, responses
from app.deployments.ingress.schemas import openai as schema
from app.deployments.ingress.schemas.request_model import IGNORED_HEADER, Body, ignored_header
from tests.deployments.http_service import Service

HELLO = [{"role": "user", "content": "hello"}]
LOOK = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
MARK = {"type": "ephemeral", "ttl": "1h"}

#: (client, route, body without `model`, ignored fields)
REQUESTS: list[tuple[str, str, dict[str, Any], str]] = [
    (
        "Claude Code", "/v1/messages",
        {
            "max_tokens": 8, "stream": False, "temperature": 1, "thinking": {"type": "adaptive"},
            "system": [{"type": "text", "text": "Be brief.", "cache_control": MARK | {"scope": "global"}}],
            "metadata": {"user_id": "user_1_account__session_2"}, "output_config": {"effort": "medium"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "tools": [{"name": "Look", "description": "Looks.", "input_schema": LOOK, "eager_input_streaming": True,
                       "cache_control": {"type": "ephemeral"}}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": MARK}]},
                {"role": "assistant", "content": [
                    {"type": "thinking", "thinking": "", "signature": ""},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "toolu_1", "name": "Look", "input": {"path": "a"},
                     "caller": {"type": "direct"}},
                ]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "empty"}],
                     "is_error": False, "cache_control": {"type": "ephemeral"}},
                ]},
                {"role": "system", "content": "The plan has changed."},
                {"role": "user", "content": "go on"},
            ],
        },
        "context_management, messages.content.cache_control, messages.content.caller, messages.content.signature, "
        "messages.content.thinking, metadata, output_config.effort, thinking, tools.cache_control, "
        "tools.eager_input_streaming",
    ),
    (
        "Codex", "/v1/responses",
        {
            "instructions": "You are a coding agent.", "stream": False, "store": False, "tool_choice": "auto",
            "parallel_tool_calls": False, "reasoning": {"effort": "medium", "summary": "auto"},
            "include": ["reasoning.encrypted_content"], "prompt_cache_key": "3f", "text": {"verbosity": "low"},
            "client_metadata": {"x-codex-installation-id": "1"}, "max_output_tokens": 8,
            "tools": [{"type": "function", "name": "shell", "description": "Runs.", "strict": False,
                       "parameters": LOOK}],
            "input": [
                {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "rules"}]},
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "list"}]},
                {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": "gAAA"},
                {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "shell",
                 "arguments": "{\"path\": \"a\"}", "status": "completed"},
                {"type": "function_call_output", "call_id": "call_1",
                 "output": [{"type": "input_text", "text": "a b"}]},
                {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "phase": "commentary",
                 "content": [{"type": "output_text", "text": "two", "annotations": [], "logprobs": []}]},
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "go on"}]},
            ],
        },
        "client_metadata, input.content, input.content.annotations, input.content.logprobs, "
        "input.encrypted_content, input.id, input.phase, input.status, input.summary, prompt_cache_key, reasoning, "
        "text.verbosity",
    ),
    (
        "Codex 0.171 for a model that it does not know", "/v1/responses",
        {
            "stream": False, "tool_choice": "auto", "parallel_tool_calls": True, "reasoning": {"summary": "auto"},
            "store": False, "include": ["reasoning.encrypted_content"], "max_output_tokens": 8,
            "tools": [
                {"type": "function", "name": "exec_command", "description": "Runs.", "strict": False,
                 "parameters": LOOK},
                {"type": "namespace", "name": "multi_agent_v1", "description": "Tools for sub-agents.", "tools": [
                    {"type": "function", "name": "close_agent", "strict": False, "parameters": LOOK}]},
                {"type": "web_search", "external_web_access": False},
            ],
            "input": [
                {"type": "message", "id": "msg_1", "role": "user", "content": [{"type": "input_text", "text": "go"}]},
                {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "close_agent",
                 "namespace": "multi_agent_v1", "arguments": "{\"path\": \"a\"}"},
                {"type": "function_call_output", "call_id": "call_1", "output": "closed"},
            ],
        },
        "input.id, reasoning, tools.web_search",
    ),
    (
        "Cline", "/v1/chat/completions",
        {
            "messages": [
                {"role": "system", "content": "Plan."},
                {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
                {"role": "assistant", "content": "b", "reasoning_content": "hm", "reasoning_details": [{"text": "x"}]},
                {"role": "user", "content": "c"},
            ],
            "temperature": 0, "stream_options": None, "reasoning_effort": "low", "max_tokens": 4,
        },
        "messages.content.cache_control, messages.reasoning_content, messages.reasoning_details, reasoning_effort",
    ),
    (
        "Continue and CodeCompanion", "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "a", "id": 1, "opts": {"visible": True}, "cycle": 1}],
            "max_tokens": 4, "prediction": {"type": "content", "content": "b"}, "store": False,
        },
        "messages.cycle, messages.id, messages.opts, store",
    ),
    (
        "Open WebUI", "/v1/chat/completions",
        {"messages": HELLO, "max_tokens": 4, "metadata": {"chat": "1"}, "session_id": "s", "logit_bias": {},
         "functions": [], "tools": None},
        "functions, metadata, session_id",
    ),
    (
        "LiteLLM", "/v1/chat/completions",
        {
            "messages": [
                *HELLO,
                {"role": "assistant", "content": None, "function_call": None, "provider_specific_fields": {"a": None},
                 "thinking_blocks": [{"type": "thinking", "thinking": "x", "signature": "y"}],
                 "tool_calls": [{"id": "1", "type": "function", "index": 0, "provider_specific_fields": {"b": 1},
                                 "function": {"name": "look", "arguments": "{}"}}]},
                {"role": "tool", "tool_call_id": "1", "content": "ok", "cache_control": {"type": "ephemeral"}},
            ],
            "max_tokens": 4, "litellm_metadata": {}, "user": "u", "verbosity": "low",
        },
        "litellm_metadata, messages.cache_control, messages.function_call, messages.provider_specific_fields, "
        "messages.thinking_blocks, messages.tool_calls.index, messages.tool_calls.provider_specific_fields, verbosity",
    ),
    (
        "LangChain and LlamaIndex", "/v1/chat/completions",
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a", "id": "lc_1", "index": 0}], "name": "ada"},
                {"role": "assistant", "content": "b", "refusal": None, "audio": None, "annotations": []},
                {"role": "user", "content": "c"},
            ],
            "n": 1, "max_completion_tokens": 4, "parallel_tool_calls": True,
        },
        "messages.annotations, messages.audio, messages.content.id, messages.content.index",
    ),
    (
        "lm-eval (chat)", "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "a", "type": "text"}], "max_tokens": 4, "temperature": 0,
         "stop": ["\n"], "seed": 1234},
        "messages.type",
    ),
    (
        "lighteval", "/v1/chat/completions",
        {"messages": HELLO, "max_completion_tokens": 4, "logprobs": False, "n": 1, "caching": True, "stop": []},
        "caching",
    ),
    (
        "guidellm", "/v1/completions",
        {"prompt": "a", "max_tokens": 2, "max_completion_tokens": None, "stop": None, "ignore_eos": True,
         "stream": False, "stream_options": None},
        "max_completion_tokens",
    ),
    (
        "inspect_ai", "/v1/chat/completions",
        {"messages": HELLO, "max_tokens": 4, "seed": 1, "logprobs": True, "top_logprobs": 1,
         "reasoning_effort": "none"},
        "reasoning_effort",
    ),
    (
        "vLLM's benchmark", "/v1/completions",
        {"prompt": "a", "temperature": 0.0, "best_of": 1, "repetition_penalty": 1.0, "max_tokens": 2, "logprobs": None,
         "stream": False, "ignore_eos": True, "add_special_tokens": True, "priority": 0},
        "add_special_tokens, best_of, priority",
    ),
    (
        "SillyTavern", "/v1/completions",
        {"prompt": "a", "max_tokens": 2, "typical_p": 1, "tfs_z": 1, "top_a": 0, "mirostat": 0, "repeat_penalty": 1,
         "skip_special_tokens": True, "dry_multiplier": 0},
        "dry_multiplier, mirostat, repeat_penalty, skip_special_tokens, tfs_z, top_a, typical_p",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("route", "body", "ignored"), [each[1:] for each in REQUESTS], ids=[e[0] for e in REQUESTS])
async def test_a_clients_request_is_answered(
    writer: httpx.AsyncClient, route: str, body: dict[str, Any], ignored: str
) -> None:
    answer = await writer.post(route, json={"model": "base"} | body)
    assert answer.status_code == 200, answer.text
    assert answer.headers.get(IGNORED_HEADER) == ignored


async def test_a_call_of_a_namespace_s_function_has_its_name(writer: httpx.AsyncClient) -> None:
    """As OpenAI's API returns it, whole and streamed, and it can be sent back."""
    inner = {"type": "function", "name": "look", "parameters": LOOK}
    body: dict[str, Any] = {
        "model": "base", "input": "hello", "tool_choice": "required", "parallel_tool_calls": False, "temperature": 0,
        "tools": [{"type": "namespace", "name": "crm", "description": "Customers.", "tools": [inner]}],
    }  # fmt: skip
    answer = await writer.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    (item,) = answer.json()["output"]
    assert (item["type"], item["namespace"], item["name"]) == ("function_call", "crm", "look")
    stream = await writer.post("/v1/responses", json=body | {"stream": True})
    events = [json.loads(line.removeprefix("data: ")) for line in stream.text.split("\n") if line.startswith("data: ")]
    items = [event["item"] for event in events if "item" in event]
    assert {(each["namespace"], each["name"]) for each in items} == {("crm", "look")}
    (done,) = [event for event in events if event["type"] == "response.function_call_arguments.done"]
    assert done["name"] == "look"
    history = [{"role": "user", "content": "hello"}, item,
               {"type": "function_call_output", "call_id": item["call_id"], "output": "ok"}]  # fmt: skip
    again = await writer.post("/v1/responses", json=body | {"input": history})
    assert again.status_code == 200, again.text
    forced = {"tools": [{"type": "web_search"}]}
    answer = await writer.post("/v1/responses", json=body | forced)
    assert answer.status_code == 400, "a search cannot be required"


async def test_streams_and_errors_name_ignored_fields_too(writer: httpx.AsyncClient) -> None:
    body = {"model": "base", "messages": HELLO, "max_tokens": 1, "store": True}
    stream = await writer.post("/v1/chat/completions", json=body | {"stream": True})
    assert stream.headers[IGNORED_HEADER] == "store"
    unknown = await writer.post("/v1/chat/completions", json=body | {"model": "nope"})
    assert (unknown.status_code, unknown.headers[IGNORED_HEADER]) == (404, "store")
    plain = await writer.post("/v1/chat/completions", json={"model": "base", "messages": HELLO, "max_tokens": 1})
    assert IGNORED_HEADER not in plain.headers


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"reasonning_effort": "low"}, "reasonning_effort"),
        ({"messages": [{"role": "user", "content": "a", "reasoning_contents": "b"}]}, "messages.0.reasoning_contents"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "bold": True}]}]},
         "messages.0.content.0.bold"),
        ({"messages": [{"role": "user", "content": "a", "type": "image"}]}, "messages.0.type"),
        ({"tools": [{"type": "function", "function": {"name": "f", "enforce": True}}]}, "tools.0.function.enforce"),
        ({"stream": True, "stream_options": {"include_cost": True}}, "stream_options.include_cost"),
        ({"web_search_options": {"search_context_size": "low"}}, "web_search_options"),
        ({"length_penalty": 2.0}, "length_penalty"),
        ({"enable_thinking": False}, "enable_thinking"),
        ({"documents": [{"text": "a"}]}, "documents"),
    ],
)  # fmt: skip
async def test_a_field_that_could_change_the_answer_is_refused_by_name(
    http: httpx.AsyncClient, fields: dict[str, Any], param: str
) -> None:
    answer = await http.post("/v1/chat/completions", json={"model": "base", "messages": HELLO} | fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


async def test_nulls_and_empty_values_of_unknown_fields_are_accepted(writer: httpx.AsyncClient) -> None:
    body = {"model": "base", "max_tokens": 1, "documents": [], "guided_options": {}, "moderation": None,
            "messages": [{"role": "user", "content": "a", "files": [], "audio": None}]}  # fmt: skip
    answer = await writer.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers[IGNORED_HEADER] == "documents, guided_options, messages.audio, messages.files, moderation"


def test_a_header_contains_no_strangers_text() -> None:
    assert ignored_header({"b", "a\r\nSet-Cookie: x", "é", "a.b-c", "x" * 200}) == "a.b-c, b"


async def test_a_truncated_tool_call_can_be_sent_back(writer: httpx.AsyncClient) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"path": "a'}}
    history = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]},
               {"role": "tool", "tool_call_id": "call_1", "content": "not run"}, *HELLO]  # fmt: skip
    body = {"model": "base", "max_tokens": 4}
    answer = await writer.post("/v1/chat/completions", json=body | {"messages": history})
    assert answer.status_code == 200, answer.text
    items = [{"role": "user", "content": "a"},
             {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": "{\"path\": "},
             {"type": "function_call_output", "call_id": "call_1", "output": "not run"}]  # fmt: skip
    answer = await writer.post("/v1/responses", json={"model": "base", "max_output_tokens": 4, "input": items})
    assert answer.status_code == 200, answer.text


async def test_refusals_can_be_sent_back(writer: httpx.AsyncClient) -> None:
    async def num_tokens(message: dict[str, Any]) -> int:
        body = {"model": "base", "messages": [*HELLO, {"role": "assistant"} | message, *HELLO]}
        answer = await writer.post("/tokenize", json=body)
        assert answer.status_code == 200, answer.text
        return int(answer.json()["count"])

    as_text = await num_tokens({"content": "I cannot."})
    assert await num_tokens({"content": None, "refusal": "I cannot."}) == as_text
    assert await num_tokens({"content": [{"type": "refusal", "refusal": "I cannot."}]}) == as_text
    item = {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "I cannot."}]}
    body = {"model": "base", "max_output_tokens": 2, "input": [item, {"role": "user", "content": "why?"}]}
    assert (await writer.post("/v1/responses", json=body)).status_code == 200


LOOK_AROUND = {
    "type": "object",
    "properties": {
        "amount": {"anyOf": [{"type": "number"}, {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}]},
        "tags": {"type": "array", "items": {"enum": ["x"]}, "uniqueItems": True, "maxItems": 2},
    },
    "required": ["amount", "tags"],
}


async def test_function_names_are_as_long_as_the_providers_allow(writer: httpx.AsyncClient) -> None:
    """Agents join a server's name and a tool's."""
    name, messages = "n" * 128, {"model": "base", "max_tokens": 600, "messages": HELLO}
    tools = [{"name": name, "input_schema": LOOK}]
    answer = await writer.post("/v1/messages", json=messages | {"tools": tools, "tool_choice": {"type": "any"}})
    assert answer.status_code == 200, answer.text
    assert answer.json()["content"][0]["name"] == name
    back = {"role": "assistant", "content": answer.json()["content"][:1]}
    assert (await writer.post("/v1/messages", json=messages | {"messages": [*HELLO, back]})).status_code == 200
    inner = {"type": "function", "name": name, "parameters": LOOK}
    body: dict[str, Any] = {
        "model": "base", "input": "hello", "tool_choice": "required", "parallel_tool_calls": False,
        "tools": [{"type": "namespace", "name": "s" * 128, "tools": [inner]}],
    }  # fmt: skip
    answer = await writer.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    (item,) = answer.json()["output"]
    assert (item["namespace"], item["name"]) == ("s" * 128, name)
    history = [{"role": "user", "content": "hello"}, item]
    assert (await writer.post("/v1/responses", json=body | {"input": history})).status_code == 200
    for route, asked, place in (
        ("/v1/messages", messages | {"tools": [tools[0] | {"name": "n" * 129}]}, "tools.0.name"),
        ("/v1/responses", body | {"tools": [inner | {"name": "n" * 129}]}, "tools.0.name"),
    ):
        refused = await writer.post(route, json=asked)
        assert refused.status_code == 400
        assert f"{place}: " in refused.json()["error"]["message"]


async def test_a_number_that_no_float_holds_is_refused_and_in_a_call_it_is_text(writer: httpx.AsyncClient) -> None:
    assert arguments_object('{"a": -1e400}') == {"INVALID_JSON": '{"a": -1e400}'}
    tool = '{"type":"function","name":"a","parameters":{"maximum":1e400}}'
    body = f'{{"model":"base","input":"hello","max_output_tokens":16,"tools":[{tool}]}}'
    refused = await writer.post("/v1/responses", content=body, headers={"Content-Type": "application/json"})
    assert refused.status_code == 400
    assert "the number 1e400 is not finite" in refused.json()["error"]["message"]


async def test_a_response_s_schema_without_strict_is_enforced_as_far_as_possible(writer: httpx.AsyncClient) -> None:
    """What the answer repeats is what was asked."""
    body = {"model": "base", "input": "hello", "max_output_tokens": 16}
    form = {"type": "json_schema", "name": "payment", "schema": LOOK_AROUND}
    tool = {"type": "function", "name": "pay", "parameters": LOOK_AROUND}
    strict: Any
    fields: Any
    for strict in ({}, {"strict": None}, {"strict": False}):
        for place, fields in (
            ("text.format.schema", {"text": {"format": form | strict}}),
            ("tools.0.parameters", {"tools": [tool | strict]}),
        ):
            answer = await writer.post("/v1/responses", json=body | fields)
            assert answer.status_code == 200, answer.text
            assert answer.headers["X-Polylora-Unenforced"].startswith(f"{place}#/properties/amount/anyOf/1/pattern")
            found = answer.json()
            openai.types.responses.ResponseUsage.model_validate(found["usage"])
            tools = [openai.types.responses.FunctionTool.model_validate(each) for each in found["tools"]]
            text = openai.types.responses.ResponseTextConfig.model_validate(found["text"])
            repeated = tools[0] if tools else text.format
            assert getattr(repeated, "strict", "") is strict.get("strict")
    for fields in ({"text": {"format": form | {"strict": True}}}, {"tools": [tool | {"strict": True}]}):
        assert (await writer.post("/v1/responses", json=body | fields)).status_code == 400


async def test_a_tool_s_failure_is_named_as_ignored(writer: httpx.AsyncClient) -> None:
    """Chat templates have no place for it; the result's text says what failed."""
    use = {"type": "tool_use", "id": "toolu_1", "name": "Look", "input": {"path": "a"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "no such file", "is_error": True}
    history = [*HELLO, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    answer = await writer.post("/v1/messages", json={"model": "base", "max_tokens": 4, "messages": history})
    assert answer.status_code == 200, answer.text
    assert answer.headers[IGNORED_HEADER] == "messages.content.is_error"


async def test_a_schema_without_strict_is_enforced_as_far_as_possible(writer: httpx.AsyncClient) -> None:
    form = {"name": "payment", "schema": LOOK_AROUND}
    body = {"model": "base", "messages": HELLO, "max_tokens": 300, "seed": 1}
    for strict in ({}, {"strict": False}):
        wanted = {"type": "json_schema", "json_schema": form | strict}
        answer = await writer.post("/v1/chat/completions", json=body | {"response_format": wanted})
        assert answer.status_code == 200, answer.text
        unenforced = answer.headers["X-Polylora-Unenforced"]
        at = "response_format.json_schema.schema#/properties"
        assert unenforced == f"{at}/amount/anyOf/1/pattern, {at}/tags/uniqueItems"
        if answer.json()["choices"][0]["finish_reason"] == "stop":
            made = json.loads(answer.json()["choices"][0]["message"]["content"])
            assert isinstance(made["amount"], int | float | str)
            assert set(made["tags"]) <= {"x"}
    wanted = {"type": "json_schema", "json_schema": form | {"strict": True}}
    refused = await writer.post("/v1/chat/completions", json=body | {"response_format": wanted})
    assert refused.status_code == 400
    assert "pattern" in refused.text
    tool = {"type": "function", "function": {"name": "pay", "parameters": LOOK_AROUND}}
    answer = await writer.post("/v1/chat/completions", json=body | {"tools": [tool], "tool_choice": "required"})
    assert answer.status_code == 200, answer.text
    assert "tools.0.function.parameters#/properties/amount/anyOf/1/pattern" in answer.headers["X-Polylora-Unenforced"]


CONTINUE = {"continue_final_message": True, "add_generation_prompt": False}


async def test_an_answer_is_continued_on_every_route(writer: httpx.AsyncClient) -> None:
    chat = [*HELLO, {"role": "assistant", "content": "It is"}]
    tokens = {
        name: (
            await writer.post("/tokenize", json={"model": "base", "messages": chat, "return_token_strs": True} | more)
        )
        for name, more in {"whole": {}, "continued": CONTINUE}.items()
    }
    assert "".join(tokens["whole"].json()["token_strs"]) == "user:hello|assistant:It is|"
    assert "".join(tokens["continued"].json()["token_strs"]) == "user:hello|assistant:It is"
    count = (await writer.post("/v1/messages/count_tokens", json={"model": "base", "messages": chat})).json()
    assert count["input_tokens"] == tokens["continued"].json()["count"]
    fields: dict[str, Any] = {"model": "base", "messages": chat, "max_tokens": 4, "temperature": 0}
    message = (await writer.post("/v1/messages", json=fields)).json()
    continued = (await writer.post("/v1/chat/completions", json=fields | CONTINUE)).json()
    assert continued["usage"]["prompt_tokens"] == count["input_tokens"]
    assert message["content"][0]["text"] == continued["choices"][0]["message"]["content"]
    called = {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}]}
    assert (await writer.post("/v1/messages", json=fields | {"messages": [*HELLO, called]})).status_code == 200


@pytest.mark.parametrize(
    ("message", "fields", "words"),
    [
        ({"content": "It is"}, {"add_generation_prompt": True}, "needs add_generation_prompt: false"),
        ({"content": None}, {}, "with content"),
        (
            {"content": "a", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]},
            {},
            "without tool_calls",
        ),
        ({"content": '{"b'}, {"guided_json": SCHEMA}, "not the beginning of an answer that guided_json allows"),
        ({"content": "no"}, {"guided_choice": ["yes"]}, "not the beginning of an answer that guided_choice allows"),
    ],
)
async def test_what_cannot_be_continued_is_refused(
    writer: httpx.AsyncClient, message: dict[str, Any], fields: dict[str, Any], words: str
) -> None:
    messages = [*HELLO, {"role": "assistant"} | message]
    answer = await writer.post("/v1/chat/completions", json={"model": "base", "messages": messages} | CONTINUE | fields)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


async def test_white_space_before_a_continuation_is_refused_on_messages(writer: httpx.AsyncClient) -> None:
    chat = [*HELLO, {"role": "assistant", "content": "It is "}]
    answer = await writer.post("/v1/messages", json={"model": "base", "messages": chat, "max_tokens": 1})
    assert answer.status_code == 400
    assert "white space" in answer.json()["error"]["message"]


@pytest.mark.parametrize("prefix", ["", "{", '{"a": ', '{"a":tru', '{ "a"\n:true', '{"a": true}'])
@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_continued_answer_follows_its_schema(writer: httpx.AsyncClient, prefix: str, is_stream: bool) -> None:
    chat = [*HELLO, {"role": "assistant", "content": prefix}]
    fields: dict[str, Any] = {
        "model": "base",
        "messages": chat,
        "max_tokens": 60,
        "temperature": 0,
        "stream": is_stream,
    }
    output = {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}
    routes = [("/v1/chat/completions", CONTINUE | {"guided_json": SCHEMA}), ("/v1/messages", output)]
    for route, more in routes[: 1 if prefix.endswith(" ") else 2]:
        answer = await writer.post(route, json=fields | more)
        assert answer.status_code == 200, answer.text
        text = streamed_text(answer.text) if is_stream else whole_text(answer.json())
        assert isinstance(json.loads(prefix + text)["a"], bool)


def whole_text(body: dict[str, Any]) -> str:
    if "choices" in body:
        return str(body["choices"][0]["message"]["content"])
    return "".join(block["text"] for block in body["content"])


def streamed_text(events: str) -> str:
    text = ""
    for line in events.splitlines():
        if line.startswith("data: {"):
            event = json.loads(line.removeprefix("data: "))
            delta = event["choices"][0]["delta"] if event.get("choices") else event.get("delta", {})
            text += delta.get("content") or delta.get("text") or ""
    return text


LM_EVAL = {"model": "base", "prompt": [[21, 22, 23], [24]], "temperature": 0, "logprobs": 1, "echo": True, "seed": 1}


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
async def test_an_echo_has_the_log_probabilities_of_the_prompt(writer: httpx.AsyncClient, max_tokens: int) -> None:
    body = (await writer.post("/v1/completions", json=LM_EVAL | {"max_tokens": max_tokens})).json()
    assert body["usage"]["completion_tokens"] == 2 * max_tokens
    for prompt, choice in zip(LM_EVAL["prompt"], body["choices"], strict=True):  # type: ignore[call-overload]
        found = choice["logprobs"]
        assert {len(values) for values in found.values()} == {len(prompt) + max_tokens}
        assert found["token_logprobs"][0] is None
        assert found["top_logprobs"][0] is None
        assert all(value <= 0 for value in found["token_logprobs"][1:])
        for token, top in zip(found["tokens"][1:], found["top_logprobs"][1:], strict=True):
            assert token in top
        assert choice["text"] == "".join(found["tokens"])
        assert [choice["text"][at] for at in found["text_offset"]] == [token[0] for token in found["tokens"]]
        assert choice["finish_reason"] == "length"


async def test_an_echo_has_the_log_probability_of_the_token_that_ends_it(writer: httpx.AsyncClient) -> None:
    """Evaluations drop the entry of the one new token, whatever it is."""
    fields = LM_EVAL | {"prompt": [21, 22, 23], "max_tokens": 1}
    (goes_on,) = (await writer.post("/v1/completions", json=fields)).json()["choices"]
    assert goes_on["finish_reason"] == "length"
    in_ids = fields | {"echo": False, "return_token_ids": True}
    token_ids = (await writer.post("/v1/completions", json=in_ids)).json()["choices"][0]["token_ids"]
    ends = await writer.post("/v1/completions", json=fields | {"stop_token_ids": token_ids})
    (choice,) = ends.json()["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"]["token_logprobs"] == goes_on["logprobs"]["token_logprobs"]
    assert len(choice["logprobs"]["tokens"]) == 4
    assert choice["text"] == "".join(choice["logprobs"]["tokens"][:3])


async def test_a_streamed_echo_has_the_same_log_probabilities(writer: httpx.AsyncClient) -> None:
    fields = LM_EVAL | {"prompt": [21, 22, 23], "max_tokens": 3}
    whole = (await writer.post("/v1/completions", json=fields)).json()["choices"][0]["logprobs"]
    streamed: dict[str, list[Any]] = {name: [] for name in whole}
    for line in (await writer.post("/v1/completions", json=fields | {"stream": True})).text.splitlines():
        if line.startswith("data: {"):
            for name, values in (json.loads(line.removeprefix("data: "))["choices"][0]["logprobs"] or {}).items():
                streamed[name] += values
    assert streamed == whole


async def test_prompt_logprobs_have_vllms_shape(writer: httpx.AsyncClient) -> None:
    fields: dict[str, Any] = {
        "model": "base",
        "prompt": [21, 22, 23],
        "temperature": 0,
        "max_tokens": 1,
        "prompt_logprobs": 2,
    }
    body = (await writer.post("/v1/completions", json=fields)).json()
    chat = (
        await writer.post(
            "/v1/chat/completions", json={"model": "base", "messages": HELLO, "max_tokens": 1, "prompt_logprobs": 0}
        )
    ).json()
    assert chat["prompt_logprobs"][0] is None
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert all(len(entry) == 1 for entry in chat["prompt_logprobs"][1:])
    first, *others = body["choices"][0]["prompt_logprobs"]
    assert first is None
    for token_id, entry in zip((22, 23), others, strict=True):
        assert set(entry[str(token_id)]) == {"logprob", "rank", "decoded_token"}
        assert {1, 2} <= {each["rank"] for each in entry.values()}
    legacy = (await writer.post("/v1/completions", json=fields | {"echo": True, "logprobs": 0, "max_tokens": 0})).json()
    values = legacy["choices"][0]["logprobs"]["token_logprobs"]
    assert values == [None, others[0]["22"]["logprob"], others[1]["23"]["logprob"]]
    assert [len(top) for top in legacy["choices"][0]["logprobs"]["top_logprobs"][1:]] == [1, 1]
    assert legacy["choices"][0]["prompt_logprobs"] == body["choices"][0]["prompt_logprobs"]


async def test_log_probabilities_of_prompts_are_limited_before_they_are_computed(
    writer: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequence_builder, "MAX_LOGPROBS", 4 * 900 * 21 - 1)
    body = {"model": "base", "prompt": [21] * 900, "n": 4, "max_tokens": 1, "prompt_logprobs": 20}
    answer = await writer.post("/v1/completions", json=body)
    assert answer.status_code == 400
    assert "log-probabilities are returned at once" in answer.json()["error"]["message"]


async def test_hundreds_of_tools_are_accepted(writer: httpx.AsyncClient) -> None:
    tools = [{"type": "function", "function": {"name": f"tool_{index}", "parameters": {}}} for index in range(140)]
    body = {"model": "base", "messages": HELLO, "max_tokens": 1, "tools": tools, "tool_choice": "none"}
    answer = await writer.post("/tokenize", json={"model": "base", "messages": HELLO, "tools": tools})
    assert answer.status_code == 200, answer.text
    parsed = schema.ChatCompletionRequest.model_validate(body)
    assert len(parsed.tools or ()) == 140


async def test_as_many_described_tools_as_openai_takes_are_enforced(
    writing: Service, writer: httpx.AsyncClient
) -> None:
    """Their schemas are longer together than one grammar of a client's may be."""
    writing.reconfigure({"max_body_bytes": 1 << 20})
    words = "What the argument is for, in words that tell a model what to write here and what not to"
    arguments = {name: {"type": "string", "description": words} for name in ("owner", "repository", "title", "body")}
    parameters = {"type": "object", "properties": arguments, "required": ["owner"]}
    functions = [{"name": f"github__tool_{index}", "parameters": parameters} for index in range(512)]
    many = [{"type": "function", "function": function} for function in functions]
    body = {"model": "base", "messages": HELLO, "max_tokens": 60, "tools": many[:128]}
    for choice in ("auto", "required"):
        answer = await writer.post("/v1/chat/completions", json=body | {"tool_choice": choice})
        assert answer.status_code == 200, answer.text
    (call,) = answer.json()["choices"][0]["message"]["tool_calls"][:1]
    assert call["function"]["name"].startswith("github__tool_")
    refused = await writer.post("/v1/chat/completions", json=body | {"tools": many})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools")
    assert "at most 262144" in refused.text


def fields_of(kind: type) -> set[str]:
    """The fields of a client library's request type."""
    return set(get_type_hints(kind))


#: Fields of the client libraries' types that this service refuses by name, because they would change the answer.
REFUSED = {
    "ChatCompletionRequest": "audio functions moderation web_search_options",
    "ChatMessage": "audio function_call",
    "MessagesRequest": "container compaction fallbacks mcp_servers thread",
    "ToolUseBlock": "toolset_name",
    "ToolResultBlock": "toolset_name",
    "ResponsesRequest": "conversation moderation prompt",
    "FunctionOutputItem": "name",
}


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (schema.ChatCompletionRequest, [chat_params.CompletionCreateParamsNonStreaming]),
        (schema.StreamOptions, [openai.types.chat.ChatCompletionStreamOptionsParam]),
        (schema.TextPart, [openai.types.chat.ChatCompletionContentPartTextParam]),
        (schema.ChatMessage, list(get_args(openai.types.chat.ChatCompletionMessageParam))[:5]),
        (schema.ToolCallBody, [openai.types.chat.ChatCompletionMessageFunctionToolCallParam]),
        (schema.ToolBody, [openai.types.chat.ChatCompletionFunctionToolParam]),
        (messages.MessagesRequest, [
            anthropic.types.message_create_params.MessageCreateParamsNonStreaming,
            anthropic.types.beta.message_create_params.MessageCreateParamsNonStreaming,
        ]),
        (messages.TextBlock, [anthropic.types.TextBlockParam, anthropic.types.beta.BetaTextBlockParam]),
        (messages.ThinkingBlock, [
            anthropic.types.ThinkingBlockParam, anthropic.types.RedactedThinkingBlockParam,
        ]),
        (messages.ToolUseBlock, [anthropic.types.ToolUseBlockParam]),
        (messages.ToolResultBlock, [anthropic.types.ToolResultBlockParam]),
        (messages.MessagesTool, [anthropic.types.ToolParam]),
        (messages.OutputConfig, [anthropic.types.OutputConfigParam]),
        (responses.ResponsesRequest, [responses_params.ResponseCreateParamsNonStreaming]),
        (responses.InputMessage, [
            openai.types.responses.EasyInputMessageParam, openai.types.responses.ResponseOutputMessageParam,
        ]),
        (responses.MessagePart, [
            openai.types.responses.ResponseInputTextParam, openai.types.responses.ResponseOutputTextParam,
        ]),
        (responses.FunctionCallItem, [openai.types.responses.ResponseFunctionToolCallParam]),
        (responses.FunctionOutputItem, [openai.types.responses.response_input_item_param.FunctionCallOutput]),
        (responses.ReasoningItem, [openai.types.responses.ResponseReasoningItemParam]),
        (responses.ResponsesTool, [openai.types.responses.FunctionToolParam]),
        (responses.TextField, [openai.types.responses.ResponseTextConfigParam]),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)  # fmt: skip
def test_every_field_of_the_official_clients_is_decided(ours: type[Body], theirs: list[type]) -> None:
    known = {field.alias or name for name, field in ours.model_fields.items()} | set(ours.ignored)
    refused = set(REFUSED.get(ours.__name__, "").split())
    assert issubclass(ours, BaseModel)
    assert not known & refused
    undecided = set().union(*map(fields_of, theirs)) - known - refused
    assert not undecided, f"{ours.__name__}: decide about {sorted(undecided)}"
