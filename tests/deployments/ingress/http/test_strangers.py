"""With an attacker's eyes: another project's names, through every route that a name can be given to."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from app.deployments.ingress.http.app import make_app
from app.deployments.ingress.http.batch_executor import BatchExecutor
from app.deployments.ingress.http.middleware.origin_check import HttpPolicy
from app.deployments.ingress.http.openapi import api_routes
from app.deployments.ingress.preprocess.adapter_combination import CombinationBody
from app.deployments.ingress.principal import handle_principal
from app.deployments.ingress.schemas.request_model import parse_body
from app.deployments.object_storage.models import NewBatch
from app.deployments.registry.event_log import NewEvent, record_events
from app.engine.errors import PolyloraError
from app.redaction import holds_key
from tests.deployments.ingress.http.middleware.test_auth import CHAT, Org, org
from tests.deployments.managed import wanted

__all__ = ["org"]

MESSAGES = CHAT["messages"]
OTHERS = {"adapters": [{"name": "NAME", "weight": 0.5}, {"name": "sql"}]}
#: What bob asks of a name; `{id}` is his project's id.
ASKED: list[tuple[str, str, Any]] = [
    ("POST", "/v1/chat/completions", CHAT | {"model": "NAME", "prediction": {"type": "content", "content": "a"}}),
    ("POST", "/v1/chat/completions", CHAT | OTHERS),
    ("POST", "/v1/completions", {"model": "base:NAME", "prompt": "a", "return_token_ids": True}),
    ("POST", "/v1/completions", {"model": "base", "prompt": "a"} | OTHERS),
    ("POST", "/generate", {"text": "a"} | OTHERS),
    ("POST", "/v1/embeddings", {"model": "NAME", "input": "a"}),
    ("POST", "/v1/embeddings", {"model": "base", "input": "a", "lora_path": "NAME"}),
    ("POST", "/v1/score", {"model": "NAME", "text_1": "a", "text_2": "b"}),
    ("POST", "/v1/rerank", {"model": "base", "query": "a", "documents": ["b"], "lora_path": "NAME"}),
    ("POST", "/v1/classify", {"model": "base:NAME", "input": "a"}),
    ("POST", "/v1/responses", {"model": "NAME", "input": "a", "store": True}),
    ("POST", "/v1/responses", {"model": "base:NAME", "input": "a", "stream": True}),
    ("POST", "/v1/responses/input_tokens", {"model": "NAME", "input": "a"}),
    ("POST", "/v1/messages", {"model": "NAME", "messages": MESSAGES, "max_tokens": 2}),
    ("POST", "/v1/messages/count_tokens", {"model": "NAME", "messages": MESSAGES}),
    ("POST", "/tokenize", {"model": "NAME", "messages": MESSAGES}),
    ("POST", "/detokenize", {"model": "NAME", "tokens": [1]}),
    ("POST", "/v1/route", {"prompt": "NAME: the other's description", "routing": {"threshold": -1}}),
    ("POST", "/v1/loras", {"name": "mine", "combine": OTHERS, "wait": True}),
    ("POST", "/v1/loras/NAME/load", {}),
    ("GET", "/v1/loras/NAME", None),
    ("PATCH", "/v1/loras/NAME", {"description": "x"}),
    ("DELETE", "/v1/loras/NAME", None),
    ("GET", "/v1/loras/NAME/generations", None),
    ("GET", "/v1/models/NAME", None),
    ("GET", "/v1/aliases/NAME", None),
    ("GET", "/v1/aliases/NAME/versions", None),
    ("PUT", "/v1/aliases/mine", {"targets": {"sql": 1, "NAME": 1}}),
    ("POST", "/v1/aliases/NAME/promote", {"target": "sql"}),
    ("POST", "/v1/aliases/mine/promote", {"target": "NAME"}),
    ("POST", "/v1/aliases/NAME/rollback", {}),
    ("DELETE", "/v1/aliases/NAME", None),
    ("GET", "/v1/events?name=NAME", None),
    ("GET", "/v1/audit?name=NAME", None),
    ("POST", "/v1/loras", {"name": "NAME", "path": "{id}/none", "wait": True}),  # last: the name is bob's from here on
]
#: Responses without anything about a name that does not exist: lists, and the base as the choice.
EMPTY = ("/v1/events?name=NAME", "/v1/audit?name=NAME", "/v1/loras/NAME/generations", "/v1/route")
#: Paths with an id of a file, batch, response or job, which other tests compare with one that does not exist; paths by
#: which a caller creates a name of its own; and that of a replica, which no project's key may use.
ELSEWHERE = {
    "/v1/files/{file_id}",
    "/v1/files/{file_id}/content",
    "/v1/batches/{batch_id}",
    "/v1/batches/{batch_id}/cancel",
    "/v1/responses/{response_id}",
    "/v1/responses/{response_id}/input_items",
    "/v1/jobs/{job_id}",
    "/v1/loras/{name}/weights",
    "/v1/aliases/{name}",
    "/v1/replicas/{replica_id}/drain",
}


def test_every_route_with_a_name_in_its_path_is_asked(service: Any) -> None:
    routes: Any = make_app(service, HttpPolicy()).routes
    named = {route.path_format for route in api_routes(routes) if "{" in route.path_format}
    managing = {path for path in named if path.startswith(("/v1/organization", "/v1/tenants"))}
    asked = {path.replace("NAME", "{name}") for _, path, _ in ASKED}
    assert named - managing - asked == ELSEWHERE - asked


async def test_anothers_name_looks_like_one_that_does_not_exist(org: Org) -> None:
    """The same status, bytes and headers, for an adapter and for an alias."""
    answer = await org.ask("ada", "PATCH", "/v1/loras/secret", json={"description": "the other's description"})
    assert answer.status_code == 200, answer.text
    answer = await org.ask("ada", "PUT", "/v1/aliases/secret-alias", json={"targets": {"secret": 1}})
    assert answer.status_code == 200, answer.text
    for method, path, body in ASKED:
        for names in (("secret", "nobody"), ("secret-alias", "nobody-alias")):
            seen = []
            for name in names:
                text = None if body is None else json.dumps(body).replace("NAME", name).replace("{id}", org.ids["bob"])
                answer = await org.ask("bob", method, path.replace("NAME", name), content=text)
                headers = {key: value for key, value in answer.headers.items() if key not in ("content-length", "date")}
                seen.append((answer.status_code, answer.text.replace(name, "NAME"), headers))
            assert seen[0] == seen[1], (method, path)
            assert seen[0][0] in (400, 404) or path in EMPTY, (path, seen[0])


async def test_in_a_batch_anothers_name_looks_like_one_that_does_not_exist(org: Org) -> None:
    runner = org.service.batch_runner(BatchExecutor(org.service).answer, "here", write_s=0.01)
    working = asyncio.create_task(runner.run())
    url, said = "/v1/chat/completions", []
    for name in ("secret", "nobody"):
        line = {"custom_id": "c", "method": "POST", "url": url, "body": CHAT | {"model": name}}
        uploaded = await org.ask(
            "bob", "POST", "/v1/files", files={"file": ("in.jsonl", json.dumps(line))}, data={"purpose": "batch"}
        )
        wanted = {"input_file_id": uploaded.json()["id"], "endpoint": url, "completion_window": "24h"}
        made = (await org.ask("bob", "POST", "/v1/batches", json=wanted)).json()
        while (batch := (await org.ask("bob", "GET", f"/v1/batches/{made['id']}")).json())["status"] != "completed":
            await asyncio.sleep(0.01)
        errors = (await org.ask("bob", "GET", f"/v1/files/{batch['error_file_id']}/content")).json()
        said.append((batch["request_counts"], errors["response"]["status_code"], errors["response"]["body"]))
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)
    assert said[0][1] == 404
    assert json.dumps(said[0]).replace("secret", "nobody") == json.dumps(said[1])


async def test_a_name_that_another_has_is_free(org: Org) -> None:
    """Uploading, registering and naming what another project has a name for makes one's own, as with any name."""
    store, bob = org.service.managed.store, org.ids["bob"]
    store.contents[f"{bob}/two"] = store.contents["two"]
    before = (await org.ask("ada", "GET", "/v1/loras/secret")).json()
    seen = []
    for name in ("secret", "nobody"):
        unread = {"name": name, "path": f"{bob}/two", "lazy": True}
        answers = [
            await org.ask("bob", "POST", "/v1/loras", json=unread),
            await org.ask("bob", "POST", "/v1/loras/manifest", json={"adapters": [unread | {"name": f"{name}2"}]}),
            await org.ask("bob", "POST", f"/v1/loras/{name}/load"),
            await org.ask("bob", "GET", f"/v1/loras/{name}"),
            await org.ask("bob", "POST", "/v1/chat/completions", json=CHAT | {"model": name}),
            await org.ask("bob", "DELETE", f"/v1/loras/{name}"),
            await org.ask("bob", "GET", f"/v1/loras/{name}"),
        ]
        seen.append([(each.status_code, sorted(each.json()), _generation(each)) for each in answers])
    assert seen[0] == seen[1]
    assert (await org.ask("ada", "GET", "/v1/loras/secret")).json() == before


