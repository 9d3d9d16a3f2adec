"""Snapshot of every route's error answers: status and body, in OpenAI's shape and, for /v1/messages, in Anthropic's.

The snapshot is `error_answers.json`. WRITE_ERROR_ANSWERS=1 writes it again after a deliberate change.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest_asyncio

from app.deployments.ingress.http.app import make_app
from app.deployments.ingress.http.middleware.origin_check import HttpPolicy
from app.deployments.tenancy.auth.key_crypto import key_digest, new_key
from tests.deployments.http_service import Service

SNAPSHOT = Path(__file__).with_name("error_answers.json")
ADMIN_KEY = new_key(is_admin=True).value
ADMIN = {"Authorization": f"Bearer {ADMIN_KEY}"}
MESSAGES = [{"role": "user", "content": "hi"}]
ORG = "/v1/organization"
PROJECT = f"{ORG}/projects/nope"

#: Valid bodies of every route that takes JSON.
BODIES: dict[tuple[str, str], dict[str, Any]] = {
    ("POST", "/v1/chat/completions"): {"model": "base", "messages": MESSAGES, "max_tokens": 1},
    ("POST", "/v1/completions"): {"model": "base", "prompt": "hi", "max_tokens": 1},
    ("POST", "/v1/embeddings"): {"model": "base", "input": "hi"},
    ("POST", "/v1/score"): {"model": "base", "text_1": "hi", "text_2": "ho"},
    ("POST", "/v1/rerank"): {"model": "base", "query": "hi", "documents": ["ho"], "top_n": 1},
    ("POST", "/v1/classify"): {"model": "base", "input": "hi"},
    ("POST", "/v1/responses"): {"model": "base", "input": "hi", "max_output_tokens": 1},
    ("POST", "/v1/responses/input_tokens"): {"model": "base", "input": "hi"},
    ("POST", "/v1/messages"): {"model": "base", "messages": MESSAGES, "max_tokens": 1},
    ("POST", "/v1/messages/count_tokens"): {"model": "base", "messages": MESSAGES},
    ("POST", "/v1/route"): {"prompt": "hi"},
    ("POST", "/generate"): {"text": "hi", "sampling_params": {"max_tokens": 1}},
    ("POST", "/tokenize"): {"model": "base", "prompt": "hi"},
    ("POST", "/detokenize"): {"model": "base", "tokens": [1]},
    ("POST", "/v1/batches"): {
        "endpoint": "/v1/completions", "input_file_id": "file-nope", "completion_window": "24h",
        "output_expires_after": {"anchor": "created_at", "seconds": 3600},
    },
    ("POST", "/v1/loras"): {"name": "sql", "path": "sql", "pinned": False, "traffic_weight": 1.0},
    ("POST", "/v1/loras/manifest"): {"adapters": [{"name": "a", "path": "a"}]},
    ("PATCH", "/v1/loras/nope"): {"pinned": True},
    ("PUT", "/v1/aliases/nope"): {"targets": {"nobody": 1.0}},
    ("POST", "/v1/aliases/nope/promote"): {"target": "sql"},
    ("POST", "/v1/aliases/nope/rollback"): {"version": 1},
    ("POST", "/v1/load_lora_adapter"): {"lora_name": "sql", "lora_path": "sql"},
    ("POST", "/v1/unload_lora_adapter"): {"lora_name": "nope"},
    ("POST", "/load_lora_adapter"): {"lora_name": "sql", "lora_path": "sql"},
    ("POST", "/unload_lora_adapter"): {"lora_name": "nope"},
    ("POST", "/v1/load_lora"): {"lora_model": "nope", "lora_path": "nope", "base_model": "other"},
    ("POST", "/v1/unload_lora"): {"lora_model": "nope", "base_model": "base"},
    ("POST", f"{ORG}/projects"): {"name": ""},
    ("POST", PROJECT): {"name": "p"},
    ("POST", f"{PROJECT}/service_accounts"): {"name": "a", "expires_in_seconds": 60},
    ("POST", f"{PROJECT}/service_accounts/nope"): {"name": "a"},
    ("POST", f"{PROJECT}/service_accounts/nope/api_keys"): {"name": "a", "expires_in_seconds": 60},
    ("POST", f"{PROJECT}/api_keys/nope"): {"expires_in_seconds": 60},
    ("POST", f"{PROJECT}/model_permissions"): {"mode": "allow_list", "model_ids": ["base"]},
    ("POST", f"{PROJECT}/rate_limits/rl-base"): {"max_requests_per_1_minute": 1},
    ("POST", f"{PROJECT}/spend_limit"): {"threshold_amount": 1, "currency": "USD", "interval": "month"},
    ("POST", f"{ORG}/admin_api_keys"): {"name": "a" * 300, "expires_in_seconds": 60},
    ("PATCH", "/v1/tenants/nope"): {"weight": 2.0, "enforce": True, "max_concurrent": 1},
    ("PUT", "/v1/tenants/nope/shares/sql"): {"project_ids": ["proj"]},
}  # fmt: skip
#: Other routes, with names and ids of nothing.
OTHERS = (
    ("GET", "/"), ("GET", "/version"), ("GET", "/livez"), ("GET", "/health"), ("GET", "/readyz"),
    ("GET", "/openapi.json"), ("GET", "/v1/models"), ("GET", "/v1/models/nope"),
    ("GET", "/v1/responses/nope"), ("DELETE", "/v1/responses/nope"), ("GET", "/v1/responses/nope/input_items"),
    ("POST", "/v1/files"), ("GET", "/v1/files"), ("GET", "/v1/files/nope"), ("GET", "/v1/files/nope/content"),
    ("DELETE", "/v1/files/nope"), ("GET", "/v1/batches"), ("GET", "/v1/batches/nope"),
    ("POST", "/v1/batches/nope/cancel"), ("GET", "/v1/loras"), ("GET", "/v1/loras/nope"),
    ("DELETE", "/v1/loras/nope"), ("POST", "/v1/loras/nope/load"), ("GET", "/v1/loras/nope/generations"),
    ("PUT", "/v1/loras/nope/weights"), ("GET", "/v1/aliases"), ("GET", "/v1/aliases/nope"),
    ("DELETE", "/v1/aliases/nope"), ("GET", "/v1/aliases/nope/versions"), ("GET", "/v1/status"),
    ("GET", "/v1/jobs/nope"), ("GET", "/v1/events"), ("GET", "/v1/audit"),
    ("GET", f"{ORG}/projects"), ("GET", PROJECT), ("POST", f"{PROJECT}/archive"),
    ("GET", f"{PROJECT}/service_accounts"), ("GET", f"{PROJECT}/service_accounts/nope"),
    ("DELETE", f"{PROJECT}/service_accounts/nope"), ("GET", f"{PROJECT}/api_keys"),
    ("GET", f"{PROJECT}/api_keys/nope"), ("DELETE", f"{PROJECT}/api_keys/nope"),
    ("GET", f"{PROJECT}/model_permissions"), ("DELETE", f"{PROJECT}/model_permissions"),
    ("GET", f"{PROJECT}/rate_limits"), ("GET", f"{PROJECT}/spend_limit"), ("DELETE", f"{PROJECT}/spend_limit"),
    ("GET", f"{ORG}/admin_api_keys"), ("GET", f"{ORG}/admin_api_keys/nope"),
    ("DELETE", f"{ORG}/admin_api_keys/nope"), ("GET", f"{ORG}/audit_logs"),
    ("GET", f"{ORG}/usage/completions"), ("GET", f"{ORG}/usage/embeddings"), ("GET", f"{ORG}/costs"),
    ("GET", "/v1/tenants/nope"), ("POST", "/v1/tenants/nope/rotate_salt"),
    ("GET", "/nowhere"), ("GET", "/v1/nowhere"), ("GET", "/metrics"), ("GET", "/v1/messages/nowhere"),
)  # fmt: skip
#: Values that a query must not have.
QUERIES = (
    *((path, query) for path in ("/v1/models", "/v1/loras", "/v1/aliases", "/v1/files", "/v1/batches", "/v1/events",
                                 "/v1/audit", f"{ORG}/projects", f"{ORG}/admin_api_keys", f"{ORG}/audit_logs")
      for query in ("limit=0", "limit=100001", "limit=-1", "limit=x", "limit=1.5", "limit=", "limt=1", "limit=1_0")),
    ("/v1/files", "order=up"), ("/v1/files", "ordr=asc"), ("/v1/responses/nope/input_items", "order=up"),
    ("/v1/responses/nope/input_items", "limit=0"), ("/v1/events", "before=x"), ("/v1/audit", "before=0"),
    (f"{ORG}/admin_api_keys", "order=up"), (f"{ORG}/projects", "include_archived=maybe"),
    (f"{ORG}/audit_logs", "after=x"), (f"{ORG}/audit_logs", "before=audit_log-x"),
    (f"{ORG}/usage/completions", "start_time=x"), (f"{ORG}/usage/completions", "start_time=1&end_time=-1"),
    (f"{ORG}/usage/completions", "start_time=1&limit=x"), (f"{ORG}/usage/completions", "start_time=1&bucket_width=1w"),
    (f"{ORG}/usage/completions", "start_time=1&batch=true"), (f"{ORG}/usage/completions", "start_time=1&page=x"),
    (f"{ORG}/usage/completions", "start_time=1&group_by=x"), (f"{ORG}/usage/embeddings", "start_time=1&user_ids=u"),
    (f"{ORG}/usage/completions", "start_time=9&end_time=3"), (f"{ORG}/usage/completions", "start_time=1&limit=100000"),
    (f"{ORG}/costs", "start_time=1&bucket_width=1h"), (f"{ORG}/costs", "start_time=1&limit=1000"),
    (f"{ORG}/costs", "limit=1"), (f"{PROJECT}/rate_limits", "limit=0"), (f"{PROJECT}/api_keys", "limit=0"),
)  # fmt: skip
#: Of one field, what is wrong with it.
FIELDS = (
    ("/v1/chat/completions", {"temperature": 9}), ("/v1/chat/completions", {"messages": []}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x", "nam": "y"}]}),
    ("/v1/chat/completions", {"messages": [{"role": "pope", "content": "x"}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    ("/v1/chat/completions", {"model": "nope"}), ("/v1/chat/completions", {"max_tokens": 1000}),
    ("/v1/chat/completions", {"max_tokens": 0}), ("/v1/chat/completions", {"best_of": 2}),
    ("/v1/chat/completions", {"lora_name": "sql"}), ("/v1/chat/completions", {"tool_choice": "required"}),
    ("/v1/chat/completions", {"stream_options": {}}), ("/v1/chat/completions", {"top_logprobs": 1}),
    ("/v1/chat/completions", {"response_format": {"type": "json_schema"}}), ("/v1/chat/completions", {"stop": ""}),
    ("/v1/chat/completions", {"logit_bias": {"x": 1}}), ("/v1/chat/completions", {"n": 100}),
    ("/v1/chat/completions", {"adapters": [{"name": "base"}]}), ("/v1/chat/completions", {"seed": "x"}),
    ("/v1/completions", {"prompt": [-1]}), ("/v1/completions", {"prompt": [[1], "x"]}),
    ("/v1/completions", {"prompt": [1000]}), ("/v1/completions", {"prompt": "x" * 500}),
    ("/v1/completions", {"max_token": 1}), ("/v1/completions", {"max_tokens": 0}),
    ("/v1/completions", {"prompt_logprobs": 100}), ("/v1/completions", {"prompt_logprobs": 1, "stream": True}),
    ("/v1/embeddings", {"input": []}), ("/v1/embeddings", {"input": ""}), ("/v1/embeddings", {"dimensions": 10**6}),
    ("/v1/embeddings", {"pooling": "median"}), ("/v1/responses", {"background": True}),
    ("/v1/score", {"text_1": ["a", "b"]}), ("/v1/score", {"queries": "a"}), ("/v1/score", {"text_2": []}),
    ("/v1/rerank", {"documents": []}), ("/v1/rerank", {"documents": [{"txt": "a"}]}), ("/v1/rerank", {"top_n": -1}),
    ("/v1/rerank", {"max_tokens_per_doc": 5}), ("/v1/classify", {"input": []}), ("/v1/classify", {"input": [1000]}),
    ("/v1/responses", {"previous_response_id": "nope"}), ("/v1/responses", {"max_output_tokens": 1000}),
    ("/v1/responses", {"input": [{"type": "reasoning"}]}), ("/v1/responses", {"truncation": "auto"}),
    ("/v1/responses", {"metadata": {"a": "sk-poly-" + "a" * 60}}),
    ("/v1/messages", {"model": "nope"}), ("/v1/messages", {"max_tokens": 1000}), ("/v1/messages", {"top_p": 2}),
    ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}),
    ("/v1/messages", {"thinking": {"type": "enabled"}}), ("/v1/route", {"messages": MESSAGES}),
    ("/generate", {"stream": True}), ("/generate", {"lora_path": ["a", "b"]}), ("/generate", {"lora_path": "nope"}),
    ("/generate", {"sampling_params": {"max_tokens": 1, "max_new_tokens": 2}}),
    ("/tokenize", {"messages": MESSAGES}), ("/detokenize", {"tokens": [-1]}),
    ("/v1/batches", {"endpoint": "/v1/messages"}), ("/v1/batches", {"completion_window": "1h"}),
    ("/v1/loras", {"path": None}), ("/v1/loras", {"lazy": True, "pinned": True}), ("/v1/loras", {"name": "a b"}),
    ("/v1/loras", {"combine": {"adapters": [{"name": "sql"}]}}), ("/v1/loras", {"traffic_weight": -1}),
    ("/v1/loras", {"wait": True, "name": "gone", "path": "gone"}), ("/v1/loras/manifest", {"adapters": []}),
    (f"{PROJECT}/model_permissions", {"mode": "maybe"}), (f"{PROJECT}/rate_limits/nope", {}),
    (f"{PROJECT}/spend_limit", {"currency": "EUR"}),
    (f"{PROJECT}/service_accounts", {"create_service_account_only": True}),
)  # fmt: skip


class Clients(NamedTuple):
    """`free`: of a service that requires no key; `keyed`: of one that wants keys."""

    free: httpx.AsyncClient
    keyed: httpx.AsyncClient
    project_key: str


@pytest_asyncio.fixture
async def clients(service: Service) -> AsyncIterator[Clients]:
    def client(rules: HttpPolicy) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(make_app(service, rules), raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url="http://test", timeout=20)

    async with (
        client(HttpPolicy(auth="open")) as free,
        client(HttpPolicy(auth="keys", admin_digest=key_digest(ADMIN_KEY))) as keyed,
    ):
        project = (await keyed.post(f"{ORG}/projects", json={"name": "p"}, headers=ADMIN)).json()
        path = f"{ORG}/projects/{project['id']}/service_accounts"
        account = (await keyed.post(path, json={"name": "a"}, headers=ADMIN)).json()
        yield Clients(free, keyed, account["api_key"]["value"])


async def answers_of(clients: Clients) -> dict[str, tuple[int, Any]]:
    """What is answered to each mistake, by what was sent."""
    found: dict[str, tuple[int, Any]] = {}

    def is_admins(path: str) -> bool:
        return path.startswith((ORG, "/v1/tenants"))

    def client_of(path: str) -> tuple[httpx.AsyncClient, Mapping[str, str]]:
        return (clients.keyed, ADMIN) if is_admins(path) else (clients.free, {})

    async def note(name: str, answer: httpx.Response) -> None:
        if answer.status_code < 400:
            found[name] = (answer.status_code, "no error")
        else:
            found[name] = (answer.status_code, answer.json())

    async def send(case: str, method: str, path: str, **content: Any) -> None:
        client, headers = client_of(path)
        answer = await client.request(method, path, headers={**headers, **content.pop("headers", {})}, **content)
        await note(f"{method} {path}: {case}", answer)

    for (method, path), body in BODIES.items():
        await send("no body", method, path)
        await send("broken JSON", method, path, content=b'{"model": ', headers={"Content-Type": "application/json"})
        await send("not UTF-8", method, path, content=b'{"a": "\xff"}', headers={"Content-Type": "application/json"})
        await send("NaN", method, path, content=b'{"a": NaN}', headers={"Content-Type": "application/json"})
        await send("key twice", method, path, content=b'{"a":1,"a":2}', headers={"Content-Type": "application/json"})
        await send("an array", method, path, json=[1])
        await send("a number", method, path, json=1)
        await send("null", method, path, json=None)
        await send("unknown field", method, path, json={**body, "qzx": 1})
        await send("too long", method, path, content=b" " * 20_001, headers={"Content-Type": "application/json"})
        await send("compressed", method, path, json=body, headers={"Content-Encoding": "br"})
        await send("a form's type", method, path, content=b"{}", headers={"Content-Type": "text/plain"})
        for field in body:
            await send(f"without {field}", method, path, json={k: v for k, v in body.items() if k != field})
            for wrong in (7, "7", {"qzx": 1}, [None], True):
                if type(wrong) is not type(body[field]):
                    await send(f"{field} {json.dumps(wrong)}", method, path, json={**body, field: wrong})
    for (method, path), body in BODIES.items():
        if "nope" in path or path in ("/v1/batches", "/v1/load_lora", "/v1/unload_lora_adapter", f"{ORG}/projects"):
            await send("valid body", method, path, json=body)
    for method, path in (*BODIES, *OTHERS):
        await send("unknown query", method, path, params={"qzx": "1"}, json=BODIES.get((method, path)))
        await send("wrong method", "PURGE", path)
        await note(f"{method} {path}: no key", await clients.keyed.request(method, path))
        wrong = {"Authorization": "Bearer sk-poly-wrong"}
        await note(f"{method} {path}: wrong key", await clients.keyed.request(method, path, headers=wrong))
        if is_admins(path):
            headers = {"Authorization": f"Bearer {clients.project_key}"}
            await note(f"{method} {path}: project's key", await clients.keyed.request(method, path, headers=headers))
    for method, path in OTHERS:
        await send("as it is", method, path)
    for path, query in QUERIES:
        await send(query, "GET", f"{path}?{query}")
    for path, fields in FIELDS:
        body = BODIES.get(("POST", path), BODIES["POST", f"{PROJECT}/rate_limits/rl-base"])
        await send(f"with {json.dumps(fields)[:100]}", "POST", path, json={**body, **fields})
    for path, headers in (("/v1/completions", ADMIN), ("/v1/messages", ADMIN), ("/v1/files", ADMIN)):
        await note(f"POST {path}: an administrator's key", await clients.keyed.post(path, json={}, headers=headers))
    await send("a page of another site", "POST", "/v1/completions", json={}, headers={"Origin": "http://evil"})
    await send("a page of another site", "POST", "/v1/messages", json={}, headers={"Origin": "http://evil"})
    await send("no configuration", "PUT", "/v1/loras/nope/weights", content=b"x")
    await send("no such contents", "PUT", "/v1/loras/nope/weights", content=b"x", headers={"X-Adapter-Config": "{}"})
    await send("wrong purpose", "POST", "/v1/files", files={"file": b"{}"}, data={"purpose": "fine-tune"})
    await send("no file", "POST", "/v1/files", files={"purpose": (None, "batch")})
    await send("unknown field", "POST", "/v1/files", files={"file": b"{}"}, data={"purpose": "batch", "qzx": "1"})
    life = {"purpose": "batch", "expires_after[seconds]": "1"}
    await send("too short a life", "POST", "/v1/files", files={"file": b"{}"}, data=life)
    await send("no model", "POST", "/v1/chat/completions/", json={"model": "nope", "messages": MESSAGES})
    return found


async def test_errors_are_answered_as_they_were(clients: Clients) -> None:
    found = json.loads(json.dumps(await answers_of(clients)))
    if os.environ.get("WRITE_ERROR_ANSWERS"):
        lines = (f"{json.dumps(name)}: {json.dumps(answer)}" for name, answer in found.items())
        SNAPSHOT.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    expected = json.loads(SNAPSHOT.read_text())
    changed = {name: (expected.get(name), answer) for name, answer in found.items() if expected.get(name) != answer}
    assert changed == {}
    assert found.keys() == expected.keys()
