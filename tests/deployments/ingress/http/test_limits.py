"""Limits and usage as clients and operators see them: headers, refusals, and a ledger that agrees with the engines."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from app.deployments.ingress import handle_api
from app.deployments.ingress.accounting import duration
from app.deployments.ingress.http.app import make_app
from app.deployments.ingress.http.middleware.origin_check import HttpPolicy
from app.deployments.tenancy.quota.limits import NANOS_PER_CENT, LimitKey
from app.deployments.tenancy.quota.rate_limiter import RejectedRequest
from app.deployments.tenancy.usage.flusher import UsageRecord
from tests.deployments.http_service import Service, add_judge
from tests.deployments.ingress.dispatch.test_dispatcher import until
from tests.deployments.ingress.http.middleware.test_auth import CHAT, Org, org
from tests.deployments.ingress.http.routes.test_admin import client_with

__all__ = ["org"]

#: A body for every route that generates. A new one belongs here, and is then metered, or the test below fails.
GENERATING: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": "sql", "prompt": ["ab", "cde"], "max_tokens": 3, "n": 2, "temperature": 0},
    "/generate": {"text": ["a", "b"], "lora_path": [None, "sql"], "sampling_params": {"max_new_tokens": 2}},
    "/v1/embeddings": {"model": "sql", "input": ["ab", "cde" * 8]},
    "/v1/score": {"model": "judge", "text_1": "a", "text_2": ["ab", "cde" * 8]},
    "/v1/rerank": {"model": "judge", "query": "a", "documents": ["ab", "cde" * 8]},
    "/v1/classify": {"model": "judge", "input": ["ab", "cde" * 8]},
    "/v1/responses": {"model": "sql", "input": "abc", "max_output_tokens": 3, "temperature": 0},
    "/v1/route": {"prompt": "which of them writes queries?"},
    "/v1/messages": {"model": "sql", "messages": CHAT["messages"], "max_tokens": 3, "temperature": 0},
}


#: A body for every route that counts or spells tokens, and asks no engine.
COUNTING: dict[str, dict[str, Any]] = {
    "/tokenize": {"model": "sql", "prompt": "abc"},
    "/detokenize": {"model": "sql", "tokens": [1, 2, 3]},
    "/v1/messages/count_tokens": {"model": "sql", "messages": CHAT["messages"]},
    "/v1/responses/input_tokens": {"model": "sql", "input": "abc"},
}


async def describe(org: Org) -> None:
    """Something to choose among, and one with a score head. The base's own sentences are embedded now, for no
    caller."""
    await add_judge(org.service)
    answer = await org.ask("admin", "PATCH", "/v1/loras/sql", json={"description": "writes queries"})
    assert answer.status_code == 200, answer.text


async def used(service: Service) -> UsageRecord:
    assert await service.accounting.usage_flusher.flush()
    return await asyncio.to_thread(service.managed.books.ledger.total)


async def engines(service: Service) -> UsageRecord:
    """What they have computed, written and held."""
    stats = service.fleet.replicas["replica-0"].thread.stats()
    return UsageRecord(
        0,
        stats.num_prompt_tokens,
        stats.num_cached_tokens,
        stats.num_tokens_generated,
        stats.num_adapter_writes,
        stats.num_adapter_write_bytes,
        0,
        stats.rank_row_ms,
        stats.kv_block_ms,
    )


def test_every_route_that_takes_a_body_is_known(service_routes: set[str]) -> None:
    """Whoever adds a route that generates has to say so: it is not managing, so it is metered."""
    managing = ("/v1/organization", "/v1/tenants", "/v1/loras", "/v1/aliases")
    keeping = ("/v1/files", "/v1/batches")  # `test_batches` has the tokens of what is computed for them later
    signing_in = {"/v1/session"}
    spellings = {"/v1/load_lora", "/v1/unload_lora", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"}
    asking = {path for path in service_routes if not path.startswith(managing + keeping)} - spellings - signing_in
    assert asking == set(GENERATING) | set(COUNTING)


@pytest_asyncio.fixture
async def service_routes(service: Service) -> set[str]:
    app: Any = make_app(service, HttpPolicy())
    return {route.path_format for route in app.routes if {"POST", "PUT"} & getattr(route, "methods", set())}


@pytest.mark.parametrize("path", sorted(GENERATING))
async def test_what_a_route_computes_is_in_the_ledger_to_the_token(org: Org, path: str) -> None:
    await describe(org)
    for _ in range(2):  # the second finds its prompt in the cache
        answer = await org.ask("ada", "POST", path, json=GENERATING[path])
        assert answer.status_code == 200, answer.text
    total = await used(org.service)
    assert total.num_requests == 2
    assert total._replace(num_requests=0, cost_nanos=0) == await engines(org.service)
    assert total.prompt_tokens > 0
    silent = ("/v1/embeddings", "/v1/score", "/v1/rerank", "/v1/classify", "/v1/route")
    assert (total.completion_tokens > 0) == (path not in silent)


@pytest.mark.parametrize("path", sorted(GENERATING))
async def test_every_route_is_limited(org: Org, path: str) -> None:
    owner = org.service.accounting.tenants_service
    await describe(org)
    await owner.limit_rates(org.ids["ada"], "base", {"requests_per_min": 1, "tokens_per_min": 100_000}, actor="test")
    await owner.configure_project(org.ids["ada"], {"max_concurrent": 4}, actor="test")
    first, second = [await org.ask("ada", "POST", path, json=GENERATING[path]) for _ in range(2)]
    assert (first.status_code, second.status_code) == (200, 429), second.text
    assert first.headers["x-ratelimit-remaining-requests"] == "0"
    await owner.limit_rates(org.ids["ada"], "base", {"requests_per_min": 9, "tokens_per_min": 1}, actor="test")
    assert (await org.ask("ada", "POST", path, json=GENERATING[path])).status_code == 429


@pytest.mark.parametrize("path", sorted(COUNTING))
async def test_counting_tokens_takes_one_request_and_nothing_else(org: Org, path: str) -> None:
    owner = org.service.accounting.tenants_service
    no_tokens = {"requests_per_min": 2, "requests_per_day": 9, "tokens_per_min": 0}
    await owner.limit_rates(org.ids["ada"], "base", no_tokens, actor="test")
    await owner.limit_spend(org.ids["ada"], 0, actor="test")
    await owner.configure_project(org.ids["ada"], {"max_concurrent": 1}, actor="test")
    began_s = time.monotonic()
    first, second, third = [await org.ask("ada", "POST", path, json=COUNTING[path]) for _ in range(3)]
    assert [each.status_code for each in (first, second, third)] == [200, 200, 429], third.text
    assert [each.headers["x-ratelimit-remaining-requests"] for each in (first, second, third)] == ["1", "0", "0"]
    error = third.json()["error"]
    assert "requests per minute" in error["message"]
    if path.startswith("/v1/messages"):
        assert (third.json()["type"], error["type"]) == ("error", "rate_limit_error")
    else:
        assert (error["type"], error["code"]) == ("requests", "rate_limit_exceeded")
    assert 28 - (time.monotonic() - began_s) <= int(third.headers["Retry-After"]) <= 30
    assert "retry-after-ms" in third.headers
    assert (await org.ask("bob", "POST", path, json=COUNTING[path])).status_code == 200
    assert await used(org.service) == await engines(org.service) == UsageRecord(), "no engine is asked"


@pytest.mark.parametrize("path", sorted(COUNTING))
async def test_counting_tokens_takes_a_request_of_the_adapter_that_is_named(org: Org, path: str) -> None:
    await org.service.accounting.tenants_service.limit_rates(
        org.ids["ada"], "sql", {"requests_per_min": 1}, actor="test"
    )
    models = ("sql", "sql", "base")
    answers = [await org.ask("ada", "POST", path, json=COUNTING[path] | {"model": model}) for model in models]
    assert [each.status_code for each in answers] == [200, 429, 200]


@pytest.mark.parametrize("path", sorted(COUNTING))
async def test_a_refused_request_that_counts_tokens_takes_one_request_as_well(org: Org, path: str) -> None:
    owner = org.service.accounting.tenants_service
    wrong: list[dict[str, Any]] = [{"model": "nobody"}]
    if path == "/detokenize":
        wrong.append({"tokens": [99]})  # is found out when the request is already held
    await owner.limit_rates(org.ids["ada"], "base", {"requests_per_min": len(wrong)}, actor="test")
    await owner.configure_project(org.ids["ada"], {"max_concurrent": 1}, actor="test")
    for change in wrong:
        refused = await org.ask("ada", "POST", path, json=COUNTING[path] | change)
        assert refused.status_code in (400, 404), refused.text
    assert (await org.ask("ada", "POST", path, json=COUNTING[path])).status_code == 429


async def test_counting_tokens_holds_one_concurrent_request_until_its_client_leaves(
    org: Org, monkeypatch: pytest.MonkeyPatch
) -> None:
    await org.service.accounting.tenants_service.configure_project(org.ids["ada"], {"max_concurrent": 1}, actor="test")
    counting = asyncio.Event()

    async def prompt_ids(*_: Any) -> Any:
        counting.set()
        await asyncio.Event().wait()

    with monkeypatch.context() as patch:
        patch.setattr(org.service.preprocessor, "prompt_ids", prompt_ids)
        asking = asyncio.create_task(org.ask("ada", "POST", "/tokenize", json=COUNTING["/tokenize"]))
        await counting.wait()
    assert (await org.ask("ada", "POST", "/tokenize", json=COUNTING["/tokenize"])).status_code == 429
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert (await org.ask("ada", "POST", "/tokenize", json=COUNTING["/tokenize"])).status_code == 200


AUTO: dict[str, Any] = {"model": "auto", "prompt": "query", "max_tokens": 3, "routing": {"threshold": -1}}


async def test_a_chosen_adapter_s_request_is_one_and_pays_for_the_choice(org: Org) -> None:
    owner = org.service.accounting.tenants_service
    await describe(org)
    assert (await org.ask("bob", "POST", "/v1/route", json={"prompt": "a"})).status_code == 200
    before = await used(org.service)
    await owner.limit_rates(org.ids["ada"], "base", {"requests_per_min": 2}, actor="test")
    await owner.limit_spend(org.ids["ada"], 100, actor="test")
    await owner.configure_project(org.ids["ada"], {"max_concurrent": 1}, actor="test")
    for _ in range(2):
        answer = await org.ask("ada", "POST", "/v1/completions", json=AUTO)
        assert answer.status_code == 200, answer.text
        assert answer.headers["X-Polylora-Adapter"].startswith("sql@")
    refused = await org.ask("ada", "POST", "/v1/completions", json=AUTO)
    assert refused.status_code == 429
    after = await used(org.service)
    assert after.num_requests - before.num_requests == 2
    assert after.prompt_tokens - before.prompt_tokens == 2 * 2 * len(AUTO["prompt"])
    spent = org.service.accounting.limiter._leases[LimitKey(org.ids["ada"], "spend")].used
    assert spent == after.cost_nanos - before.cost_nanos > 0


async def test_a_choice_that_is_made_again_takes_no_second_request(org: Org, monkeypatch: pytest.MonkeyPatch) -> None:
    """The adapter was read only when it was chosen, and turned out to score texts."""
    await describe(org)
    await org.service.accounting.tenants_service.limit_rates(
        org.ids["ada"], "base", {"requests_per_min": 1}, actor="test"
    )
    found = iter([True, True, False])
    monkeypatch.setattr(org.service.preprocessor.semantic_router, "has_score_head", lambda _: next(found))
    answer = await org.ask("ada", "POST", "/v1/completions", json=AUTO)
    assert answer.status_code == 200, answer.text
    assert (await org.ask("ada", "POST", "/v1/completions", json=AUTO)).status_code == 429


@pytest.mark.parametrize("change", [{"max_tokens": 10_000}, {"stop": ["a"] * 99}])
async def test_what_is_refused_after_the_choice_holds_nothing(org: Org, change: dict[str, Any]) -> None:
    owner = org.service.accounting.tenants_service
    await describe(org)
    await owner.configure_project(org.ids["ada"], {"max_concurrent": 1}, actor="test")
    for body in (AUTO | change, AUTO | change, AUTO):
        answer = await org.ask("ada", "POST", "/v1/completions", json=body)
    assert answer.status_code == 200, answer.text


async def test_a_choice_whose_tokens_are_not_there_is_not_made(org: Org) -> None:
    await describe(org)
    await org.service.accounting.tenants_service.limit_rates(
        org.ids["ada"], "base", {"tokens_per_min": 4}, actor="test"
    )
    before = (await engines(org.service)).prompt_tokens
    assert (await org.ask("ada", "POST", "/v1/completions", json=AUTO)).status_code == 429
    assert (await engines(org.service)).prompt_tokens == before


async def test_a_choice_of_a_tenant_whose_limits_are_not_enforced_goes_on(org: Org) -> None:
    owner = org.service.accounting.tenants_service
    await describe(org)
    await owner.limit_rates(org.ids["ada"], "base", {"tokens_per_min": 6, "requests_per_min": 9}, actor="test")
    await owner.configure_project(org.ids["ada"], {"enforce": False, "max_concurrent": 1}, actor="test")
    for _ in range(3):
        assert (await org.ask("ada", "POST", "/v1/completions", json=AUTO)).status_code == 200
    refused = org.service.accounting.limiter.rejected
    assert refused == {RejectedRequest("tokens", is_enforced=False): 3}, "each once, and what was held came back"


async def test_python_callers_are_in_the_ledger_too(service: Service) -> None:
    await handle_api.generate(service, "abc", {"max_tokens": 3}, "sql")
    assert (await used(service))[:4] == (1, *(await engines(service))[1:4])


@pytest.mark.parametrize("stream", [False, True])
async def test_requests_that_fail_and_streams_that_end_are_settled_once(org: Org, stream: bool) -> None:
    owner = org.service.accounting.tenants_service
    await owner.limit_rates(org.ids["ada"], "base", {"tokens_per_min": 1000, "requests_per_min": 100}, actor="test")
    await owner.configure_project(org.ids["ada"], {"max_concurrent": 1}, actor="test")
    for _ in range(5):  # one at a time, so that what is not given back would be missed
        answer = await org.ask("ada", "POST", "/v1/chat/completions", json=CHAT | {"stream": stream})
        assert answer.status_code == 200
    remaining = int(answer.headers["x-ratelimit-remaining-tokens"])
    total = await used(org.service)
    assert remaining >= 1000 - (total.prompt_tokens + total.completion_tokens) - 100, "what was not used came back"
    org.service.fleet.drop("replica-0")
    for _ in range(2):
        failed = await org.ask("ada", "POST", "/v1/chat/completions", json=CHAT | {"stream": stream})
        assert failed.status_code == 503, "not 429: what failed before holds nothing"
    assert (await used(org.service)).num_requests == 7


async def test_a_client_that_leaves_pays_for_what_it_got(org: Org) -> None:
    owner = org.service.accounting.tenants_service
    await owner.configure_project(org.ids["ada"], {"max_concurrent": 1}, actor="test")
    replica = org.service.fleet.replicas["replica-0"]
    replica.backend.max_steps = 3
    long = CHAT | {"stream": True, "max_tokens": 50, "ignore_eos": True}
    asking = asyncio.create_task(org.ask("ada", "POST", "/v1/chat/completions", json=long))
    await until(lambda: replica.backend.num_steps == 3)
    refused = await org.ask("ada", "POST", "/v1/chat/completions", json=CHAT)
    assert refused.status_code == 429
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await until(lambda: len(replica.aborted) == 1)
    replica.backend.max_steps = None
    await until(lambda: not replica.engine.has_work)
    generated = replica.thread.stats().num_tokens_generated
    assert generated <= 4
    async with asyncio.timeout(120):
        while (await used(org.service)).completion_tokens != generated:
            await asyncio.sleep(0.002)
    async with asyncio.timeout(120):  # its place is given back when it has been counted
        while (answer := await org.ask("ada", "POST", "/v1/chat/completions", json=CHAT)).status_code == 429:
            await asyncio.sleep(0.002)
    assert answer.status_code == 200


async def test_a_client_that_leaves_before_the_first_token_pays_for_its_prompt(org: Org) -> None:
    """Or prompts would be computed without a limit, for whoever leaves soon enough."""
    owner, tenant_id = org.service.accounting.tenants_service, org.ids["ada"]
    await owner.limit_rates(tenant_id, "base", {"tokens_per_min": 120}, actor="test")
    await owner.limit_spend(tenant_id, 1, actor="test")
    await owner.configure_project(tenant_id, {"max_concurrent": 1}, actor="test")
    backend = org.service.fleet.replicas["replica-0"].backend
    backend.max_steps = backend.num_steps
    asked = {"model": "base", "prompt": "a" * 90, "max_tokens": 20}
    asking = asyncio.create_task(org.ask("ada", "POST", "/v1/completions", json=asked))
    await until(lambda: org.service.num_streams == 1)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await until(lambda: not org.service.num_streams)
    pools = org.service.accounting.limiter._leases
    assert pools[LimitKey(tenant_id, "spend")].used == 90 * 1000
    assert pools[LimitKey(tenant_id, "concurrent")].reserved == 0
    assert (await org.ask("ada", "POST", "/v1/completions", json=asked)).status_code == 429
    backend.max_steps = None
    backend.resumed.set()


@pytest.mark.parametrize("is_embedding", [False, True])
async def test_a_request_that_fails_after_its_prompt_was_computed_pays_for_it(org: Org, is_embedding: bool) -> None:
    """Its limits lose what its bill has, so that a prompt that always fails is not computed without limit."""
    owner, tenant_id = org.service.accounting.tenants_service, org.ids["ada"]
    await owner.limit_spend(tenant_id, 100, actor="test")
    for replica in org.service.fleet.replicas.values():
        replica.backend.overflowing = set(range(16))
    fields: dict[str, Any] = {"input": "a" * 90} if is_embedding else {"prompt": "a" * 90, "max_tokens": 3}
    path = "/v1/embeddings" if is_embedding else "/v1/completions"
    answer = await org.ask("ada", "POST", path, json={"model": "sql"} | fields)
    assert answer.status_code >= 400, answer.text
    spent = org.service.accounting.limiter._leases[LimitKey(tenant_id, "spend")].used
    assert spent == (await used(org.service)).cost_nanos > 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_while_its_answer_is_stored_holds_nothing(org: Org, stream: bool) -> None:
    await org.service.accounting.tenants_service.configure_project(org.ids["ada"], {"max_concurrent": 1}, actor="test")
    keeping = asyncio.Event()

    async def keep(*_: Any, **__: Any) -> None:
        keeping.set()
        await asyncio.Event().wait()

    org.service.storage.keep_response = keep  # type: ignore[method-assign]
    body = GENERATING["/v1/responses"] | {"store": True, "stream": stream}
    asking = asyncio.create_task(org.ask("ada", "POST", "/v1/responses", json=body))
    await keeping.wait()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert org.service.accounting.limiter._leases[LimitKey(org.ids["ada"], "concurrent")].reserved == 0
    assert (await org.ask("ada", "POST", "/v1/chat/completions", json=CHAT)).status_code == 200


async def test_headers_and_refusals_of_rates(org: Org) -> None:
    owner = org.service.accounting.tenants_service
    plain = await org.ask("ada", "POST", "/v1/chat/completions", json=CHAT)
    assert not [name for name in plain.headers if name.startswith("x-ratelimit")], "no limit, no header"
    await owner.limit_rates(org.ids["ada"], "base", {"requests_per_min": 2, "tokens_per_min": 10_000}, actor="test")
    began_s = time.monotonic()
    first, second, third = [await org.ask("ada", "POST", "/v1/chat/completions", json=CHAT) for _ in range(3)]
    assert [each.status_code for each in (first, second, third)] == [200, 200, 429]
    assert [each.headers["x-ratelimit-limit-requests"] for each in (first, second, third)] == ["2", "2", "2"]
    assert [each.headers["x-ratelimit-remaining-requests"] for each in (first, second, third)] == ["1", "0", "0"]
    assert first.headers["x-ratelimit-reset-requests"].endswith("s")
    error = third.json()["error"]
    assert (error["type"], error["code"]) == ("requests", "rate_limit_exceeded")
    assert "requests per minute" in error["message"]
    assert 28 - (time.monotonic() - began_s) <= int(third.headers["Retry-After"]) <= 30
    assert abs(int(third.headers["retry-after-ms"]) / 1000 - int(third.headers["Retry-After"])) <= 1
    assert (await org.ask("bob", "POST", "/v1/chat/completions", json=CHAT)).status_code == 200


async def test_operators_see_what_is_left(org: Org) -> None:
    owner, url = org.service.accounting.tenants_service, f"/v1/tenants/{org.ids['ada']}"
    assert (await org.ask("admin", "GET", url)).json()["limits"] == []
    await owner.limit_rates(org.ids["ada"], "base", {"requests_per_day": 9}, actor="test")
    await owner.limit_spend(org.ids["ada"], 1, actor="test")
    await owner.configure_project(org.ids["ada"], {"max_concurrent": 3}, actor="test")
    backend = org.service.fleet.replicas["replica-0"].backend
    backend.max_steps = 0
    asking = asyncio.create_task(org.ask("ada", "POST", "/v1/chat/completions", json=CHAT))
    while not org.service.num_streams:
        await asyncio.sleep(0.001)
    limits = {each["kind"]: each for each in (await org.ask("admin", "GET", url)).json()["limits"]}
    assert limits["day"] == {"kind": "day", "model": "base", "limit": 9, "remaining": 8}
    assert limits["concurrent"] == {"kind": "concurrent", "model": None, "limit": 3, "remaining": 2}
    assert limits["spend"]["remaining"] < limits["spend"]["limit"] == NANOS_PER_CENT
    backend.max_steps = None
    backend.resumed.set()
    assert (await asking).status_code == 200
    await org.service.accounting.limiter.report()
    limits = {each["kind"]: each for each in (await org.ask("admin", "GET", url)).json()["limits"]}
    assert (limits["day"]["remaining"], limits["concurrent"]["remaining"]) == (8, 3)


async def test_a_request_beyond_the_tokens_of_a_minute_is_not_to_be_retried(org: Org) -> None:
    await org.service.accounting.tenants_service.limit_rates(
        org.ids["ada"], "base", {"tokens_per_min": 20}, actor="test"
    )
    answer = await org.ask("ada", "POST", "/v1/chat/completions", json=CHAT | {"max_tokens": 50})
    assert (answer.status_code, answer.json()["error"]["type"]) == (429, "tokens")
    assert answer.headers["X-Should-Retry"] == "false"
    assert "Retry-After" not in answer.headers


async def test_an_adapter_s_limit_is_its_own(org: Org) -> None:
    await org.service.accounting.tenants_service.limit_rates(
        org.ids["ada"], "sql", {"requests_per_min": 1}, actor="test"
    )
    statuses = [
        (await org.ask("ada", "POST", "/v1/chat/completions", json=CHAT | {"model": model})).status_code
        for model in ("sql", "sql", "base", "secret")
    ]
    assert statuses == [200, 429, 200, 200]


async def test_an_adapter_s_limit_holds_for_it_among_others(org: Org) -> None:
    await org.service.accounting.tenants_service.limit_rates(
        org.ids["ada"], "sql", {"requests_per_min": 0}, actor="test"
    )
    for adapters in ([{"name": "sql", "weight": 0.5}], [{"name": "sql"}, {"name": "secret"}]):
        answer = await org.ask("ada", "POST", "/v1/chat/completions", json=CHAT | {"adapters": adapters})
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert "'sql'" in answer.json()["error"]["message"]


async def test_the_official_client_does_not_try_again_when_the_money_is_gone(org: Org) -> None:
    owner = org.service.accounting.tenants_service
    await owner.limit_spend(org.ids["ada"], 0, actor="test")
    asked = 0

    async def count(_: httpx.Request) -> None:
        nonlocal asked
        asked += 1

    org.http.event_hooks = {"request": [count], "response": []}
    client = AsyncOpenAI(api_key=org.keys["ada"], base_url="http://test/v1", http_client=org.http, max_retries=3)
    with pytest.raises(openai.RateLimitError) as caught:
        await client.chat.completions.create(model="base", messages=[{"role": "user", "content": "hi"}])
    assert caught.value.code == "insufficient_quota"
    assert caught.value.response.headers["x-should-retry"] == "false"
    assert asked == 1


async def test_limits_that_are_not_enforced_refuse_no_request(org: Org) -> None:
    owner = org.service.accounting.tenants_service
    await owner.limit_rates(org.ids["ada"], "base", {"requests_per_min": 1}, actor="test")
    await owner.configure_project(org.ids["ada"], {"enforce": False}, actor="test")
    for _ in range(3):
        assert (await org.ask("ada", "POST", "/v1/chat/completions", json=CHAT)).status_code == 200
    assert sum(org.service.accounting.limiter.rejected.values()) == 2


async def test_usage_and_costs_by_the_official_client(org: Org) -> None:
    admin = client_with(org.http, admin_key=org.admin).admin.organization
    for who, model in (("ada", "base"), ("ada", "sql"), ("bob", "base")):
        answer = await org.ask(who, "POST", "/v1/chat/completions", json=CHAT | {"model": model})
        assert answer.status_code == 200
    start = int(org.service.accounting.clock()) - 60
    minutes = await admin.usage.completions(start_time=start, bucket_width="1m", group_by=["project_id", "model"])
    results = [result for bucket in minutes.data for result in bucket.results]
    groups = {(result.project_id, result.model): result for result in results}  # type: ignore[union-attr]
    assert set(groups) == {(org.ids["ada"], "base"), (org.ids["ada"], "sql"), (org.ids["bob"], "base")}
    assert all(result.num_model_requests == 1 for result in groups.values())  # type: ignore[union-attr]
    ledger, took = await used(org.service), [result.model_extra or {} for result in groups.values()]
    for field, counted in (
        ("num_adapter_loads", ledger.num_loads),
        ("adapter_load_bytes", ledger.load_bytes),
        ("rank_row_seconds", ledger.rank_row_ms / 1000),
        ("kv_block_seconds", ledger.kv_block_ms / 1000),
    ):
        assert sum(each[field] for each in took) == pytest.approx(counted)
    assert ledger.num_loads == 1
    (day,) = (await admin.usage.completions(start_time=start, project_ids=[org.ids["ada"]])).data[-1:]
    (total,) = day.results
    assert total.object == "organization.usage.completions.result"
    assert total.num_model_requests == 2
    assert total.project_id is None
    one = await admin.usage.completions(start_time=start - 7200, bucket_width="1m", limit=30)
    assert one.has_more
    assert one.next_page is not None
    two = await admin.usage.completions(start_time=start - 7200, bucket_width="1m", limit=30, page=one.next_page)
    assert two.data[0].start_time == one.data[-1].end_time
    costs = await admin.usage.costs(start_time=start, group_by=["project_id", "line_item"])
    lines = [result for bucket in costs.data for result in bucket.results]
    by_line = {(line.project_id, line.line_item): line for line in lines}  # type: ignore[union-attr]
    base = groups[org.ids["bob"], "base"]
    expected = (base.input_tokens + 4 * base.output_tokens) / 1e6  # type: ignore[union-attr]
    assert by_line[org.ids["bob"], "base"].amount.value == pytest.approx(expected)  # type: ignore[union-attr]
    assert (await admin.usage.embeddings(start_time=start)).data[0].results == []
    assert (await org.ask("bob", "POST", "/v1/embeddings", json={"model": "base", "input": "abc"})).status_code == 200
    costs = await admin.usage.costs(start_time=start, project_ids=[org.ids["bob"]])
    (line,) = costs.data[-1].results
    assert line.amount.value == pytest.approx(expected + 3 / 1e6), "vectors cost, too"  # type: ignore[union-attr]
    for wrong in ({"bucket_width": "1w"}, {"group_by": ["salt"]}, {"limit": 0}, {"page": "x"}):
        with pytest.raises(openai.BadRequestError):
            await admin.usage.completions(start_time=start, **wrong)


async def test_costs_by_line_item_and_by_project_add_up(org: Org) -> None:
    admin, tenancy = client_with(org.http, admin_key=org.admin).admin.organization, org.service.accounting
    for who, model in (("ada", "base"), ("ada", "sql"), ("bob", "base")):
        assert (await org.ask(who, "POST", "/v1/chat/completions", json=CHAT | {"model": model})).status_code == 200
    await until(lambda: org.service.fleet.replicas["replica-0"].thread.stats().num_running == 0)
    start = int(tenancy.clock()) - 60

    async def lines(**asked: Any) -> list[Any]:
        page = await admin.usage.costs(start_time=start, **asked)
        return [result for bucket in page.data for result in bucket.results]

    by_line = await lines(group_by=["project_id", "line_item"])
    total = await used(org.service)
    assert {line.line_item for line in by_line} == {"base", "sql"}
    assert {line.quantity_unit for line in by_line} == {"tokens"}
    assert sum(line.quantity for line in by_line) == total.prompt_tokens + total.completion_tokens
    (all_,) = await lines()
    assert all_.amount.value == pytest.approx(total.cost_nanos / 1e9)
    assert all_.amount.value == pytest.approx(sum(line.amount.value for line in by_line))
    assert all_.quantity is all_.quantity_unit is None
    by_project = await lines(group_by=["project_id"])
    assert sum(line.amount.value for line in by_project) == pytest.approx(all_.amount.value)
    (only,) = await lines(line_items=["base"], group_by=["line_item"])
    assert only.quantity == sum(line.quantity for line in by_line if line.line_item == "base")


async def test_spend_limits_by_the_official_client(org: Org) -> None:
    limits = client_with(org.http, admin_key=org.admin).admin.organization.projects.spend_limit
    project_id = org.ids["ada"]
    with pytest.raises(openai.NotFoundError):
        await limits.retrieve(project_id)
    made = await limits.update(project_id, threshold_amount=1, currency="USD", interval="month")
    assert (made.threshold_amount, made.enforcement.status) == (1, "inactive")
    answer = await org.ask("ada", "POST", "/v1/chat/completions", json=CHAT)
    assert answer.status_code == 200
    assert (await limits.delete(project_id)).deleted
    with pytest.raises(openai.NotFoundError):
        await limits.retrieve(project_id)


def test_durations_are_written_as_openai_does() -> None:
    assert [duration(each) for each in (0, 0.0121, 1, 1.5, 59.9, 60, 361, 7322)] == [
        "0ms",
        "13ms",
        "1s",
        "1.5s",
        "59.9s",
        "1m0s",
        "6m1s",
        "2h2m2s",
    ]


async def test_a_project_s_flood_of_sequences_leaves_places_to_others(org: Org) -> None:
    org.service.reconfigure({"max_sequences": 64})
    (replica,) = org.service.fleet.replicas.values()
    replica.engine._waiting.max_total = 128
    replica.backend.max_steps = replica.backend.num_steps
    many = {"model": "base", "prompt": [1, 2], "max_tokens": 1, "n": 64, "temperature": 1.0}
    flood = [asyncio.create_task(org.ask("ada", "POST", "/v1/completions", json=many)) for _ in range(8)]
    await until(lambda: any(task.done() for task in flood))
    victims = [
        asyncio.create_task(org.ask("bob", "POST", "/v1/completions", json=many | {"n": number})) for number in (1, 16)
    ]
    await until(lambda: replica.engine._waiting.used_by(org.ids["bob"]) == 17)
    num_submitted = len(replica.submitted)
    again = await org.ask("ada", "POST", "/v1/completions", json=many)
    assert (again.status_code, again.json()["error"]["code"]) == (429, "queue_full")
    assert len(replica.submitted) == num_submitted, "refused without the engine"
    replica.backend.max_steps = None
    replica.backend.resumed.set()
    assert [(await victim).status_code for victim in victims] == [200, 200]
    answers = await asyncio.gather(*flood)
    codes = Counter(answer.status_code for answer in answers)
    assert codes.keys() == {200, 429}
    message = next(answer for answer in answers if answer.status_code == 429).json()["error"]["message"]
    assert "engine.max_queued_requests is 128" in message


async def test_each_sequence_counts_as_concurrent(org: Org) -> None:
    owner = org.service.accounting.tenants_service
    await owner.configure_project(org.ids["ada"], {"max_concurrent": 3}, actor="test")
    body = {"model": "base", "prompt": [1, 2], "max_tokens": 1, "temperature": 1.0}
    assert (await org.ask("ada", "POST", "/v1/completions", json=body | {"n": 3})).status_code == 200
    refused = await org.ask("ada", "POST", "/v1/completions", json=body | {"n": 4})
    assert refused.status_code == 429
    assert "needs 4 of the project's concurrent sequences, and the limit is 3; lower n" in refused.text