def _generation(answer: httpx.Response) -> Any:
    return answer.json().get("generation")


async def test_anothers_job_looks_like_one_that_does_not_exist(org: Org) -> None:
    store, ada = org.service.managed.store, org.ids["ada"]
    store.contents[f"{ada}/two"] = store.contents["two"]
    load = {"name": "mine", "path": f"{ada}/two", "wait": True}
    job_id = str((await org.ask("ada", "POST", "/v1/loras", json=load)).json()["job"]["id"])
    assert (await org.ask("ada", "GET", f"/v1/jobs/{job_id}")).status_code == 200
    seen = [await org.ask("bob", "GET", f"/v1/jobs/{each}") for each in (job_id, "987654321")]
    assert seen[0].status_code == seen[1].status_code == 404
    assert seen[0].text.replace(job_id, "JOB") == seen[1].text.replace("987654321", "JOB")


async def test_nothing_of_the_service_as_a_whole_is_shown_to_a_project(org: Org) -> None:
    """How many adapters and requests there are, and what is in memory, is of all tenants."""
    received = (await org.ask("bob", "GET", "/v1/status")).json()
    assert sorted(received) == ["is_ready", "model", "object", "version"]
    assert "replicas" in (await org.ask("admin", "GET", "/v1/status")).json()
    assert (await org.ask("bob", "GET", "/metrics")).status_code == 403


