"""Pages of other sites, and who may manage adapters."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from app.config import HttpConfig
from app.deployments.ingress.http.app import make_app
from app.deployments.ingress.http.middleware.origin_check import HttpPolicy
from app.deployments.registry.models import DEFAULT_TENANT
from app.engine.errors import ConfigError
from tests.deployments.http_service import Service

LOAD: dict[str, Any] = {
    "url": "/v1/load_lora_adapter",
    "content": '{"lora_name": "sql", "lora_path": "two", "load_inplace": true}',
}


ON_LOOPBACK = HttpPolicy(is_on_loopback=True)
TOKEN = "0f1e2d3c4b5a69788796a5b4c3d2e1f0"


@asynccontextmanager
async def client_of(
    service: Service, rules: HttpPolicy, *, host: str = "127.0.0.1:8000", client: str = "127.0.0.1"
) -> AsyncIterator[httpx.AsyncClient]:
    """Requests that arrive at the address `host`, as from `client`."""
    transport = httpx.ASGITransport(make_app(service, rules), raise_app_exceptions=False, client=(client, 5))
    async with httpx.AsyncClient(transport=transport, base_url=f"http://{host}") as http:
        yield http


def digest_of_sql(service: Service) -> str:
    ref = service.registry.resolve("sql", "", tenant_id=DEFAULT_TENANT)
    assert ref is not None
    return ref.digest


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Content-Type": "text/plain", "Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"}, 403),
        ({"Content-Type": "application/json", "Origin": "https://evil.example"}, 403),
        ({"Content-Type": "application/json", "Origin": "null"}, 403),
        ({"Content-Type": "application/json", "Sec-Fetch-Site": "cross-site"}, 403),
        ({"Content-Type": "application/json", "Sec-Fetch-Site": "same-site"}, 403),
        ({"Content-Type": "application/json", "Host": "evil.example:8000", "Origin": "http://evil.example:8000"}, 403),
        ({"Content-Type": "application/json", "Host": "evil.example"}, 403),
        ({"Content-Type": "application/json", "Host": "127.0.0.1.evil.example"}, 403),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "text/plain; charset=utf-8"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content-Type": "multipart/form-data; boundary=x"}, 415),
    ],
)
async def test_what_another_site_can_send_changes_nothing(
    service: Service, headers: dict[str, str], status: int
) -> None:
    before = digest_of_sql(service)
    async with client_of(service, ON_LOOPBACK) as http:
        for request in (LOAD, {"url": "/v1/unload_lora", "content": '{"lora_model": "sql"}'}):
            answer = await http.post(**request, headers=headers)
            assert answer.status_code == status, answer.text
            assert answer.json()["error"]["type"] in ("permission_error", "invalid_request_error")
    assert digest_of_sql(service) == before


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Content-Type": "application/json"},
        {"Content-Type": "application/json; charset=utf-8", "Host": "localhost:8000"},
        {"Content-Type": "application/json", "Origin": "http://127.0.0.1:8000", "Sec-Fetch-Site": "same-origin"},
        {"Content-Type": "application/json", "Host": "[::1]:8000"},
        {"Content-Type": "application/json", "Host": "models.localhost"},
        {"Content-Type": "application/json", "Sec-Fetch-Site": "none"},
    ],
)
async def test_the_operator_s_own_requests_pass(service: Service, headers: dict[str, str]) -> None:
    before = digest_of_sql(service)
    async with client_of(service, ON_LOOPBACK) as http:
        answer = await http.post(**LOAD, headers=headers)
        assert answer.status_code == 200, answer.text
    assert digest_of_sql(service) != before


async def test_a_service_for_a_network_is_asked_by_any_name(service: Service) -> None:
    """HAProxy passes its requests on at 127.0.0.1, which is not where it listens."""
    named = {"Host": "models.example:8000"}
    async with client_of(service, HttpPolicy()) as http:
        assert (await http.get("/v1/models", headers=named)).status_code == 200
    async with client_of(service, ON_LOOPBACK, host="10.0.0.7") as http:
        assert (await http.get("/v1/models", headers=named)).status_code == 403
    rules = HttpPolicy(is_on_loopback=True, allowed_hosts=("models.example",))
    async with client_of(service, rules) as http:
        assert (await http.get("/v1/models", headers=named)).status_code == 200


@pytest.mark.parametrize(
    ("host", "is_on_loopback"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False), ("10.0.0.7", False)],
)
def test_where_the_service_listens_says_who_reaches_it(host: str, is_on_loopback: bool) -> None:
    assert HttpPolicy.of(HttpConfig(), {}, host).is_on_loopback is is_on_loopback


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
async def test_what_another_site_s_page_gets_does_not_reach_a_route(service: Service, site: str) -> None:
    async with client_of(service, HttpPolicy()) as http:
        for path in ("/v1/models", "/openapi.json", "/health"):
            answer = await http.get(path, headers={"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "no-cors"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "cross_site_request")


async def test_browsers_are_told_not_to_use_answers_elsewhere(service: Service) -> None:
    async with client_of(service, ON_LOOPBACK) as http:
        answers = [
            await http.get("/v1/models"),
            await http.get("/nowhere"),
            await http.get("/v1/models", headers={"Host": "evil.example"}),
        ]
    assert [answer.status_code for answer in answers] == [200, 404, 403]
    for answer in answers:
        assert answer.headers.get_list("x-content-type-options") == ["nosniff"]
        assert answer.headers.get_list("cross-origin-resource-policy") == ["same-origin"]


@pytest.mark.parametrize(
    "name", ["Via", "Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto", "X-Real-IP"]
)
async def test_who_comes_through_a_proxy_of_this_machine_is_not_local(service: Service, name: str) -> None:
    headers = {name: "127.0.0.1"}
    async with client_of(service, HttpPolicy(is_on_loopback=True)) as http:
        assert (await http.get("/v1/models")).status_code == 200
        assert (await http.get("/v1/models", headers=headers)).status_code == 401
    async with client_of(service, HttpPolicy(is_on_loopback=True, auth="open")) as http:
        assert (await http.get("/v1/loras", headers=headers)).status_code == 403
        assert (await http.post(**LOAD, headers=headers)).status_code == 403


def test_an_old_protocol_is_a_proxy_s() -> None:
    """As nginx passes requests on unless it is configured otherwise, with a Host of this machine."""
    scope = {"type": "http", "headers": [(b"host", b"127.0.0.1:8000")], "client": ("127.0.0.1", 5)}
    assert ON_LOOPBACK.is_local(scope | {"http_version": "1.1"})
    assert not ON_LOOPBACK.is_local(scope | {"http_version": "1.0"})


def test_the_address_that_our_haproxy_adds_is_no_sign_of_another_proxy() -> None:
    headers = [(b"host", b"127.0.0.1:8000"), (b"x-forwarded-for", b"127.0.0.1")]
    scope = {"type": "http", "http_version": "1.1", "headers": headers, "client": ("127.0.0.1", 5)}
    environ = {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_HAPROXY_BINARY_PATH": "/x/bin/polylora-haproxy"}
    assert HttpPolicy.of(HttpConfig(), environ, "127.0.0.1").is_local(scope)
    assert not HttpPolicy.of(HttpConfig(), {}, "127.0.0.1").is_local(scope)


async def test_an_origin_that_is_listed_gets_cors_and_no_other_does(service: Service) -> None:
    rules = HttpPolicy(allowed_origins=("https://app.example",))
    asked = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}
    async with client_of(service, rules) as http:
        before = await http.options("/v1/chat/completions", headers=asked)
        assert before.headers["access-control-allow-origin"] == "https://app.example"
        models = await http.get("/v1/models", headers={"Origin": "https://app.example"})
        assert models.headers["access-control-allow-origin"] == "https://app.example"
        assert models.headers["access-control-expose-headers"] == "*"
        other = await http.get("/v1/models", headers={"Origin": "https://evil.example"})
        assert other.status_code == 403
        assert "access-control-allow-origin" not in other.headers


MANAGED = ("/v1/loras", "/v1/events", "/v1/audit", "/v1/aliases", "/v1/loras/sql/generations")


@pytest.mark.parametrize(("client", "status"), [("127.0.0.1", 200), ("::1", 200), ("10.0.0.9", 403), ("liar", 403)])
async def test_adapters_are_managed_from_this_machine_unless_configured_otherwise(
    service: Service, client: str, status: int
) -> None:
    async with client_of(service, HttpPolicy(auth="open"), host="models.example", client=client) as http:
        for path in MANAGED:
            assert (await http.get(path)).status_code == status
        assert (await http.post(**LOAD)).status_code == status
        assert (await http.get("/v1/models")).status_code == 200, "inference is open"
    rules = HttpPolicy(management="open", auth="open")
    async with client_of(service, rules, host="models.example", client=client) as http:
        assert (await http.get("/v1/loras")).status_code == 200


async def test_behind_a_proxy_that_is_not_ours_no_client_is_local(service: Service) -> None:
    """HAProxy without our program: everybody's address is 127.0.0.1, or what they write."""
    environ = {"RAY_SERVE_ENABLE_HA_PROXY": "1"}
    config = HttpConfig(auth="open")
    async with client_of(service, HttpPolicy.of(config, environ, "0.0.0.0")) as http:
        assert (await http.get("/v1/loras")).status_code == 403
    rules = HttpPolicy.of(config, environ, "127.0.0.1")  # only this machine reaches it
    async with client_of(service, rules) as http:
        assert (await http.get("/v1/loras")).status_code == 200
    ours = environ | {"RAY_SERVE_HAPROXY_BINARY_PATH": "/x/bin/polylora-haproxy"}
    async with client_of(service, HttpPolicy.of(config, ours, "0.0.0.0"), host="models.example") as http:
        assert (await http.get("/v1/loras")).status_code == 200


