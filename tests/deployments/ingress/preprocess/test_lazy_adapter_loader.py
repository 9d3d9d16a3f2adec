"""Adapters that are looked for, registered and read when the first request names them."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from app.config import LimitsConfig
from app.deployments.ingress.preprocess.lazy_adapter_loader import MAX_LOOKUPS_PER_TENANT, LazyAdapterLoader
from app.deployments.ingress.principal import Principal, handle_principal
from app.deployments.registry.feed.view import RegistryView
from app.deployments.registry.jobs.auto_registration import ResolverSettings
from app.deployments.tenancy.models import Tenant
from app.engine.errors import AdapterFormatError, AdapterMismatch, NotReady, QueueFull
from tests.deployments.http_service import Service
from tests.deployments.ingress.dispatch.test_dispatcher import until

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


class ByName:
    """A place where each adapter is called as its name is."""

    def source(self, name: str, tenant_id: str) -> str | None:
        return name if tenant_id == "default" else f"{tenant_id}/{name}"


@pytest.fixture
def finding(service: Service) -> Service:
    service.managed.resolution.reconfigure(ResolverSettings([ByName()]))
    return service


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"model": "two"} | CHAT),
        ("/v1/completions", {"model": "base:two", "prompt": "hi"}),
        ("/v1/completions", {"model": "base", "lora_path": "two", "prompt": "hi"}),
        ("/v1/embeddings", {"model": "two", "input": "hi"}),
        ("/generate", {"text": "hi", "lora_path": "two", "sampling_params": {"max_tokens": 3}}),
        ("/tokenize", {"model": "two", "prompt": "hi"}),
        ("/v1/messages/count_tokens", {"model": "two"} | CHAT),
    ],
)
async def test_every_route_finds_it(finding: Service, http: httpx.AsyncClient, path: str, body: object) -> None:
    answer = await http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert finding.registry.adapter("two", "default") is not None


async def test_several_adapters_are_found_together(finding: Service) -> None:
    from app.deployments.ingress.schemas.openai import WeightedAdapter

    adapters = [WeightedAdapter(name="two"), WeightedAdapter(name="new")]
    assert await finding.preprocessor.resolver.resolve("base", handle_principal(), adapters=adapters) is not None
    assert {finding.registry.adapter(name, "default") is not None for name in ("two", "new")} == {True}


async def test_what_nobody_has_is_the_usual_404(finding: Service, http: httpx.AsyncClient) -> None:
    found, missing = "nobody", (await http.post("/v1/completions", json={"model": "nobody", "prompt": "hi"}))
    assert missing.status_code == 404
    assert f"there is no model or adapter '{found}'" in missing.json()["error"]["message"]
    for odd in ("../two", "/etc/passwd", "a/b"):
        assert (await http.post("/v1/completions", json={"model": odd, "prompt": "hi"})).status_code == 404
    assert "../two" not in finding.managed.store.loads


async def test_an_adapter_that_cannot_be_read_is_its_typed_error(finding: Service, http: httpx.AsyncClient) -> None:
    finding.managed.store.contents["bad"] = AdapterMismatch("it is for another base")
    answer = await http.post("/v1/completions", json={"model": "bad", "prompt": "hi"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_adapter")


async def test_without_places_the_store_is_not_asked(service: Service, http: httpx.AsyncClient) -> None:
    assert (await http.post("/v1/completions", json={"model": "two", "prompt": "hi"})).status_code == 404
    assert service.managed.store.loads == ["sql"]


class Gated:
    """A store that answers when it may; `requested_grammar` are the names."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.gate = asyncio.Event()

    async def resolve(self, name: str, *, tenant_id: str, who: str) -> bool:  # noqa: ARG002
        self.asked.append((tenant_id, name))
        await self.gate.wait()
        return True

    async def load_for_request(self, name: str, *, tenant_id: str, who: str) -> None:
        await self.resolve(name, tenant_id=tenant_id, who=who)


def tenant(name: str, *denied: str) -> Principal:
    row = Tenant(name, name, 0.0, model_mode="deny_list", model_ids=frozenset(denied))
    return Principal(name, "key", row, kind="project")


async def test_a_project_asks_among_its_own_names_for_what_it_may_use(service: Service) -> None:
    store = Gated()
    store.gate.set()
    loader = LazyAdapterLoader(service.registry, store, LimitsConfig(), has_resolvers=True)
    assert not await loader.register(["not-this"], tenant("a", "not-this"))
    assert not await loader.register(["sql"], tenant("a")), "it is everybody's, and registered"
    assert await loader.register(["this", "this"], tenant("a"))
    assert store.asked == [("a", "this")]
    off = LazyAdapterLoader(service.registry, store, LimitsConfig(), has_resolvers=False)
    assert not await off.register(["this"], tenant("b"))
    assert store.asked == [("a", "this")]


