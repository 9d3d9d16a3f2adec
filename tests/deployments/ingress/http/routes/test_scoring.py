"""POST /v1/score, /v1/rerank and /v1/classify: the shapes of vLLM, Jina and Cohere, and what the engine computed."""

from __future__ import annotations

import json
import math
from typing import Any

import httpx
import numpy as np
import pytest
import pytest_asyncio

from app.deployments.ingress.http.batch_executor import BatchExecutor
from app.deployments.ingress.principal import handle_principal
from app.deployments.ingress.scoring import apply_activation
from app.engine.adapters.adapter import LoraAdapter
from app.engine.errors import InvalidRequest
from app.engine.request import PoolingParams
from tests.deployments.http_service import Letters, Service, add_judge
from tests.fakes import fake_embedding, fake_request


@pytest_asyncio.fixture
async def judge(service: Service) -> LoraAdapter:
    return await add_judge(service)


@pytest_asyncio.fixture
async def topics(service: Service) -> LoraAdapter:
    return await add_judge(service, "topics", labels=3)


def expected(adapter: LoraAdapter, text: str | list[int]) -> list[float]:
    token_ids = Letters().encode(text) if isinstance(text, str) else text
    request = fake_request("r", token_ids, adapter, pooling=PoolingParams(task="classify"))
    numbers: list[float] = np.frombuffer(fake_embedding(request, adapter), "<f4").tolist()
    return numbers


def sigmoid(number: float) -> float:
    return 1 / (1 + math.exp(-number))


@pytest.mark.parametrize(
    "names", [("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")]
)
async def test_a_text_is_scored_against_each_of_others(
    http: httpx.AsyncClient, judge: LoraAdapter, names: tuple[str, str]
) -> None:
    for first, second, pairs in (
        ("which", "this", ["which|this"]),
        ("which", ["this", "that one"], ["which|this", "which|that one"]),
        (["which"], ["this", "that one"], ["which|this", "which|that one"]),
        (["a", "b"], ["c", "d"], ["a|c", "b|d"]),
    ):
        answer = await http.post("/v1/score", json={"model": "judge", names[0]: first, names[1]: second})
        assert answer.status_code == 200, answer.text
        body = answer.json()
        scores = [sigmoid(expected(judge, pair)[0]) for pair in pairs]
        assert [item["score"] for item in body["data"]] == pytest.approx(scores, rel=1e-12)
        assert [(item["index"], item["object"]) for item in body["data"]] == [(i, "score") for i in range(len(pairs))]
        assert (body["object"], body["model"]) == ("list", "judge")
        assert body["id"].startswith("score-")
        assert body["usage"] == {"prompt_tokens": len("".join(pairs)), "total_tokens": len("".join(pairs))}
    assert answer.headers["x-polylora-adapter"] == "judge@1"


async def test_documents_are_ranked_by_relevance(http: httpx.AsyncClient, service: Service, judge: LoraAdapter) -> None:
    documents = ["of cats", "of dogs", "of cats", "of a long way", "d"]
    scores = [sigmoid(expected(judge, f"which|{text}")[0]) for text in documents]
    order = sorted(range(5), key=lambda index: -scores[index])
    body: dict[str, Any] = {"model": "judge", "query": "which", "documents": documents}
    found = (await http.post("/v1/rerank", json=body)).json()
    assert [item["index"] for item in found["results"]] == order
    assert order.index(0) < order.index(2), "equal documents keep their order"
    assert [item["document"]["text"] for item in found["results"]] == [documents[index] for index in order]
    assert [item["relevance_score"] for item in found["results"]] == pytest.approx(
        [scores[i] for i in order], rel=1e-12
    )
    assert found["usage"]["total_tokens"] == sum(len(f"which|{text}") for text in documents)
    assert found["id"].startswith("rerank-")
    given = body | {"documents": [{"text": text} for text in documents], "top_n": 2, "return_documents": False}
    fewer = (await http.post("/v1/rerank", json=given)).json()["results"]
    assert fewer == [
        {"index": i, "relevance_score": s["relevance_score"]} for i, s in zip(order[:2], found["results"], strict=False)
    ]
    raw = (await http.post("/v1/rerank", json=body | {"use_activation": False})).json()["results"]
    assert [item["relevance_score"] for item in raw] == [expected(judge, f"which|{documents[i]}")[0] for i in order]
    assert service.observed == [("rerank", 200)] * 3
    assert [usage.prompt_tokens for usage in service.counted[-1][1] if usage] == [len(f"which|{t}") for t in documents]


