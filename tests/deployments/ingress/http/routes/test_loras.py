"""The management routes: every spelling, pages, jobs, aliases, who asked for what."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from typing import Any

import httpx
import pytest

from app.deployments.ingress.http.request_parsing import MAX_PAGE
from app.engine.adapters.card import TRAINED_ON
from app.engine.errors import AdapterFormatError
from tests.deployments.http_service import Service
from tests.deployments.managed import ADA, wanted

LEGACY = {"model": "base", "prompt": "hi", "max_tokens": 2, "ignore_eos": True}
HEADER = "x-polylora-adapter"


async def ids(http: httpx.AsyncClient, route: str) -> list[Any]:
    answer = await http.get(route)
    assert answer.status_code == 200, answer.text
    return [item["id"] for item in answer.json()["data"]]


async def test_every_spelling_loads_and_unloads(http: httpx.AsyncClient) -> None:
    spellings = (
        ("/v1/load_lora_adapter", {"lora_name": "new", "lora_path": "new"}, 200),
        ("/v1/load_lora", {"base_model": "base", "lora_model": "new", "lora_path": "new", "pin_lora": True}, 200),
        ("/v1/loras", {"name": "new", "path": "new", "wait": True}, 201),
        ("/v1/loras?wait=true", {"name": "new", "path": "new"}, 201),
    )
    removals = (
        ("POST", "/v1/unload_lora_adapter", {"lora_name": "new"}),
        ("POST", "/v1/unload_lora", {"lora_model": "new"}),
        ("DELETE", "/v1/loras/new", None),
        ("DELETE", "/v1/loras/new", None),
    )
    for generation, (load, unload) in enumerate(zip(spellings, removals, strict=True), start=1):
        answer = await http.post(load[0], json=load[1])
        assert answer.status_code == load[2], answer.text
        if load[0] == "/v1/load_lora_adapter":
            assert answer.text == "Success: LoRA adapter 'new' added successfully."
            answer = await http.get("/v1/loras/new")
        body = answer.json()
        assert (body.get("lora_model"), body.get("status")) == (
            ("new", "success") if load[0] == "/v1/load_lora" else (None, None)
        )
        assert (body["id"], body["generation"], body["state"]) == ("new", generation, "LOADED")
        assert body["pinned"] == (generation == 2)
        assert (await http.post("/v1/completions", json=LEGACY | {"model": "new"})).headers[
            HEADER
        ] == f"new@{generation}"
        answer = await http.request(unload[0], unload[1], json=unload[2])
        assert answer.status_code == 200
        if unload[1] == "/v1/unload_lora_adapter":
            assert answer.text == "Success: LoRA adapter 'new' removed successfully."
        else:
            assert answer.json()["state"] == "REMOVED"
            assert answer.json()["status"] == "success"
        assert (await http.get("/v1/loras/new")).status_code == 404
        assert (await http.request(unload[0], unload[1], json=unload[2])).status_code == 404
        assert (await http.post("/v1/completions", json=LEGACY | {"model": "new"})).status_code == 404
    history = await http.get("/v1/loras/new/generations")
    assert [item["id"] for item in history.json()["data"]] == [4, 3, 2, 1]
    for route in ("/v1/load_lora", "/v1/unload_lora"):
        body = {"base_model": "other", "lora_model": "new"} | ({"lora_path": "new"} if route == "/v1/load_lora" else {})
        assert (await http.post(route, json=body)).status_code == 404


@pytest.mark.parametrize(("trained_on", "num_warnings"), [("acme/other-0.5B", 1), ("org/Base", 0), (None, 0)])
async def test_an_adapter_that_names_another_base_model_is_loaded_with_a_warning(
    http: httpx.AsyncClient,
    service: Service,
    caplog: pytest.LogCaptureFixture,
    trained_on: str | None,
    num_warnings: int,
) -> None:
    store = service.managed.store
    store.metadata[store.contents["new"]] = json.dumps({} if trained_on is None else {TRAINED_ON: trained_on})  # type: ignore[index]
    service.managed.registry.aliases.base_names = frozenset({"base"})
    bodies = [
        (await http.post("/v1/loras", json={"name": "new", "path": "new", "wait": True})).json(),
        (await http.post("/v1/load_lora", json={"lora_model": "new", "lora_path": "new"})).json(),
        (await http.post("/v1/loras/new/load")).json(),
        (await http.get("/v1/loras/new")).json(),
    ]
    assert [len(body["warnings"]) for body in bodies] == [num_warnings] * 4
    said = [record.getMessage() for record in caplog.records if "trained on" in record.getMessage()]
    assert said == [f"adapter new: {warning}" for warning in bodies[0]["warnings"] * 2], "once for each load"


async def test_vllm_loads_a_name_again_only_in_place(http: httpx.AsyncClient, service: Service) -> None:
    body, contents = {"lora_name": "new", "lora_path": "new"}, service.managed.store.contents
    cases: tuple[tuple[dict[str, bool], int], ...] = (({}, 200), ({}, 400), ({"load_inplace": True}, 200))
    for extra, status in cases:
        answer = await http.post("/v1/load_lora_adapter", json=body | extra)
        assert answer.status_code == status, answer.text
        if status == 400:
            assert answer.json()["error"]["message"] == (
                "The lora adapter 'new' has already been loaded. If you want to load the adapter in place, "
                "set 'load_inplace' to True."
            )
            contents["new"] = contents["two"]
    assert (await http.get("/v1/loras/new")).json()["generation"] == 2


async def test_dynamo_names_a_folder_by_the_adapter_and_the_hub_by_its_repository(
    http: httpx.AsyncClient, service: Service
) -> None:
    answer = await http.post("/v1/load_lora", json={"lora_model": "new"})
    assert (answer.status_code, answer.json()["status"], answer.json()["source"]) == (200, "success", "new")
    store = service.managed.store
    store.contents["hf://org/repo@main"] = store.contents["new"]
    answer = await http.post("/v1/load_lora", json={"lora_model": "of-hub", "lora_path": "org/repo@main"})
    assert (answer.status_code, answer.json()["source"]) == (200, "hf://org/repo@main"), answer.text


async def test_what_is_deleted_while_it_is_being_loaded_does_not_appear(
    http: httpx.AsyncClient, service: Service
) -> None:
    gate = service.managed.store.gates["new"] = asyncio.Event()
    asked = await http.post("/v1/loras", json={"name": "new", "path": "new"})
    waiting = asyncio.create_task(http.post("/v1/loras?wait=true", json={"name": "new", "path": "new"}))
    while service.managed.store.loads.count("new") < 2:
        await asyncio.sleep(0.005)
    deleted = await http.delete("/v1/loras/new")
    assert deleted.status_code == 200
    body = deleted.json()
    assert {key: body[key] for key in ("id", "object", "state")} == {
        "id": "new",
        "object": "lora",
        "state": "REMOVED",
    }
    refused = await waiting
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "adapter_unloaded")
    gate.set()
    async with asyncio.timeout(600):
        while (job := (await http.get(asked.headers["location"])).json())["state"] != "FAILED":
            await asyncio.sleep(0.005)
    assert "unloaded while it was being loaded" in job["reason"]
    assert (await http.get("/v1/loras/new")).status_code == 404
    assert (await http.delete("/v1/loras/new")).status_code == 404


async def test_a_load_answers_at_once_with_a_job(http: httpx.AsyncClient, service: Service) -> None:
    before_s = time.time()
    gate = service.managed.store.gates["new"] = asyncio.Event()
    answer = await http.post("/v1/loras", json={"name": "new", "path": "new", "pinned": True, "traffic_weight": 2})
    assert answer.status_code == 202
    body = answer.json()
    assert (body["state"], body["generation"]) == ("REQUESTED", 1)
    assert (await http.get("/v1/loras/new")).json()["state"] in ("REQUESTED", "DOWNLOADING", "VALIDATING")
    assert (await http.post("/v1/completions", json=LEGACY | {"model": "new"})).status_code == 404
    gate.set()
    async with asyncio.timeout(600):
        while (job := (await http.get(answer.headers["location"])).json())["state"] != "LOADED":
            assert job["id"] == body["job"]["id"]
            await asyncio.sleep(0.005)
    shown = (await http.get("/v1/loras/new")).json()
    assert (shown["state"], shown["pinned"], shown["traffic_weight"]) == ("LOADED", True, 2.0)
    assert shown["job"] == job
    assert shown["residency"] == {"host": True, "replicas": []}
    assert (await http.post("/v1/completions", json=LEGACY | {"model": "new"})).headers[HEADER] == "new@1"
    async with asyncio.timeout(600):  # the replica reports what it holds after its step
        while not (replicas := (await http.get("/v1/loras/new")).json()["residency"]["replicas"]):
            await asyncio.sleep(0.005)
    (replica,) = replicas
    assert replica["id"] == "replica-0"
    assert replica["num_requests"] in (0, 1)
    assert int(before_s) <= replica["last_used"] <= time.time()
    answer = await http.delete("/v1/loras/new?wait=false")
    assert (answer.status_code, answer.json()["job"]["kind"]) == (202, "unload")
    assert answer.json()["state"] == "DRAINING"


async def test_what_cannot_be_loaded_says_why_and_is_remembered(http: httpx.AsyncClient, service: Service) -> None:
    service.managed.store.contents["broken"] = AdapterFormatError("tensor 'x' has NaN")
    cases = ({"path": "../x"}, 403), ({"path": "absent"}, 404), ({"path": "broken"}, 400), ({"name": "base"}, 400)
    for fields, status in cases:
        answer = await http.post("/v1/loras", json={"name": "bad", "path": "x", "wait": True} | fields)
        assert answer.status_code == status, fields
    for fields in ({}, {"path": 3}, {"path": "x", "traffic_weight": -1}, {"path": "x", "rank": 8}):
        assert (await http.post("/v1/loras", json={"name": "bad"} | fields)).status_code == 400, fields
    shown = (await http.get("/v1/loras/bad")).json()
    assert (shown["state"], shown["reason"]) == ("FAILED", "tensor 'x' has NaN")
    assert await ids(http, "/v1/loras") == ["sql"]
    events = (await http.get("/v1/events?name=bad&limit=2")).json()
    assert (events["data"][0]["event"], events["data"][0]["detail"]) == ("failed", "tensor 'x' has NaN")
    assert events["has_more"]
    older = (await http.get(f"/v1/events?name=bad&before={events['last_id']}")).json()
    assert events["data"] + older["data"] == (await http.get("/v1/events?name=bad")).json()["data"]
    assert older["data"]
    assert not older["has_more"]


async def test_weights_whose_sum_is_no_number_are_refused_and_change_nothing(http: httpx.AsyncClient) -> None:
    for name in ("one", "two"):
        body = {"name": name, "path": "new", "wait": True, "traffic_weight": 1e308}
        answer = await http.post("/v1/loras", json=body)
        assert (answer.status_code, "traffic_weight" in answer.text) == (400, True), answer.text
    assert (await http.patch("/v1/loras/sql", json={"traffic_weight": 1e308})).status_code == 400
    answer = await http.post("/v1/loras", json={"name": "new", "path": "new", "wait": True, "traffic_weight": 1e6})
    assert (answer.status_code, answer.json()["traffic_weight"]) == (201, 1e6)
    assert await ids(http, "/v1/loras") == ["new", "sql"]


async def test_lists_ask_no_other_process(
    http: httpx.AsyncClient, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    await service.managed.client.load_and_wait(wanted("a", "new"))
    monkeypatch.setattr(service.adapter_admin, "store", None)
    for route, first in (("/v1/models", "base"), ("/v1/loras", "a")):
        assert (await ids(http, route))[:1] == [first]
    assert (await http.get("/v1/models/a")).status_code == 200


async def test_lists_have_pages(http: httpx.AsyncClient, service: Service) -> None:
    for index in range(5):
        await service.managed.client.load_and_wait(wanted(f"a{index}", "new"))
    await service.managed.client.put_alias("a2x", {"a2": 1.0}, **ADA)
    names = ["a0", "a1", "a2", "a2x", "a3", "a4", "sql"]
    assert await ids(http, "/v1/models") == ["base", *names]
    assert await ids(http, "/v1/loras") == [name for name in names if name != "a2x"]
    assert await ids(http, "/v1/aliases") == ["a2x"]
    seen: list[str] = []
    body: dict[str, Any] = {"has_more": True, "last_id": None}
    while body["has_more"]:
        after = f"&after={body['last_id']}" if seen else ""
        body = (await http.get(f"/v1/models?limit=3{after}")).json()
        assert (body["first_id"], body["last_id"]) == (body["data"][0]["id"], body["data"][-1]["id"])
        seen += [item["id"] for item in body["data"]]
    assert seen == ["base", *names]
    assert await ids(http, "/v1/models?limit=1") == ["base"]
    assert await ids(http, "/v1/models?limit=2&after=base") == ["a0", "a1"]
    assert await ids(http, "/v1/loras?after=a2z") == ["a3", "a4", "sql"], "what is gone still marks a place"
    assert await ids(http, "/v1/loras?after=z") == []
    for limit in ("0", "-1", "x", str(MAX_PAGE + 1), "1.5", "९"):
        answer = await http.get("/v1/models", params={"limit": limit})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "limit")
    for name, model_id, parent in (
        ("base", "base", None),
        ("a1", "a1", "base"),
        ("base:a1", "a1", "base"),
        ("a2x", "a2x", "base"),
    ):
        shown = (await http.get(f"/v1/models/{name}")).json()
        assert (shown["id"], shown["parent"]) == (model_id, parent)
    assert (await http.get("/v1/models/x")).status_code == 404


async def test_models_tell_remote_sources_and_no_path_of_the_server(http: httpx.AsyncClient, service: Service) -> None:
    contents = service.managed.store.contents
    contents["hf://org/sql@v1"] = contents["new"]
    contents["/srv/secret/sql"] = contents["two"]
    for name, source in (("far", "hf://org/sql@v1"), ("near", "/srv/secret/sql")):
        assert (await http.post("/v1/loras?wait=true", json={"name": name, "path": source})).status_code == 201
    await http.put("/v1/aliases/app", json={"targets": {"near": 1, "far": 3}})
    models = await http.get("/v1/models")
    roots = {model["id"]: model["root"] for model in models.json()["data"]}
    assert roots == {"base": "base", "far": "hf://org/sql@v1", "near": "near", "sql": "sql", "app": "far"}
    assert "/srv" not in models.text
    assert (await http.get("/v1/models/near")).json()["root"] == "near"
    assert "/srv/secret/sql" in (await http.get("/v1/loras/near")).text, "operators see it"


async def test_an_activated_adapter_says_by_which_tokens(http: httpx.AsyncClient, service: Service) -> None:
    store, key = service.managed.store, "alora_invocation_tokens"
    store.contents |= {"at-once": "d-plain", "activated": "d-activated"}
    store.invocations["d-activated"] = (3, 1, 4)
    for name in ("activated", "at-once"):
        assert (await http.post("/v1/loras?wait=true", json={"name": name, "path": name})).json()["id"] == name
    for name, received in (("activated", [3, 1, 4]), ("at-once", None)):
        assert (await http.get(f"/v1/loras/{name}")).json()[key] == received
        assert (await http.get(f"/v1/models/{name}")).json().get(key) == received
    for route in ("/v1/loras", "/v1/models"):
        data = (await http.get(route)).json()["data"]
        assert {item["id"]: item[key] for item in data if item.get(key)} == {"activated": [3, 1, 4]}, route
    assert (await http.post("/v1/loras?wait=true", json={"name": "activated", "path": "new"})).json()[key] is None


async def test_what_a_card_says_of_itself_is_shown(
    http: httpx.AsyncClient, service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    store = service.managed.store
    store.contents |= {"card": "d-card", "plain": "d-plain", "long": "d-long"}
    store.metadata |= {"d-card": '{"author": "ada", "version": "3"}', "d-long": '{"readme": "%s"}' % ("x" * 2000)}
    received = {}
    for name in ("card", "plain", "long"):
        assert (await http.post("/v1/loras?wait=true", json={"name": name, "path": name})).status_code == 201
        received[name] = (await http.get(f"/v1/loras/{name}")).json()["metadata"]
    assert received == {"card": {"author": "ada", "version": "3"}, "plain": {}, "long": {}}
    assert "adapter long has 2014 characters of metadata" in caplog.text
    listed = {item["id"]: item["metadata"] for item in (await http.get("/v1/loras")).json()["data"]}
    assert listed == {"sql": {}} | received
    assert (await http.post("/v1/loras?wait=true", json={"name": "card", "path": "plain"})).json()["metadata"] == {}


async def test_a_canary_is_promoted_and_rolled_back(http: httpx.AsyncClient, service: Service) -> None:
    for name, source in (("v1", "new"), ("v2", "two")):
        await service.managed.client.load_and_wait(wanted(name, source))

    async def served(**fields: str) -> str:
        answer = await http.post("/v1/completions", json=LEGACY | {"model": "app"} | fields)
        assert answer.status_code == 200, answer.text
        return answer.headers[HEADER]

    answer = await http.put("/v1/aliases/app", json={"targets": {"v1": 50, "v2": 50}})
    assert (answer.status_code, answer.json()["version"]) == (200, 1)
    users = [f"u{index}" for index in range(12)]
    first = {user: await served(user=user) for user in users}
    assert set(first.values()) == {"v1@1", "v2@1"}, "2 in 4096 that all agree"
    assert {user: await served(user=user) for user in users} == first, "sticky"
    for spelling in ({"model": "base:app"}, {"model": "base", "lora_path": "app"}):
        assert await served(user="u0", **spelling) == first["u0"]
    anonymous = Counter([await served() for _ in range(24)])
    assert set(anonymous) == {"v1@1", "v2@1"}, "without a user, any"
    stream = await http.post("/v1/completions", json=LEGACY | {"model": "app", "user": "u0", "stream": True})
    assert stream.headers[HEADER] == first["u0"]
    assert (await http.post("/v1/aliases/app/promote", json={"target": "v2"})).json()["targets"] == {"v2": 1.0}
    assert {await served(user=user) for user in users} == {"v2@1"}
    assert (await http.delete("/v1/loras/v2")).status_code == 409
    assert (await http.post("/v1/aliases/app/rollback")).json()["version"] == 1
    assert {user: await served(user=user) for user in users} == first, "exactly as before"
    assert (await http.post("/v1/aliases/app/rollback", json={"version": 2})).json()["targets"] == {"v2": 1.0}
    assert (await http.get("/v1/aliases/app")).json()["previous_version"] == 1
    assert (await http.delete("/v1/aliases/app")).status_code == 200
    assert (await http.get("/v1/aliases/app")).status_code == 404
    assert (await http.post("/v1/completions", json=LEGACY | {"model": "app"})).status_code == 404
    events = (await http.get("/v1/events", params={"name": "app"})).json()["data"]
    assert [event["detail"] for event in reversed(events)] == [
        {"version": 1, "targets": {"v1": 50, "v2": 50}}, {"version": 2, "targets": {"v2": 1}},
        {"from": 2, "to": 1}, {"from": 1, "to": 2}, {"version": 2},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("method", "route", "body", "status"),
    [
        ("PUT", "/v1/aliases/app", {"targets": {}}, 400),
        ("PUT", "/v1/aliases/app", {"targets": {"sql": 0}}, 400),
        ("PUT", "/v1/aliases/app", {"targets": {"absent": 1}}, 404),
        ("PUT", "/v1/aliases/sql", {"targets": {"sql": 1}}, 400),
        ("PUT", "/v1/aliases/..", {"targets": {"sql": 1}}, 404),
        ("POST", "/v1/aliases/app/promote", {"target": "sql"}, 404),
        ("POST", "/v1/aliases/app/rollback", {"version": 0}, 400),
        ("POST", "/v1/aliases/app/rollback", {}, 404),
        ("DELETE", "/v1/aliases/app", None, 404),
        ("PATCH", "/v1/loras/absent", {"pinned": True}, 404),
        ("PATCH", "/v1/loras/sql", {"pinned": "yes"}, 400),
        ("GET", "/v1/jobs/absent", None, 404),
        ("GET", "/v1/loras/%ED%A0%80", None, 404),
        ("DELETE", "/v1/loras/%00", None, 404),
        ("POST", "/v1/loras", {"name": "x", "path": "a\0b"}, 403),
        ("GET", "/v1/events?before=x", None, 400),
    ],
)
async def test_what_is_refused(http: httpx.AsyncClient, method: str, route: str, body: Any, status: int) -> None:
    answer = await http.request(method, route, json=body)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["message"]


async def test_pins_and_weights_change_and_the_audit_says_who(http: httpx.AsyncClient) -> None:
    answer = await http.patch("/v1/loras/sql", json={"pinned": True})
    assert (answer.json()["pinned"], answer.json()["traffic_weight"]) == (True, 1.0)
    answer = await http.patch("/v1/loras/sql", json={"traffic_weight": 0})
    assert (answer.json()["pinned"], answer.json()["traffic_weight"]) == (True, 0.0)
    records = (await http.get("/v1/audit?name=sql")).json()["data"]
    assert [record["action"] for record in records] == ["configure", "configure", "load", "request load"]
    assert records[0]["detail"] == {"traffic_weight": 0.0}
    assert records[0]["who"].startswith("http ")


async def test_whether_to_wait_is_true_or_false(http: httpx.AsyncClient) -> None:
    for method, route, body in (
        ("POST", "/v1/loras", {"name": "new", "path": "new"}),
        ("DELETE", "/v1/loras/sql", None),
    ):
        for word in ("maybe", "yes", ""):
            answer = await http.request(method, f"{route}?wait={word}", json=body)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, "wait")
    assert await ids(http, "/v1/loras") == ["sql"]
    assert (await http.get("/v1/loras/new")).status_code == 404, "nothing was begun"
    for word, status in (("False", 202), ("0", 202), ("TRUE", 201), ("1", 201)):  # they end in this order
        assert (await http.post(f"/v1/loras?wait={word}", json={"name": "new", "path": "new"})).status_code == status


async def test_the_versions_of_an_alias_are_listed_for_who_rolls_back(http: httpx.AsyncClient) -> None:
    for name in ("new", "two"):
        assert (await http.post("/v1/loras?wait=true", json={"name": name, "path": name})).status_code == 201
    for targets in ({"sql": 1.0}, {"sql": 95.0, "new": 5.0}, {"two": 1.0}):
        assert (await http.put("/v1/aliases/app", json={"targets": targets})).status_code == 200
    assert (await http.post("/v1/aliases/app/rollback", json={"version": 1})).status_code == 200
    versions = (await http.get("/v1/aliases/app/versions")).json()["data"]
    assert [(item["id"], item["targets"], item["is_in_force"]) for item in versions] == [
        (3, {"two": 1.0}, False),
        (2, {"sql": 95.0, "new": 5.0}, False),
        (1, {"sql": 1.0}, True),
    ]
    assert (await http.get("/v1/aliases/nobody/versions")).status_code == 404


async def test_an_alias_may_stand_for_the_base_beside_an_adapter(http: httpx.AsyncClient) -> None:
    put = await http.put("/v1/aliases/canary", json={"targets": {"base": 50.0, "sql": 50.0}})
    assert put.status_code == 200, put.text
    body = {"prompt": "a", "max_tokens": 2, "ignore_eos": True, "model": "canary"}
    answered = set()
    for user in range(24):
        answer = await http.post("/v1/completions", json=body | {"user": str(user)})
        again = await http.post("/v1/completions", json=body | {"user": str(user)})
        assert answer.status_code == 200, answer.text
        assert answer.headers.get("x-polylora-adapter") == again.headers.get("x-polylora-adapter")
        answered.add(answer.headers.get("x-polylora-adapter"))
    assert answered == {None, "sql@1"}
    assert (await http.post("/v1/aliases/canary/promote", json={"target": "base"})).status_code == 200
    assert (await http.post("/v1/completions", json=body)).headers.get("x-polylora-adapter") is None
    for name in ("other", "canary"):
        assert (await http.put("/v1/aliases/x", json={"targets": {name: 1.0}})).status_code == 404
