"""Tenants managed by OpenAI's own client: every call goes through it, against the application in this process."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pydantic
import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from openai._base_client import BasePage

from app.deployments.ingress.http.app import make_app
from app.deployments.ingress.http.middleware.origin_check import HttpPolicy
from app.deployments.tenancy.auth.key_crypto import key_digest, new_key
from tests.deployments.http_service import Service

NOW = int(time.time()) - 30
ADMIN_KEY = new_key(is_admin=True).value


@pytest_asyncio.fixture
async def transport(service: Service) -> AsyncIterator[httpx.AsyncClient]:
    rules = HttpPolicy(admin_digest=key_digest(ADMIN_KEY))
    application = httpx.ASGITransport(make_app(service, rules), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=application, timeout=20) as client:
        yield client


def client_with(transport: httpx.AsyncClient, *, api_key: str = "none", admin_key: str = ADMIN_KEY) -> AsyncOpenAI:
    return AsyncOpenAI(
        api_key=api_key,
        admin_api_key=admin_key,
        base_url="http://test/v1",
        http_client=transport,
        max_retries=0,
        _strict_response_validation=True,
    )


async def test_from_a_project_to_an_answer(transport: httpx.AsyncClient) -> None:
    admin = client_with(transport).admin.organization
    project = await admin.projects.create(name="Acme")
    assert (project.status, project.name, project.archived_at) == ("active", "Acme", None)
    account = await admin.projects.service_accounts.create(project.id, name="app")
    assert account.api_key is not None
    assert account.api_key.value.startswith("sk-poly-")
    answer = await client_with(transport, api_key=account.api_key.value).chat.completions.create(
        model="base", messages=[{"role": "user", "content": "hi"}], max_tokens=4
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 0
    archived = await admin.projects.archive(project.id)
    assert archived.status == "archived"
    assert archived.archived_at is not None
    with pytest.raises(openai.AuthenticationError):
        await client_with(transport, api_key=account.api_key.value).models.list()


async def test_projects_are_listed_in_pages(transport: httpx.AsyncClient) -> None:
    projects = client_with(transport).admin.organization.projects
    made = [(await projects.create(name=f"p{index}")).id for index in range(5)]
    assert [each.id async for each in projects.list(limit=2)] == made
    await projects.archive(made[1])
    assert [each.id async for each in projects.list()] == [each for each in made if each != made[1]]
    assert [each.id async for each in projects.list(include_archived=True, limit=3)] == made
    renamed = await projects.update(made[0], name="another")
    assert (await projects.retrieve(made[0])).name == renamed.name == "another"
    with pytest.raises(openai.NotFoundError):
        await projects.retrieve("proj_none")
    with pytest.raises(openai.BadRequestError, match="archived"):
        await projects.update(made[1], name="too late")
    with pytest.raises(openai.BadRequestError, match="name"):
        await projects.create(name=" ")


async def test_service_accounts_and_their_keys(transport: httpx.AsyncClient) -> None:
    projects = client_with(transport).admin.organization.projects
    project = await projects.create(name="Acme")
    bare = await projects.service_accounts.create(project.id, name="bare", create_service_account_only=True)
    assert (bare.api_key, bare.role) == (None, "none")
    account = await projects.service_accounts.create(project.id, name="app", expires_in_seconds=60)
    first = account.api_key
    assert first is not None
    assert first.expires_at is not None
    assert 59 <= first.expires_at - first.created_at <= 60
    second = await projects.service_accounts.api_keys.create(account.id, project_id=project.id, name="next")
    listed = [each async for each in projects.api_keys.list(project.id, limit=1)]
    assert [each.id for each in listed] == [first.id, second.id]
    assert [each.name for each in listed] == ["Secret Key", "next"]
    for each, value in zip(listed, (first.value, second.value), strict=True):
        assert each.owner.service_account is not None
        assert each.owner.service_account.id == account.id
        assert value[12:-6] not in each.model_dump_json()
        assert each.redacted_value.endswith(value[-4:])
    changed = await projects.api_keys.update(second.id, project_id=project.id, expires_in_seconds=3600)
    assert changed.expires_at is not None
    assert (await projects.api_keys.retrieve(second.id, project_id=project.id)).expires_at == changed.expires_at
    deleted = await projects.api_keys.delete(first.id, project_id=project.id)
    assert (deleted.id, deleted.deleted) == (first.id, True)
    with pytest.raises(openai.NotFoundError):
        await projects.api_keys.retrieve(first.id, project_id=project.id)
    other = await projects.create(name="other")
    with pytest.raises(openai.NotFoundError):
        await projects.api_keys.retrieve(second.id, project_id=other.id)
    renamed = await projects.service_accounts.update(account.id, project_id=project.id, name="renamed")
    assert renamed.name == "renamed"
    assert [each.id async for each in projects.service_accounts.list(project.id, limit=1)] == [bare.id, account.id]
    gone = await projects.service_accounts.delete(account.id, project_id=project.id)
    assert gone.deleted
    assert [each.id async for each in projects.api_keys.list(project.id)] == []
    with pytest.raises(openai.AuthenticationError):
        await client_with(transport, api_key=second.value).models.list()


async def test_admin_keys(transport: httpx.AsyncClient) -> None:
    keys = client_with(transport).admin.organization.admin_api_keys
    made = [await keys.create(name=f"k{index}", expires_in_seconds=3600) for index in range(3)]
    assert all(each.value.startswith("sk-admin-") for each in made)
    second = client_with(transport, admin_key=made[1].value).admin.organization
    assert [each.id async for each in second.admin_api_keys.list(limit=2)] == [each.id for each in made]
    newest = [each.id async for each in second.admin_api_keys.list(limit=2, order="desc")]
    assert newest == [each.id for each in reversed(made)]
    assert (await second.admin_api_keys.retrieve(made[0].id)).redacted_value == made[0].redacted_value
    assert (await keys.delete(made[1].id)).deleted
    with pytest.raises(openai.AuthenticationError):
        await second.projects.list()
    with pytest.raises(openai.PermissionDeniedError):
        await client_with(transport, api_key=made[0].value).chat.completions.create(
            model="base", messages=[{"role": "user", "content": "hi"}]
        )


async def test_rate_limits(transport: httpx.AsyncClient) -> None:
    projects = client_with(transport).admin.organization.projects
    project = await projects.create(name="Acme")
    (base,) = [each async for each in projects.rate_limits.list_rate_limits(project.id)]
    assert (base.id, base.model, base.max_requests_per_1_minute) == ("rl-base", "base", 2**31 - 1)
    changed = await projects.rate_limits.update_rate_limit(
        "rl-base", project_id=project.id, max_requests_per_1_minute=10, max_tokens_per_1_minute=1000
    )
    assert (changed.max_requests_per_1_minute, changed.max_tokens_per_1_minute) == (10, 1000)
    await projects.rate_limits.update_rate_limit("rl-sql", project_id=project.id, max_requests_per_1_day=5)
    again = await projects.rate_limits.update_rate_limit(
        "rl-base", project_id=project.id, max_tokens_per_1_minute=2**31 - 1
    )
    assert (again.max_requests_per_1_minute, again.max_tokens_per_1_minute) == (10, 2**31 - 1)
    listed = [each async for each in projects.rate_limits.list_rate_limits(project.id, limit=1)]
    assert [(each.model, each.max_requests_per_1_day) for each in listed] == [("base", 2**31 - 1), ("sql", 5)]


async def test_model_permissions(transport: httpx.AsyncClient) -> None:
    projects = client_with(transport).admin.organization.projects
    project = await projects.create(name="Acme")
    assert (await projects.model_permissions.retrieve(project.id)).mode == "deny_list"
    changed = await projects.model_permissions.update(project.id, mode="allow_list", model_ids=["sql"])
    assert (changed.mode, changed.api_model_ids) == ("allow_list", ["sql"])
    assert (await projects.model_permissions.delete(project.id)).deleted
    assert (await projects.model_permissions.retrieve(project.id)).api_model_ids == []


async def test_the_audit_says_who_changed_what(transport: httpx.AsyncClient) -> None:
    admin = client_with(transport).admin.organization
    project = await admin.projects.create(name="Acme")
    account = await admin.projects.service_accounts.create(project.id, name="app")
    assert account.api_key is not None
    await admin.projects.archive(project.id)
    lines = [each async for each in admin.audit_logs.list(limit=2)]
    expected = ["project.archived", "api_key.created", "service_account.created", "project.created"]
    assert [each.type for each in lines] == expected
    assert lines[0].actor is not None
    assert lines[0].actor.api_key is not None
    assert lines[0].actor.api_key.id == "key_environment"
    only = [each.type async for each in admin.audit_logs.list(event_types=["project.created", "project.archived"])]
    assert only == ["project.archived", "project.created"]
    other = await admin.projects.create(name="other")
    assert [each.type async for each in admin.audit_logs.list(project_ids=[other.id])] == ["project.created"]
    assert [each.type async for each in admin.audit_logs.list(resource_ids=[other.id])] == ["project.created"]
    assert len([each async for each in admin.audit_logs.list(actor_ids=["key_environment"])]) == 5
    assert not (await admin.audit_logs.list(actor_ids=["key_x"])).data
    now_s = lines[0].effective_at
    for times, is_found in (
        ({"gte": now_s, "lt": now_s + 1}, True), ({"gt": now_s - 1, "lte": now_s}, True), ({"gt": now_s + 5}, False),
        ({"lt": now_s - 5}, False),
    ):  # fmt: skip
        found = [each.id async for each in admin.audit_logs.list(effective_at=times)]  # type: ignore[arg-type]
        assert (lines[0].id in found) is is_found, times


async def test_what_openai_s_objects_cannot_say(transport: httpx.AsyncClient) -> None:
    project = await client_with(transport).admin.organization.projects.create(name="Acme")
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    url = f"http://test/v1/tenants/{project.id}"
    tenant = (await transport.get(url, headers=headers)).json()
    assert (tenant["object"], tenant["weight"], tenant["max_adapters"]) == ("polylora.tenant", 1.0, None)
    changes = {"weight": 2.5, "max_adapters": 3, "enforce": False}
    tenant = (await transport.patch(url, headers=headers, json=changes)).json()
    assert (tenant["weight"], tenant["max_adapters"], tenant["enforce"]) == (2.5, 3, False)
    assert (await transport.patch(url, headers=headers, json={"calls_per_min": 5})).json()["calls_per_min"] == 5
    tenant = (await transport.patch(url, headers=headers, json={"max_adapters": -1, "calls_per_min": -1})).json()
    assert tenant["calls_per_min"] is None
    assert (tenant["weight"], tenant["max_adapters"]) == (2.5, None)
    for wrong in ({"weight": 0}, {"weight": -1}, {"weight": 1e9}, {"salt": "x"}):
        assert (await transport.patch(url, headers=headers, json=wrong)).status_code == 400
    assert (await transport.post(f"{url}/rotate_salt", headers=headers)).status_code == 200
    other = await client_with(transport).admin.organization.projects.create(name="other")
    shared = await transport.put(f"{url}/shares/sql", headers=headers, json={"project_ids": [other.id]})
    assert shared.json()["shares"] == {"sql": [other.id]}
    unknown = await transport.put(f"{url}/shares/sql", headers=headers, json={"project_ids": ["proj_none"]})
    assert unknown.status_code == 404


def unknown(value: Any, place: str = "") -> list[str]:
    """Where an answer has fields that the client's types do not know; those that are missing it refuses by itself."""
    if isinstance(value, list | tuple):
        return [name for index, item in enumerate(value) for name in unknown(item, f"{place}[{index}]")]
    if not isinstance(value, pydantic.BaseModel):
        return []
    of_pages = {"object", "first_id", "last_id"} if isinstance(value, BasePage) else set[str]()  # sent, and not typed
    found = [f"{place}.{name}" for name in (value.model_extra or {}).keys() - of_pages]
    return found + [
        each for name in value.model_fields_set for each in unknown(getattr(value, name), f"{place}.{name}")
    ]


