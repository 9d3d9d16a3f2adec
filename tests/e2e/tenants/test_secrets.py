"""No secret is told: keys, the database's password, what tenants' salts are made of.

Every way in is tried with a key in the wrong place; then everything that the service has written, said or shows is
searched, as whoever operates the machine could read it.
"""

from __future__ import annotations

import base64
import json
import re
import secrets
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
import sqlalchemy

from app.config import ADMIN_KEY, DIGEST
from app.deployments.tenancy.auth.key_crypto import derived_salt, key_digest, new_key
from load_tests.process_tree import session_processes
from load_tests.service import ROOT
from tests.e2e.process import POLYLORA
from tests.e2e.tenants.conftest import DATABASE_PASSWORD, KEY, RAY_TOKEN, Keyed, metric_lines, paths_below

HUB_TOKEN = f"hf_{secrets.token_hex(16)}"
#: What an operator may ask Ray's dashboard.
DASHBOARD_PATHS = (
    "/api/serve/applications/",
    "/api/v0/actors?detail=1",
    "/api/v0/tasks?detail=1",
    "/api/v0/workers?detail=1",
    "/api/v0/runtime_envs?detail=1",
    "/api/v0/jobs?detail=1",
    "/api/jobs/",
    "/logical/actors",
    "/nodes?view=summary",
)


class Place(NamedTuple):
    """Something that can be read, and what is in it. `may_hold`: the names of secrets that belong there."""

    name: str
    content: bytes
    may_hold: tuple[str, ...] = ()


def test_no_secret_is_told(keyed: Keyed) -> None:
    made = _make(keyed)
    answers = _answers(keyed, made)
    secret = {name: _forms(value) for name, value in _secrets(keyed, made).items()}
    places = [*answers, *_files(keyed), *_processes(keyed), *_dashboard(keyed), *_database(keyed)]
    places += [Place("metrics", "\n".join(metric_lines(keyed)).encode()), Place("HAProxy's log", keyed.heard())]
    found = {
        f"{name} in {place.name}"
        for place in places
        for name, forms in secret.items()
        if name not in place.may_hold and any(form in place.content for form in forms)
    }
    assert not found, "\n".join(sorted(found))
    _check_searched(keyed, made, places)


class Made(NamedTuple):
    """A project, a key of it, and an admin key of the shell's."""

    project_id: str
    project_key: str
    keygen_key: str


def _make(keyed: Keyed) -> Made:
    settings = keyed.process.folder / "keygen.yaml"
    settings.write_text(json.dumps(keyed.document))
    done = subprocess.run(
        [*POLYLORA, "create-admin-key", "--config", str(settings)],
        cwd=ROOT,
        env={name: value for name, value in keyed.process.environment.items() if name != ADMIN_KEY},
        capture_output=True,
        text=True,
        check=True,
    )
    keygen_key = done.stdout.strip()
    assert keygen_key.startswith("sk-admin-")
    assert keygen_key not in done.stderr
    with httpx.Client(base_url=f"{keyed.url}/v1", headers=_bearer(keygen_key), timeout=600) as admin:
        project = admin.post("/organization/projects", json={"name": "secretive"}).json()["id"]
        admin.patch(f"/tenants/{project}", json={"hub_token": HUB_TOKEN}).raise_for_status()
        account = admin.post(f"/organization/projects/{project}/service_accounts", json={"name": "app"}).json()
        return Made(project, account["api_key"]["value"], keygen_key)


def _secrets(keyed: Keyed, made: Made) -> Mapping[str, str | bytes]:
    """By name."""
    engine = sqlalchemy.create_engine(_with_driver(keyed.registry_url))
    with engine.connect() as connection:
        query = sqlalchemy.text("SELECT salt_secret, salt_version FROM projects WHERE id = :id")
        salt_secret, version = connection.execute(query, {"id": made.project_id}).one()
    engine.dispose()
    keys = {
        "the environment's admin key": KEY,
        "the shell's admin key": made.keygen_key,
        "a project's key": made.project_key,
    }
    return {
        **{name: _middle(key) for name, key in keys.items()},
        "the database's password": DATABASE_PASSWORD,
        "a project's hub token": HUB_TOKEN,
        "a salt's secret": bytes.fromhex(salt_secret),
        "a salt": derived_salt(bytes.fromhex(salt_secret), version),
        "a salt before": derived_salt(bytes.fromhex(salt_secret), version - 1),
    }


def _forms(value: str | bytes) -> tuple[bytes, ...]:
    """How a secret may be written."""
    if isinstance(value, str):
        return (value.encode(),)
    encoded = base64.b64encode(value).rstrip(b"=")
    return (
        value,
        value.hex().encode(),
        encoded,
        base64.urlsafe_b64encode(value).rstrip(b"="),
        repr(value)[2:-1].encode(),
    )