async def test_pages_of_events_do_not_tell_of_what_others_caused(org: Org) -> None:
    """Another project with the same contents has its rows come and go: only that project sees the events."""
    registry, ada = org.service.managed.registry, org.ids["ada"]

    async def pages() -> list[tuple[list[str], bool]]:
        found, before = [], ""
        while True:
            page = (await org.ask("ada", "GET", f"/v1/events?name=secret&limit=1{before}")).json()
            found.append(([each["event"] for each in page["data"]], page["has_more"]))
            if not page["has_more"]:
                return found
            before = f"&before={page['last_id']}"

    before = await pages()
    assert [len(events) for events, _ in before] == [1] * len(before)
    moves = [NewEvent(event, "secret", ada) for event in ("unloaded from device", "loaded to device")] * 600
    with registry.database.write() as connection:
        record_events(connection, registry.database, moves)
    assert await pages() == before


@pytest.mark.parametrize("path", ["/v1/events", "/v1/audit"])
async def test_ids_of_records_do_not_tell_how_much_others_do(org: Org, path: str) -> None:
    """They are random; pages go on behind them, and ids of others mean nothing."""
    for name, alias in (("ada", "one"), ("bob", "others"), ("bob", "others-too"), ("ada", "two")):
        answer = await org.ask(name, "PUT", f"/v1/aliases/{alias}", json={"targets": {"base": 1}})
        assert answer.status_code == 200, answer.text
    whole = (await org.ask("ada", "GET", path)).json()
    ids = [record["id"] for record in whole["data"]]
    assert [record["name"] for record in whole["data"]][:2] == ["two", "one"]
    assert whole["first_id"] == ids[0]
    assert all(re.fullmatch("(evt|audit)_[0-9a-f]{24}", each) for each in ids)
    assert len(set(ids)) == len(ids)
    paged, before = [], ""
    while True:
        page = (await org.ask("ada", "GET", f"{path}?limit=1{before}")).json()
        paged += [record["id"] for record in page["data"]]
        if not page["has_more"]:
            break
        before = f"&before={page['last_id']}"
    assert paged == ids
    other = "/v1/audit" if path == "/v1/events" else "/v1/events"
    for who, where, known in (("bob", path, ids[0]), ("ada", other, ids[0]), ("ada", path, "7"), ("ada", path, "é")):
        refused = await org.ask(who, "GET", f"{where}?before={known}")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "before")
    project = {"OpenAI-Project": org.ids["ada"]}
    page = (await org.ask("admin", "GET", f"{path}?limit=1&before={ids[0]}", headers=project)).json()
    assert [each["id"] for each in page["data"]] == [ids[1]], "operators know records by the same ids"


