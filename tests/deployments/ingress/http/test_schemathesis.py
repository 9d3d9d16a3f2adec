"""Requests made from /openapi.json, valid and almost valid: no answer is a 5xx, except a 503 that the service means."""

from __future__ import annotations

import asyncio
import copy
import itertools
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode

from app.config import INFERENCE_PATHS
from app.deployments.ingress.error_responses import TABLE
from app.deployments.ingress.http.app import make_app
from app.deployments.ingress.http.middleware.origin_check import HttpPolicy
from app.deployments.object_storage.models import NewBatch, StoredResponse
from app.deployments.registry.models import DEFAULT_TENANT
from app.deployments.tenancy.auth.key_crypto import key_digest
from app.engine.errors import PolyloraError
from tests.deployments.http_service import Service
from tests.deployments.ingress.http.routes.test_admin import ADMIN_KEY
from tests.deployments.managed import wanted
from tests.fakes import fake_adapter
from tests.seeds import run_seed

#: Requests of the nightly test, and requests and paths of the one that always runs.
MANY, FEW = 20_000, (12, 2)
#: Requests of a route, before what it needs is made again.
PER_ROUND = 12
#: Codes of the 503s that /openapi.json's errors have.
KNOWN_503 = {row.code for row in TABLE.values() if row.status == 503}
#: Values that exist of fields and of parameters of paths, so that requests get further than a 404.
NAMES = {
    "model": ["base", "sql", "judge", "auto"],
    "lora_path": ["sql"],
    "lora_name": ["sql", "new"],
    "name": ["sql", "prod", "new"],
}


def described(document: dict[str, Any], known: dict[str, list[str]]) -> dict[str, Any]:
    """The document, with values that exist in place of any string."""
    document = copy.deepcopy(document)
    stack: list[Any] = [document]
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            fields = value.get("properties")
            named = dict(fields) if isinstance(fields, dict) else {}
            if value.get("in") == "path":
                named[value["name"]] = value["schema"]
            for name in known.keys() & named.keys():
                if isinstance(named[name], dict) and named[name].get("type") == "string":
                    named[name]["enum"] = known[name]
            stack += value.values()
        elif isinstance(value, list):
            stack += value
    return document


async def existing(service: Service) -> dict[str, list[str]]:
    """Makes a project, an alias and stored things, anew for each round: requests delete them."""
    owner = service.accounting.tenants_service
    project = await owner.create_project("fuzzed", actor="test")
    account, issued = await owner.create_account(project.id, "app", with_key=True, expires_in_s=None, actor="test")
    assert issued is not None
    admin = await owner.create_admin_key("fuzzed", None, actor="test")
    for adapter_name, labels in (("sql", 0), ("judge", 1)):
        adapter = fake_adapter(adapter_name, 8, labels=labels)
        service.fleet.adapters[adapter.card.digest] = adapter
        service.managed.store.contents[adapter_name] = adapter.card.digest
        with suppress(PolyloraError):  # it is there, or is being removed
            await service.managed.client.load_and_wait(wanted(adapter_name, adapter_name))
    await service.managed.client.put_alias("prod", {"base": 1.0}, tenant_id=DEFAULT_TENANT, who="test")
    file = await service.storage.begin_file("a", "batch", 2, tenant_id=DEFAULT_TENANT, life_s=3600, max_bytes=1 << 20)
    await service.storage.add_part(file.id, 0, b"{}")
    await service.storage.end_file(file.id, 1, tenant_id=DEFAULT_TENANT)
    batch = NewBatch(
        tenant_id=DEFAULT_TENANT, key_id="", endpoint="/v1/completions", input_file_id=file.id, window_s=60.0,
        output_life_s=60.0, max_open=10_000, max_bytes=1 << 30, note="{}",
    )  # fmt: skip
    made = await service.storage.create_batch(batch)
    stored = StoredResponse("resp_1", '[{"id": "item_1", "type": "message"}]', '{"id": "resp_1", "output": []}')
    await service.storage.keep_response(
        stored, tenant_id=DEFAULT_TENANT, life_s=3600, max_count=10_000, max_bytes=1 << 20
    )
    ids = {
        "project_id": project.id, "account_id": account.id, "file_id": file.id, "batch_id": made.id,
        "input_file_id": file.id, "tenant_id": project.id, "response_id": "resp_1",
        "rate_limit_id": "rl-base",
    }  # fmt: skip
    return NAMES | {name: [value, "none"] for name, value in ids.items()} | {"key_id": [issued.key.id, admin.key.id]}