def _bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def _answers(keyed: Keyed, made: Made) -> list[Place]:
    """Answers to requests with keys where they belong, and where they do not."""
    found: list[Place] = []

    def note(answer: httpx.Response) -> None:
        name = f"the answer {answer.status_code} to {answer.request.method} {answer.request.url.path} ({len(found)})"
        found.append(Place(name, repr(answer.headers.raw).encode() + answer.read()))

    with httpx.Client(base_url=keyed.url, timeout=600, event_hooks={"response": [note]}) as http:
        for key in (made.project_key, made.keygen_key, KEY):
            _ask_everything(http, _bearer(key), made)
            for where in _misplaced(key):
                for path, body in (("/v1/completions", {"model": "tiny", "prompt": "x"}), ("/v1/messages", {})):
                    http.post(path, json=body, **where)
                for path in ("/v1/models", "/health", "/nowhere", "/v1/organization/projects"):
                    http.get(path, **where)
        wrong = new_key(is_admin=False).value
        assert http.get("/v1/models", headers=_bearer(wrong)).status_code == 401
        assert wrong.encode() not in found[-1].content
        http.post(f"/v1/tenants/{made.project_id}/rotate_salt", headers=_bearer(KEY))
    found.append(Place("the answer to no HTTP", _no_http(keyed, made.project_key)))
    return found


def _misplaced(key: str) -> list[dict[str, Any]]:
    """Requests' arguments that hold a key where none is expected, or looked for."""
    return [
        {"params": {"api_key": key}},
        {"params": {"key": key, "limit": key, "after": key}},
        {"headers": {"Authorization": key}},
        {"headers": {"Authorization": f"Basic {key}"}},
        {"headers": _bearer(key + "x")},
        {"headers": _bearer(key) | {"OpenAI-Project": key}},
        {"headers": _bearer(key) | {"X-Request-ID": key}},
        {"headers": {"X-API-Key": key, "Cookie": f"key={key}"}},
        {"headers": {"Host": f"{key.lower()}.localhost", "Origin": f"https://{key}"}},
    ]


def _ask_everything(http: httpx.Client, headers: Mapping[str, str], made: Made) -> None:
    key = headers["Authorization"].removeprefix("Bearer ")
    text = {"prompt": "hello there", "max_tokens": 4}
    for stream in (False, True):
        http.post("/v1/completions", headers=headers, json={"model": "r8", "stream": stream, **text})
    for model in (key, f"tiny:{key}", "nobody"):
        http.post("/v1/completions", headers=headers, json={"model": model, **text})
    for body in ({key: 1}, {"model": "tiny", "prompt": "x", "api_key": key}, {"model": "tiny", "temperature": key}):
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/load_lora_adapter", "/generate"):
            http.post(path, headers=headers, json=body)
    for broken in (f'{{"api_key": "{key}"', f'{{"model": {key}}}', f'"{key}"', key):
        http.post("/v1/completions", headers=headers, content=broken)
        http.post("/v1/organization/projects", headers=headers, content=broken)
    project = f"/v1/organization/projects/{made.project_id}"
    for path in (
        *("/v1/models", "/v1/loras", "/v1/status", "/v1/journal/events", "/openapi.json", "/metrics", "/v1/aliases"),
        *(f"/v1/models/{key}", f"/v1/loras/{key}", f"/v1/organization/projects/{key}", f"/{key}", f"/v1/tenants/{key}"),
        *("/v1/organization/admin_api_keys", "/v1/organization/audit_logs", "/v1/organization/projects", project),
        *(f"{project}/api_keys", f"{project}/service_accounts", f"{project}/rate_limits"),
        *(f"/v1/tenants/{made.project_id}", f"{project}/api_keys/{key}"),
    ):
        http.get(path, headers=headers)
    _keep_everything(http, headers, key)
    http.post("/v1/load_lora_adapter", headers=headers, json={"lora_name": "mine", "lora_path": f"/nowhere/{key}"})
    http.delete(f"/v1/loras/{key}", headers=headers)


def _keep_everything(http: httpx.Client, headers: Mapping[str, str], key: str) -> None:
    """What clients call what is kept for them."""
    endpoint, body = "/v1/completions", {"model": "tiny", "prompt": "x", "max_tokens": 2}
    line = json.dumps({"custom_id": "c", "method": "POST", "url": endpoint, "body": body})
    for name in (f"{key}.jsonl", "in.jsonl"):
        files = {"file": (name, line)}
        answer = http.post("/v1/files", headers=headers, files=files, data={"purpose": "batch", "expires_after": key})
        answer = http.post("/v1/files", headers=headers, files=files, data={"purpose": "batch"})
    wanted = {"input_file_id": answer.json().get("id", "none"), "endpoint": endpoint, "completion_window": "24h"}
    for metadata in ({key: "x"}, {"x": key}):
        http.post("/v1/batches", headers=headers, json=wanted | {"metadata": metadata})
        stored = {"model": "tiny", "input": "x", "max_output_tokens": 16, "store": True, "metadata": metadata}
        http.post("/v1/responses", headers=headers, json=stored)
    http.post("/v1/batches", headers=headers, json=wanted | {"input_file_id": key})


