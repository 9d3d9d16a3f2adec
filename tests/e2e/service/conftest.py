"""One `serve run` for all tests of this folder: a tiny model, two engine replicas, two ingresses.

`pytest tests/e2e/service --engine xla` runs them all on the JAX engine; `tests/e2e/service_jax` does with a few.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import hypothesis  # noqa: F401  (imported only at the end, its plug-in fails: Ray confuses the recursion counter)
import openai
import pytest

from app.cli.ray_env import RAY_SWITCHES
from load_tests.service import free_port
from tests.e2e.process import ServiceProcess, serve_run, tiny_document
from tests.e2e.tiny import save_adapter, save_tiny_model
from tests.nightly import mark_folder

RANKS = {"r1": 1, "r8": 8, "r16": 16, "r64": 64}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_folder(items, __file__, pytest.mark.e2e)


@dataclass
class Service:
    """The running service and what it was started with."""

    process: ServiceProcess
    document: dict[str, Any]
    loras: Path
    clients: list[httpx.Client] = field(default_factory=list)

    @property
    def url(self) -> str:
        return self.process.url

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=600)

    def openai(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=600)


#: The engine's section, beside its sizes. XLA takes the cores that the process may use.
ENGINES: dict[str, dict[str, Any]] = {"cpu": {"cpu": {"num_threads": 1}}, "xla": {"xla": {}}}


@pytest.fixture(scope="package")
def service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    engine = request.config.getoption("--engine")
    with running_service(tmp_path_factory.mktemp("service"), ENGINES[engine], num_replicas=2) as started:
        yield started


@contextmanager
def running_service(
    folder: Path, engine: dict[str, Any], num_replicas: int, environment: Mapping[str, str] | None = None
) -> Iterator[Service]:
    """A tiny model with adapters of all `RANKS`, served by so many engine replicas and ingresses."""
    port = free_port()
    document = service_document(folder, port, engine, num_replicas)
    switches = {name: value for name, value, _ in RAY_SWITCHES}  # as `polylora serve` does
    process = serve_run(document, port, {**switches, **(environment or {})})
    try:
        process.wait_until_healthy(600)
        yield Service(process, document, folder / "loras")
    finally:
        process.stop()


def service_document(folder: Path, port: int, engine: dict[str, Any], num_replicas: int) -> dict[str, Any]:
    """The application file of `running_service`, whose model and adapters are made in the folder."""
    save_tiny_model(folder / "model")
    for seed, (name, rank) in enumerate(RANKS.items()):
        save_adapter(folder / "loras" / name, rank=rank, seed=seed)
    return tiny_document(
        port,
        folder,
        {"num_kv_blocks": 512, "lora_pool_rows": 128, **engine},
        num_replicas=num_replicas,
        preload=list(RANKS),
        limits={"max_body_bytes": 200_000},
    )


@pytest.fixture(scope="package")
def handle(service: Service) -> Iterator[Callable[..., Any]]:
    """Calls of the application's handle from this process, as another Ray job makes them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own, while it is imported: pydantic's deprecations
        import ray
        from ray import serve
        from ray.serve import schema  # noqa: F401

    service.process.announce_cluster()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", str(service.process.folder))
        patch.delenv("RAY_ADDRESS", raising=False)
        ray.init(address="auto", namespace="tests", log_to_driver=False, logging_level="ERROR")
    app = serve.get_app_handle("polylora")

    def call(method: str, *args: Any, **kwargs: Any) -> Any:
        """Blocks; in a thread, because a handle refuses to block an event loop's."""
        return threads.submit(lambda: getattr(app, method).remote(*args, **kwargs).result(timeout_s=600)).result()

    with ThreadPoolExecutor(4) as threads:
        yield call
    ray.shutdown()


async def num_socket_links(service: Service, handle: Callable[..., Any]) -> int:
    """How many links send their frames through sockets while an answer is on its way."""
    body = {"model": "r8", "prompt": "x", "max_tokens": 900, "ignore_eos": True, "stream": True}
    async with (
        httpx.AsyncClient(base_url=service.url, timeout=600) as http,
        http.stream("POST", "/v1/completions", json=body) as answer,
    ):
        answer.raise_for_status()
        await anext(answer.aiter_lines())
        stats = await asyncio.to_thread(handle, "replica_stats")
    return sum(item["num_socket_links"] for item in stats)