async def test_every_answer_is_of_openai_s_types_and_names_ended_batches(transport: httpx.AsyncClient) -> None:
    admin = client_with(transport).admin.organization
    projects, usage = admin.projects, admin.usage
    project = await projects.create(name="Acme")
    p = {"project_id": project.id}
    account = await projects.service_accounts.create(**p, name="app", expires_in_seconds=3600)
    assert account.api_key is not None
    key = account.api_key
    user = client_with(transport, api_key=key.value)
    await user.chat.completions.create(model="base", messages=[{"role": "user", "content": "hi"}], max_tokens=2)
    await user.embeddings.create(model="base", input="hi", encoding_format="float")
    second = await admin.admin_api_keys.create(name="second")
    groups: Any = ["project_id", "api_key_id", "model"]
    answers = [
        project, account, second,
        await projects.retrieve(project.id), await projects.update(project.id, name="Other"), await projects.list(),
        await projects.service_accounts.list(**p), await projects.service_accounts.retrieve(account.id, **p),
        await projects.service_accounts.update(account.id, **p, name="x"),
        await projects.service_accounts.api_keys.create(account.id, **p, name="next"),
        await projects.api_keys.list(**p), await projects.api_keys.retrieve(key.id, **p),
        await projects.api_keys.update(key.id, **p, expires_in_seconds=60),
        await projects.rate_limits.list_rate_limits(**p),
        await projects.rate_limits.update_rate_limit("rl-base", **p, max_requests_per_1_minute=9),
        await projects.spend_limit.update(**p, threshold_amount=1, currency="USD", interval="month"),
        await projects.spend_limit.retrieve(**p), await projects.spend_limit.delete(**p),
        await projects.model_permissions.update(**p, mode="allow_list", model_ids=["base"]),
        await projects.model_permissions.retrieve(**p), await projects.model_permissions.delete(**p),
        await admin.admin_api_keys.list(), await admin.admin_api_keys.retrieve(second.id),
        await admin.admin_api_keys.delete(second.id),
        await projects.api_keys.delete(key.id, **p), await projects.service_accounts.delete(account.id, **p),
        await projects.archive(project.id),
    ]  # fmt: skip
    for width in ("1m", "1h", "1d"):
        answers.append(await usage.completions(start_time=NOW, bucket_width=width, group_by=groups))
        answers.append(await usage.embeddings(start_time=NOW, bucket_width=width, group_by=groups))
    answers.append(await usage.costs(start_time=NOW, group_by=["project_id", "line_item", "api_key_id"]))
    received = [each for answer in answers for each in unknown(answer, type(answer).__name__)]
    ended = ["APIKeyDeleteResponse.ended_batches", "ServiceAccountDeleteResponse.ended_batches"]
    held = {"num_adapter_loads", "adapter_load_bytes", "rank_row_seconds", "kv_block_seconds"}
    assert {each.rpartition(".")[2] for each in received} >= held, "OpenAI has no field for what adapters took"
    others = [each for each in received if each.rpartition(".")[2] not in held]
    assert others == ended, "batches end with their key, and OpenAI has no field for that"
    assert (await admin.audit_logs.list()).data, "which says what was changed in words of its own, and is not compared"
