"""`polylora serve` on two cores: two engines start, and one that can never start is told instead of waited for."""

from __future__ import annotations

import asyncio
import resource
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from load_tests.service import free_port
from tests.e2e.process import ServiceProcess, tiny_document
from tests.e2e.tiny import save_tiny_model

#: By day tests/cli/test_room.py has what is said of engines without room.
pytestmark = [pytest.mark.e2e, pytest.mark.nightly]

#: Whatever this machine has.
TWO_CORES = {"RAY_OVERRIDE_RESOURCES": '{"CPU": 2}'}


def serving(folder: Path, engine_deployment: dict[str, Any]) -> ServiceProcess:
    """`polylora serve` with the shares that deployments ask for by default, but for what is given."""
    save_tiny_model(folder / "model")
    (folder / "loras").mkdir()
    port = free_port()
    engine = {"cpu": {"num_threads": 1}, "num_kv_blocks": 64, "lora_pool_rows": 16}
    document = tiny_document(port, folder, engine)
    document["applications"][0]["deployments"] = [{"name": "EngineReplica"} | engine_deployment]
    path = folder / "serve.yaml"
    path.write_text(yaml.safe_dump(document))
    code = "import sys; from app.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "serve", "--config", str(path)]
    return ServiceProcess(command, port, TWO_CORES | {"POLYLORA_STATE_DIR": str(folder / "state")})


def test_two_engines_start_and_answer(tmp_path: Path) -> None:
    process = serving(tmp_path, {"num_replicas": 2})
    try:
        process.wait_until_healthy(600)
        body = {"model": "tiny", "prompt": "the quick", "max_tokens": 4, "temperature": 0}
        answer = httpx.post(f"{process.url}/v1/completions", json=body, timeout=600)
        assert answer.status_code == 200, answer.text
        process.wait_until_said("Ready after", 600)
    finally:
        assert process.stop() == 0


def test_a_service_whose_processes_may_open_1024_files_says_so_and_serves(tmp_path: Path) -> None:
    process = serving(tmp_path, {"num_replicas": 2})
    try:
        resource.prlimit(process.process.pid, resource.RLIMIT_NOFILE, (1024, 1024))  # and of all that it will start
        process.wait_until_said("Ready after", 600)
        assert "HAProxy holds 448 connections instead of 4096" in process.tail()
        assert asyncio.run(statuses(process.url, 100)) == [200] * 100
    finally:
        assert process.stop() == 0


async def statuses(url: str, num_clients: int) -> list[int]:
    """How so many streams end that begin at once, each on a connection of its own."""
    body = {"model": "tiny", "prompt": "the quick", "max_tokens": 40, "ignore_eos": True, "stream": True}
    async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=None)) as http:
        answers = await asyncio.gather(*(http.post(f"{url}/v1/completions", json=body) for _ in range(num_clients)))
    assert all(answer.text.endswith("data: [DONE]\n\n") for answer in answers if answer.status_code == 200)
    return [answer.status_code for answer in answers]


def test_an_engine_without_room_is_told_and_ends_the_command(tmp_path: Path) -> None:
    process = serving(tmp_path, {"ray_actor_options": {"num_cpus": 64}})
    try:
        process.wait_until_said("Ray cannot place 1 of EngineReplica (64 CPU each); there is 2 CPU", 600)
        answer = httpx.get(f"{process.url}/health", timeout=30)
        assert answer.status_code == 503, answer.text
        assert process.process.wait(600) == 1
        assert "the service does not start: Ray cannot place 1 of EngineReplica" in process.tail()
    finally:
        process.stop()
