"""`polylora apply` against the service's own routes, over a socket: what it asks for is what the registry then says."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import uvicorn

from app.cli.main import main
from app.deployments.ingress.http.app import make_app
from app.deployments.ingress.http.middleware.origin_check import HttpPolicy
from app.deployments.tenancy.auth.key_crypto import key_digest
from app.engine.adapters.combining.combination import is_combination, parse_combination
from app.engine.errors import AdapterFormatError
from tests.deployments.http_service import Service
from tests.deployments.managed import wanted

Apply = Callable[..., Awaitable[tuple[int, list[str]]]]

WANTED = """
adapters:
  - {name: sql, path: sql}
  - {name: new, path: new, pinned: true}
  - {name: two, path: two, traffic_weight: 2.5}
aliases:
  - {name: app, targets: {sql: 95, new: 5}}
"""


@asynccontextmanager
async def served(service: Service, rules: HttpPolicy) -> AsyncIterator[str]:
    """The service on a port of its own; its URL."""
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(make_app(service, rules), lifespan="off", ws="none", log_level="warning"))
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving
        listening.close()


@pytest_asyncio.fixture
async def apply(service: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> AsyncIterator[Apply]:
    """Run `polylora apply` with a file of this text; its exit status and the lines it prints."""

    async def run(text: str, *options: str) -> tuple[int, list[str]]:
        file = tmp_path / "adapters.yaml"
        file.write_text(text)
        status = await asyncio.to_thread(main, ["apply", str(file), "--url", url, *options])
        return status, capsys.readouterr().out.splitlines()

    async with served(service, HttpPolicy()) as url:
        yield run


async def test_the_token_is_sent_along(service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rules = HttpPolicy(management="token", token_digest=key_digest("right"))
    async with served(service, rules) as url:
        file = tmp_path / "adapters.yaml"
        file.write_text(WANTED)
        assert await asyncio.to_thread(main, ["apply", str(file), "--url", url]) == 1
        monkeypatch.setenv("POLYLORA_MANAGEMENT_TOKEN", "right")
        assert await asyncio.to_thread(main, ["apply", str(file), "--url", url]) == 0


async def test_the_service_becomes_what_the_file_says(apply: Apply, http: httpx.AsyncClient) -> None:
    status, lines = await apply(WANTED)
    assert (status, lines[-1]) == (0, "3 changes made"), "the service had 'sql' from the start"
    adapters = {item["id"]: item for item in (await http.get("/v1/loras")).json()["data"]}
    assert {name: (item["state"], item["pinned"], item["traffic_weight"]) for name, item in adapters.items()} == {
        "sql": ("LOADED", False, 1.0), "new": ("LOADED", True, 1.0), "two": ("LOADED", False, 2.5),
    }  # fmt: skip
    assert (await http.get("/v1/aliases/app")).json()["targets"] == {"sql": 95.0, "new": 5.0}
    audit = (await http.get("/v1/audit")).json()["data"]
    assert await apply(WANTED) == (0, ["0 changes made"])
    assert (await http.get("/v1/audit")).json()["data"] == audit, "nothing was even asked for"

    changed = WANTED.replace("pinned: true", "pinned: false").replace("new: 5}", "new: 45}")
    status, lines = await apply(changed, "--dry-run")
    assert (status, lines[-1]) == (0, "2 changes to make")
    status, lines = await apply(changed)
    assert (status, lines[-1]) == (0, "2 changes made")
    assert not (await http.get("/v1/loras/new")).json()["pinned"]
    status, lines = await apply("adapters: [{name: sql, path: sql}]", "--prune")
    assert (status, lines[-1]) == (0, "3 changes made")
    assert [item["id"] for item in (await http.get("/v1/loras")).json()["data"]] == ["sql"]
    assert (await http.get("/v1/aliases")).json()["data"] == []


async def test_a_reload_reads_again_and_says_what_failed(
    apply: Apply, service: Service, http: httpx.AsyncClient
) -> None:
    assert (await apply(WANTED))[0] == 0
    reads = len(service.managed.store.loads)
    service.managed.store.contents["new"] = AdapterFormatError("tensor 'x' has NaN")
    status, lines = await apply(WANTED, "--reload")
    assert status == 1
    assert "! new  tensor 'x' has NaN" in lines
    assert lines[-1] == "2 changes made, 1 failed"
    assert len(service.managed.store.loads) == reads + 3
    assert (await http.get("/v1/loras/new")).json()["state"] == "LOADED", "its old meaning stays"


async def test_a_source_that_moved_is_another_generation(
    apply: Apply, service: Service, http: httpx.AsyncClient
) -> None:
    status, lines = await apply("adapters: [{name: sql, path: new}]")
    assert (status, lines) == (0, ["~ sql  source sql -> new", "1 changes made"])
    body = (await http.get("/v1/loras/sql")).json()
    assert (body["source"], body["generation"]) == ("new", 2)
    assert body["digest"] == service.managed.store.contents["new"]


async def test_a_name_may_turn_from_an_adapter_into_an_alias_and_back(apply: Apply, http: httpx.AsyncClient) -> None:
    alias = "adapters: [{name: new, path: new}]\naliases: [{name: sql, targets: {new: 1}}]"
    status, lines = await apply(alias)
    assert status == 1
    assert any("'sql' is an adapter" in line for line in lines), "not removed unless that is asked for"
    status, lines = await apply(alias, "--prune")
    assert (status, lines[-1]) == (0, "2 changes made"), lines
    assert (await http.get("/v1/aliases/sql")).json()["targets"] == {"new": 1.0}
    assert await apply(alias, "--prune") == (0, ["0 changes made"])
    status, lines = await apply("adapters: [{name: sql, path: sql}]", "--prune")
    assert (status, lines[-1]) == (0, "3 changes made"), lines
    assert [item["id"] for item in (await http.get("/v1/loras")).json()["data"]] == ["sql"]


async def test_an_alias_lets_go_of_an_adapter_before_it_is_pruned(apply: Apply, http: httpx.AsyncClient) -> None:
    assert (await apply(WANTED))[0] == 0
    fewer = WANTED.replace("  - {name: new, path: new, pinned: true}\n", "").replace(", new: 5", "")
    status, lines = await apply(fewer, "--prune")
    assert (status, lines[-1]) == (0, "2 changes made"), lines
    assert (await http.get("/v1/loras/new")).status_code == 404


class Contents(dict[str, Any]):
    """What the store can read: also every combination."""

    def get(self, source: str, default: Any = None) -> Any:
        return parse_combination(source).digest if is_combination(source) else super().get(source, default)


EVERYTHING = """
adapters:
  - {name: mix, combine: {adapters: [{name: sql, weight: 0.5}, {name: new}], method: ties, density: 0.5}}
  - {name: sql, path: sql, description: writes SQL, defaults: {temperature: 0, system_prompt: Be brief.}}
  - {name: new, path: new}
  - {name: later, path: two, lazy: true, description: for later, defaults: {max_tokens: 9}, traffic_weight: 2}
