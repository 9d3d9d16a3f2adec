"""Authentication by API keys: who is admitted, as whom, and what a key of the wrong kind may not do."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from app.config import ADMIN_KEY, DIGEST, MANAGEMENT_TOKEN, SECRETS_KEY, AuthMode, HttpConfig
from app.deployments.ingress.accounting import TenantTableClient
from app.deployments.ingress.http.app import make_app
from app.deployments.ingress.http.middleware.auth import SESSION_PATH
from app.deployments.ingress.http.middleware.origin_check import HttpPolicy
from app.deployments.ingress.http.middleware.request_log import PROBES
from app.deployments.ingress.http.openapi import api_routes, flat_routes
from app.deployments.registry.models import LoadRequest
from app.deployments.tenancy.auth.key_crypto import environment_digest, key_digest, new_key
from app.deployments.tenancy.auth.tenant_mirror import MAX_TABLE_AGE_S
from app.engine.errors import ConfigError
from tests.deployments.http_service import Service
from tests.deployments.ingress.http.middleware.test_origin_check import client_of
from tests.fakes import fake_adapter

CHAT = {"model": "base", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 0}


def bearer(value: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {value}"}


class Org:
    """Two projects with a key each, an admin key, and an adapter of the first's that only it may use."""

    def __init__(self, service: Service, http: httpx.AsyncClient) -> None:
        self.service, self.http = service, http
        self.ids: dict[str, str] = {}
        self.keys: dict[str, str] = {}
        self.admin = ""

    async def set_up(self) -> None:
        owner = self.service.accounting.tenants_service
        self.admin = (await owner.create_admin_key("first", None, actor="test")).value
        for name in ("ada", "bob"):
            project = await owner.create_project(name, actor="test")
            _, issued = await owner.create_account(project.id, "app", with_key=True, expires_in_s=None, actor="test")
            assert issued is not None
            self.ids[name], self.keys[name] = project.id, issued.value
        adapter = fake_adapter("secret", 8)
        self.service.fleet.adapters[adapter.card.digest] = adapter
        self.service.managed.store.contents["secret"] = adapter.card.digest
        await self.service.managed.client.load_and_wait(LoadRequest(self.ids["ada"], "secret", "secret", "test"))

    async def ask(self, who: str, method: str, path: str, **what: Any) -> httpx.Response:
        headers = bearer(self.admin if who == "admin" else self.keys[who]) | what.pop("headers", {})
        return await self.http.request(method, path, headers=headers, **what)


@pytest_asyncio.fixture
async def org(service: Service) -> AsyncIterator[Org]:
    transport = httpx.ASGITransport(make_app(service, HttpPolicy()), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=20) as http:
        found = Org(service, http)
        await found.set_up()
        yield found


@pytest.fixture
def secrets_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRETS_KEY, "0123456789abcdef" * 3 + "9f")


@pytest.mark.usefixtures("secrets_key")
async def test_a_projects_hub_token_is_set_and_removed_and_never_shown(
    org: Org, caplog: pytest.LogCaptureFixture
) -> None:
    path, token = f"/v1/tenants/{org.ids['ada']}", "hf_aVeryPrivateToken"
    with caplog.at_level("DEBUG"):
        answers = [await org.ask("admin", "PATCH", path, json={"hub_token": token})]
        assert answers[0].json()["has_hub_token"] is True
        for bad in (f"{token} {token}", token * 100, [token], {token: 1}):
            answers.append(await org.ask("admin", "PATCH", path, json={"hub_token": bad}))
            assert answers[-1].status_code == 400
            assert answers[-1].json()["error"]["param"] == "hub_token"
        answers.append(await org.ask("ada", "PATCH", path, json={"hub_token": token}))
        assert answers[-1].status_code == 403
        answers += [await org.ask("admin", "GET", each) for each in (path, "/v1/organization/audit_logs")]
        answers.append(await org.ask("admin", "PATCH", path, json={"weight": 2.0}))
        assert answers[-1].json()["has_hub_token"] is True
        answers.append(await org.ask("admin", "PATCH", path, json={"hub_token": ""}))
        assert answers[-1].json()["has_hub_token"] is False
    assert not [answer.text for answer in answers if token in answer.text]
    assert token not in caplog.text


