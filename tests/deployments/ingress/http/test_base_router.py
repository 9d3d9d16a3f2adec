"""Two base models behind one application: which of them answers, which is charged, and what belongs to both."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import httpx2
import openai
import pytest
import pytest_asyncio

from app.deployments.ingress.base_models import BaseModels
from app.deployments.ingress.http.app import make_app
from app.deployments.ingress.http.batch_executor import answer_line
from app.deployments.ingress.http.middleware.origin_check import HttpPolicy
from app.deployments.ingress.principal import Principal
from app.deployments.registry.db.database import sqlite_url
from app.deployments.registry.models import LoadRequest
from app.deployments.registry.registry import Registry
from app.deployments.tenancy.auth.project_store import AdapterQuota
from app.engine.errors import InvalidRequest
from tests.deployments.fleet import Fleet
from tests.deployments.http_service import Service
from tests.deployments.ingress.dispatch.test_dispatcher import until
from tests.deployments.ingress.http.test_event_stream import Client
from tests.deployments.managed import FakeStore, ManagedStore, wanted
from tests.fakes import fake_adapter

NAMES = ("base", "other")
#: The adapters that are registered and those that may be, by base model.
ADAPTERS = {"base": ("sql", "both", "new"), "other": ("chat", "both", "more")}


class Bases(NamedTuple):
    first: Service
    second: Service

    def add(self, service: Service, name: str) -> None:
        adapter = fake_adapter(f"{service.base_name} {name}", 8)
        service.fleet.adapters[adapter.card.digest] = adapter
        service.managed.store.contents[name] = adapter.card.digest

    def served(self) -> list[int]:
        """How many inference requests each has answered well since the last call."""
        counts = []
        for service in self:
            counts.append(sum(status == 200 for _, status in service.observed))
            service.observed.clear()
        return counts


@pytest_asyncio.fixture
async def two(tmp_path: Path) -> AsyncIterator[Bases]:
    stores = [ManagedStore.at(tmp_path)]
    registry = Registry(sqlite_url(tmp_path / "registry.sqlite"), "other", base_names=("other",))
    stores.append(ManagedStore(registry, FakeStore(), uploads=stores[0].uploads))
    registry.catalog.check_quota = AdapterQuota("base")
    fleets = [Fleet(1), Fleet(1)]
    first = Service(fleets[0], stores[0], base_names=NAMES)
    two = Bases(first, Service(fleets[1], stores[1], base_names=NAMES, first=first))
    for service in two:
        for name in ADAPTERS[service.base_name]:
            two.add(service, name)
        for name in ADAPTERS[service.base_name][:2]:
            await service.managed.client.load_and_wait(wanted(name, name))
    await until(lambda: all(service.registry.num_adapters == 2 for service in two))
    yield two
    for service in reversed(two):
        await service.close()
    for store in stores:
        await store.close()
    for fleet in fleets:
        fleet.stop()


def app_of(two: Bases) -> Any:
    return make_app(two.first, HttpPolicy(), others=[two.second])


@pytest_asyncio.fixture
async def http(two: Bases) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app_of(two), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=20) as client:
        yield client


@pytest_asyncio.fixture
async def gpt(two: Bases) -> AsyncIterator[openai.AsyncOpenAI]:
    transport = httpx2.ASGITransport(app_of(two))
    async with httpx2.AsyncClient(transport=transport) as client:
        yield openai.AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=client, max_retries=0)


MESSAGES: Any = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("model", "served"),
    [
        ("base", [1, 0]), ("other", [0, 1]), ("sql", [1, 0]), ("chat", [0, 1]), ("other:chat", [0, 1]),
        ("base:both", [1, 0]), ("other:both", [0, 1]), ("both", [1, 0]),
    ],
)  # fmt: skip
async def test_a_model_is_answered_by_its_base(
    two: Bases, gpt: openai.AsyncOpenAI, model: str, served: list[int]
) -> None:
    answer = await gpt.chat.completions.create(model=model, messages=MESSAGES, max_tokens=4)
    assert answer.model == model
    assert two.served() == served
    stream = await gpt.completions.create(model=model, prompt="hi", max_tokens=8, stream=True)
    assert [event async for event in stream]
    assert two.served() == served


async def test_the_models_are_those_of_both_bases(gpt: openai.AsyncOpenAI, http: httpx.AsyncClient) -> None:
    listed = [(model.id, model.model_dump()["parent"]) for model in (await gpt.models.list()).data]
    assert listed == [
        ("base", None), ("both", "base"), ("sql", "base"), ("other", None), ("other:both", "other"), ("chat", "other"),
    ]  # fmt: skip
    for name, parent in listed:
        found = (await gpt.models.retrieve(name)).model_dump()
        assert (found["id"], found["parent"]) == (name, parent)
    for limit in range(1, 8):
        pages: list[str] = []
        query: dict[str, Any] = {"limit": limit}
        while True:
            page = (await http.get("/v1/models", params=query)).json()
            assert 0 < len(page["data"]) <= limit
            pages += [model["id"] for model in page["data"]]
            if not page["has_more"]:
                break
            query["after"] = page["last_id"]
        assert pages == [name for name, _ in listed], limit
    with pytest.raises(openai.NotFoundError, match="there is no model or adapter 'nobody'"):
        await gpt.models.retrieve("nobody")


async def test_an_unknown_model_is_the_same_404_as_with_one_base(two: Bases, http: httpx.AsyncClient) -> None:
    alone = httpx.ASGITransport(make_app(two.first, HttpPolicy()))
    async with httpx.AsyncClient(transport=alone, base_url="http://test") as single:
        for path in ("/v1/chat/completions", "/v1/messages"):
            body = {"model": "nobody", "messages": MESSAGES, "max_tokens": 4}
            found, expected = await http.post(path, json=body), await single.post(path, json=body)
            assert (found.status_code, found.json()) == (404, expected.json())


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b'"x"', b'{"model": 3}', b'{"model": "other"} x'])
async def test_a_body_that_is_no_request_is_refused_as_with_one_base(
    two: Bases, http: httpx.AsyncClient, content: bytes
) -> None:
    alone = httpx.ASGITransport(make_app(two.first, HttpPolicy()))
    async with httpx.AsyncClient(transport=alone, base_url="http://test") as single:
        for path in ("/v1/chat/completions", "/v1/messages", "/v1/loras", "/v1/load_lora_adapter"):
            headers = {"Content-Type": "application/json"}
            found = await http.post(path, content=content, headers=headers)
            expected = await single.post(path, content=content, headers=headers)
            assert (found.status_code, found.json()) == (expected.status_code, expected.json())
            assert found.status_code == 400


async def test_a_body_may_be_as_long_as_with_one_base_and_no_longer(http: httpx.AsyncClient) -> None:
    body = {"model": "other", "prompt": "hi", "max_tokens": 1, "user": "u" * 19_000}
    assert (await http.post("/v1/completions", json=body)).status_code == 200
    answer = await http.post("/v1/completions", json=body | {"user": "u" * 20_000})
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")


@pytest.mark.parametrize("index", [0, 1])
async def test_a_client_that_leaves_ends_its_stream(two: Bases, index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.deployments.ingress.http.test_event_stream.make_app", lambda *_: app_of(two))
    service = two[index]
    (replica,) = service.fleet.replicas.values()
    replica.backend.max_steps = 20
    body = {"model": service.base_name, "prompt": "hi", "max_tokens": 100, "ignore_eos": True, "stream": True}
    client = Client(service, "/v1/completions", json.dumps(body).encode())
    await until(lambda: len(client.events) >= 4)  # it streams while the engine waits
    client.leaves.set()
    await client.answered
    assert service.observed == [("completions", 499)]
    await until(lambda: len(replica.aborted) == 1)
    replica.backend.resumed.set()
    await until(lambda: not replica.engine.has_work)


async def test_one_key_serves_both_and_each_request_is_charged_once_to_its_base(
    two: Bases, http: httpx.AsyncClient
) -> None:
    owner = two.first.accounting.tenants_service
    project = await owner.create_project("ada", actor="test")
    _, issued = await owner.create_account(project.id, "app", with_key=True, expires_in_s=None, actor="test")
    assert issued is not None
    for name in NAMES:
        await owner.limit_rates(project.id, name, {"requests_per_min": 2}, actor="test")

    async def status(model: str, prompt: str = "hi") -> int:
        body = {"model": model, "prompt": prompt, "max_tokens": 2}
        headers = {"Authorization": f"Bearer {issued.value}"}
        answer = await http.post("/v1/completions", json=body, headers=headers)
        return answer.status_code

    assert await status("other") == 200
    assert await status("chat") == 200
    assert await status("other") == 429
    assert await status("base") == 200, "the other base model's requests are not its own"
    assert await status("base", "x" * 500) == 400, "refused and charged"
    assert await status("base") == 429
    assert await status("nobody") == 429, "unknown names are charged to the first base model"
    await two.first.accounting.usage_flusher.flush()
    rates = (await owner.project(project.id)).limits.rates
    assert rates.keys() == set(NAMES)


async def test_new_projects_and_their_rate_limits_know_both_bases(two: Bases, http: httpx.AsyncClient) -> None:
    owner = two.first.accounting.tenants_service
    admin = await owner.create_admin_key("first", None, actor="test")
    headers = {"Authorization": f"Bearer {admin.value}"}
    made = await http.post("/v1/organization/projects", json={"name": "ada"}, headers=headers)
    path = f"/v1/organization/projects/{made.json()['id']}/rate_limits"
    listed = (await http.get(path, headers=headers)).json()["data"]
    assert [limit["model"] for limit in listed] == list(NAMES)


async def test_adapters_are_managed_at_their_base(two: Bases, http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/loras", json={"name": "more", "path": "more", "wait": True})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "base_model"
    assert "?base_model=" in answer.json()["error"]["message"]
    body = {"name": "more", "path": "more"}
    loading = await http.post("/v1/loras?base_model=other", json=body)
    assert loading.status_code == 202, loading.text
    job = loading.json()["job"]["id"]
    await until(lambda: "more" in two.second.registry.names("default"))
    assert (await http.get(f"/v1/jobs/{job}")).json()["name"] == "more"
    assert (await http.get("/v1/loras/more")).json()["id"] == "more"
    assert (await http.patch("/v1/loras/more", json={"description": "d"})).json()["description"] == "d"
    again = await http.post("/v1/load_lora_adapter", json={"lora_name": "more", "lora_path": "more"})
    assert "already been loaded" in again.text
    listed = (await http.get("/v1/loras", params={"base_model": "other", "limit": 10})).json()["data"]
    assert [each["id"] for each in listed] == ["both", "chat", "more"]
    alias = await http.put("/v1/aliases/talk", json={"targets": {"more": 1}})
    assert alias.status_code == 200, alias.text
    await until(lambda: "talk" in two.second.registry.names("default"))
    assert (await http.get("/v1/models/talk")).json()["parent"] == "other"
    assert (await http.delete("/v1/aliases/talk")).status_code == 200
    assert (await http.delete("/v1/loras/more")).status_code == 200
    assert (await http.get("/v1/models/more")).status_code == 404
    dynamo = {"lora_model": "more", "lora_path": "more", "base_model": "other"}
    assert (await http.post("/v1/load_lora", json=dynamo)).status_code == 200
    assert (await http.post("/v1/unload_lora_adapter", json={"lora_name": "more"})).status_code == 200
    manifest = {"adapters": [{"name": "more", "path": "more"}]}
    assert (await http.post("/v1/loras/manifest", json=manifest)).status_code == 400
    assert (await http.post("/v1/loras/manifest?base_model=other", json=manifest)).status_code == 200


async def test_a_name_of_another_base_is_not_given_twice(http: httpx.AsyncClient) -> None:
    for name in ("sql", "base"):
        answer = await http.post("/v1/loras?base_model=other", json={"name": name, "path": "more", "wait": True})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "name")
        assert f"{name!r} belongs to the base model 'base'" in answer.json()["error"]["message"]
    answer = await http.get("/v1/loras?base_model=nobody")
    assert answer.status_code == 404
    assert "there are base, other" in answer.json()["error"]["message"]


async def test_a_callers_own_adapter_comes_before_a_public_one_of_an_earlier_base(two: Bases) -> None:
    owner = two.first.accounting.tenants_service
    project = await owner.create_project("ada", actor="test")
    await two.second.managed.client.load_and_wait(LoadRequest(project.id, "sql", "chat", "test"))
    await until(lambda: "sql" in two.second.registry.names(project.id))
    bases = BaseModels(two)
    mine = Principal(project.id, "ada", project, "key", "project")
    assert bases.serving("sql", mine) is two.second
    assert bases.serving("sql", Principal("default", "anyone")) is two.first
    with pytest.raises(InvalidRequest, match="several base models"):
        bases.registering(["new"], None, mine)
    assert bases.registering(["sql"], None, mine) is two.second


async def test_a_quota_of_adapters_counts_those_of_all_bases(two: Bases) -> None:
    owner = two.first.accounting.tenants_service
    project = await owner.create_project("ada", actor="test")
    await owner.configure_project(project.id, {"max_adapters": 1}, actor="test")
    await two.first.managed.client.load_and_wait(LoadRequest(project.id, "one", "sql", "test"))
    with pytest.raises(Exception, match="would have 2 adapters and may have 1"):
        await two.second.managed.client.load_and_wait(LoadRequest(project.id, "two", "chat", "test"))


async def test_the_lines_of_a_batch_go_to_their_bases(two: Bases, gpt: openai.AsyncOpenAI) -> None:
    runner = two.first.batch_runner(answer_line(BaseModels(two)), "here", write_s=0.01)
    working = asyncio.create_task(runner.run())
    url = "/v1/completions"
    lines = [
        {"custom_id": model, "method": "POST", "url": url, "body": {"model": model, "prompt": "hi", "max_tokens": 2}}
        for model in ("base", "chat", "other", "nobody")
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    file = await gpt.files.create(file=("in.jsonl", io.BytesIO(content)), purpose="batch")
    batch = await gpt.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h")
    while (batch := await gpt.batches.retrieve(batch.id)).status != "completed":
        await asyncio.sleep(0.01)
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)
    assert batch.output_file_id is not None
    text = (await gpt.files.content(batch.output_file_id)).text
    assert {json.loads(line)["custom_id"] for line in text.splitlines()} == {"base", "chat", "other"}
    assert sum(route == "completions" and status == 200 for route, status in two.second.observed) == 2


async def test_the_service_is_ready_when_each_base_is(two: Bases, http: httpx.AsyncClient) -> None:
    await until(lambda: all(service.is_ready() for service in two))
    assert (await http.get("/health")).status_code == 200
    two.second.fleet.drop("replica-0")
    assert (await http.get("/health")).status_code == 503