"""


async def test_a_file_says_everything_about_an_adapter(apply: Apply, service: Service, http: httpx.AsyncClient) -> None:
    store = service.managed.store
    store.contents = Contents(store.contents)
    status, lines = await apply(EVERYTHING)
    assert (status, lines[-1]) == (0, "4 changes made"), lines
    assert [line.partition("  ")[0] for line in lines[:-1]] == ["~ sql", "+ new", "+ later", "+ mix"], "parts first"
    found = {item["id"]: item for item in (await http.get("/v1/loras")).json()["data"]}
    assert found["sql"]["description"] == "writes SQL"
    assert found["sql"]["defaults"] == {"temperature": 0, "system_prompt": "Be brief."}
    mix = found["mix"]["combine"]
    assert mix | {"adapters": sorted(mix["adapters"], key=str)} == {
        "adapters": [{"name": "new@1", "weight": 1.0}, {"name": "sql@1", "weight": 0.5}],
        "method": "ties",
        "density": 0.5,
    }
    later = found["later"]
    assert (later["state"], later["description"], later["traffic_weight"]) == ("REGISTERED", "for later", 2.0)
    assert (later["defaults"], later["combine"]) == ({"max_tokens": 9}, None)
    assert await apply(EVERYTHING) == (0, ["0 changes made"])

    changed = EVERYTHING.replace("density: 0.5", "density: 0.25").replace("temperature: 0,", "top_k: 3,")
    status, lines = await apply(changed.replace("for later", "soon"))
    assert (status, lines[-1]) == (0, "3 changes made"), lines
    found = {item["id"]: item for item in (await http.get("/v1/loras")).json()["data"]}
    assert found["sql"]["defaults"] == {"top_k": 3, "system_prompt": "Be brief."}
    assert found["sql"]["generation"] == 1, "its contents were not read again"
    assert found["mix"]["combine"]["density"] == 0.25
    assert (found["later"]["state"], found["later"]["description"]) == ("REGISTERED", "soon")


async def test_a_combination_follows_the_contents_of_its_parts(
    apply: Apply, service: Service, http: httpx.AsyncClient
) -> None:
    store = service.managed.store
    store.contents = Contents(store.contents)
    assert (await apply(EVERYTHING))[0] == 0
    status, lines = await apply(EVERYTHING.replace("name: new, path: new", "name: new, path: two"))
    assert (status, lines) == (0, ["~ new  source new -> two", "~ mix  read again", "2 changes made"])
    parts = (await http.get("/v1/loras/mix")).json()["combine"]["adapters"]
    assert {"name": "new@2", "weight": 1.0} in parts
    await service.managed.client.load_and_wait(wanted("new", "new"))  # outside the file
    status, lines = await apply(EVERYTHING)
    assert (status, len(lines)) == (0, 2), lines
    assert lines[0].startswith("~ mix  source ties(")
    status, lines = await apply("adapters: [{name: sql, path: sql}]", "--prune")
    assert (status, [line[:5] for line in lines[:-1]]) == (0, ["- mix", "- lat", "- new"]), "parts last"


async def test_a_lazy_adapter_is_loaded_once_the_file_says_so(apply: Apply, http: httpx.AsyncClient) -> None:
    lazy = "adapters: [{name: later, path: two, lazy: true}]"
    assert (await apply(lazy))[1] == [
        "+ later  register two", "  sql  adapter, not in the file: stays; --prune removes it", "1 changes made",
    ]  # fmt: skip
    status, lines = await apply("adapters: [{name: later, path: two}]")
    assert (status, lines[0]) == (0, "~ later  load")
    assert (await http.get("/v1/loras/later")).json()["state"] == "LOADED"
    assert (await apply(lazy))[1][-1] == "0 changes made", "loaded meanwhile"
    status, lines = await apply(lazy.replace("two", "new"))
    assert (status, lines[0]) == (0, "~ later  source two -> new")
    assert (await http.get("/v1/loras/later")).json()["source"] == "new"