def cases(document: dict[str, Any], num_paths: int | None, number: int) -> Iterator[Any]:
    """Cases of every route in turn, or of some paths, drawn from the run's seed; half of them with a mistake. `number`:
    of the round."""
    if num_paths is not None:
        some = random.Random(run_seed()).sample(sorted(document["paths"]), num_paths)
        document = document | {"paths": {path: document["paths"][path] for path in some}}
    operations = [found.ok() for found in schemathesis.openapi.from_dict(document).get_all_operations()]
    for operation in operations:
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            yield from drawn(operation.as_strategy(generation_mode=mode), PER_ROUND // 2, run_seed() + number)


def drawn(strategy: Any, count: int, number: int) -> list[Any]:
    """Examples of a strategy, by the seed `number`, and never shrunk."""
    found: list[Any] = []

    @seed(number)
    @settings(
        max_examples=count, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck), verbosity=Verbosity.quiet,
    )  # fmt: skip
    @given(case=strategy)
    def collect(case: Any) -> None:
        found.append(case)

    with suppress(Unsatisfiable):  # a route without parameters takes no mistake
        collect()
    return found


async def check(service: Service, num_requests: int, num_paths: int | None = None) -> Counter[tuple[str, int]]:
    """Sends at least so many requests; counts them by route and status."""
    app = make_app(service, HttpPolicy(auth="open", admin_digest=key_digest(ADMIN_KEY)))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    statuses: Counter[tuple[str, int]] = Counter()
    failures: dict[str, str] = {}
    async with httpx.AsyncClient(transport=transport, timeout=60) as client:
        for number in itertools.count():
            document = described(app.openapi(), await existing(service))
            for case in cases(document, num_paths, number):
                request = request_of(client, case)
                if request is None:
                    continue
                response = await asyncio.wait_for(client.send(request), 60)
                statuses[f"{case.method} {case.path}", response.status_code] += 1
                code = response.json()["error"].get("code") if response.status_code == 503 else None
                if response.status_code >= 500 and code not in KNOWN_503:
                    text = f"{response.text[:300]}: {case.as_curl_command()[:1500]}"
                    failures.setdefault(f"{case.method} {case.path}", text)
            if statuses.total() >= num_requests:
                break
    assert not failures, "\n".join(f"{route}: {text}" for route, text in failures.items())
    return statuses


def request_of(client: httpx.AsyncClient, case: Any) -> httpx.Request | None:
    """A case as a request with a key that its route takes; None if it cannot be written as HTTP."""
    prepared = requests.Request(**case.as_transport_kwargs(base_url="http://test")).prepare()
    drawn_headers = ("content-length", "authorization", "x-api-key")
    headers = {name: value for name, value in prepared.headers.items() if name.lower() not in drawn_headers}
    if case.path.startswith(("/v1/organization", "/v1/tenants")):
        headers["Authorization"] = f"Bearer {ADMIN_KEY}"
    body = prepared.body.encode() if isinstance(prepared.body, str) else prepared.body
    try:
        request = client.build_request(prepared.method, prepared.url, headers=headers, content=body)
    except (UnicodeEncodeError, httpx.InvalidURL):
        return None
    if case.path == "/v1/overview" and "stream" in request.url.params:
        return None  # the page's events have no end, and this transport waits for it: test_overview.py reads them
    return request


async def test_no_request_gets_a_5xx(writing: Service) -> None:
    assert (await check(writing, *FEW)).total() >= FEW[0]


@pytest.mark.nightly
@pytest.mark.timeout(4 * 3600)
async def test_no_request_of_many_gets_a_5xx(writing: Service) -> None:
    statuses = await check(writing, MANY)
    assert {status for _, status in statuses} & {401, 429} == set(), "requests that are not let in show nothing"
    answered = {route for route, status in statuses if status == 200}
    # Of the eight fields for the two texts one pair must be drawn alone, which takes chance too long.
    assert answered | {"POST /v1/score"} >= {f"POST {path}" for path in INFERENCE_PATHS}
