"""From the last release to this code and back, and both at once: nothing that was acknowledged is lost.

The release is what git has under its tag or commit, run with this machine's packages.
"""

from __future__ import annotations

import io
import secrets
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from app.config import ADMIN_KEY, SECRETS_KEY
from app.deployments.tenancy.auth.key_crypto import new_key
from app.version import version
from load_tests.service import ROOT, Service, free_port, serve_arguments
from tests.e2e.process import tiny_document
from tests.e2e.tiny import save_adapter, save_tiny_model
from tests.postgres import PostgresServer, find_postgres

#: The last release: its tag, and its commit for a repository without tags.
RELEASE, RELEASE_COMMIT = "v0.1.0", "ada35bfb3bb5dd4c222c12dca8e5fb2094e20c7f"
KEY = new_key(is_admin=True).value
FILE = b'{"custom_id": "1"}\n'
#: Time for usage to be written, and for a change to reach another service.
TIMEOUT_S = 60.0

#: By day tests/deployments/registry/db/test_database.py compares the tables with the ones that were released.
pytestmark = [pytest.mark.e2e, pytest.mark.nightly]


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The release's files."""
    folder = tmp_path_factory.mktemp("release")
    for name in (RELEASE, RELEASE_COMMIT):
        done = subprocess.run(["git", "-C", ROOT, "archive", name], capture_output=True, check=False)
        if done.returncode == 0:
            with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
                archive.extractall(folder, filter="data")
            return folder
    pytest.skip(f"the repository has neither {RELEASE} nor its commit: {done.stderr.decode()}")


@pytest.fixture(params=["SQLite", "PostgreSQL"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, str]]:
    """The variables that name an empty registry."""
    environment = {"POLYLORA_STATE_DIR": str(tmp_path / "state"), ADMIN_KEY: KEY, SECRETS_KEY: secrets.token_hex(32)}
    if request.param == "SQLite":
        yield environment
        return
    programs = find_postgres()
    if programs is None:
        pytest.skip("PostgreSQL's programs are not installed")
    server = PostgresServer(programs)
    try:
        yield environment | {"POLYLORA_REGISTRY_URL": server.new_database()}
    finally:
        server.stop()


