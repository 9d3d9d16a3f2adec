"""Names of several parts and versions of names, on every route that takes a name, and an alias of the base's name."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import httpx
import httpx2
import pytest
from openai import AsyncOpenAI

from app.deployments.ingress.http.app import make_app
from app.deployments.ingress.http.middleware.origin_check import HttpPolicy
from app.deployments.ingress.principal import handle_principal
from app.deployments.ingress.schemas.openai import WeightedAdapter
from app.deployments.registry.jobs.auto_registration import ResolverSettings
from app.engine.adapters.combining.combination import parse_combination
from app.model_names import ROUTE_SUFFIXES
from tests.deployments.http_service import Service
from tests.deployments.ingress.http.middleware.test_auth import CHAT, Org, org
from tests.deployments.ingress.http.routes.test_batches import BODIES, ended, gpt, jsonl, lines_of, upload, works
from tests.deployments.ingress.http.routes.test_uploads import HEADERS, WEIGHTS, known
from tests.deployments.ingress.http.test_limits import COUNTING, GENERATING
from tests.deployments.managed import wanted
from tests.fakes import fake_adapter

__all__ = ["gpt", "org", "works"]

NAME = "some-org/legal.v2"
SPELLINGS = (NAME, quote(NAME, safe=""), NAME.replace("/", "%2f"))
LEGACY = {"model": NAME, "prompt": "hi", "max_tokens": 2, "ignore_eos": True}


async def load(http: httpx.AsyncClient, name: str = NAME, path: str = "new") -> dict[str, Any]:
    answer = await http.post("/v1/loras", json={"name": name, "path": path, "wait": True})
    assert answer.status_code == 201, answer.text
    loaded: dict[str, Any] = answer.json()
    return loaded


@pytest.mark.parametrize("spelling", SPELLINGS)
async def test_every_path_takes_a_name_with_a_slash(http: httpx.AsyncClient, service: Service, spelling: str) -> None:
    known(service, WEIGHTS, "new")
    answer = await http.put(f"/v1/loras/{spelling}/weights", content=WEIGHTS, headers=HEADERS)
    assert answer.status_code == 200, answer.text
    for path in (f"/v1/loras/{spelling}", f"/v1/models/{spelling}", f"/v1/models/base:{spelling}"):
        answer = await http.get(path)
        assert (answer.status_code, answer.json()["id"]) == (200, NAME), answer.text
    assert (await http.patch(f"/v1/loras/{spelling}", json={"pinned": True})).json()["pinned"]
    assert (await http.post(f"/v1/loras/{spelling}/load")).json()["id"] == NAME
    assert len((await http.get(f"/v1/loras/{spelling}/generations")).json()["data"]) == 1
    alias = spelling.replace("legal", "prod")
    for weights in ({NAME: 3, "sql": 1}, {"sql": 1}):
        answer = await http.put(f"/v1/aliases/{alias}", json={"targets": weights})
        assert answer.status_code == 200, answer.text
    assert (await http.get(f"/v1/aliases/{alias}")).json()["id"] == NAME.replace("legal", "prod")
    assert len((await http.get(f"/v1/aliases/{alias}/versions")).json()["data"]) == 2
    assert (await http.post(f"/v1/aliases/{alias}/rollback")).json()["targets"] == {NAME: 3, "sql": 1}
    assert (await http.post(f"/v1/aliases/{alias}/promote", json={"target": NAME})).json()["targets"] == {NAME: 1}
    assert (await http.delete(f"/v1/loras/{spelling}")).status_code == 409, "the alias points to it"
    assert (await http.delete(f"/v1/aliases/{alias}")).status_code == 200
    assert (await http.delete(f"/v1/loras/{spelling}")).status_code == 200
    assert (await http.get(f"/v1/models/{spelling}")).status_code == 404


async def test_the_official_client_retrieves_it(http: httpx.AsyncClient, service: Service) -> None:
    await load(http)
    transport = httpx2.ASGITransport(make_app(service, HttpPolicy()), raise_app_exceptions=False)
    async with httpx2.AsyncClient(transport=transport, base_url="http://test") as sender:
        client = AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=sender)
        assert (await client.models.retrieve(NAME)).id == NAME
        assert NAME in [model.id async for model in client.models.list()]


async def test_every_body_takes_a_name_with_a_slash_and_a_version(http: httpx.AsyncClient, service: Service) -> None:
    entry = await load(http)
    bodies = GENERATING | COUNTING
    for spelling in (NAME, f"{NAME}@1", f"{NAME}@{entry['digest'][:8]}", f"{NAME}@sha256:{entry['digest']}"):
        for route, body in bodies.items():
            if "model" not in body:
                continue
            for model in (spelling, f"base:{spelling}"):
                answer = await http.post(route, json=body | {"model": model})
                if route in ("/v1/score", "/v1/rerank", "/v1/classify"):
                    assert f"adapter '{NAME}' has no score head" in answer.text, f"{route} {model}: {answer.text}"
                else:
                    assert answer.status_code == 200, f"{route} {model}: {answer.text}"
        fields: tuple[dict[str, Any], ...] = (
            {"lora_path": spelling},
            {"adapters": [{"name": spelling, "weight": 1}]},
        )
        for field in fields:
            answer = await http.post("/v1/completions", json=LEGACY | {"model": "base"} | field)
            assert answer.status_code == 200, answer.text
        body = {"text": "a", "lora_path": spelling, "sampling_params": {"max_new_tokens": 2}}
        assert (await http.post("/generate", json=body)).json()["meta_info"]["lora"] == NAME
        parts = [WeightedAdapter(name=spelling, weight=0.5), WeightedAdapter(name="sql", weight=0.5)]
        combination = service.preprocessor.resolver.combine(parts, handle_principal())
        assert {part.ref.name for part in combination.parts} == {NAME, "sql"}
        assert parse_combination(combination.source) == combination
    answer = await http.post("/v1/completions", json=LEGACY)
    assert answer.headers["x-polylora-adapter"] == f"{NAME}@1"
    assert (
        await http.post("/v1/completions", json=LEGACY | {"model": answer.headers["x-polylora-adapter"]})
    ).is_success


async def test_a_version_that_a_name_does_not_mean_is_refused(http: httpx.AsyncClient) -> None:
    first = await load(http)
    second = await load(http, path="two")
    assert (first["generation"], second["generation"]) == (1, 2)
    for version in (1, 3, first["digest"][:12], f"sha256:{first['digest']}"):
        name = f"{NAME}@{version}"
        answer = await http.post("/v1/completions", json=LEGACY | {"model": name})
        assert answer.status_code == 404, answer.text
        for text in (repr(name), "generation 2", second["digest"][:12]):
            assert text in answer.json()["error"]["message"]
        for method, path in (("GET", "models"), ("GET", "loras"), ("DELETE", "loras")):
            assert (await http.request(method, f"/v1/{path}/{quote(name, safe='')}")).status_code == 404
        assert (await http.patch(f"/v1/loras/{name}", json={"description": "x"})).status_code == 404
        assert (await http.put("/v1/aliases/prod", json={"targets": {name: 1}})).status_code == 404
    generations = (await http.get(f"/v1/loras/{NAME}@1/generations")).json()["data"]
    assert [each["digest"] for each in generations] == [first["digest"]]
    for version in (2, second["digest"][:12]):
        assert (await http.get(f"/v1/models/{NAME}@{version}")).json()["id"] == NAME
        assert (await http.get(f"/v1/loras/{NAME}@{version}")).json()["generation"] == 2
        answer = await http.patch(f"/v1/loras/{NAME}@{version}", json={"description": str(version)})
        assert (answer.json()["id"], answer.json()["description"]) == (NAME, str(version))
    assert (await http.delete(f"/v1/loras/{NAME}@2")).status_code == 200
    assert (await http.get(f"/v1/loras/{NAME}")).status_code == 404


async def test_an_alias_of_a_version_serves_no_other(http: httpx.AsyncClient) -> None:
    entry = await load(http)
    target = f"{NAME}@{entry['digest'][:8]}"
    assert (await http.put("/v1/aliases/prod", json={"targets": {target: 1}})).json()["targets"] == {target: 1}
    for model in ("prod", "prod@1", f"prod@{entry['digest'][:12]}"):
        answer = await http.post("/v1/completions", json=LEGACY | {"model": model})
        assert answer.headers["x-polylora-adapter"] == f"{NAME}@1", answer.text
    assert (await http.get("/v1/models/prod@1")).json()["id"] == "prod"
    assert (await http.post("/v1/completions", json=LEGACY | {"model": "prod@2"})).status_code == 404
    assert (await http.delete(f"/v1/loras/{NAME}")).status_code == 409, "the alias points to it"
    await load(http, path="two")
    assert (await http.post("/v1/completions", json=LEGACY | {"model": "prod"})).status_code == 404
    assert (await http.post("/v1/aliases/prod/promote", json={"target": target})).status_code == 404
    mixed = {"targets": {"sql": 99, NAME: 1}}
    assert (await http.put("/v1/aliases/prod", json=mixed)).status_code == 200
    for _ in range(5):  # a version chooses among an alias's targets
        answer = await http.post("/v1/completions", json=LEGACY | {"model": "prod@2"})
        assert answer.headers["x-polylora-adapter"] == f"{NAME}@2"


@pytest.mark.parametrize(
    "name", [*(f"org/{suffix}" for suffix in ROUTE_SUFFIXES), "proj_1/x", "a@2", "../x", "a//b", "a/", "base", "auto"]
)
async def test_what_is_no_name_is_refused_wherever_one_is_given(http: httpx.AsyncClient, name: str) -> None:
    bodies = (
        ("POST", "/v1/loras?wait=true", {"name": name, "path": "new"}),
        ("POST", "/v1/loras", {"name": name, "path": "new", "lazy": True}),
        ("POST", "/v1/loras/manifest", {"adapters": [{"name": name, "path": "new"}]}),
        ("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": "new"}),
        ("POST", "/v1/load_lora", {"lora_model": name, "lora_path": "new"}),
    )
    for method, route, body in bodies:
        answer = await http.request(method, route, json=body)
        assert answer.status_code == 400, f"{route}: {answer.text}"
        assert answer.json()["error"]["param"] == "name"


async def test_resolvers_find_a_name_with_a_slash(http: httpx.AsyncClient, service: Service) -> None:
    asked: list[str] = []

    class Finding:
        def source(self, name: str, tenant_id: str) -> str | None:  # noqa: ARG002
            asked.append(name)
            return "new" if name == "hub/found" else None

    service.managed.resolution.reconfigure(ResolverSettings((Finding(),)))
    assert (await http.post("/v1/completions", json=LEGACY | {"model": "hub/found@1"})).status_code == 200
    assert (await http.post("/v1/completions", json=LEGACY | {"model": "hub/lost"})).status_code == 404
    assert (await http.post("/v1/completions", json=LEGACY | {"model": "proj_1/x"})).status_code == 404
    assert asked == ["hub/found", "hub/lost"], "a project's folder is not looked for"


@pytest.mark.usefixtures("works")
async def test_batches_take_such_names(writing: Service, gpt: AsyncOpenAI) -> None:
    adapter = fake_adapter("new", 8)
    writing.fleet.adapters[adapter.card.digest] = adapter
    writing.managed.store.contents["new"] = adapter.card.digest
    await writing.managed.client.load_and_wait(wanted(NAME, "new"))
    versions = ("", "@1", f"@{adapter.card.digest[:8]}", "@2")
    content = jsonl([BODIES["/v1/chat/completions"] | {"model": NAME + version} for version in versions])
    batch = await gpt.batches.create(
        input_file_id=await upload(gpt, content), endpoint="/v1/chat/completions", completion_window="24h"
    )
    done = await ended(gpt, batch.id)
    assert done.request_counts is not None
    assert (done.request_counts.completed, done.request_counts.failed) == (3, 1)
    (failed,) = await lines_of(gpt, done.error_file_id)
    assert failed["response"]["status_code"] == 404


async def test_permissions_limits_and_shares_take_names_of_all_versions(org: Org) -> None:
    ada, bob = org.ids["ada"], org.ids["bob"]
    source = f"{ada}/legal"
    org.service.managed.store.contents[source] = org.service.managed.store.contents["new"]
    answer = await org.ask("ada", "POST", "/v1/loras?wait=true", json={"name": NAME, "path": source})
    assert answer.status_code == 201, answer.text
    body = CHAT | {"model": f"{NAME}@1"}
    assert (await org.ask("ada", "POST", "/v1/chat/completions", json=body)).status_code == 200
    assert (await org.ask("bob", "POST", "/v1/chat/completions", json=body)).status_code == 404
    answer = await org.ask(
        "admin", "PUT", f"/v1/tenants/{ada}/shares/{quote(NAME, safe='')}", json={"project_ids": [bob]}
    )
    assert answer.status_code == 200, answer.text
    assert (await org.ask("bob", "POST", "/v1/chat/completions", json=body)).status_code == 200
    permissions = f"/v1/organization/projects/{bob}/model_permissions"
    for model_id, status in ((f"{ada}:{NAME}", 200), ("base", 404), (NAME, 404)):
        answer = await org.ask("admin", "POST", permissions, json={"mode": "allow_list", "model_ids": [model_id]})
        assert answer.status_code == 200, answer.text
        assert (await org.ask("bob", "POST", "/v1/chat/completions", json=body)).status_code == status
    for model_id in (f"{NAME}@1", f"{ada}:{NAME}@1", "proj_1/x"):
        answer = await org.ask("admin", "POST", permissions, json={"mode": "allow_list", "model_ids": [model_id]})
        assert answer.status_code == 400, "a permission is of a name"
    assert (await org.ask("admin", "DELETE", permissions)).status_code == 200
    rate = f"/v1/organization/projects/{ada}/rate_limits/rl-{quote(f'{ada}:{NAME}', safe='')}"
    answer = await org.ask("admin", "POST", rate, json={"max_requests_per_1_minute": 0})
    assert (answer.status_code, answer.json()["model"]) == (200, f"{ada}:{NAME}"), answer.text
    assert (await org.ask("ada", "POST", "/v1/chat/completions", json=body)).status_code == 429


async def test_an_alias_of_the_base_s_name_takes_its_requests(http: httpx.AsyncClient, service: Service) -> None:
    entry = await load(http)
    digest = service.preprocessor.tokenizer.spec.digest
    exact = f"base@{digest[:12]}"
    for model in ("base", exact):
        answer = await http.post("/v1/completions", json=LEGACY | {"model": model})
        assert (answer.status_code, answer.headers.get("x-polylora-adapter")) == (200, None), answer.text
    answer = await http.put("/v1/aliases/base", json={"targets": {NAME: 1}})
    assert answer.status_code == 200, answer.text
    for model in ("base", f"base@{entry['digest'][:8]}"):
        answer = await http.post("/v1/completions", json=LEGACY | {"model": model})
        assert answer.headers["x-polylora-adapter"] == f"{NAME}@1", answer.text
    for body in (
        {"model": exact},
        {"model": f"base@sha256:{digest}"},
    ):
        answer = await http.post("/v1/completions", json=LEGACY | body)
        assert (answer.status_code, answer.headers.get("x-polylora-adapter")) == (200, None), answer.text
    assert (await http.post("/v1/completions", json=LEGACY | {"model": f"base:{NAME}"})).status_code == 200
    weights = [{"name": "sql", "weight": 1}]
    answer = await http.post("/v1/completions", json=LEGACY | {"model": "base", "adapters": weights})
    assert answer.status_code == 200, answer.text
    answer = await http.post("/generate", json={"text": "a", "sampling_params": {"max_new_tokens": 2}})
    assert answer.json()["meta_info"]["lora"] is None, "no name is given, so the base answers"
    listed = {each["id"]: each for each in (await http.get("/v1/models")).json()["data"]}
    assert listed[exact]["parent"] is None
    assert (listed["base"]["parent"], listed["base"]["root"]) == ("base", NAME)
    paged = [each["id"] async for each in _pages(http)]
    assert sorted(paged) == sorted(listed)
    assert (await http.get(f"/v1/models/{exact}")).json()["id"] == exact
    assert (await http.get("/v1/models/base")).json()["root"] == NAME
    answer = await http.put("/v1/aliases/base", json={"targets": {"base": 1}})
    assert answer.status_code == 200, answer.text
    answer = await http.post("/v1/completions", json=LEGACY | {"model": "base"})
    assert (answer.status_code, answer.headers.get("x-polylora-adapter")) == (200, None), "there it means the base"
    assert (await http.delete("/v1/aliases/base")).status_code == 200
    assert (await http.get("/v1/models/base")).json()["parent"] is None


async def test_a_version_of_an_alias_is_found_where_requests_are_answered(
    http: httpx.AsyncClient, service: Service
) -> None:
    entry = await load(http)
    digest = service.preprocessor.tokenizer.spec.digest
    targets = {"base": 3, f"{NAME}@{entry['digest'][:8]}": 1}
    assert (await http.put("/v1/aliases/canary", json={"targets": targets})).status_code == 200
    for contents, version, status in (
        ("new", digest[:12], 200),
        ("new", f"sha256:{digest}", 200),
        ("new", entry["digest"][:12], 200),
        ("new", "1", 200),
        ("new", "f" * 12, 404),
        ("two", entry["digest"][:12], 404),
        ("two", "2", 404),
    ):
        await load(http, path=contents)
        name = f"canary@{version}"
        answers = (
            await http.post("/v1/completions", json=LEGACY | {"model": name}),
            await http.get(f"/v1/models/{quote(name, safe='')}"),
        )
        assert {answer.status_code for answer in answers} == {status}, f"{name}: {[a.text for a in answers]}"


async def test_a_project_takes_no_name_of_the_base(org: Org) -> None:
    answer = await org.ask("ada", "PUT", "/v1/aliases/base", json={"targets": {"base": 1}})
    assert answer.status_code == 400
    await org.ask("admin", "PUT", "/v1/aliases/base", json={"targets": {"sql": 1}})
    answer = await org.ask("ada", "POST", "/v1/chat/completions", json=CHAT | {"model": "base"})
    assert answer.headers["x-polylora-adapter"] == "sql@1", answer.text


async def test_every_model_says_how_much_it_takes(http: httpx.AsyncClient) -> None:
    await load(http)
    await http.put("/v1/aliases/prod", json={"targets": {NAME: 1}})
    listed = (await http.get("/v1/models")).json()["data"]
    assert {each["id"] for each in listed} == {"base", "sql", NAME, "prod"}
    for entry in listed:
        assert entry["max_model_len"] == listed[0]["max_model_len"] > 0
        assert (await http.get(f"/v1/models/{entry['id']}")).json() == entry


async def _pages(http: httpx.AsyncClient) -> Any:
    after = ""
    while True:
        page = (await http.get(f"/v1/models?limit=1{after}")).json()
        for each in page["data"]:
            yield each
        if not page["has_more"]:
            return
        after = f"&after={quote(page['last_id'], safe='')}"