def _no_http(keyed: Keyed, key: str) -> bytes:
    """What is answered to a request that is none."""
    place = urlsplit(keyed.url)
    with socket.create_connection((place.hostname, place.port), timeout=60) as connection:
        connection.sendall(f"GET /v1/models?api_key={key} HTTP/1.1\r\nno header {key}\r\n\r\n".encode())
        return connection.recv(1 << 16)


def _files(keyed: Keyed) -> Iterator[Place]:
    """Everything that the service has written: its output, logs, Ray's session, HAProxy's files, the registry's."""
    for path in paths_below(keyed.process.folder):
        if path.is_file() and not path.is_symlink():
            kept = ("a salt's secret",) if ".sqlite" in path.name else ()
            with suppress(FileNotFoundError):
                yield Place(f"the file {path}", path.read_bytes(), kept)


def _processes(keyed: Keyed) -> Iterator[Place]:
    """Command lines, and the environments of all but the process that was given the keys."""
    first = keyed.process.process.pid
    for pid in session_processes(first):
        with suppress(FileNotFoundError, ProcessLookupError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            yield Place(f"the command line of {pid}", command)
            if pid != first:
                title = command[:60].decode(errors="replace").replace("\0", " ")
                # Whoever opens the database needs it, and Ray has one environment for all.
                place = f"the environment of {title}"
                yield Place(place, Path(f"/proc/{pid}/environ").read_bytes(), ("the database's password",))


def _dashboard(keyed: Keyed) -> Iterator[Place]:
    said = re.search(r"Ray's dashboard is (http://\S+);", keyed.process.log.read_text())
    assert said is not None, keyed.process.tail()
    with httpx.Client(base_url=said[1], headers=_bearer(RAY_TOKEN), timeout=600) as http:
        for path in DASHBOARD_PATHS:
            answer = http.get(path)
            assert answer.status_code == 200, (path, answer.text[:300])
            yield Place(f"the dashboard's {path}", answer.content)


def _database(keyed: Keyed) -> Iterator[Place]:
    """All rows of all tables of the registry; the audit is one of them."""
    engine = sqlalchemy.create_engine(_with_driver(keyed.registry_url))
    tables = sqlalchemy.MetaData()
    tables.reflect(engine)
    with engine.connect() as connection:
        for name, table in tables.tables.items():
            rows = repr(connection.execute(sqlalchemy.select(table)).all()).encode()
            yield Place(f"the table {name}", rows, ("a salt's secret",) if name == "projects" else ())
    engine.dispose()


def _with_driver(url: str) -> str:
    return url.replace("postgresql://", "postgresql+psycopg://", 1)


def _check_searched(keyed: Keyed, made: Made, places: list[Place]) -> None:
    """What was searched is what it is called: each place has what it tells, and the search finds what is there."""
    for name, text in (
        ("the answer 401 to GET /v1/models", "the API key is wrong"),
        (f"the file {keyed.process.log}", "Ready after"),
        (f"the file {keyed.process.environment['POLYLORA_STATE_DIR']}/logs/polylora.log", '"path": "/v1/models/sk-'),
        ("replica_polylora_Ingress", "POST / 200"),
        ("the environment of ray::ServeReplica:polylora:Ingress", f"{ADMIN_KEY}{DIGEST}={key_digest(KEY)}"),
        ("the environment of ray::ServeReplica:polylora:EngineReplica", DATABASE_PASSWORD),
        ("the dashboard's /api/serve/applications/", "EngineReplica"),
        ("the dashboard's /api/v0/actors", "AdapterStoreActor"),
        ("the table api_keys", key_digest(made.project_key)),
        ("the table tenant_audit", "api_key.created"),
        ("metrics", "ray_polylora_"),
        ("HAProxy's log", '"/v1/models/sk-..."'),
    ):
        assert any(text.encode() in place.content for place in places if name in place.name), (name, text)
    given = Path(f"/proc/{keyed.process.process.pid}/environ").read_bytes()
    assert _forms(_middle(KEY))[0] in given, "what was given to the first process; nobody can take that away"


def _middle(key: str) -> str:
    """Enough of a key to know it by; its first and last letters are in lists, for people to tell keys apart."""
    return key[17:37]
