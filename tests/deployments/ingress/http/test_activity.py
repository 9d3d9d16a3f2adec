"""What is seen of an adapter's requests, as its description tells it: of whoever may know."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from app.deployments.ingress.http.app import make_app
from app.deployments.ingress.http.middleware.origin_check import HttpPolicy
from app.engine.errors import AdapterUnreadable, NotReady
from tests.deployments.http_service import Service
from tests.deployments.ingress.http.middleware.test_auth import CHAT, Org, org

__all__ = ["org"]

ASK = {"model": "sql", "prompt": "hi", "max_tokens": 3, "ignore_eos": True}


async def seen(http: httpx.AsyncClient, name: str = "sql") -> dict[str, Any]:
    answer = await http.get(f"/v1/loras/{name}")
    assert answer.status_code == 200, answer.text
    activity: dict[str, Any] = answer.json()["activity"]
    return activity


async def test_requests_tokens_and_first_tokens_are_counted(http: httpx.AsyncClient, service: Service) -> None:
    before = await seen(http)
    assert before == {
        "since": before["since"],
        "requests": 0,
        "errors": 0,
        "prompt_tokens": 0,
        "cached_tokens": 0,
        "completion_tokens": 0,
        "time_to_first_token_seconds": None,
        "loads": {"source": 0, "disk": 0, "device": 0},
    }
    for body in (ASK, ASK | {"n": 2, "stream": True}, ASK | {"model": "base"}):
        assert (await http.post("/v1/completions", json=body)).status_code == 200
    after = await seen(http)
    assert (after["requests"], after["errors"]) == (2, 0)
    assert (after["prompt_tokens"], after["completion_tokens"]) == (6, 9), "each of n answers reads its prompt"
    times = after["time_to_first_token_seconds"]
    assert times["count"] == 2
    assert 0 < times["p50"] <= times["p99"] < 120
    await service.accounting.usage_flusher.flush()
    assert (await seen(http))["loads"] == {"source": 0, "disk": 0, "device": 1}


async def test_a_request_for_several_adapters_counts_for_each(http: httpx.AsyncClient) -> None:
    await http.post("/v1/loras?wait=true", json={"name": "new", "path": "new"})
    texts = {"text": ["a", "bb", "c"], "lora_path": ["sql", "new", None], "sampling_params": {"max_new_tokens": 2}}
    assert (await http.post("/generate", json=texts)).status_code == 200
    for name, num_prompt in (("sql", 1), ("new", 2)):
        found = await seen(http, name)
        assert (found["requests"], found["prompt_tokens"]) == (1, num_prompt)
        assert found["time_to_first_token_seconds"] is None, "whose was first is not known"


async def test_failures_are_errors_and_clients_that_left_are_not(
    http: httpx.AsyncClient, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AdapterUnreadable("its files are gone", retry_after_s=1)

    with monkeypatch.context() as patch:
        patch.setattr(service.preprocessor._dispatcher, "stream", refuse)
        assert (await http.post("/v1/completions", json=ASK)).status_code == 503
    assert (await http.post("/v1/completions", json=ASK)).status_code == 200
    found = await seen(http)
    assert (found["requests"], found["errors"]) == (2, 1)
    job = service.counted[-1][0]
    assert job is not None
    service.adapter_metrics.record(job, 499)
    found = await seen(http)
    assert (found["requests"], found["errors"]) == (3, 1)


async def test_what_could_not_be_reported_is_reported_later(
    http: httpx.AsyncClient, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(_: object) -> None:
        raise NotReady("the store restarts")

    with monkeypatch.context() as patch:
        patch.setattr(service.accounting.tenants_service, "note_activity", away)
        for _ in range(2):
            assert (await http.post("/v1/completions", json=ASK)).status_code == 200
            assert (await http.get("/v1/loras/sql")).status_code == 503
    assert (await seen(http))["requests"] == 2
    await service.adapter_metrics.close()
    assert (await seen(http))["requests"] == 2, "once"


async def test_an_ingress_that_ends_tells_what_it_has_seen(http: httpx.AsyncClient, service: Service) -> None:
    assert (await http.post("/v1/completions", json=ASK)).status_code == 200
    await service.adapter_metrics.close()
    ref = service.registry.resolve("sql", "", "default")
    assert ref is not None
    assert (await service.accounting.tenants_service.adapter_stats(ref, tenant_id=None)).activity.num_requests == 1


async def test_new_contents_start_from_zero(http: httpx.AsyncClient, service: Service) -> None:
    assert (await http.post("/v1/completions", json=ASK)).status_code == 200
    service.managed.store.contents["sql"] = service.managed.store.contents["two"]
    await http.post("/v1/loras?wait=true", json={"name": "sql", "path": "sql"})
    assert (await seen(http))["requests"] == 0


async def test_a_project_sees_its_own_requests_and_no_loads(org: Org) -> None:
    service = org.service
    owner, ada, bob = service.accounting.tenants_service, org.ids["ada"], org.ids["bob"]
    await owner.share(ada, "secret", [bob], actor="test")
    store = service.managed.store
    store.contents[f"{bob}/twin"] = store.contents["secret"]
    load = {"lora_name": "twin", "lora_path": f"{bob}/twin"}
    assert (await org.ask("bob", "POST", "/v1/load_lora_adapter", json=load)).status_code == 200
    for who, model, number in (("ada", "secret", 1), ("bob", "secret", 2), ("bob", "twin", 4)):
        for _ in range(number):
            answer = await org.ask(who, "POST", "/v1/chat/completions", json=CHAT | {"model": model})
            assert answer.status_code == 200, answer.text
    for who, name, number in (("ada", "secret", 1), ("bob", "twin", 4)):
        activity = (await org.ask(who, "GET", f"/v1/loras/{name}")).json()["activity"]
        assert activity["requests"] == number, (who, name)
        assert "loads" not in activity, "others may have the same contents"
    for who, name in (("ada", "twin"), ("bob", "secret")):
        assert (await org.ask(who, "GET", f"/v1/loras/{name}")).status_code == 404
    by_admin = await org.ask("admin", "GET", "/v1/loras/secret", headers={"OpenAI-Project": ada})
    assert by_admin.json()["activity"]["requests"] == 3, "everybody's, for this name"
    assert "loads" in by_admin.json()["activity"]
    transport = httpx.ASGITransport(make_app(service, HttpPolicy()), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as without_key:
        assert (await without_key.get("/v1/loras/secret")).status_code == 401