async def test_without_a_key_to_encrypt_it_a_hub_token_is_refused(org: Org) -> None:
    path = f"/v1/tenants/{org.ids['ada']}"
    answer = await org.ask("admin", "PATCH", path, json={"hub_token": "hf_x"})
    assert answer.status_code == 400
    assert SECRETS_KEY in answer.json()["error"]["message"]
    assert (await org.ask("admin", "PATCH", path, json={"hub_token": ""})).status_code == 200, "there is none to remove"


async def test_without_keys_this_machine_is_let_in_and_no_other(service: Service) -> None:
    async with client_of(service, HttpPolicy(), client="10.0.0.9", host="models.example") as http:
        refused = await http.post("/v1/chat/completions", json=CHAT)
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
        assert "create-admin-key" in refused.json()["error"]["message"]
        assert (await http.get("/health")).status_code == 200
    async with client_of(service, HttpPolicy(auth="open"), client="10.0.0.9", host="models.example") as http:
        assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 200
    async with client_of(service, HttpPolicy()) as http:
        for headers in ({}, bearer("unused"), bearer("sk-proj-of-another-service")):
            assert (await http.post("/v1/chat/completions", json=CHAT, headers=headers)).status_code == 200


async def test_with_the_first_key_the_door_closes_for_good(service: Service) -> None:
    owner = service.accounting.tenants_service
    async with client_of(service, HttpPolicy()) as http:
        issued = await owner.create_admin_key("first", None, actor="test")
        assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 401
        await owner.revoke_key(None, issued.key.id, actor="test")
        assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 401
    async with client_of(service, HttpPolicy(auth="open")) as http:
        assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 200
        wrong = new_key(is_admin=False).value
        assert (await http.post("/v1/chat/completions", json=CHAT, headers=bearer(wrong))).status_code == 401


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer "},
        {"Authorization": "Basic YTpi"},
        {"Authorization": "Bearer \xff\xfe"},
        bearer("sk-poly-" + 43 * "A"),
        bearer("sk-poly-" + 100_000 * "A"),
        {"X-Api-Key": "here"},
    ],
)
async def test_what_is_no_key_is_a_401_in_openai_s_shape(org: Org, headers: dict[str, str]) -> None:
    encoded = {name: value.encode("latin-1") for name, value in headers.items()}
    answer = await org.http.post("/v1/chat/completions", json=CHAT, headers=encoded)
    assert answer.status_code == 401
    assert answer.headers["WWW-Authenticate"] == "Bearer"
    assert answer.json()["error"]["code"] == "invalid_api_key"


async def test_a_key_in_a_query_or_another_header_is_none(org: Org) -> None:
    for where in ({"params": {"api_key": org.keys["ada"]}}, {"headers": {"X-Api-Key": org.keys["ada"]}}):
        assert (await org.http.get("/v1/models", **where)).status_code == 401


