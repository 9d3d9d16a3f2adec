"""POST /v1/embeddings and the Python handle's embed: OpenAI's client reads what the engine computed."""

from __future__ import annotations

import base64
import itertools
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from app.deployments.ingress import embeddings, handle_api
from app.engine.errors import InvalidRequest
from app.engine.models.spec import EncoderSpec
from app.engine.request import PoolingParams
from tests.deployments.http_service import Letters, Service
from tests.fakes import fake_adapter, fake_embedding, fake_request

SQL = fake_adapter("sql", 8)


@pytest.fixture
def client(http: httpx.AsyncClient) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=http, max_retries=0)


def expected(text: str | list[int], adapter: str | None = None, **pooling: Any) -> list[float]:
    token_ids = Letters().encode(text) if isinstance(text, str) else text
    chosen = SQL if adapter else None
    request = fake_request("r", token_ids, chosen, pooling=PoolingParams(**pooling))
    numbers: list[float] = np.frombuffer(fake_embedding(request, chosen), "<f4").tolist()
    return numbers


async def test_the_official_client_gets_a_vector_for_everything_it_may_send(client: openai.AsyncOpenAI) -> None:
    cases: list[tuple[Any, list[Any]]] = [
        ("one text", ["one text"]),
        (["one text", "another"], ["one text", "another"]),
        ([7, 8, 9], [[7, 8, 9]]),
        ([[7, 8, 9], [10]], [[7, 8, 9], [10]]),
    ]
    formats: list[dict[str, Any]] = [{}, {"encoding_format": "float"}, {"encoding_format": "base64"}]
    for (given, texts), encoding in itertools.product(cases, formats):
        answer = await client.embeddings.create(model="base", input=given, **encoding)
        vectors: list[Any] = [item.embedding for item in answer.data]
        if encoding.get("encoding_format") == "base64":
            vectors = [np.frombuffer(base64.b64decode(text), "<f4").tolist() for text in vectors]
        assert vectors == [expected(text) for text in texts]
        assert [item.index for item in answer.data] == list(range(len(texts)))
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, texts))
        assert answer.model == "base"


async def test_adapters_dimensions_and_pooling(client: openai.AsyncOpenAI, service: Service) -> None:
    raw = await client.embeddings.with_raw_response.create(model="sql", input="text", user="ada")
    assert raw.headers["x-polylora-adapter"] == "sql@1"
    assert raw.parse().data[0].embedding == expected("text", "sql") != expected("text")
    for model, extra in (("base:sql", {}), ("base", {"lora_path": "sql"})):
        answer = await client.embeddings.create(model=model, input="text", dimensions=2, extra_body=extra)
        assert answer.data[0].embedding == expected("text", "sql", num_dimensions=2)
    answer = await client.embeddings.create(model="base", input="text", extra_body={"pooling": "mean"})
    assert answer.data[0].embedding == expected("text", method="mean")
    assert service.observed == [("embeddings", 200)] * 4
    assert [usage.prompt_tokens for usage in service.counted[-1][1] if usage] == [4]


async def test_more_texts_than_may_be_under_way_come_back_in_order(
    client: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embeddings, "MAX_OPEN_EMBEDDINGS", 3)
    texts = [chr(65 + index) * (1 + index % 7) for index in range(40)]
    answer = await client.embeddings.create(model="base", input=texts)
    assert [item.embedding for item in answer.data] == [expected(text) for text in texts]


@pytest.mark.parametrize(
    ("body", "status", "param", "words"),
    [
        ({"input": []}, 400, "input", "0 texts"),
        ({"input": ["a", ""]}, 400, "input", "text 1 of input has no tokens"),
        ({"input": "a" * 129}, 400, "input", "129 tokens but the context holds 128"),
        ({"input": ["x"] * 2049}, 400, "input", "2049 texts"),
        ({"input": [3, 61]}, 400, "input", "vocabulary ends at 60"),
        ({"input": [[3], "a"]}, 400, "input.0", "valid"),
        ({"input": 5}, 400, "input", "valid"),
        ({}, 400, "input", "required"),
        ({"input": "a", "dimensions": 5}, 400, "dimensions", "'base' has 4"),
        ({"input": "a", "dimensions": 0}, 400, "dimensions", "greater than or equal to 1"),
        ({"input": "a", "encoding_format": "hex"}, 400, "encoding_format", "'float' or 'base64'"),
        ({"input": "a", "pooling": "cls"}, 400, "pooling", "'last' and 'mean'"),
        ({"input": "a", "temperature": 0.5}, 400, "temperature", "unknown field"),
        ({"input": "a", "model": "nobody"}, 404, None, "nobody"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
async def test_what_cannot_be_embedded_is_refused_by_name(
    http: httpx.AsyncClient, body: dict[str, Any], status: int, param: str | None, words: str
) -> None:
    answer = await http.post("/v1/embeddings", json={"model": "base"} | body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param)
    assert words in error["message"]


@pytest.mark.parametrize("empty", ["", [""], ["a", ""], [[]], [[3], []]], ids=str)
async def test_an_empty_text_is_refused_also_where_the_model_adds_tokens(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, empty: Any
) -> None:
    """An encoder's tokenizer puts two around any text, and a base's often one before it."""
    monkeypatch.setattr(Letters, "encode", lambda _, text: [1, *(ord(character) % 61 for character in text), 2])
    answer = await http.post("/v1/embeddings", json={"model": "base", "input": empty})
    index = 0 if len(empty) < 2 else 1
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")
    assert f"text {index} of input has no tokens" in answer.json()["error"]["message"]
    received = await http.post("/v1/embeddings", json={"model": "base", "input": " "})
    assert received.json()["usage"]["prompt_tokens"] == 3


async def test_the_handle_gives_the_same_numbers_and_is_counted(service: Service) -> None:
    assert await handle_api.embed(service, "text", "sql", None, None) == expected("text", "sql")
    assert await handle_api.embed(service, ["a", "b"], None, "mean", 3) == [
        expected(text, method="mean", num_dimensions=3) for text in "ab"
    ]
    with pytest.raises(InvalidRequest, match="no tokens"):
        await handle_api.embed(service, "", None, None, None)
    assert service.observed == [("handle", 200), ("handle", 200), ("handle", 400)]


async def test_an_encoder_writes_no_text(http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Letters, "spec", replace(Letters.spec, encoder=EncoderSpec(16, 0, 2)))
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"model": "sql", "messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/completions", {"model": "base", "prompt": "hi"}),
        ("/generate", {"text": "hi"}),
    ]
    for route, body in bodies:
        answer = await http.post(route, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
        assert "/v1/embeddings" in answer.json()["error"]["message"]