async def test_a_shared_alias_does_not_say_in_lists_what_it_stands_for(org: Org) -> None:
    await org.ask("ada", "PUT", "/v1/aliases/prod", json={"targets": {"secret": 1}})
    share = f"/v1/tenants/{org.ids['ada']}/shares/prod"
    answer = await org.ask("admin", "PUT", share, json={"project_ids": [org.ids["bob"]]})
    assert answer.status_code == 200, answer.text
    assert (await org.ask("bob", "POST", "/v1/chat/completions", json=CHAT | {"model": "prod"})).status_code == 200
    for path in ("/v1/models", "/v1/models/prod"):
        assert "secret" not in (await org.ask("bob", "GET", path)).text
    assert (await org.ask("ada", "GET", "/v1/models/prod")).json()["root"] == "secret"


async def test_what_is_denied_is_denied_under_every_name(org: Org) -> None:
    owner, ada = org.service.accounting.tenants_service, org.ids["ada"]
    answer = await org.ask("admin", "PUT", "/v1/aliases/sql-prod", json={"targets": {"sql": 1}})
    assert answer.status_code == 200, answer.text
    answer = await org.ask("ada", "PUT", "/v1/aliases/mine", json={"targets": {"base": 1}})
    assert answer.status_code == 200, answer.text

    async def statuses() -> list[int]:
        asked = [CHAT | {"model": model} for model in ("base", "sql", "sql-prod", "mine", "secret")]
        return [(await org.ask("ada", "POST", "/v1/chat/completions", json=body)).status_code for body in asked]

    assert await statuses() == [200] * 5
    await owner.permit_models(ada, "deny_list", ["base", "sql"], actor="test")
    assert await statuses() == [404, 404, 404, 404, 200]
    await owner.permit_models(ada, "allow_list", ["sql-prod", f"{ada}:mine"], actor="test")
    assert await statuses() == [404, 404, 200, 404, 404], "an allowed alias of the operator's allows what it stands for"


