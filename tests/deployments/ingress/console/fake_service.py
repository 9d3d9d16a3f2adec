"""The HTTP service over a fleet of fake engines on a port: `python -m tests.deployments.ingress.console.fake_service`.

The routes, the registry and the tenants are the real ones; the models write letters without sense. The console is
developed with it, and tested with more adapters, failures and replicas than a machine could load.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import socket
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from app.deployments.ingress.http.app import make_app
from app.deployments.ingress.http.middleware.origin_check import HttpPolicy
from app.deployments.ingress.http.routes import console
from app.deployments.registry.models import DEFAULT_TENANT, Registration
from app.engine.errors import PolyloraError
from tests.deployments.fleet import Fleet
from tests.deployments.http_service import Service
from tests.deployments.managed import ManagedStore, wanted
from tests.fakes import fake_adapter

NAMES = ("sql", "sql-next", "support", "support-de", "legal-summary", "triage", "tone-formal", "invoice-fields")
DESCRIPTIONS = {
    "sql": "Questions about the sales database, answered with SQL",
    "support": "Polite answers to customers' tickets",
    "legal-summary": "Three-sentence summaries of contracts",
}


@asynccontextmanager
async def fake_service(folder: Path, num_replicas: int = 3, num_adapters: int = 0) -> AsyncIterator[Service]:
    """A service with the adapters of `NAMES`, one that failed to load, two aliases, and `num_adapters` more that are
    registered and not read."""
    fleet, managed = Fleet(num_replicas), ManagedStore.at(folder)
    for rank, name in enumerate(NAMES):
        adapter = fake_adapter(name, 8 * (1 + rank % 4))
        fleet.adapters[adapter.card.digest] = adapter
        managed.store.contents[name] = adapter.card.digest
        await managed.client.load_and_wait(replace(wanted(name, name), description=DESCRIPTIONS.get(name)))
    with suppress(PolyloraError):
        await managed.client.load_and_wait(wanted("reports", "reports-2026"))
    await managed.client.put_alias("sql-live", {"sql": 90.0, "sql-next": 10.0}, tenant_id=DEFAULT_TENANT, who="ada")
    await managed.client.put_alias("help", {"support": 1.0}, tenant_id=DEFAULT_TENANT, who="ada")
    if num_adapters:
        more = [Registration(f"tenant-{n:05}", f"many/{n:05}", 1.0, None) for n in range(num_adapters)]
        await managed.client.register(more, tenant_id=DEFAULT_TENANT, who="ada")
    service = Service(fleet, managed)
    now_s = time.time()
    decisions = [
        (now_s - 1500, 1, 2, "pending tokens", 1.62),
        (now_s - 900, 2, 3, "rank rows in demand", 2.4),
        (now_s + 5, 3, 4, "rank rows in demand", 3.1),
    ]
    await service.placement.report_scaling("EngineReplica", decisions)
    reporting = asyncio.create_task(service.traffic.keep_reporting())
    try:
        yield service
    finally:
        reporting.cancel()
        await service.close()
        await managed.close()
        fleet.stop()


@asynccontextmanager
async def serving(service: Service, port: int, policy: HttpPolicy | None = None) -> AsyncIterator[str]:
    """The service on a port of this machine; gives its URL."""
    app: Any = make_app(service, policy or HttpPolicy(is_on_loopback=True))
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1))
    listening = socket.create_server(("127.0.0.1", port))
    running = asyncio.create_task(server.serve(sockets=[listening]))
    while not server.started:
        await asyncio.sleep(0.02)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await running
        listening.close()


async def send_traffic(url: str, key: str = "") -> None:
    """Requests as of several users, without end."""
    chance = random.Random(1)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(base_url=url, timeout=30, headers=headers) as client:
        while True:
            name = chance.choice(("base", "sql-live", "help", *NAMES[:6]))
            body = {"model": name, "prompt": "How many?", "max_tokens": chance.randrange(8, 60), "ignore_eos": True}
            with suppress(httpx.HTTPError):  # the service stops first
                await client.post("/v1/completions", json=body)
            await asyncio.sleep(chance.random() * 0.5)


async def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--port", type=int, default=8970)
    options.add_argument("--adapters", type=int, default=0)
    options.add_argument("--keys", action="store_true", help="make an admin key and print it")
    options.add_argument("--traffic", action="store_true")
    given = options.parse_args()
    console.assets = console.assets.__wrapped__  # type: ignore[assignment]  # files are read for each request
    with tempfile.TemporaryDirectory() as folder:
        async with fake_service(Path(folder), 3, given.adapters) as service, serving(service, given.port) as url:
            key = ""
            if given.keys:
                tenants = service.managed.tenants_client
                print("admin", (await tenants.create_admin_key("first", None, actor="test")).value, flush=True)
                project = await tenants.create_project("atlas", actor="test")
                _, issued = await tenants.create_account(
                    project.id, "app", with_key=True, expires_in_s=None, actor="test"
                )
                assert issued is not None
                key = issued.value
                print("project", key, flush=True)
            print(url, flush=True)
            if given.traffic:
                await asyncio.gather(*(send_traffic(url, key) for _ in range(3)))
            await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
