"""Requests made from /openapi.json, valid and almost valid: no answer is a 5xx, except a 503 that the service means."""

from __future__ import annotations

import asyncio
import copy
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

from app.deployments.ingress.error_responses import TABLE
from app.deployments.ingress.http.app import make_app
from app.deployments.ingress.http.middleware.origin_check import HttpPolicy
from app.deployments.tenancy.auth.key_crypto import key_digest
from tests.deployments.http_service import Service
from tests.deployments.ingress.http.routes.test_admin import ADMIN_KEY
from tests.seeds import run_seed

#: Requests of the nightly test, and requests and routes of the one that always runs.
MANY, FEW = 20_000, (40, 6)
#: Codes of the 503s that /openapi.json's errors have.
KNOWN_503 = {row.code for row in TABLE.values() if row.status == 503}
#: Names that exist, so that requests get further than a 404.
NAMES = {"model": ["base", "sql", "auto"], "lora_path": ["sql"], "lora_name": ["sql", "new"]}


def described(document: dict[str, Any]) -> dict[str, Any]:
    """The document, with names that exist in place of any string."""
    document = copy.deepcopy(document)
    stack: list[Any] = [document]
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            fields = value.get("properties")
            for name in NAMES.keys() & (fields if isinstance(fields, dict) else {}).keys():
                if isinstance(fields[name], dict) and fields[name].get("type") == "string":
                    fields[name]["enum"] = NAMES[name]
            stack += value.values()
        elif isinstance(value, list):
            stack += value
    return document


def cases(document: dict[str, Any], num_requests: int, num_routes: int | None) -> Iterator[Any]:
    """Cases of every route in turn, or of some, drawn from the run's seed; half of them with a mistake."""
    operations = [found.ok() for found in schemathesis.openapi.from_dict(described(document)).get_all_operations()]
    if num_routes is not None:
        operations = random.Random(run_seed()).sample(operations, num_routes)
    per_operation = -(-num_requests // (2 * len(operations)))
    for operation in operations:
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            yield from drawn(operation.as_strategy(generation_mode=mode), per_operation)


def drawn(strategy: Any, count: int) -> list[Any]:
    """Examples of a strategy: of the run's seed, and never shrunk."""
    found: list[Any] = []

    @seed(run_seed())
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


async def check(service: Service, num_requests: int, num_routes: int | None = None) -> Counter[int]:
    app = make_app(service, HttpPolicy(admin_digest=key_digest(ADMIN_KEY)))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    statuses: Counter[int] = Counter()
    failures: dict[str, str] = {}
    async with httpx.AsyncClient(transport=transport, timeout=60) as client:
        for case in cases(app.openapi(), num_requests, num_routes):
            prepared = requests.Request(**case.as_transport_kwargs(base_url="http://test")).prepare()
            headers = {key: value for key, value in prepared.headers.items() if key.lower() != "content-length"}
            if case.path.startswith(("/v1/organization", "/v1/tenants")):
                headers["Authorization"] = f"Bearer {ADMIN_KEY}"
            body = prepared.body.encode() if isinstance(prepared.body, str) else prepared.body
            try:
                request = client.build_request(prepared.method, prepared.url, headers=headers, content=body)
            except (UnicodeEncodeError, httpx.InvalidURL):
                continue  # no request at all
            response = await asyncio.wait_for(client.send(request), 60)
            statuses[response.status_code] += 1
            if response.status_code < 500:
                continue
            code = response.json()["error"].get("code") if response.status_code == 503 else None
            if code not in KNOWN_503:
                text = f"{response.text[:300]}: {case.as_curl_command()[:1500]}"
                failures.setdefault(f"{case.method} {case.path}", text)
    assert not failures, "\n".join(f"{route}: {text}" for route, text in failures.items())
    return statuses


async def test_no_request_gets_a_5xx(service: Service) -> None:
    assert (await check(service, *FEW)).total() > 0


@pytest.mark.nightly
@pytest.mark.timeout(4 * 3600)
async def test_no_request_of_many_gets_a_5xx(service: Service) -> None:
    assert (await check(service, MANY)).total() > MANY // 2
