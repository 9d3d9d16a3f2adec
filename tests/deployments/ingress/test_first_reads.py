"""A registered adapter that nobody has read: what the first requests for it meet."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from app.config import LimitsConfig
from app.deployments.ingress.first_reads import FirstReads
from app.deployments.ingress.tenants import handle_caller
from app.engine.errors import AdapterFormatError, NotReady, QueueFull
from tests.deployments.http_service import Service

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


async def register(http: httpx.AsyncClient, *names: str) -> None:
    answer = await http.post("/v1/loras/manifest", json={"adapters": [{"name": name, "path": name} for name in names]})
    assert answer.json() == {"object": "manifest", "num_registered": len(names), "num_unchanged": 0}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"model": "two"} | CHAT),
        ("/v1/completions", {"model": "base:two", "prompt": "hi"}),
        ("/v1/completions", {"model": "base", "adapters": [{"name": "two"}, {"name": "new"}], "prompt": "hi"}),
        ("/v1/embeddings", {"model": "two", "input": "hi"}),
        ("/generate", {"text": "hi", "lora_path": "two", "sampling_params": {"max_tokens": 3}}),
        ("/v1/completions", {"model": "app", "prompt": "hi"}),
    ],
)
async def test_the_first_request_has_it_read(
    service: Service, http: httpx.AsyncClient, path: str, body: dict[str, object]
) -> None:
    await register(http, "two", "new")
    assert (await http.put("/v1/aliases/app", json={"targets": {"two": 1}})).status_code == 200
    listed = {row["id"]: row["state"] for row in (await http.get("/v1/loras")).json()["data"]}
    assert listed == {"sql": "LOADED", "two": "REGISTERED", "new": "REGISTERED"}
    assert "two" in [row["id"] for row in (await http.get("/v1/models")).json()["data"]]
    if "adapters" not in body:
        assert (await http.post(path, json=body)).status_code == 200
    else:  # the fake store combines nothing: that both were read is what is to be seen
        await http.post(path, json=body)
        assert service.managed.store.loads[1:3] == ["two", "new"]
    assert (await http.get("/v1/loras/two")).json()["state"] == "LOADED"


async def test_one_is_registered_by_the_field_read_and_read_when_asked(
    service: Service, http: httpx.AsyncClient
) -> None:
    answer = await http.post("/v1/loras", json={"name": "two", "path": "two", "read": False, "description": "counts"})
    assert answer.status_code == 201
    assert {key: answer.json()[key] for key in ("id", "state", "generation", "source", "description")} == {
        "id": "two",
        "state": "REGISTERED",
        "generation": 0,
        "source": "two",
        "description": "counts",
    }
    assert service.managed.store.loads == ["sql"]
    read = await http.post("/v1/loras/two/read")
    assert (read.status_code, read.json()["state"], read.json()["job"]["state"]) == (200, "LOADED", "LOADED")
    assert (await http.post("/v1/loras/two/read")).json()["job"] is None


async def test_what_cannot_be_read_says_so_to_the_request_and_why_to_who_manages(
    service: Service, http: httpx.AsyncClient
) -> None:
    service.managed.store.contents["bad"] = AdapterFormatError("/srv/bad has no config")
    await register(http, "bad")
    answer = await http.post("/v1/completions", json={"model": "bad", "prompt": "hi"})
    assert (answer.status_code, "/srv" in answer.text) == (503, False)
    assert int(answer.headers["retry-after"]) >= 1
    described = (await http.get("/v1/loras/bad")).json()
    assert (described["state"], described["last_error"]) == ("REGISTERED", "/srv/bad has no config")
    assert (await http.post("/v1/loras/bad/read")).status_code == 400


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"name": "x", "path": "x", "read": False, "pinned": True}, "pinned"),
        ({"name": "x", "compose": {"adapters": [{"name": "sql"}]}, "read": False}, "read"),
        ({"name": "x", "compose": {"adapters": [{"name": "two"}, {"name": "sql"}]}}, "adapters"),
    ],
)
async def test_what_needs_contents_is_refused(
    service: Service, http: httpx.AsyncClient, body: object, param: str
) -> None:
    await register(http, "two")
    answer = await http.post("/v1/loras", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert service.registry.adapter("x", "default") is None


async def test_vllm_and_dynamo_load_what_is_only_registered(http: httpx.AsyncClient) -> None:
    await register(http, "two", "new")
    loaded = await http.post("/v1/load_lora_adapter", json={"lora_name": "two", "lora_path": "two"})
    assert loaded.status_code == 200, loaded.text
    assert (await http.post("/v1/load_lora", json={"lora_model": "new"})).status_code == 200


class Gated:
    """A store that answers when it may."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.gate = asyncio.Event()

    async def read_for_request(self, name: str, *, tenant_id: str, who: str) -> None:  # noqa: ARG002
        self.asked.append((tenant_id, name))
        await self.gate.wait()


async def test_requests_for_one_name_wait_together_and_only_so_many() -> None:
    store = Gated()
    reads = FirstReads(store, LimitsConfig(max_waiting_per_adapter=2, max_waiting_for_adapters=3))
    ends = [asyncio.create_task(reads.read(name, "a", handle_caller())) for name in ("x", "x", "y")]
    while len(store.asked) < 2:
        await asyncio.sleep(0)
    with pytest.raises(QueueFull, match="2 requests wait for adapter 'x'"):
        await reads.read("x", "a", handle_caller())
    with pytest.raises(QueueFull, match="3 for any"):
        await reads.read("z", "a", handle_caller())
    assert store.asked == [("a", "x"), ("a", "y")]
    store.gate.set()
    await asyncio.gather(*ends)
    await reads.read("z", "a", handle_caller())
    await reads.close()


async def test_who_waits_for_too_long_is_told_to_come_again() -> None:
    reads = FirstReads(Gated(), LimitsConfig(adapter_wait_s=0.01))
    with pytest.raises(NotReady, match="adapter_wait_s") as refused:
        await reads.read("x", "a", handle_caller())
    assert refused.value.retry_after_s == 5
    await reads.close()