@pytest.mark.parametrize(
    ("mode", "names", "expected"),
    [
        (None, [], [200, 200, 200, 200, 200, 200]),
        ("deny_list", ["mix"], [200, 200, 404, 404, 200, 404]),
        ("deny_list", ["two"], [200, 404, 404, 404, 404, 404]),
        ("deny_list", ["base"], [200, 200, 200, 200, 200, 200]),
        ("allow_list", ["sql", "two", "ada:secret"], [200, 200, 404, 404, 200, 404]),
        ("allow_list", ["mix"], [404, 404, 200, 404, 404, 404]),
        ("allow_list", ["mixed", "ada:secret"], [404, 404, 404, 200, 404, 404]),
    ],
)
async def test_a_combination_is_denied_by_its_own_name_and_by_those_of_its_parts(
    org: Org, mode: str | None, names: list[str], expected: list[int]
) -> None:
    """One that is registered is not allowed because all that it is made of is."""
    service, store = org.service, org.service.managed.store
    await service.managed.client.load_and_wait(wanted("two", "two"))
    combine = {"adapters": [{"name": "sql"}, {"name": "two"}]}
    made = service.preprocessor.resolver.combine(parse_body(CombinationBody, combine).adapters, handle_principal())
    store.contents[made.source] = made.digest
    answer = await org.ask("admin", "POST", "/v1/loras", json={"name": "mix", "combine": combine, "wait": True})
    assert answer.status_code == 201, answer.text
    answer = await org.ask("admin", "PUT", "/v1/aliases/mixed", json={"targets": {"mix": 1}})
    assert answer.status_code == 200, answer.text
    ids = [name.replace("ada:", f"{org.ids['ada']}:") for name in names]
    await service.accounting.tenants_service.permit_models(org.ids["ada"], mode, ids, actor="test")
    asked: list[dict[str, Any]] = [{"model": name} for name in ("sql", "two", "mix", "mixed")]
    asked += [{"model": "base"} | combine, {"model": "base", "adapters": [{"name": "mix"}, {"name": "secret"}]}]
    statuses = []
    for body in asked:
        answer = await org.ask("ada", "POST", "/v1/messages/count_tokens", json=body | {"messages": MESSAGES})
        statuses.append(answer.status_code)
    assert statuses == expected


async def test_what_actors_raise_holds_no_key(org: Org) -> None:
    """Ray keeps it, and its dashboard shows it."""
    service, key, its = org.service, org.keys["ada"], {"tenant_id": org.ids["ada"]}
    storage, store, mine = service.storage, service.adapter_admin.store, its | {"who": "test"}
    await store.put_alias("prod", {"base": 1.0}, **mine)
    asked: list[Callable[[], Awaitable[object]]] = [
        lambda: storage.file(key, **its),
        lambda: storage.batch(key, **its),
        lambda: storage.response(key, **its),
        lambda: storage.file_page(limit=1, after=key, purpose=None, newest=True, **its),
        lambda: storage.create_batch(
            NewBatch(its["tenant_id"], "", "/v1/completions", key, 1.0, 1.0, 1, 1 << 20, "{}")
        ),
        lambda: store.put_alias("prod", {key: 1.0}, **mine),
        lambda: store.put_alias(key, {"base": 1.0}, **mine),
        lambda: store.promote_alias("prod", key, **mine),
        lambda: store.promote_alias(key, "base", **mine),
        lambda: store.alias_versions(key, **its),
        lambda: store.remove_alias(key, **mine),
        lambda: store.begin_unload(key, **mine),
        lambda: store.describe(key, **its),
        lambda: store.load_registered(key, **mine),
        lambda: store.job(key, **its),
    ]
    for ask in asked:
        with pytest.raises(PolyloraError) as caught:
            await ask()
        assert not holds_key(str(caught.value))


async def test_no_description_holds_a_key(org: Org) -> None:
    received = {"description": f"ask with {org.keys['ada']}"}
    store, ada = org.service.managed.store, org.ids["ada"]
    store.contents[f"{ada}/two"] = store.contents["two"]
    combine = {"name": "both", "combine": {"adapters": [{"name": "sql"}, {"name": "secret"}]}}
    asked: list[tuple[str, str, Any]] = [
        ("PATCH", "/v1/loras/secret", received),
        ("POST", "/v1/loras", {"name": "new", "path": f"{ada}/two"} | received),
        ("POST", "/v1/loras", combine | received),
        ("POST", "/v1/loras/manifest", {"adapters": [{"name": "new", "path": f"{ada}/two"} | received]}),
    ]
    for method, path, body in asked:
        answer = await org.ask("ada", method, path, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "description"), (path, answer.text)
    config = {"X-Adapter-Config": json.dumps({"r": 8, "description": org.keys["ada"]})}
    answer = await org.ask("ada", "PUT", "/v1/loras/new/weights", content=b"x", headers=config)
    assert (answer.status_code, "API key" in answer.text) == (400, True)
