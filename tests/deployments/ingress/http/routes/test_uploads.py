"""PUT /v1/loras/{name}/weights: an adapter from its bytes is checked, owned and routed like any other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest
from starlette.requests import ClientDisconnect

from app.deployments.ingress.http.routes import loras as loras_module
from app.deployments.ingress.preprocess.adapter_combination import CombinationBody
from app.deployments.ingress.principal import handle_principal
from app.deployments.ingress.schemas.request_model import parse_body
from app.deployments.registry.db.retention import uploads_in_use
from app.deployments.registry.models import UPLOADED
from tests.deployments.http_service import Service
from tests.deployments.ingress.http.middleware.test_auth import Org, org
from tests.deployments.managed import complete_upload

__all__ = ["org"]

CONFIG, WEIGHTS = '{"r": 8}', b"weights"
HEADERS = {"X-Adapter-Config": CONFIG, "Content-Type": "application/octet-stream"}


def known(service: Service, weights: bytes, like: str) -> str:
    """The source of these weights, which are the contents of another adapter of the tests."""
    assert service.managed.uploads is not None
    with complete_upload(service.managed.uploads, CONFIG.encode(), weights) as source:
        service.managed.store.contents[source] = service.managed.store.contents[like]
    return source


async def test_weights_are_routable_when_it_answers(http: httpx.AsyncClient, service: Service) -> None:
    known(service, WEIGHTS, "new")
    known(service, b"others", "two")
    body = {"model": "tuned", "prompt": [1, 2], "max_tokens": 3, "return_token_ids": True}
    for generation, weights in ((1, WEIGHTS), (2, b"others")):
        answer = await http.put("/v1/loras/tuned/weights", content=weights, headers=HEADERS)
        assert answer.status_code == 200, answer.text
        received = (await http.post("/v1/completions", json=body)).json()["adapter"]
        assert received["generation"] == generation
        assert received["digest"] == service.managed.store.contents["new" if generation == 1 else "two"]


async def test_an_answer_keeps_the_version_it_began_with(http: httpx.AsyncClient, service: Service) -> None:
    known(service, WEIGHTS, "new")
    known(service, b"others", "two")
    body = {"model": "tuned", "prompt": [1, 2], "max_tokens": 20, "ignore_eos": True, "seed": 3}
    body |= {"return_token_ids": True}
    await http.put("/v1/loras/tuned/weights", content=WEIGHTS, headers=HEADERS)
    alone = (await http.post("/v1/completions", json=body)).json()
    (replica,) = service.fleet.replicas.values()
    replica.backend.max_steps = replica.backend.num_steps + 5
    running = asyncio.create_task(http.post("/v1/completions", json=body))
    while replica.backend.num_steps < replica.backend.max_steps:  # some of its tokens are drawn
        await asyncio.sleep(0.001)
    await http.put("/v1/loras/tuned/weights", content=b"others", headers=HEADERS)
    replica.backend.max_steps = None
    replica.backend.resumed.set()
    received = (await running).json()
    assert received["adapter"] == alone["adapter"]
    assert received["choices"][0]["token_ids"] == alone["choices"][0]["token_ids"]
    after = (await http.post("/v1/completions", json=body)).json()
    assert after["adapter"]["generation"] == alone["adapter"]["generation"] + 1
    assert after["choices"][0]["token_ids"] != alone["choices"][0]["token_ids"]


async def test_what_no_name_means_any_more_is_not_in_use(http: httpx.AsyncClient, service: Service) -> None:
    first, second = known(service, WEIGHTS, "new"), known(service, b"others", "two")
    database = service.managed.registry.database
    await http.put("/v1/loras/tuned/weights", content=WEIGHTS, headers=HEADERS)
    assert uploads_in_use(database) == {first}
    await http.put("/v1/loras/tuned/weights", content=b"others", headers=HEADERS)
    assert uploads_in_use(database) == {second}
    assert (await http.delete("/v1/loras/tuned")).status_code == 200
    assert uploads_in_use(database) == frozenset()


async def test_the_parts_of_a_combination_stay_in_use(http: httpx.AsyncClient, service: Service) -> None:
    """It keeps the contents that its parts had, whatever their names mean later."""
    first, second = known(service, WEIGHTS, "new"), known(service, b"others", "two")
    database = service.managed.registry.database
    await http.put("/v1/loras/tuned/weights", content=WEIGHTS, headers=HEADERS)
    combine = {"adapters": [{"name": "tuned"}, {"name": "sql"}]}
    made = service.preprocessor.resolver.combine(parse_body(CombinationBody, combine).adapters, handle_principal())
    service.managed.store.contents[made.source] = made.digest
    answer = await http.post("/v1/loras", json={"name": "mix", "combine": combine, "wait": True})
    assert answer.status_code < 300, answer.text
    await http.put("/v1/loras/tuned/weights", content=b"others", headers=HEADERS)
    assert uploads_in_use(database) == {first, second}
    assert (await http.delete("/v1/loras/tuned")).status_code == 200
    assert uploads_in_use(database) == {first}
    assert (await http.delete("/v1/loras/mix")).status_code == 200
    assert uploads_in_use(database) == frozenset()


@pytest.mark.parametrize("name", ["base", "auto", "-x"])
async def test_a_name_that_cannot_be_one_writes_nothing(http: httpx.AsyncClient, service: Service, name: str) -> None:
    assert (await http.put(f"/v1/loras/{name}/weights", content=WEIGHTS, headers=HEADERS)).status_code == 400
    assert service.managed.uploads is not None
    assert not list(service.managed.uploads.root.iterdir())


@pytest.mark.parametrize("as_file", [False, True])
async def test_a_long_configuration_comes_in_a_form(http: httpx.AsyncClient, service: Service, as_file: bool) -> None:
    config = CONFIG[:-1] + ', "target_modules": ["' + "x" * 200_000 + '"]}'
    assert service.managed.uploads is not None
    with complete_upload(service.managed.uploads, config.encode(), WEIGHTS) as source:
        service.managed.store.contents[source] = service.managed.store.contents["new"]
    files = {"weights": ("adapter_model.safetensors", WEIGHTS, "application/octet-stream")}
    fields = {} if as_file else {"config": config}
    if as_file:
        files["config"] = ("adapter_config.json", config.encode(), "application/json")
    answer = await http.put("/v1/loras/org/tuned/weights", files=files, data=fields)
    assert answer.status_code == 200, answer.text
    assert answer.json()["digest"] == service.managed.store.contents["new"]


async def test_a_form_that_is_no_upload_is_refused(http: httpx.AsyncClient, service: Service) -> None:
    path, weights = "/v1/loras/tuned/weights", {"weights": ("w", WEIGHTS)}
    key = "sk-poly-" + "a" * 40
    wrong = (
        ({"files": weights}, 400, None),
        ({"files": weights, "data": {"config": CONFIG, "other": "x"}}, 400, "other"),
        ({"files": {"config": ("c", CONFIG.encode())}}, 400, "weights"),
        ({"files": weights, "data": {"config": f'{{"x": "{key}"}}'}}, 400, None),
        ({"content": b"no form", "headers": {"Content-Type": "multipart/form-data; boundary=x"}}, 400, "file"),
        ({"content": b"no form", "headers": {"Content-Type": "multipart/form-data"}}, 400, "file"),
    )
    for sent, status, param in wrong:
        answer = await http.put(path, **sent)
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text
    service.reconfigure({"max_upload_bytes": 1024})
    for num_bytes, message in (
        (3 << 20, "1024 and the fields of a form, together"),
        (1025, "limits.max_upload_bytes 1024"),
    ):
        files = {"weights": ("w", bytes(num_bytes))}
        answer = await http.put(path, files=files, data={"config": CONFIG})
        assert (answer.status_code, message in answer.text) == (413, True), answer.text
    assert (await http.post("/v1/loras", files=weights)).status_code == 415, "elsewhere a form is refused"


async def test_what_is_no_upload_is_refused(http: httpx.AsyncClient, service: Service) -> None:
    path = "/v1/loras/tuned/weights"
    kind = {"Content-Type": "application/octet-stream"}
    assert (await http.put(path, content=WEIGHTS, headers=kind)).status_code == 400, "no config"
    assert (await http.put(path, content=WEIGHTS, headers=HEADERS)).status_code == 404, (
        "the store reads no such adapter"
    )
    service.reconfigure({"max_upload_bytes": 1024})
    assert (await http.put(path, content=bytes(1025), headers=HEADERS)).status_code == 413
    source = known(service, WEIGHTS, "new")
    answer = await http.post("/v1/loras", json={"name": "mine", "path": source, "wait": True})
    assert answer.status_code == 403, "a client names no upload"
    assert source.startswith(UPLOADED)


async def test_a_project_s_weights_are_its_own_and_within_its_quota(org: Org) -> None:
    known(org.service, WEIGHTS, "new")
    for who in ("ada", "bob"):
        listed = (await org.ask(who, "GET", "/v1/loras")).json()["data"]
        assert "tuned" not in [each["id"] for each in listed]
    put = {"content": WEIGHTS, "headers": HEADERS}
    assert (await org.ask("ada", "PUT", "/v1/loras/tuned/weights", **put)).status_code == 200
    assert (await org.ask("bob", "GET", "/v1/loras/tuned")).status_code == 404
    audit = await org.service.managed.client.audit("tuned", limit=5, before=None, tenant_id=org.ids["ada"])
    assert any(UPLOADED in record.detail for record in audit)
    await org.service.accounting.tenants_service.configure_project(org.ids["bob"], {"max_adapters": 0}, actor="test")
    answer = await org.ask("bob", "PUT", "/v1/loras/tuned/weights", **put)
    assert answer.json()["error"]["code"] != "internal_error"
    assert answer.status_code in (403, 429)


async def test_weights_go_to_the_store_in_parts_and_a_client_that_leaves_leaves_nothing(
    http: httpx.AsyncClient, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loras_module, "PART_BYTES", 3)
    uploads = service.managed.uploads
    assert uploads is not None
    sizes: list[int] = []
    write = uploads.write

    def write_part(upload_id: str, offset: int, part: bytes) -> None:
        sizes.append(len(part))
        write(upload_id, offset, part)

    monkeypatch.setattr(uploads, "write", write_part)

    async def pieces(*, stops: bool = False) -> AsyncIterator[bytes]:
        for piece in (b"we", b"igh", b"t", b"s"):
            yield piece
        if stops:
            raise ClientDisconnect

    known(service, WEIGHTS, "new")
    sizes.clear()
    assert (await http.put("/v1/loras/tuned/weights", content=pieces(), headers=HEADERS)).status_code == 200
    assert sizes == [5, 2], "whole pieces, and the rest"
    assert (await http.put("/v1/loras/other/weights", content=pieces(stops=True), headers=HEADERS)).status_code == 499
    async with asyncio.timeout(60):
        while len(list(uploads.root.iterdir())) > 1:
            await asyncio.sleep(0.001)


async def test_a_project_s_uploads_leave_places_to_others(org: Org) -> None:
    known(org.service, WEIGHTS, "new")
    gate = asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield WEIGHTS[:3]
        await gate.wait()
        yield WEIGHTS[3:]

    uploads = org.service.managed.uploads
    assert uploads is not None
    put = {"headers": HEADERS}
    tasks = [
        asyncio.create_task(org.ask("ada", "PUT", f"/v1/loras/slow{number}/weights", content=slow(), **put))
        for number in range(2)
    ]
    while len(uploads._arriving) < 2:
        await asyncio.sleep(0.001)
    refused = await org.ask("ada", "PUT", "/v1/loras/third/weights", content=WEIGHTS, **put)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
    assert (await org.ask("bob", "PUT", "/v1/loras/mine/weights", content=WEIGHTS, **put)).status_code == 200
    gate.set()
    assert [answer.status_code for answer in await asyncio.gather(*tasks)] == [200, 200]
