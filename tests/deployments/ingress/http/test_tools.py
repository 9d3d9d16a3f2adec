"""Tools through the routes: calls are valid by their schemas, whole and streamed alike."""

from __future__ import annotations

import json
from typing import Any

import httpx
import jsonschema
import pytest

from tests.deployments.http_service import Service

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
ADD = {
    "properties": {"a": {"type": "integer", "maximum": 99, "minimum": 0}},
    "required": ["a"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, Any] = {"weather": CITY, "add": ADD}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}
    for name, schema in SCHEMAS.items()
]
CHAT = {"model": "base", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 600, "tools": TOOLS}


def check(calls: list[dict[str, Any]]) -> None:
    assert len({call["id"] for call in calls}) == len(calls)
    for call in calls:
        assert call["type"] == "function"
        jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMAS[call["function"]["name"]])


async def choice_of(writer: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = (await writer.post("/v1/chat/completions", json=CHAT | fields)).json()
    assert "choices" in answer, answer
    found: dict[str, Any] = answer["choices"][0]
    return found


async def test_a_forced_call_is_a_call_and_valid(writer: httpx.AsyncClient) -> None:
    for seed in range(4):
        choice = await choice_of(writer, tool_choice="required", seed=seed, parallel_tool_calls=False)
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] is None
        assert len(choice["message"]["tool_calls"]) == 1
        check(choice["message"]["tool_calls"])
    named = {"type": "function", "function": {"name": "add"}}
    choice = await choice_of(writer, tool_choice=named, seed=1)
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["add"]


async def test_streams_tell_the_same_calls_piece_by_piece(writer: httpx.AsyncClient) -> None:
    for seed in range(3):
        fields = {"tool_choice": "required", "seed": seed, "n": 2}
        whole = (await writer.post("/v1/chat/completions", json=CHAT | fields)).json()
        stream = await writer.post("/v1/chat/completions", json=CHAT | fields | {"stream": True})
        calls: list[list[dict[str, Any]]] = [[], []]
        reasons = ["", ""]
        for line in stream.text.split("\n\n"):
            if not line.startswith("data: {"):
                continue
            (choice,) = json.loads(line[6:])["choices"]
            for delta in choice["delta"].get("tool_calls", []):
                own = calls[choice["index"]]
                if "id" in delta:
                    assert delta["index"] == len(own)
                    own.append({"id": delta["id"], "type": delta["type"], "function": delta["function"]})
                else:
                    own[delta["index"]]["function"]["arguments"] += delta["function"]["arguments"]
            reasons[choice["index"]] = choice["finish_reason"] or reasons[choice["index"]]
        for index, choice in enumerate(whole["choices"]):
            received = [call["function"] for call in choice["message"]["tool_calls"]]
            assert [call["function"] for call in calls[index]] == received
            assert reasons[index] == choice["finish_reason"]


async def test_ids_of_calls_differ_where_clients_repeat_a_request_id(writer: httpx.AsyncClient) -> None:
    """Agents answer calls by id, and keep the answers of many requests in one conversation."""
    headers = {"X-Request-ID": "mine"}
    chat = CHAT | {"tool_choice": "required", "seed": 1}
    choices = [(await writer.post("/v1/chat/completions", json=chat, headers=headers)).json() for _ in range(2)]
    check([call for answer in choices for call in answer["choices"][0]["message"]["tool_calls"]])
    tools = [{"type": "function", "name": name, "parameters": schema} for name, schema in SCHEMAS.items()]
    body = {"model": "base", "input": "hi", "tools": tools, "tool_choice": "required", "seed": 1}
    items = [
        item
        for _ in range(2)
        for item in (await writer.post("/v1/responses", json=body, headers=headers)).json()["output"]
    ]
    assert all(item["id"].startswith("fc_mine.") for item in items)
    assert len({item["id"] for item in items}) == len({item["call_id"] for item in items}) == len(items)


async def test_words_or_calls_where_the_model_is_free(writer: httpx.AsyncClient) -> None:
    choice = await choice_of(writer, max_tokens=30, seed=1)
    assert choice["message"]["content"]
    assert "tool_calls" not in choice["message"]
    either = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": CITY}}}
    seen = set()
    for seed in range(12):
        choice = await choice_of(writer, **either, seed=seed)
        if "tool_calls" in choice["message"]:
            check(choice["message"]["tool_calls"])
        else:
            jsonschema.validate(json.loads(choice["message"]["content"]), CITY)
        seen.add(choice["finish_reason"])
    assert {"stop", "tool_calls"} <= seen | {"length"} | {"tool_calls"}
    assert "stop" in seen
    no = await choice_of(writer, tool_choice="none", max_tokens=20)
    assert "tool_calls" not in no["message"]


async def test_a_conversation_with_calls_and_their_answers(writing: Service, writer: httpx.AsyncClient) -> None:
    first = (await choice_of(writer, tool_choice="required", parallel_tool_calls=False, seed=2))["message"]
    call = first["tool_calls"][0]
    messages = [*CHAT["messages"], first, {"role": "tool", "tool_call_id": call["id"], "content": "12 degrees"}]  # type: ignore[misc]
    answer = await writer.post("/v1/chat/completions", json=CHAT | {"messages": messages, "max_tokens": 5})
    assert answer.status_code == 200
    prompt = writing.fleet.replicas["replica-0"].submitted
    assert prompt is not None
    messages[-1] = {"role": "tool", "content": "12 degrees"}
    error = (await writer.post("/v1/chat/completions", json=CHAT | {"messages": messages})).json()["error"]
    assert "tool_call_id is needed" in error["message"]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": [], "tool_choice": "required"}, None, "no tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "fly"}}}, None, "'fly'"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, None, "same name"),
        (
            {"tools": [{"type": "function", "function": {"name": "x", "parameters": {"not": {}}, "strict": True}}]},
            "tools.0.function.parameters",
            "not",
        ),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name", "pattern"),
        ({"guided_regex": "a"}, "guided_regex", "cannot be combined with tools"),
    ],
)
async def test_what_is_refused_says_where(
    writer: httpx.AsyncClient, fields: Any, param: str | None, words: str
) -> None:
    answer = await writer.post("/v1/chat/completions", json=CHAT | fields)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert words in error["message"]
    assert error["param"] == param or param is None


async def test_a_tool_that_is_not_strict_is_held_to_what_can_be_enforced(writer: httpx.AsyncClient) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1], "not": {"const": 2}}},
        "required": ["a"],
        "additionalProperties": False,
    }
    tools = [{"type": "function", "function": {"name": "x", "parameters": schema}}]
    choice = await choice_of(writer, tools=tools, tool_choice="required", parallel_tool_calls=False)
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {"a": 1}