@pytest.mark.parametrize(
    ("authorization", "status"),
    [
        (None, 401),
        ("Bearer wrong", 401),
        ("Bearer ", 401),
        (f"Basic {TOKEN}", 401),
        ("Bearer rïght", 401),
        (f"Bearer {TOKEN}", 200),
        (f"bearer {TOKEN}", 200),
    ],
)
async def test_a_token_is_asked_for_also_on_this_machine(
    service: Service, authorization: str | None, status: int
) -> None:
    rules = HttpPolicy.of(HttpConfig(management="token"), {"POLYLORA_MANAGEMENT_TOKEN": TOKEN}, "0.0.0.0")
    headers = {} if authorization is None else {"Authorization": authorization.encode("latin-1")}
    async with client_of(service, rules) as http:
        for path in MANAGED:
            answer = await http.get(path, headers=headers)
            assert answer.status_code == status
            assert status == 200 or answer.headers["www-authenticate"] == "Bearer"
        assert (await http.get("/v1/models")).status_code == 200


async def test_with_the_token_adapters_are_managed_from_elsewhere_and_nothing_is_asked(service: Service) -> None:
    rules = HttpPolicy.of(HttpConfig(management="token"), {"POLYLORA_MANAGEMENT_TOKEN": TOKEN}, "0.0.0.0")
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with client_of(service, rules, host="models.example", client="10.0.0.9") as http:
        assert (await http.get("/v1/loras", headers=headers)).status_code == 200
        asked = await http.post("/v1/completions", headers=headers, json={"model": "base", "prompt": "a"})
        assert (asked.status_code, asked.json()["error"]["code"]) == (403, "insufficient_permissions")
        assert (await http.get("/v1/loras")).status_code == 401


def test_a_token_that_is_not_set_is_named() -> None:
    with pytest.raises(ConfigError, match="POLYLORA_MANAGEMENT_TOKEN is not set"):
        HttpPolicy.of(HttpConfig(management="token"), {}, "0.0.0.0")


async def test_the_audit_names_addresses_and_nothing_else(service: Service) -> None:
    rules = HttpPolicy(management="open", auth="open")
    async with client_of(service, rules, host="h", client="10.0.0.1 approved by the CISO") as http:
        assert (await http.post(**LOAD)).status_code == 200
        who = {record["who"] for record in (await http.get("/v1/audit")).json()["data"]}
    assert "http, unknown address" in who
    assert not any("CISO" in name for name in who)
