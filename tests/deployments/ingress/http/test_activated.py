"""A prompt without the activated adapter's invocation tokens is computed by the base and billed to the adapter.

Here a letter is a token, and the invocation is "go".
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from app.deployments.tenancy.usage.queries import UsageQuery
from app.engine.adapters.card import AdapterRef
from tests.deployments.http_service import Letters, Service
from tests.deployments.ingress.http.middleware.test_auth import Org, org
from tests.deployments.ingress.http.test_activity import seen
from tests.deployments.managed import wanted
from tests.fakes import fake_adapter

__all__ = ["org"]

CALL = tuple(Letters().encode("go"))
ADAPTER = fake_adapter("activated", 8, invocation=CALL)
NO_END = {"ignore_eos": True}
ASK = {"max_tokens": 5, "temperature": 0} | NO_END


@pytest_asyncio.fixture
async def read_ahead(service: Service, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[str]]:
    """Names of the adapters that the store was asked to read ahead of a request, `activation_of` among what it has."""
    asked: list[str] = []

    async def prefetch(ref: AdapterRef) -> None:
        asked.append(ref.name)

    service.fleet.adapters[ADAPTER.card.digest] = ADAPTER
    store = service.managed.store
    store.contents["activated"] = ADAPTER.card.digest
    store.invocations[ADAPTER.card.digest] = CALL
    await service.managed.client.load_and_wait(wanted("activated", "activated"))
    monkeypatch.setattr(service._directory._store, "prefetch", prefetch)
    yield asked


async def completed(http: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    answer = await http.post("/v1/completions", json=ASK | fields)
    assert answer.status_code == 200, answer.text
    return answer


def is_loaded(service: Service) -> bool:
    residents = service.fleet.replicas["replica-0"].thread.stats().residents
    return bool(service.fleet.fetches) or bool(residents)


async def test_it_loads_nothing_and_has_the_base_s_bits(
    service: Service, http: httpx.AsyncClient, read_ahead: list[str]
) -> None:
    models = ("activated", "base")
    without, base = [(await completed(http, model=name, prompt="og, to", logprobs=1)).json() for name in models]
    assert without["choices"] == base["choices"]
    assert not is_loaded(service)
    assert read_ahead == []
    activated, base = [(await completed(http, model=name, prompt="ago, to", logprobs=1)).json() for name in models]
    assert activated["choices"] != base["choices"]
    assert is_loaded(service)
    assert read_ahead == ["activated"]


@pytest.mark.usefixtures("read_ahead")
async def test_it_is_the_adapter_s_in_answers_and_books(service: Service, http: httpx.AsyncClient) -> None:
    day_s, began_s = 86400, int(time.time())
    answer = await completed(http, model="activated", prompt="og, to", return_token_ids=True)
    assert answer.headers["X-Polylora-Adapter"] == "activated@1"
    assert answer.json()["adapter"]["digest"] == ADAPTER.card.digest
    params = {"max_new_tokens": 2} | NO_END
    texts = {"text": ["og, to"], "lora_path": ["activated"], "sampling_params": params}
    (received,) = (await http.post("/generate", json=texts)).json()
    assert received["meta_info"]["lora"] == "activated"
    found = await seen(http, "activated")
    assert (found["requests"], found["prompt_tokens"], found["completion_tokens"]) == (2, 12, 7)
    assert found["loads"] == {"source": 0, "disk": 0, "device": 0}
    assert service.metrics.requests[-1]["is_adapter"]
    assert await service.accounting.usage_flusher.flush()
    query = UsageQuery(began_s // day_s * day_s, began_s + day_s, None, day_s, "completions", {}, ("model", "digest"))
    buckets = await asyncio.to_thread(service.managed.books.ledger.buckets, query)
    used = [(group, charge.completion_tokens) for bucket in buckets for group, charge in bucket.results]
    assert used == [({"model": "activated", "digest": ADAPTER.card.digest}, 7)]
    assert not is_loaded(service)


@pytest.mark.usefixtures("read_ahead")
async def test_each_text_is_looked_at_by_itself(service: Service, http: httpx.AsyncClient) -> None:
    async def vectors(model: str, *texts: str) -> list[Any]:
        answer = await http.post("/v1/embeddings", json={"model": model, "input": texts})
        assert answer.status_code == 200, answer.text
        return [item["embedding"] for item in answer.json()["data"]]

    assert await vectors("activated", "og") == await vectors("base", "og")
    assert not is_loaded(service)
    both, base = await vectors("activated", "og", "go"), await vectors("base", "og", "go")
    assert both[0] == base[0]
    assert both[1] != base[1]


@pytest.mark.usefixtures("read_ahead")
async def test_a_caller_without_permission_is_refused_whatever_the_prompt(org: Org) -> None:
    for model in ("activated", "base"):
        await org.service.accounting.tenants_service.permit_models(org.ids["bob"], "allow_list", ["base"], actor="test")
        answer = await org.ask("bob", "POST", "/v1/completions", json=ASK | {"model": model, "prompt": "og"})
        assert answer.status_code == (404 if model == "activated" else 200), answer.text
