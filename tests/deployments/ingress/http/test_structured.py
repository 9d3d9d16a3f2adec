"""Answers that follow a schema, through the routes: what is asked in which field, and what is refused where."""

from __future__ import annotations

import json
from typing import Any

import httpx
import jsonschema
import pytest

SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}, "count": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["colour", "count"],
    "additionalProperties": False,
}
CHAT = {"model": "base", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 100}
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}


async def content(writer: httpx.AsyncClient, **fields: Any) -> str:
    answer = (await writer.post("/v1/chat/completions", json=CHAT | fields)).json()
    assert answer["choices"][0]["finish_reason"] == "stop", answer
    return str(answer["choices"][0]["message"]["content"])


async def test_a_schema_in_every_spelling(writer: httpx.AsyncClient) -> None:
    for fields in (
        {"response_format": FORMAT},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
        {"guided_json": SCHEMA},
    ):
        texts = {await content(writer, **fields, seed=seed) for seed in range(3)}
        for text in texts:
            jsonschema.validate(json.loads(text), SCHEMA)
    assert await content(writer, structured_outputs={"regex": "ab{3}"}) == "abbb"
    assert await content(writer, guided_choice=["yes", "no"]) in ("yes", "no")
    assert await content(writer, guided_grammar='start: "x" "y"') == "xy"
    assert await content(writer, structured_outputs={"choice": ["only"]}) == "only"


async def test_streams_and_other_routes_follow_too(writer: httpx.AsyncClient) -> None:
    stream = await writer.post(
        "/v1/chat/completions", json=CHAT | {"response_format": FORMAT, "stream": True, "seed": 1}
    )
    events = [json.loads(line[6:]) for line in stream.text.split("\n\n") if line.startswith("data: {")]
    text = "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
    assert text == await content(writer, response_format=FORMAT, seed=1)
    body = {"model": "base", "prompt": "x", "structured_outputs": {"choice": ["abc"]}, "echo": True, "max_tokens": 9}
    assert (await writer.post("/v1/completions", json=body)).json()["choices"][0]["text"] == "xabc"
    body = {"text": "x", "sampling_params": {"guided_regex": "[0-9]{4}"}}
    assert (await writer.post("/generate", json=body)).json()["text"].isdigit()


async def test_an_object_of_any_kind(writer: httpx.AsyncClient) -> None:
    answer = await writer.post(
        "/v1/chat/completions",
        json=CHAT | {"response_format": {"type": "json_object"}, "max_tokens": 900, "seed": 3},
    )
    choice = answer.json()["choices"][0]
    assert choice["message"]["content"].startswith("{")
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(choice["message"]["content"]), dict)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema is needed"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "wibble"}}}},
            "response_format.json_schema.schema",
            "wibble",
        ),
        (
            {"guided_json": {"type": "object", "properties": {"a": {"items": {"not": {}}, "type": "array"}}}},
            "guided_json",
            "guided_json: at #/properties/a/items/not: ",
        ),
        ({"guided_regex": "(?=a)b"}, "guided_regex", "look-around"),
        ({"guided_regex": "a(b"}, "guided_regex", "unclosed"),
        ({"guided_json": "{"}, "guided_json", "is not JSON"),
        ({"structured_outputs": {"grammar": "start: nowhere"}}, "structured_outputs.grammar", "nowhere"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "unknown field"),
        ({"guided_choice": ["a"], "guided_regex": "b"}, "guided_choice", "use one of them"),
        ({"guided_choice": ["a"], "ignore_eos": True}, "ignore_eos", "where the answer ends"),
        ({"guided_choice": ["a"], "min_tokens": 3}, "min_tokens", "where the answer ends"),
        ({"min_tokens": 200}, "min_tokens", "at most 100"),
        ({"logit_bias": {"200": 1}}, "logit_bias", "ends at 119"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "not a token id"),
        ({"logit_bias": {"3": 101}}, "logit_bias", "-100 to 100"),
    ],
)
async def test_what_is_refused_says_where(writer: httpx.AsyncClient, fields: Any, param: str, words: str) -> None:
    answer = await writer.post("/v1/chat/completions", json=CHAT | fields)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["param"] == param
    assert words in error["message"]


async def test_a_suffix_is_refused_with_a_reason(writer: httpx.AsyncClient) -> None:
    body = {"model": "base", "prompt": "x"}
    for fields, words in (
        ({"suffix": "y"}, "fill in the middle"),
        ({"max_tokens": 0}, "needs echo or prompt_logprobs"),
    ):
        answer = await writer.post("/v1/completions", json=body | fields)
        assert answer.status_code == 400
        assert words in answer.json()["error"]["message"]