async def test_anthropic_s_routes_take_the_key_as_its_clients_send_it(org: Org) -> None:
    body = {"model": "base", "max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]}
    submitted = org.service.fleet.replicas["replica-0"].submitted
    key = {"x-api-key": org.keys["ada"]}
    assert (await org.http.post("/v1/messages", json=body, headers=key)).status_code == 200
    assert submitted[-1].tenant_id == org.ids["ada"]
    count = {name: body[name] for name in ("model", "messages")}
    assert (await org.http.post("/v1/messages/count_tokens", json=count, headers=key)).status_code == 200
    both = bearer(org.keys["bob"]) | key
    assert (await org.http.post("/v1/messages", json=body, headers=both)).status_code == 200
    assert submitted[-1].tenant_id == org.ids["bob"], "Authorization is what every route reads"
    for wrong in ({}, {"x-api-key": "sk-poly-wrong"}, bearer("sk-poly-wrong") | key):
        answer = await org.http.post("/v1/messages", json=body, headers=wrong)
        assert (answer.status_code, answer.json()["type"]) == (401, "error")
        assert answer.json()["error"]["type"] == "authentication_error"
    for path in ("/v1/chat/completions", "/v1/messages_not", "/v1/responses"):
        assert (await org.http.post(path, json=body, headers=key)).status_code == 401


async def test_a_request_is_its_project_s(org: Org) -> None:
    answer = await org.ask("ada", "POST", "/v1/chat/completions", json=CHAT)
    assert answer.status_code == 200, answer.text
    owner = org.service.accounting.tenants_service
    await owner.configure_project(org.ids["bob"], {"weight": 3.0}, actor="test")
    await org.ask("bob", "POST", "/v1/chat/completions", json=CHAT)
    submitted = org.service.fleet.replicas["replica-0"].submitted
    assert [each.tenant_id for each in submitted] == [org.ids["ada"], org.ids["bob"]]
    assert [each.weight for each in submitted] == [1.0, 3.0]
    salts = {each.cache_salt for each in submitted}
    assert len(salts) == 2
    assert b"" not in salts
    await owner.rotate_salt(org.ids["ada"], actor="test")
    await org.ask("ada", "POST", "/v1/chat/completions", json=CHAT)
    assert submitted[-1].cache_salt not in salts


async def test_prefixes_are_not_shared_between_projects(org: Org) -> None:
    body = CHAT | {"messages": [{"role": "user", "content": "x" * 40}]}
    cached = []
    for who in ("ada", "ada", "bob", "bob"):
        usage = (await org.ask(who, "POST", "/v1/chat/completions", json=body)).json()["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert cached[0] == cached[2] == 0
    assert cached[1] == cached[3] > 0


async def test_no_request_chooses_its_salt_tenant_weight_or_key(org: Org) -> None:
    """Through no field of a body, no header and no query; the server derives them all."""
    submitted = org.service.fleet.replicas["replica-0"].submitted
    await org.ask("bob", "POST", "/v1/chat/completions", json=CHAT)
    true = submitted[-1]
    forged = {"cache_salt": "x", "tenant_id": org.ids["ada"], "weight": 100, "key_id": "k", "num_charged": 1000}
    for field, value in forged.items():
        for where in ({field: value}, {"extra_body": {field: value}}, {"metadata": {field: str(value)}}):
            answer = await org.ask("bob", "POST", "/v1/chat/completions", json=CHAT | where)
            assert answer.status_code in (200, 400), answer.text
        headers = bearer(org.keys["bob"]) | {field.replace("_", "-"): str(value), "X-Tenant-Id": org.ids["ada"]}
        path = f"/v1/chat/completions?{field}={value}"
        assert (await org.http.request("POST", path, headers=headers, json=CHAT)).status_code == 200
    for each in submitted[submitted.index(true) :]:
        assert (each.cache_salt, each.tenant_id, each.weight) == (true.cache_salt, true.tenant_id, true.weight)
        assert (each.key_id, each.num_charged) == (true.key_id, None)


async def test_expiry_revocation_rotation_and_archiving(org: Org) -> None:
    owner, view = org.service.accounting.tenants_service, org.service.accounting.view
    project_id = org.ids["ada"]
    account = (await owner.accounts(project_id, 10, None))[0]
    (old,) = await owner.keys(project_id, 10, None)
    new = await owner.create_key(project_id, account.id, "next", None, actor="test")
    expiring = await owner.expire_key(project_id, old.id, 60, actor="test")
    for value in (org.keys["ada"], new.value):
        assert (await org.http.get("/v1/models", headers=bearer(value))).status_code == 200, "both, for a while"
    assert expiring.expires_s is not None
    assert view.find(org.keys["ada"], expiring.expires_s - 1) is not None
    assert view.find(org.keys["ada"], expiring.expires_s) is None
    await owner.revoke_key(project_id, new.key.id, actor="test")
    assert (await org.http.get("/v1/models", headers=bearer(new.value))).status_code == 401
    assert (await org.ask("bob", "GET", "/v1/models")).status_code == 200
    await owner.archive_project(org.ids["bob"], actor="test")
    assert (await org.ask("bob", "GET", "/v1/models")).status_code == 401


async def test_a_project_s_header_must_be_its_own(org: Org) -> None:
    same = await org.ask("ada", "GET", "/v1/models", headers={"OpenAI-Project": org.ids["ada"]})
    other = await org.ask("ada", "GET", "/v1/models", headers={"OpenAI-Project": org.ids["bob"]})
    assert (same.status_code, other.status_code) == (200, 401)


@pytest.mark.parametrize("auth", ["auto", "keys", "open"])
async def test_an_operator_chooses_an_admin_key_of_any_form(service: Service, auth: AuthMode) -> None:
    key = "8a4b1c0d9e2f37465a6b7c8d9e0f1a2b3c4d5e6f708192a3b4c5d6e7f8091a2b"  # openssl rand -hex 32
    rules = HttpPolicy.of(HttpConfig(auth=auth), {ADMIN_KEY: key}, "127.0.0.1")
    async with client_of(service, rules) as http:
        assert (await http.get("/v1/organization/projects", headers=bearer(key))).status_code == 200
        assert (await http.get("/v1/organization/projects", headers=bearer(key[:-1]))).status_code in (401, 403)


@pytest.mark.parametrize("name", [ADMIN_KEY, MANAGEMENT_TOKEN])
@pytest.mark.parametrize(
    ("secret", "is_accepted"),
    [
        ("0f1e2d3c4b5a69788796a5b4c3d2e1f0", True),  # 32 hexadecimal digits: 128 bits
        ("0f1e2d3c4b5a69788796a5b4c3d2e1f", False),
        ("q8Zt2LmXv0RbN5wYc7KdHs", True),  # 22 letters and digits of both cases
        ("q8Zt2LmXv0RbN5wYc7KdH", False),
        ("x", False),
        ("hunter2hunter2hunter2hunter2hunter2", False),
        ("a" * 64, False),
        ("0f1e2d3c 4b5a6978 8796a5b4 c3d2e1f0", False),
        ("0f1e2d3c4b5a69788796a5b4c3d2e1f\u00e9", False),
    ],
)
def test_a_secret_that_could_be_guessed_is_refused(name: str, secret: str, is_accepted: bool) -> None:
    if is_accepted:
        assert environment_digest({name: secret}, name) == key_digest(secret)
    else:
        with pytest.raises(ConfigError, match=f"^{name} could be guessed; .*openssl rand -hex 32") as caught:
            environment_digest({name: secret}, name)
        assert secret not in str(caught.value) or len(secret) == 1


async def test_keys_are_not_honoured_for_ever_without_the_table_s_owner(org: Org) -> None:
    """A key could have been revoked, and this ingress would not know."""
    view, clock = org.service.accounting.view, org.service.accounting.clock
    view.confirmed_s = clock() - MAX_TABLE_AGE_S + 60
    assert (await org.ask("ada", "GET", "/v1/models")).status_code == 200
    view.confirmed_s = clock() - MAX_TABLE_AGE_S - 1
    for who in ("ada", "admin"):
        answer = await org.ask(who, "GET", "/v1/organization/projects")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_ready")
        assert answer.headers["retry-after"]
    wrong = await org.http.get("/v1/models", headers=bearer(new_key(is_admin=False).value))
    assert wrong.status_code == 401
    view.confirmed_s = clock()
    assert (await org.ask("ada", "GET", "/v1/models")).status_code == 200


async def test_each_answer_of_the_table_s_owner_confirms_the_keys(service: Service) -> None:
    now_s, answers = 1000.0, iter([None, ConnectionError(), None])

    async def watch(*_: object) -> None:
        nonlocal now_s
        now_s += 10
        if error := next(answers, asyncio.CancelledError()):
            raise error

    table = TenantTableClient(service.accounting.tenants_service, "watcher", clock=lambda: now_s)
    table._watch = watch
    follow = asyncio.create_task(table.follow())
    with pytest.raises(asyncio.CancelledError):
        await follow
    assert table.view.confirmed_s == 1030, "the second poll failed, the third answered"


async def test_the_key_of_the_environment_administers(service: Service) -> None:
    key = new_key(is_admin=True).value
    rules = HttpPolicy.of(HttpConfig(), {ADMIN_KEY: key}, "127.0.0.1")
    assert rules.admin_digest == key_digest(key)
    async with client_of(service, rules) as http:
        assert (await http.get("/v1/models")).status_code == 401, "there is a key now"
        assert (await http.get("/v1/organization/projects", headers=bearer(key))).status_code == 200
    with pytest.raises(ConfigError, match="create-admin-key") as caught:
        HttpPolicy.of(HttpConfig(), {ADMIN_KEY: "hunter2"}, "127.0.0.1")
    assert "hunter2" not in str(caught.value)


def test_the_environment_may_hold_a_hash_instead() -> None:
    key, token = new_key(is_admin=True).value, "0f1e2d3c4b5a69788796a5b4c3d2e1f0"
    environ = {f"{ADMIN_KEY}{DIGEST}": key_digest(key), f"{MANAGEMENT_TOKEN}{DIGEST}": key_digest(token)}
    rules = HttpPolicy.of(HttpConfig(management="token"), environ, "0.0.0.0")
    given = {ADMIN_KEY: key, MANAGEMENT_TOKEN: token}
    assert rules == HttpPolicy.of(HttpConfig(management="token"), given, "0.0.0.0")
    assert rules.is_management_token(token)
    assert not rules.is_management_token(key_digest(token)), "whoever reads the environment has not the token"
    with pytest.raises(ConfigError, match="64 hexadecimal digits"):
        HttpPolicy.of(HttpConfig(), {f"{ADMIN_KEY}{DIGEST}": "hunter2"}, "0.0.0.0")


async def test_admin_keys_infer_nothing_and_inference_keys_administer_nothing(org: Org) -> None:
    """Every route: a generating one refuses admin keys, an administering one all others, before it reads a body."""
    generating = {"/v1/chat/completions", "/v1/completions", "/generate"}
    bodies = {
        "/v1/chat/completions": CHAT,
        "/v1/completions": {"model": "base", "prompt": "a"},
        "/generate": {"text": "a"},
    }
    paths = {(method, route.path_format) for route in _routes(org) for method in route.methods - {"HEAD"}}
    assert {path for _, path in paths} >= generating
    for method, path in sorted(paths):
        filled = path.replace("{", "").replace("}", "")
        if path in generating:
            answer = await org.ask("admin", method, filled, json=bodies[path])
            assert answer.status_code == 403, path
            assert answer.json()["error"]["type"] == "insufficient_permissions"
        elif path.startswith(("/v1/organization", "/v1/tenants")):
            answer = await org.ask("ada", method, filled, json={})
            assert answer.status_code == 403, path
        if path not in PROBES and (method, path) != ("DELETE", SESSION_PATH):
            assert (await org.http.request(method, filled)).status_code == 401, path


def _routes(org: Org) -> list[Any]:
    app: Any = make_app(org.service, HttpPolicy())
    return list(api_routes(app.routes))


async def test_another_project_s_adapter_does_not_exist(org: Org) -> None:
    """The same status, bytes and headers as for a name that does not exist, through every field and route."""
    name, nobody = "secret", "nobody"
    asked: list[tuple[str, str, dict[str, Any] | None]] = [
        ("POST", "/v1/chat/completions", CHAT | {"model": "NAME"}),
        ("POST", "/v1/chat/completions", CHAT | {"model": "base:NAME"}),
        ("POST", "/v1/chat/completions", CHAT | {"lora_path": "NAME"}),
        ("POST", "/v1/chat/completions", CHAT | {"model": "NAME", "stream": True}),
        ("POST", "/v1/completions", {"model": "NAME", "prompt": "a"}),
        ("POST", "/generate", {"text": "a", "lora_path": "NAME"}),
        ("POST", "/generate", {"text": ["a", "b"], "lora_path": [None, "NAME"]}),
        ("GET", "/v1/models/NAME", None),
        ("GET", "/v1/models/base:NAME", None),
        ("GET", "/v1/loras/NAME", None),
        ("GET", "/v1/loras/NAME/generations", None),
        ("PATCH", "/v1/loras/NAME", {"pinned": False}),
        ("DELETE", "/v1/loras/NAME", None),
        ("POST", "/v1/unload_lora", {"lora_model": "NAME"}),
        ("POST", "/v1/unload_lora_adapter", {"lora_name": "NAME"}),
        ("GET", "/v1/events?name=NAME", None),
        ("GET", "/v1/audit?name=NAME", None),
        ("GET", "/v1/aliases/NAME", None),
        ("PUT", "/v1/aliases/mine", {"targets": {"NAME": 1}}),
        ("POST", "/v1/aliases/NAME/rollback", {}),
        ("DELETE", "/v1/aliases/NAME", None),
    ]
    for method, path, body in asked:
        seen = []
        for word in (name, nobody):
            text = None if body is None else httpx.Request("POST", "http://x", json=body).content.decode()
            content = None if text is None else text.replace("NAME", word)
            answer = await org.ask("bob", method, path.replace("NAME", word), content=content)
            headers = {key: value for key, value in answer.headers.items() if key not in ("content-length", "date")}
            seen.append((answer.status_code, answer.text.replace(word, "NAME"), headers))
        assert seen[0] == seen[1], path
    listed = [await org.ask("bob", "GET", path) for path in ("/v1/models", "/v1/loras", "/v1/aliases", "/v1/events")]
    assert all("secret" not in answer.text for answer in listed)
    mine = await org.ask("ada", "POST", "/v1/chat/completions", json=CHAT | {"model": "secret"})
    assert mine.status_code == 200


async def test_shared_and_public_adapters_are_used_and_not_managed(org: Org) -> None:
    assert [each["id"] for each in (await org.ask("bob", "GET", "/v1/models")).json()["data"]] == ["base", "sql"]
    await org.service.accounting.tenants_service.share(org.ids["ada"], "secret", [org.ids["bob"]], actor="test")
    listed = (await org.ask("bob", "GET", "/v1/models")).json()["data"]
    assert [each["id"] for each in listed] == ["base", "secret", "sql"]
    for model in ("secret", "sql"):
        answer = await org.ask("bob", "POST", "/v1/chat/completions", json=CHAT | {"model": model})
        assert answer.status_code == 200
        assert (await org.ask("bob", "DELETE", f"/v1/loras/{model}")).status_code == 404, "it is another's"
    submitted = org.service.fleet.replicas["replica-0"].submitted[-1]
    assert submitted.tenant_id == org.ids["bob"], "who asks pays"
    await org.service.accounting.tenants_service.share(org.ids["ada"], "secret", [], actor="test")
    gone = await org.ask("bob", "POST", "/v1/chat/completions", json=CHAT | {"model": "secret"})
    assert gone.status_code == 404


async def test_pages_of_models_are_in_order_and_whole(org: Org) -> None:
    await org.service.accounting.tenants_service.share(org.ids["ada"], "secret", [org.ids["bob"]], actor="test")
    for name in ("a", "m", "z", "sql"):
        await org.service.managed.client.load_and_wait(LoadRequest(org.ids["bob"], name, "two", "test"))
    whole, after = [], None
    while True:
        params = {"limit": "2"} | ({"after": after} if after else {})
        page = (await org.ask("bob", "GET", "/v1/models", params=params)).json()
        whole += [each["id"] for each in page["data"]]
        if not page["has_more"]:
            break
        after = page["last_id"]
    assert whole == ["base", "a", "m", "secret", "sql", "z"]


async def test_models_that_are_not_allowed_do_not_exist(org: Org) -> None:
    owner = org.service.accounting.tenants_service
    await owner.permit_models(org.ids["bob"], "allow_list", ["sql"], actor="test")
    assert [each["id"] for each in (await org.ask("bob", "GET", "/v1/models")).json()["data"]] == ["sql"]
    for model, status in (("base", 404), ("sql", 200), ("base:sql", 200)):
        answer = await org.ask("bob", "POST", "/v1/chat/completions", json=CHAT | {"model": model})
        assert answer.status_code == status, model
    await owner.permit_models(org.ids["bob"], "deny_list", ["sql"], actor="test")
    assert [each["id"] for each in (await org.ask("bob", "GET", "/v1/models")).json()["data"]] == ["base"]


async def test_a_project_manages_its_own_adapters_from_its_own_folders(org: Org) -> None:
    store, mine = org.service.managed.store, f"{org.ids['bob']}/two"
    store.contents[mine] = store.contents["two"]
    load = {"lora_name": "mine", "lora_path": mine}
    assert (await org.ask("bob", "POST", "/v1/load_lora_adapter", json=load)).status_code == 200
    assert (await org.ask("ada", "GET", "/v1/loras/mine")).status_code == 404
    described = (await org.ask("bob", "GET", "/v1/loras/mine")).json()
    assert not {"residency", "last_used"} & described.keys(), "others may have the same contents"
    events = (await org.ask("bob", "GET", "/v1/events")).json()["data"]
    assert {each["event"] for each in events} <= {"requested", "registered", "routable"}
    for path in ("two", f"{org.ids['ada']}/two", "/etc", f"{org.ids['bob']}/../two"):
        refused = await org.ask("bob", "POST", "/v1/load_lora_adapter", json={"lora_name": "n", "lora_path": path})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "unsafe_source"), path
    assert (await org.ask("bob", "PATCH", "/v1/loras/mine", json={"pinned": True})).status_code == 403
    assert (await org.ask("admin", "PATCH", "/v1/loras/sql", json={"pinned": True})).status_code == 200
    by_admin = await org.ask("admin", "GET", "/v1/loras/mine", headers={"OpenAI-Project": org.ids["bob"]})
    assert by_admin.status_code == 200
    assert (await org.ask("bob", "DELETE", "/v1/loras/mine")).status_code == 200


async def test_loads_at_the_same_time_do_not_pass_the_quota_together(org: Org) -> None:
    store, project_id = org.service.managed.store, org.ids["bob"]
    store.contents[f"{project_id}/a"] = store.contents["two"]
    await org.service.accounting.tenants_service.configure_project(project_id, {"max_adapters": 3}, actor="test")
    loads = [
        org.ask("bob", "POST", "/v1/load_lora_adapter", json={"lora_name": f"n{i}", "lora_path": f"{project_id}/a"})
        for i in range(8)
    ]
    answers = await asyncio.gather(*loads)
    assert sorted(answer.status_code for answer in answers) == 3 * [200] + 5 * [403]
    refused = next(answer for answer in answers if answer.status_code == 403)
    assert refused.json()["error"]["code"] == "adapter_quota_reached"
    assert refused.headers["X-Should-Retry"] == "false"
    assert "may have 3" in refused.json()["error"]["message"]
    listed = (await org.ask("bob", "GET", "/v1/loras")).json()["data"]
    assert len(listed) == 3
    again = {"lora_name": listed[0]["id"], "lora_path": f"{project_id}/a", "load_inplace": True}
    assert (await org.ask("bob", "POST", "/v1/load_lora_adapter", json=again)).status_code == 200, "it is no more"
    await org.service.accounting.tenants_service.configure_project(
        project_id, {"max_adapters": None, "max_adapter_bytes": 3 * listed[0]["size_bytes"]}, actor="test"
    )
    one_more = {"lora_name": "more", "lora_path": f"{project_id}/a"}
    assert (await org.ask("bob", "POST", "/v1/load_lora_adapter", json=one_more)).status_code == 403
    await org.service.accounting.tenants_service.configure_project(project_id, {"enforce": False}, actor="test")
    assert (await org.ask("bob", "POST", "/v1/load_lora_adapter", json=one_more)).status_code == 200


async def test_uses_of_keys_are_recorded_once_a_minute(org: Org) -> None:
    owner = org.service.accounting.tenants_service
    for _ in range(3):
        await org.ask("ada", "GET", "/v1/models")
    (before,) = await owner.keys(org.ids["ada"], 10, None)
    await org.service.accounting.report_key_use()
    (after,) = await owner.keys(org.ids["ada"], 10, None)
    assert before.last_used_s is None
    assert after.last_used_s is not None


async def test_a_key_in_the_url_is_refused_and_not_repeated(org: Org) -> None:
    key = org.keys["ada"]
    for path, query in ((f"/v1/models/{key}", {}), (f"/v1/loras/{key[:30]}", {}), ("/v1/models", {"api_key": key})):
        answer = await org.ask("ada", "GET", path, params=query)
        assert answer.status_code == 400, path
        assert "Authorization: Bearer" in answer.json()["error"]["message"]
        assert key[:30] not in answer.text


async def test_a_key_in_a_body_is_not_repeated_and_names_nothing(org: Org) -> None:
    key = org.keys["ada"]
    load = {"lora_name": key, "lora_path": f"{org.ids['ada']}/x"}
    for path, body in (
        ("/v1/completions", {"model": key, "prompt": "x"}),
        ("/v1/completions", {"model": "tiny", "prompt": "x", key: 1}),
        ("/v1/load_lora_adapter", load),
        ("/v1/load_lora_adapter", {"lora_name": "mine", "lora_path": f"{org.ids['ada']}/{key}"}),
    ):
        answer = await org.ask("ada", "POST", path, json=body)
        assert 400 <= answer.status_code < 500, body
        assert key[12:-6] not in answer.text
    renamed = await org.ask("admin", "POST", "/v1/organization/projects", json={"name": f"of {key}"})
    assert renamed.status_code == 400
    assert key[12:-6] not in renamed.text


async def test_no_key_is_written_anywhere(org: Org, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    answers = [
        await org.ask("ada", "POST", "/v1/chat/completions", json={"model": "nobody", "messages": [], "x": 1}),
        await org.ask("ada", "POST", "/v1/organization/projects", json={}),
        await org.ask("admin", "GET", "/v1/organization/audit_logs"),
        await org.ask("admin", "GET", f"/v1/organization/projects/{org.ids['ada']}/api_keys"),
        await org.http.get("/v1/models", headers=bearer(org.keys["ada"][:-1] + "!")),
    ]
    received = caplog.text + "".join(answer.text + str(answer.headers) for answer in answers)
    assert not [key for key in (*org.keys.values(), org.admin) if key[12:-6] in received]


async def test_a_key_s_role_is_what_it_may_do(org: Org) -> None:
    """A member infers and manages, the other roles do one of both; a change of role is in force at once."""
    project = f"/v1/organization/projects/{org.ids['ada']}/service_accounts"
    keys, accounts = {"member": org.keys["ada"]}, {}
    for role in ("inference", "management"):
        made = (await org.ask("admin", "POST", project, json={"name": role, "role": role})).json()
        assert made["role"] == role
        keys[role], accounts[role] = made["api_key"]["value"], made["id"]
    chat = CHAT | {"model": "base"}

    async def may(role: str) -> tuple[int, int, int]:
        headers = bearer(keys[role])
        infers = await org.http.post("/v1/chat/completions", json=chat, headers=headers)
        manages = await org.http.patch("/v1/loras/secret", json={"description": role}, headers=headers)
        lists = await org.http.get("/v1/loras", headers=headers)
        for refused in (infers, manages, lists):
            assert refused.status_code == 200 or refused.json()["error"]["code"] == "insufficient_permissions"
        return infers.status_code, manages.status_code, lists.status_code

    assert await may("member") == (200, 200, 200)
    assert await may("inference") == (200, 403, 403)
    assert await may("management") == (403, 200, 200)
    for path in ("/v1/files", "/v1/batches", "/v1/responses/resp_x"):
        assert (await org.http.get(path, headers=bearer(keys["management"]))).status_code == 403
    for value in keys.values():
        assert (await org.http.get("/v1/models", headers=bearer(value))).status_code == 200
        assert (await org.http.get("/v1/organization/projects", headers=bearer(value))).status_code == 403
    more = (await org.ask("admin", "POST", f"{project}/{accounts['inference']}/api_keys", json={})).json()
    keys["more"] = more["value"]
    assert await may("more") == (200, 403, 403), "a key has the role of its account"
    changed = await org.ask("admin", "POST", f"{project}/{accounts['inference']}", json={"role": "management"})
    assert (changed.json()["role"], changed.json()["name"]) == ("management", "inference")
    assert await may("more") == await may("inference") == (403, 200, 200)
    wrong = await org.ask("admin", "POST", project, json={"name": "x", "role": "owner"})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "role")


async def test_every_management_route_refuses_a_key_that_only_infers(org: Org) -> None:
    """Whatever route is added: all of them, with any method."""
    owner = org.service.accounting.tenants_service
    _, issued = await owner.create_account(
        org.ids["ada"], "app", with_key=True, expires_in_s=None, role="inference", actor="test"
    )
    assert issued is not None
    app = make_app(org.service, HttpPolicy())
    inference = re.compile(
        r"/$|/version|/health|/livez|/readyz|/openapi.json|/generate|/tokenize|/detokenize|/v1/(models|chat|completions|embeddings|"
        r"messages|responses|files|batches|score|rerank|classify|route|session)\b|/console"
    )
    num_refused, admitted = 0, list[str]()
    for route in flat_routes(app.routes):
        if inference.match(route.path_format):
            continue
        path = re.sub(r"\{[^}]*\}", "x", route.path_format)
        for method in route.methods or ():
            answer = await org.http.request(method, path, headers=bearer(issued.value), json={})
            if answer.status_code == 403:
                num_refused += 1
            else:
                admitted.append(f"{method} {path}")
    assert admitted == []
    assert num_refused > 40
