"""`polylora tenants` against the application in this process: every action, and what it prints."""

from __future__ import annotations

import asyncio
import json
import sys
import urllib.error
import urllib.request
from argparse import Namespace
from collections.abc import AsyncIterator, Callable
from email.message import Message
from io import BytesIO
from typing import Any

import httpx
import pytest
import pytest_asyncio

from app.cli import tenants
from app.cli.main import main
from app.config import ADMIN_KEY
from app.deployments.ingress.http.app import make_app
from app.deployments.ingress.http.middleware.origin_check import HttpPolicy
from app.deployments.tenancy.auth.key_crypto import is_key, key_digest, new_key
from load_tests.service import free_port
from tests.deployments.http_service import Service
from tests.deployments.ingress.conftest import service

__all__ = ["service"]

KEY = new_key(is_admin=True).value
Run = Callable[..., Any]


@pytest_asyncio.fixture
async def run(service: Service, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Run]:
    """Runs the command in a thread; what it sends goes to the application on this loop."""
    application = make_app(service, HttpPolicy(admin_digest=key_digest(KEY)))
    transport = httpx.ASGITransport(application, raise_app_exceptions=False)
    loop = asyncio.get_running_loop()

    def urlopen(request: urllib.request.Request, timeout: float) -> Any:
        async def send() -> httpx.Response:
            async with httpx.AsyncClient(transport=transport, timeout=timeout) as client:
                method, data = request.get_method(), request.data
                headers = dict(request.header_items())
                return await client.request(method, request.full_url, content=data, headers=headers)  # type: ignore[arg-type]

        answer = asyncio.run_coroutine_threadsafe(send(), loop).result(30)
        if answer.status_code >= 400:
            raise urllib.error.HTTPError(request.full_url, answer.status_code, "", Message(), BytesIO(answer.content))
        return BytesIO(answer.content)

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    monkeypatch.setenv(ADMIN_KEY, KEY)

    async def run(*arguments: str) -> int:
        return await asyncio.to_thread(main, ["tenants", "--url", "http://test", *arguments])

    yield run