async def test_one_question_per_name_and_few_per_tenant() -> None:
    store = Gated()
    limits = LimitsConfig(
        max_pending_requests_per_adapter=MAX_LOOKUPS_PER_TENANT + 3,
        max_pending_cold_requests=MAX_LOOKUPS_PER_TENANT + 4,
    )
    loader = LazyAdapterLoader(RegistryView(), store, limits, has_resolvers=True)
    waiting = [asyncio.create_task(loader.register([f"n{i}"], tenant("a"))) for i in range(MAX_LOOKUPS_PER_TENANT)]
    waiting += [asyncio.create_task(loader.register(["n0"], tenant("a"))) for _ in range(2)]
    await until(lambda: len(store.asked) == MAX_LOOKUPS_PER_TENANT)
    with pytest.raises(QueueFull, match=f"{MAX_LOOKUPS_PER_TENANT} unregistered names"):
        await loader.register(["more"], tenant("a"))
    waiting.append(asyncio.create_task(loader.register(["n0"], tenant("a"))))
    await asyncio.sleep(0)
    with pytest.raises(QueueFull, match="max_pending_requests_per_adapter"):
        await loader.register(["n0"], tenant("a"))
    waiting.append(asyncio.create_task(loader.register(["n0"], tenant("b"))))
    await asyncio.sleep(0)
    waiting.append(asyncio.create_task(loader.register(["n0"], tenant("c"))))
    await asyncio.sleep(0)
    with pytest.raises(QueueFull, match=f"max_pending_cold_requests is {MAX_LOOKUPS_PER_TENANT + 4}"):
        await waiting.pop(-3)  # the newest of the tenant with the most gives way
    store.gate.set()
    assert await asyncio.gather(*waiting) == [True] * len(waiting)
    assert await loader.register(["more"], tenant("a")), "there is room again"
    assert not len(loader._waiting_lookups._total)


async def test_nobody_waits_longer_than_for_any_adapter() -> None:
    store = Gated()
    loader = LazyAdapterLoader(RegistryView(), store, LimitsConfig(adapter_load_timeout_s=0.01), has_resolvers=True)
    with pytest.raises(NotReady, match="adapter_load_timeout_s"):
        await loader.register(["slow"], tenant("a"))
    store.gate.set()
    assert await loader.register(["slow"], tenant("a")), "the question went on"
    assert len(store.asked) == 1
    await loader.close()


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


async def test_one_is_registered_by_the_field_lazy_and_loaded_when_asked(
    service: Service, http: httpx.AsyncClient
) -> None:
    answer = await http.post("/v1/loras", json={"name": "two", "path": "two", "lazy": True, "description": "counts"})
    assert answer.status_code == 201
    assert {key: answer.json()[key] for key in ("id", "state", "generation", "source", "description")} == {
        "id": "two",
        "state": "REGISTERED",
        "generation": 0,
        "source": "two",
        "description": "counts",
    }
    assert service.managed.store.loads == ["sql"]
    read = await http.post("/v1/loras/two/load")
    assert (read.status_code, read.json()["state"], read.json()["job"]["state"]) == (200, "LOADED", "LOADED")
    assert (await http.post("/v1/loras/two/load")).json()["job"] is None


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
    assert (await http.post("/v1/loras/bad/load")).status_code == 400


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"name": "x", "path": "x", "lazy": True, "pinned": True}, "pinned"),
        ({"name": "x", "combine": {"adapters": [{"name": "sql"}]}, "lazy": True}, "lazy"),
        ({"name": "x", "combine": {"adapters": [{"name": "two"}, {"name": "sql"}]}}, "adapters"),
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


async def test_requests_for_one_name_wait_together_and_only_so_many() -> None:
    store, limits = Gated(), LimitsConfig(max_pending_requests_per_adapter=2, max_pending_cold_requests=3)
    loader = LazyAdapterLoader(RegistryView(), store, limits, has_resolvers=False)
    ends = [asyncio.create_task(loader.read(name, "a", handle_principal())) for name in ("x", "x", "y")]
    while len(store.asked) < 2:
        await asyncio.sleep(0)
    with pytest.raises(QueueFull, match="max_pending_requests_per_adapter is 2"):
        await loader.read("x", "a", handle_principal())
    with pytest.raises(QueueFull, match="max_pending_cold_requests is 3"):
        await loader.read("z", "a", handle_principal())
    assert store.asked == [("a", "x"), ("a", "y")]
    store.gate.set()
    await asyncio.gather(*ends)
    await loader.read("z", "a", handle_principal())
    await loader.close()


async def test_who_waits_for_too_long_is_told_to_come_again() -> None:
    loader = LazyAdapterLoader(RegistryView(), Gated(), LimitsConfig(adapter_load_timeout_s=0.01), has_resolvers=False)
    with pytest.raises(NotReady, match="adapter_load_timeout_s") as refused:
        await loader.read("x", "a", handle_principal())
    assert refused.value.retry_after_s == 5
    await loader.close()
