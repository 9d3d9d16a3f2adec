"""A name that no ingress knows: what a request meets before it is a 404."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from app.config import LimitsConfig
from app.deployments.ingress.tenants import Caller, handle_caller
from app.deployments.ingress.unregistered import MAX_NAMES, Unregistered
from app.deployments.registry.resolving import Places
from app.deployments.registry.view import RegistryView
from app.deployments.tenants.entries import Tenant
from app.engine.errors import AdapterMismatch, NotReady, QueueFull
from tests.deployments.http_service import Service
from tests.deployments.ingress.test_dispatcher import until

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


class ByName:
    """A place where each adapter is called as its name is."""

    def source(self, name: str, tenant_id: str) -> str | None:
        return name if tenant_id == "default" else f"{tenant_id}/{name}"


@pytest.fixture
def finding(service: Service) -> Service:
    service.managed.resolution.use(Places([ByName()]))
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
    assert await finding.frontend.find_adapter("base", handle_caller(), adapters=adapters) is not None
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
    """A store that answers when it may; `asked` are the names."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.gate = asyncio.Event()

    async def resolve(self, name: str, *, tenant_id: str, who: str) -> bool:  # noqa: ARG002
        self.asked.append((tenant_id, name))
        await self.gate.wait()
        return True


def tenant(name: str, *denied: str) -> Caller:
    row = Tenant(name, name, 0.0, model_mode="deny_list", model_ids=frozenset(denied))
    return Caller(name, "key", row, kind="project")


async def test_a_project_asks_among_its_own_names_for_what_it_may_use(service: Service) -> None:
    store = Gated()
    store.gate.set()
    asking = Unregistered(service.registry, store, LimitsConfig(), is_on=True)
    assert not await asking.ask(["not-this"], tenant("a", "not-this"))
    assert not await asking.ask(["sql"], tenant("a")), "it is everybody's, and registered"
    assert await asking.ask(["this", "this"], tenant("a"))
    assert store.asked == [("a", "this")]
    off = Unregistered(service.registry, store, LimitsConfig(), is_on=False)
    assert not await off.ask(["this"], tenant("b"))
    assert store.asked == [("a", "this")]


async def test_one_question_per_name_and_few_per_tenant() -> None:
    store = Gated()
    limits = LimitsConfig(max_waiting_per_adapter=MAX_NAMES + 3, max_waiting_for_adapters=MAX_NAMES + 4)
    asking = Unregistered(RegistryView(), store, limits, is_on=True)
    waiting = [asyncio.create_task(asking.ask([f"n{i}"], tenant("a"))) for i in range(MAX_NAMES)]
    waiting += [asyncio.create_task(asking.ask(["n0"], tenant("a"))) for _ in range(2)]
    await until(lambda: len(store.asked) == MAX_NAMES)
    with pytest.raises(QueueFull, match=f"{MAX_NAMES} names"):
        await asking.ask(["more"], tenant("a"))
    waiting.append(asyncio.create_task(asking.ask(["n0"], tenant("a"))))
    await asyncio.sleep(0)
    with pytest.raises(QueueFull, match="max_waiting_per_adapter"):
        await asking.ask(["n0"], tenant("a"))
    waiting.append(asyncio.create_task(asking.ask(["n0"], tenant("b"))))
    await asyncio.sleep(0)
    with pytest.raises(QueueFull, match="max_waiting_for_adapters"):
        await asking.ask(["n0"], tenant("c"))
    store.gate.set()
    assert await asyncio.gather(*waiting) == [True] * len(waiting)
    assert await asking.ask(["more"], tenant("a")), "there is room again"
    assert not asking._waiting


async def test_nobody_waits_longer_than_for_any_adapter() -> None:
    store = Gated()
    asking = Unregistered(RegistryView(), store, LimitsConfig(adapter_wait_s=0.01), is_on=True)
    with pytest.raises(NotReady, match="adapter_wait_s"):
        await asking.ask(["slow"], tenant("a"))
    store.gate.set()
    assert await asking.ask(["slow"], tenant("a")), "the question went on"
    assert len(store.asked) == 1
    await asking.close()