async def test_a_url_with_v1_is_the_same_service(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert await run("create", "acme") == 0
    for url in ("http://test/v1", "http://test/v1/"):
        capsys.readouterr()
        assert await run("list", "--url", url) == 0
        assert "acme" in capsys.readouterr().out


def test_a_service_that_is_not_there_is_said_in_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(ADMIN_KEY, KEY)
    url = f"http://127.0.0.1:{free_port()}"
    assert main(["tenants", "--url", url, "list"]) == 1
    said = capsys.readouterr().err
    assert f"no answer from {url}: [Errno " in said
    assert "urlopen" not in said


async def test_a_project_that_is_not_there_has_not_used_nothing(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert await run("list") == 0
    assert capsys.readouterr().out == "no projects; `polylora tenants create NAME` makes one\n"
    assert await asyncio.to_thread(main, ["usage", "--url", "http://test", "default"]) == 0
    assert capsys.readouterr().out == "nothing was used\n"
    assert await asyncio.to_thread(main, ["usage", "--url", "http://test", "nope"]) == 1
    assert "there is no project 'nope'" in capsys.readouterr().err


def test_usage_of_embeddings_is_shown_beside_that_of_answers() -> None:
    answered = {
        "model": "sql",
        "num_model_requests": 2,
        "input_tokens": 9,
        "input_cached_tokens": 4,
        "output_tokens": 5,
    }
    embedded = {"model": "base", "num_model_requests": 1, "input_tokens": 3}
    pages = {"completions": [answered], "embeddings": [embedded]}

    class Api:
        def call(self, _: str, path: str) -> dict[str, Any]:
            kind = path.partition("?")[0].rpartition("/")[2]
            return {"object": "page", "data": [{"start_time": 3600, "results": pages[kind]}]}

    answer, lines = tenants._usage(Api(), Namespace(project=None))  # type: ignore[arg-type]
    assert lines == [
        "01:00  sql: 2 requests, 9 tokens in (4 cached), 5 out",
        "01:00  base: 1 requests, 3 tokens in, embedded",
    ]
    assert [bucket["results"] for bucket in answer["data"]] == [[answered], [embedded]]


async def test_a_project_s_life_from_the_shell(run: Run, capsys: pytest.CaptureFixture[str], service: Service) -> None:
    assert await run("create", "acme") == 0
    project_id, value = capsys.readouterr().out.split()
    assert is_key(value)
    limits = ["--requests-per-min", "10", "--weight", "2", "--max-adapters", "3", "--spend-cents", "500"]
    assert await run("limit", project_id, *limits, "--enforce", "false") == 0
    assert await run("limit", project_id, "--model", "sql", "--tokens-per-min", "1000") == 0
    assert await run("limit", project_id, "--max-adapters", "-1") == 0
    tenant = service.accounting.view.tenant(project_id)
    assert tenant is not None
    assert (tenant.weight, tenant.enforce) == (2, False)
    assert (tenant.limits.max_adapters, tenant.limits.spend_cents) == (None, 500)
    assert tenant.limits.rates["base"].requests_per_min == 10
    assert tenant.limits.rates["sql"].tokens_per_min == 1000
    capsys.readouterr()
    assert await run("create", "other") == 0
    other_id, _ = capsys.readouterr().out.split()
    assert await run("share", project_id, "sql", other_id) == 0
    capsys.readouterr()
    assert await run("show", project_id) == 0
    shown = capsys.readouterr().out
    assert f"shares sql with {other_id}\n" in shown
    assert "requests_per_min 10" in shown
    assert "limit of requests of base: 10, 10 left\n" in shown
    assert "{" not in shown
    assert value not in shown
    assert await run("key", project_id, "--expires-in-s", "60") == 0
    key_id, second = capsys.readouterr().out.split()
    assert is_key(second)
    assert await run("revoke", project_id, key_id) == 0
    assert service.accounting.view.find(second, 0.0) is None
    assert await run("share", project_id, "sql") == 0
    salt = tenant.salt
    assert await run("rotate-salt", project_id) == 0
    assert service.accounting.view.tenant(project_id).salt != salt  # type: ignore[union-attr]
    capsys.readouterr()
    for project in ([project_id], []):
        assert await asyncio.to_thread(main, ["usage", "--url", "http://test", *project]) == 0
        assert capsys.readouterr().out == "nothing was used\n"
    assert await run("archive", project_id) == 0
    capsys.readouterr()
    for arguments in (["--json", "list"], ["list", "--json"], ["list", "--json", "--url", "http://test"]):
        assert await run(*arguments) == 0
        listed = {each["id"]: each["status"] for each in json.loads(capsys.readouterr().out)}
        assert listed == {project_id: "archived", other_id: "active"}


async def test_keys_have_roles(run: Run, capsys: pytest.CaptureFixture[str], service: Service) -> None:
    assert await run("create", "acme", "--role", "management") == 0
    project_id, first = capsys.readouterr().out.split()
    assert await run("key", project_id, "--role", "inference", "--expires-in-s", "60") == 0
    key_id, second = capsys.readouterr().out.split()
    found = [service.accounting.view.find(value, 0.0) for value in (first, second)]
    assert [each is not None and each.key.role for each in found] == ["management", "inference"]
    assert await run("revoke", project_id, key_id) == 0
    assert capsys.readouterr().out == f"revoked {key_id}\n"


async def test_on_a_terminal_what_is_made_has_names(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert await run("create", "acme") == 0
    project, key, note = capsys.readouterr().out.splitlines()
    assert project.startswith("project  proj_")
    assert is_key(key.removeprefix("key      "))
    assert note == "the key is not shown again"
    assert await run("key", project.split()[1]) == 0
    key_id, key, _ = capsys.readouterr().out.splitlines()
    assert (key_id.split()[0], is_key(key.removeprefix("key  "))) == ("id", True)
    assert await run("create", "other", "--json") == 0
    assert json.loads(capsys.readouterr().out)["project"]["name"] == "other"


async def test_what_goes_wrong_is_one_line(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await run("show", "proj_none") == 1
    assert "there is no project" in capsys.readouterr().err
    assert await run("limit", "proj_none") == 1
    assert "no change given" in capsys.readouterr().err
    monkeypatch.delenv(ADMIN_KEY)
    assert await run("list") == 1
    assert "create-admin-key" in capsys.readouterr().err
