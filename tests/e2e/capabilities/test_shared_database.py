"""Two services on one PostgreSQL have one registry."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from load_tests.service import free_port
from tests.e2e.process import ServiceProcess, polylora_serve, tiny_document
from tests.e2e.tiny import save_adapter, save_tiny_model
from tests.postgres import PostgresServer, find_postgres

#: By day tests/deployments/registry/test_sharing.py has stores on one database.
pytestmark = pytest.mark.nightly

BODY = {"model": "sql", "prompt": "the quick", "max_tokens": 12, "temperature": 0, "ignore_eos": True}


def test_what_one_loads_replaces_and_unloads_the_other_serves(tmp_path: Path) -> None:
    programs = find_postgres()
    if programs is None:
        pytest.skip("PostgreSQL's programs are not installed")
    save_tiny_model(tmp_path / "model")
    for seed, name in enumerate(("one", "two")):
        save_adapter(tmp_path / "loras" / name, rank=2, seed=seed)
    with ExitStack() as running:
        server = PostgresServer(programs)
        running.callback(server.stop)
        url = server.new_database()
        services = [running.enter_context(_client(tmp_path, url, running)) for _ in range(2)]
        texts = set()
        for number, path in enumerate(("one", "two")):
            body = {"name": "sql", "path": path, "wait": True}
            assert services[number].post("/v1/loras", json=body).status_code == 201
            answers = [service.post("/v1/completions", json=BODY) for service in services]
            assert [answer.status_code for answer in answers] == [200, 200]
            (text,) = {answer.json()["choices"][0]["text"] for answer in answers}
            texts.add(text)
        assert len(texts) == 2
        services[0].delete("/v1/loras/sql").raise_for_status()
        parts = {
            kind: (tmp_path / "loras" / "one" / name).read_bytes()
            for kind, name in (("config", "adapter_config.json"), ("weights", "adapter_model.safetensors"))
        }
        services[0].put("/v1/loras/up/weights", files=parts).raise_for_status()
        answers = [service.post("/v1/completions", json=BODY | {"model": "up"}) for service in services]
        (text,) = {answer.raise_for_status().json()["choices"][0]["text"] for answer in answers}
        assert text in texts
        assert [service.post("/v1/completions", json=BODY).status_code for service in services] == [404, 404]


def _client(folder: Path, registry_url: str, running: ExitStack) -> httpx.Client:
    port = free_port()
    document = tiny_document(port, folder, {"cpu": {"num_threads": 1}, "num_kv_blocks": 64, "lora_pool_rows": 16})
    process: ServiceProcess = polylora_serve(document, port, {"POLYLORA_REGISTRY_URL": registry_url})
    running.callback(process.stop)
    process.wait_until_said("Ready after", 600)
    return httpx.Client(base_url=process.url, timeout=600)