class Running:
    """A service of one release. Calls are an admin's unless they have a key; completions need none."""

    def __init__(self, checkout: Path, folder: Path, environment: dict[str, str]) -> None:
        port = free_port()
        engine = {"num_kv_blocks": 256, "lora_pool_rows": 64, "cpu": {"num_threads": 1}}
        document = tiny_document(port, folder, engine)
        document["applications"][0]["args"]["http"] = {"auth": "open"}
        path = folder / f"{port}.yaml"
        path.write_text(yaml.safe_dump(document))
        self.process = Service(serve_arguments(str(path), port), {"OMP_NUM_THREADS": "1", **environment}, checkout)
        self._url = f"http://127.0.0.1:{port}"

    def __enter__(self) -> Running:
        self.process.__enter__()
        try:
            self.process.wait_for("Ready after", 600)
        except BaseException:
            self.process.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.process.__exit__(None, None, None)

    def call(self, method: str, path: str, body: Any = None, key: str = KEY, **options: Any) -> Any:
        """The answer's JSON. Raises AssertionError for a status that is an error."""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        answer = httpx.request(method, f"{self._url}{path}", json=body, headers=headers, timeout=120, **options)
        assert answer.is_success, f"{method} {path}: {answer.status_code} {answer.text}"
        return answer.json() if "json" in answer.headers["content-type"] else answer.content

    def load(self, name: str, path: str, **more: Any) -> None:
        self.call("POST", "/v1/loras?wait=true", {"name": name, "path": path, **more})

    def complete(self, model: str, key: str = "") -> str:
        prompt = {"prompt": "the quick", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        return str(self.call("POST", "/v1/completions", {"model": model, **prompt}, key)["choices"][0]["text"])


def until(condition: Callable[[], bool], what: str) -> None:
    """A condition that fails is not yet met."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline_s:
        with suppress(AssertionError):
            if condition():
                return
        time.sleep(0.2)
    raise AssertionError(what)


class Customer:
    """A project with a key, a rate limit, a hub token, a file and usage."""

    def __init__(self, service: Running) -> None:
        project = service.call("POST", "/v1/organization/projects", {"name": "acme"})
        self.id = project["id"]
        accounts = f"/v1/organization/projects/{self.id}/service_accounts"
        self.key = service.call("POST", accounts, {"name": "app"})["api_key"]["value"]
        limits = f"/v1/organization/projects/{self.id}/rate_limits/rl-tiny"
        service.call("POST", limits, {"max_requests_per_1_minute": 1234})
        service.call("PATCH", f"/v1/tenants/{self.id}", {"hub_token": "hf_token"})
        form: dict[str, Any] = {"files": {"file": ("a.jsonl", FILE)}, "data": {"purpose": "batch"}}
        self.file_id = service.call("POST", "/v1/files", key=self.key, **form)["id"]

    def facts(self, service: Running) -> dict[str, Any]:
        """What the service knows of it."""
        path = f"/v1/organization/projects/{self.id}"
        query = f"?start_time={int(time.time()) - 86_400}&bucket_width=1d&limit=2&project_ids={self.id}"
        buckets = service.call("GET", f"/v1/organization/usage/completions{query}")["data"]
        limits = service.call("GET", f"{path}/rate_limits")["data"]
        return {
            "name": service.call("GET", path)["name"],
            "accounts": [each["name"] for each in service.call("GET", f"{path}/service_accounts")["data"]],
            "limits": {each["model"]: each["max_requests_per_1_minute"] for each in limits},
            "has hub token": service.call("GET", f"/v1/tenants/{self.id}")["has_hub_token"],
            "file": service.call("GET", f"/v1/files/{self.file_id}/content", key=self.key),
            "requests": sum(each["num_model_requests"] for bucket in buckets for each in bucket["results"]),
        }


def registry(service: Running) -> dict[str, Any]:
    """Every name's meaning and tokens, and what has happened to it."""
    loras = service.call("GET", "/v1/loras")["data"]
    aliases = service.call("GET", "/v1/aliases")["data"]
    names = [each["id"] for each in loras]
    return {
        "adapters": {each["id"]: [each[field] for field in ("digest", "generation", "pinned")] for each in loras},
        "aliases": {each["id"]: each["targets"] for each in aliases},
        "texts": {name: service.complete(name) for name in ("tiny", *names, *(each["id"] for each in aliases))},
        "generations": {
            name: [each["id"] for each in service.call("GET", f"/v1/loras/{name}/generations")["data"]]
            for name in names
        },
        "audit": [each["id"] for each in service.call("GET", "/v1/audit?limit=100")["data"]],
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model, and adapters that a service may load."""
    save_tiny_model(tmp_path / "model")
    for seed, name in enumerate(("one", "two", "three")):
        save_adapter(tmp_path / "loras" / name, rank=4 << seed, seed=seed)
    return tmp_path


def fill(service: Running) -> Customer:
    """Change everything that a database keeps."""
    service.load("a", "one", pinned=True)
    service.load("b", "two")
    service.load("b", "three")  # its second generation
    service.load("gone", "one")
    service.call("DELETE", "/v1/loras/gone")
    service.call("PUT", "/v1/aliases/app", {"targets": {"b": 1}})
    customer = Customer(service)
    for _ in range(3):
        service.complete("tiny", customer.key)
    until(lambda: customer.facts(service)["requests"] == 3, "the usage was not written")
    return customer


def test_an_upgrade_and_the_way_back_keep_everything(release: Path, folder: Path, database: dict[str, str]) -> None:
    with Running(release, folder, database) as service:
        assert service.call("GET", "/version")["version"] != version(), "this is the release itself"
        customer = fill(service)
        known, facts = registry(service), customer.facts(service)
    assert known["generations"] == {"a": [1], "b": [2, 1]}
    assert len(set(known["texts"].values())) == 3, "each adapter says something else, and the alias what b says"
    with Running(ROOT, folder, database) as service:
        assert service.call("GET", "/version")["version"] == version()
        assert registry(service) == known
        assert customer.facts(service) == facts
        service.load("c", "two")
        service.call("PUT", "/v1/aliases/app", {"targets": {"c": 1}})
        service.complete("tiny", customer.key)
        until(lambda: customer.facts(service)["requests"] == 4, "the usage was not written")
        later = registry(service)
    assert later["texts"] == known["texts"] | {"c": later["texts"]["c"], "app": later["texts"]["c"]}
    with Running(release, folder, database) as service:
        assert registry(service) == later
        assert customer.facts(service) == facts | {"requests": 4}
        service.load("c", "three")
        assert service.complete("app") == known["texts"]["b"]


@pytest.mark.parametrize("database", ["PostgreSQL"], indirect=True)
def test_two_releases_share_a_database(release: Path, folder: Path, database: dict[str, str]) -> None:
    """Each has its own Ray; what one registers, the other serves, and a key of one is a key of the other."""
    other = database | {"POLYLORA_STATE_DIR": str(folder / "other")}
    with Running(release, folder, database) as old, Running(ROOT, folder, other) as new:
        share(old, new, "one")
        share(new, old, "two")


def share(first: Running, second: Running, path: str) -> None:
    """Change names and projects through the first; the second serves them, and changes a name in turn."""
    name = f"shared-{path}"
    first.load(name, path)
    text = first.complete(name)
    until(lambda: second.complete(name) == text, f"{name} did not come")
    customer = Customer(first)
    until(lambda: bool(second.complete("tiny", customer.key)), "the project did not come")
    assert customer.facts(second)["file"] == FILE
    second.load(name, "three")
    until(lambda: first.complete(name) == second.complete(name) != text, "the new contents did not come")
    first.call("DELETE", f"/v1/loras/{name}")
    until(lambda: name not in str(second.call("GET", "/v1/models")), f"{name} did not go")