async def test_texts_and_token_ids_are_classified(http: httpx.AsyncClient, topics: LoraAdapter) -> None:
    given: tuple[Any, list[Any]]
    for given in (
        ("a text", ["a text"]),
        (["a", "bc"], ["a", "bc"]),
        ([7, 8], [[7, 8]]),
        ([[7], [8, 9]], [[7], [8, 9]]),
    ):
        body = (await http.post("/v1/classify", json={"model": "topics", "input": given[0]})).json()
        for index, (item, text) in enumerate(zip(body["data"], given[1], strict=True)):
            weights = [math.exp(number) for number in expected(topics, text)]
            probs = [weight / sum(weights) for weight in weights]
            assert item["probs"] == pytest.approx(probs, rel=1e-9)
            assert item["label"] == f"LABEL_{probs.index(max(probs))}"
            assert (item["index"], item["num_classes"]) == (index, 3)
    raw = await http.post("/v1/classify", json={"model": "base:topics", "input": "a text", "use_activation": False})
    assert raw.json()["data"][0]["probs"] == expected(topics, "a text")


def test_an_activation_of_any_size_is_a_probability() -> None:
    assert apply_activation([0.0]) == [0.5]
    assert apply_activation([-1e30]) == [0.0]
    assert apply_activation([1e30]) == [1.0]
    assert apply_activation([-3.0]) == pytest.approx([1 / (1 + math.e**3)])
    assert apply_activation([1e30, -1e30, 1e30]) == [0.5, 0.0, 0.5]


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("score", {"text_1": ["a", "b"], "text_2": ["c"] * 3}, "text_1", "give one, or one for each"),
        ("score", {"text_1": "a", "text_2": []}, "text_2", "1 to 2048"),
        ("score", {"text_1": "", "text_2": ""}, "text_2", "no characters"),
        ("score", {"text_1": "a", "documents": ["c"]}, None, "text_1 and text_2"),
        ("score", {"text_1": "a"}, None, "text_1 and text_2"),
        ("score", {"text_1": "a", "text_2": "b" * 200}, "text_2", "tokens but the context holds 128"),
        ("rerank", {"query": "a", "documents": []}, "documents", "1 to 2048"),
        ("rerank", {"query": "a", "documents": ["b"], "max_tokens_per_doc": 9}, "max_tokens_per_doc", ""),
        ("rerank", {"query": "a", "documents": ["b"], "instruction": "x"}, "instruction", ""),
        ("rerank", {"query": "a", "documents": ["b"], "adapters": [{"name": "judge"}]}, "adapters", ""),
        ("classify", {"input": [[999]]}, "input", "vocabulary ends"),
        ("classify", {"input": [""]}, "input", "no tokens"),
    ],
)
@pytest.mark.usefixtures("judge")
async def test_what_cannot_be_scored_is_refused(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], param: str | None, words: str
) -> None:
    answer = await http.post(f"/v1/{path}", json={"model": "judge"} | body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert words in error["message"]


@pytest.mark.usefixtures("judge", "topics")
async def test_each_adapter_names_the_routes_that_it_is_for(http: httpx.AsyncClient) -> None:
    for path, body, words in (
        ("chat/completions", {"model": "judge", "messages": [{"role": "user", "content": "a"}]}, "/v1/score"),
        ("completions", {"model": "judge", "prompt": "a", "max_tokens": 2}, "/v1/rerank"),
        ("embeddings", {"model": "judge", "input": "a"}, "/v1/classify"),
        ("score", {"model": "sql", "text_1": "a", "text_2": "b"}, "/v1/chat/completions"),
        ("classify", {"model": "base", "input": "a"}, "the base model has no score head"),
        ("rerank", {"model": "topics", "query": "a", "documents": ["b"]}, "has 3 labels"),
    ):
        answer = await http.post(f"/v1/{path}", json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "model"), (path, error)
        assert words in error["message"]


async def test_a_batch_has_scores_too(service: Service, judge: LoraAdapter) -> None:
    executor = BatchExecutor(service)
    bodies: dict[str, dict[str, Any]] = {
        "/v1/score": {"text_1": "a", "text_2": "b"},
        "/v1/rerank": {"query": "a", "documents": ["b"]},
        "/v1/classify": {"input": "a|b"},
    }
    answers = [
        json.loads(await executor.answer(path, {"model": "judge"} | body, handle_principal(), "one"))
        for path, body in bodies.items()
    ]
    found = [
        answers[0]["data"][0]["score"],
        answers[1]["results"][0]["relevance_score"],
        *answers[2]["data"][0]["probs"],
    ]
    assert found == pytest.approx([sigmoid(expected(judge, "a|b")[0])] * 3, rel=1e-12)
    with pytest.raises(InvalidRequest, match="text_1 and text_2"):
        await executor.answer("/v1/score", {"model": "judge"}, handle_principal(), "two")
