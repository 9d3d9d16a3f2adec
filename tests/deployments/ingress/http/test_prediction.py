"""`prediction` through the chat route: it changes no answer, and usage says what became of it."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

CHAT = {"model": "base", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 20, "seed": 1}


async def answered(writer: httpx.AsyncClient, **fields: Any) -> tuple[str, dict[str, Any]]:
    answer = (await writer.post("/v1/chat/completions", json=CHAT | fields)).json()
    return answer["choices"][0]["message"]["content"], answer["usage"]


@pytest.mark.parametrize("as_parts", [False, True])
async def test_an_answer_is_the_same_with_a_prediction_which_usage_counts(
    writer: httpx.AsyncClient, as_parts: bool
) -> None:
    grammar = {"structured_outputs": {"regex": "a{6}b{6}"}}
    text, usage = await answered(writer, **grammar)
    assert "completion_tokens_details" not in usage
    for content in ("{}a", text, text[:6] + "zzz"):
        parts = [{"type": "text", "text": content[:3]}, {"type": "text", "text": content[3:]}]
        prediction = {"type": "content", "content": parts if as_parts else content}
        again, details = await answered(writer, **grammar, prediction=prediction)
        assert again == text
        assert {key: details[key] for key in usage} == usage
        received = details["completion_tokens_details"]
        assert (received["accepted_prediction_tokens"] == 0) == (content == "{}a")
        if content == text:
            assert received["rejected_prediction_tokens"] == 0


async def test_a_stream_ends_with_what_became_of_the_prediction_of_all_its_answers(writer: httpx.AsyncClient) -> None:
    prediction = {"type": "content", "content": "yes"}
    body = CHAT | {"structured_outputs": {"choice": ["yes"]}, "n": 2, "prediction": prediction}
    stream = await writer.post(
        "/v1/chat/completions", json=body | {"stream": True, "stream_options": {"include_usage": True}}
    )
    events = [json.loads(line[6:]) for line in stream.text.split("\n\n") if line.startswith("data: {")]
    whole = (await writer.post("/v1/chat/completions", json=body)).json()
    assert events[-1]["usage"] == whole["usage"]
    received = whole["usage"]["completion_tokens_details"]
    assert received["accepted_prediction_tokens"] >= 2


async def test_what_is_no_prediction_is_refused(writer: httpx.AsyncClient) -> None:
    for prediction, param in (
        ({"type": "text", "content": "x"}, "prediction.type"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "content", "content": "x" * 2000}, "prediction"),
    ):
        answer = await writer.post("/v1/chat/completions", json=CHAT | {"prediction": prediction})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    assert (await writer.post("/v1/chat/completions", json=CHAT | {"prediction": None})).status_code == 200
