"""What an ingress does behind its routes: limits that change, readiness, counts, and what it reads ahead."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from app.config import HttpConfig
from app.deployments.ingress.preprocess import adapter_directory
from app.deployments.ingress.principal import handle_principal
from app.deployments.ingress.schemas.openai import ChatCompletionRequest
from app.engine.adapters.adapter_tokenizer import AdapterTokenizer
from app.engine.adapters.card import AdapterRef
from app.engine.errors import NotReady
from tests.deployments.http_service import Service
from tests.deployments.ingress.dispatch.test_dispatcher import until
from tests.deployments.managed import MINE, wanted


async def test_new_limits_are_those_of_requests_and_of_waiting_for_replicas(service: Service) -> None:
    service.reconfigure({"replica_timeout_s": 2.5, "max_logprobs": 3})
    assert service._request_router.replica_timeout_s == 2.5
    assert (service.preprocessor.limits.max_sequences, service.preprocessor.limits.max_logprobs) == (4, 3)
    with pytest.raises(ValueError, match="replica_timeout_s"):
        service.reconfigure({"replica_timeout_s": "soon"})
    assert service._request_router.replica_timeout_s == 2.5


async def test_it_is_ready_while_a_replica_is(service: Service) -> None:
    assert service.is_ready()
    assert await service.replica_stats() == [{"replica_id": "replica-0", "num_running": 0}]
    service.fleet.drop("replica-0")
    assert not service.is_ready()
    assert await service.replica_stats() == []


async def test_a_service_that_may_sleep_is_ready_and_says_that_it_sleeps(
    service: Service, http: httpx.AsyncClient
) -> None:
    awake = service._config
    service._config = awake.model_copy(update={"http": HttpConfig(ready_at_zero_replicas=True)})
    assert (await http.get("/readyz")).json() == {"status": "ok"}
    service.fleet.drop("replica-0")
    for path in ("/readyz", "/health"):
        answer = await http.get(path)
        assert (answer.status_code, answer.json()) == (200, {"status": "asleep"})
    assert not service.is_ready(), "polylora status says that no engine runs"
    refused = await http.post("/v1/completions", json={"model": "base", "prompt": "hi"})
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "5"), "replica_timeout_s is over"


async def test_a_replica_that_does_not_answer_is_left_out_of_the_counts(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.fleet.add()
    stats = service._replicas.stats

    async def one_is_away(replica_id: str) -> dict[str, object]:
        if replica_id == "replica-0":
            raise NotReady("away")
        return await stats(replica_id)

    monkeypatch.setattr(service._replicas, "stats", one_is_away)
    assert [counts["replica_id"] for counts in await service.replica_stats()] == ["replica-1"]


@pytest.mark.parametrize("is_away", [False, True])
async def test_an_adapter_that_is_on_no_device_is_read_ahead_once(
    service: Service, monkeypatch: pytest.MonkeyPatch, is_away: bool
) -> None:
    expected: list[AdapterRef] = []
    gate = asyncio.Event()

    async def prefetch(ref: AdapterRef) -> None:
        expected.append(ref)
        await gate.wait()
        if is_away:
            raise NotReady("the store restarts")

    monkeypatch.setattr(service.managed.client, "prefetch", prefetch)
    caller = handle_principal()
    refs = {await service.preprocessor.resolver.resolve("sql", caller) for _ in range(3)}
    await until(lambda: bool(expected))
    assert refs == set(expected)
    assert len(expected) == 1, "one read is enough for three requests"
    gate.set()
    await until(lambda: not service._directory._prefetching)
    assert await service.preprocessor.resolver.resolve("sql", caller) in refs
    assert not service._directory._prefetching, "it was asked for a moment ago"
    monkeypatch.setattr(adapter_directory, "PREFETCH_AGAIN_AFTER_S", 0.0)
    assert await service.preprocessor.resolver.resolve("sql", caller) in refs
    await until(lambda: len(expected) == 2)


async def test_an_adapter_that_is_on_a_device_is_not_read_ahead(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service.managed.client, "prefetch", None)  # calling it would fail
    ref = service.registry.resolve("sql", "", handle_principal().tenant_id)
    assert ref is not None
    replica = service.fleet.replicas["replica-0"]
    await asyncio.wrap_future(replica.thread.load_adapter(service.fleet.adapters[ref.digest], ref))
    assert await service.preprocessor.resolver.resolve("sql", handle_principal()) == ref


async def test_an_adapter_of_one_tenant_is_nothing_to_another(service: Service) -> None:
    assert service.registry.resolve("sql", "", handle_principal().tenant_id) is not None
    assert service.registry.resolve("sql", "", "another") is None


async def test_a_request_is_its_caller_s(service: Service) -> None:
    from app.deployments.ingress.principal import Principal
    from app.deployments.ingress.schemas.openai import CompletionRequest

    caller = Principal("acme", "ada")
    job = await service.preprocessor.completion(CompletionRequest(model="base", prompt="hi", n=2), caller)
    assert [request.tenant_id for request in job.requests] == ["acme", "acme"]


async def test_a_chat_is_written_with_its_adapters_own_text(service: Service) -> None:
    service.managed.store.contents |= {"own": "d1", "plain": "d2"}
    text = service.managed.store.texts["d1"] = AdapterTokenizer("mine|", {}, {}).to_json()
    for name in ("own", "plain"):
        await service.managed.registry_service.loads.load_and_wait(wanted(name, name))
    letters, asked = service.preprocessor.tokenizer, "user:hi|"
    for model, wanted_text in (("own", "mine|" + asked), ("plain", asked), ("base", asked)):
        body = ChatCompletionRequest.model_validate({"model": model, "messages": [{"role": "user", "content": "hi"}]})
        job = await service.preprocessor.chat(body, handle_principal())
        assert list(job.requests[0].token_ids) == letters.encode(wanted_text)
    entry = service.managed.registry.catalog.get("own", **MINE)
    assert entry is not None
    assert entry.text == text
    service.managed.store.contents["own"] = "d3"  # contents without a text of their own take the name over
    await service.managed.registry_service.loads.load_and_wait(wanted("own", "own"))
    assert service.preprocessor.directory.text(entry.ref) == text, "a request under way keeps its adapter's"
    entry = service.managed.registry.catalog.get("own", **MINE)
    assert entry is not None
    assert service.preprocessor.directory.text(entry.ref) == ""
