"""Costs of a registry of many adapters: a page, a lookup, a change, and the size of the tables.

The rows are written to the database at once, with an event for each; then the registry's process opens it and an
ingress copies it, as both do at start. The database is empty before, or a new file. Pages and single adapters are
requested through the HTTP routes in this process: the times include the routes and JSON, but no socket and no Ray (an
adapter's own page adds one call to the registry's process, 1 to 2 ms). A page starts somewhere in the list. The
database's lines are single calls of the registry's methods, each a transaction of its own in a thread, as in its
process. Finally up to 100,000 more names are registered lazily.

    python -m load_tests.control.bench_registry --adapters 100000
    python -m load_tests.control.bench_registry --adapters 1000000 --database postgresql://user@host/empty
"""

from __future__ import annotations

import argparse
import asyncio
import random
import resource
import secrets
import tempfile
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
from sqlalchemy import Connection, Table, func, insert, select

from app.cli.register import BATCH
from app.config import AdaptersConfig, ModelConfig
from app.deployments.ingress.accounting import PricingContext, RequestAccounting
from app.deployments.ingress.adapter_admin import AdapterAdmin
from app.deployments.ingress.adapter_metrics import AdapterMetrics
from app.deployments.ingress.http.app import make_app
from app.deployments.ingress.http.middleware.origin_check import HttpPolicy
from app.deployments.ingress.service import IngressService
from app.deployments.placement.messages import Residency
from app.deployments.placement.view import PlacementView
from app.deployments.registry.db.database import sqlite_url
from app.deployments.registry.db.tables import adapters, events
from app.deployments.registry.feed.view import RegistryView
from app.deployments.registry.jobs.failure_backoff import FailureBackoff
from app.deployments.registry.jobs.lazy_registrations import LazyRegistrations
from app.deployments.registry.jobs.preload import Preloader
from app.deployments.registry.models import DEFAULT_TENANT, ReadAdapter, State
from app.deployments.registry.registry import Registry
from app.deployments.registry.service import RegistryService
from app.deployments.registry.tier_events import TierEvents
from app.deployments.rpc.long_poll_host import Version
from app.deployments.store.host_cache import HostAdapterCache
from app.deployments.store.service import StoreParts, StoreService
from app.deployments.store.shared_adapter import SharedAdapter
from app.deployments.store.tier_counters import TierCounters
from app.deployments.tenancy.auth.tenant_mirror import TenantMirror
from app.deployments.tenancy.models import NO_LIMITS
from app.deployments.tenancy.service import TenantsService
from app.deployments.tenancy.usage.adapter_stats import Activity, ActivityKey, ActivityStats, AdapterStatsTable
from app.deployments.tenancy.usage.prices import Prices
from app.engine.adapters.card import AdapterCard, AdapterRef

#: Rows written by one statement.
_BATCH = 10_000
#: Names that are registered lazily.
MAX_LAZY = 100_000


class _InstantStore:
    """A store that reads adapters at once: reading is not measured."""

    cached_digests: frozenset[str] = frozenset()

    async def load(self, source: str, tenant_id: str) -> ReadAdapter:  # noqa: ARG002
        card = AdapterCard(secrets.token_hex(32), "base", 16, ("q_proj",), "float32", 1 << 20)
        return ReadAdapter(f"/adapters/{source}", card)

    def host(self, source: str) -> str:  # noqa: ARG002
        return "local"

    def invalidate(self, digest: str) -> None:
        pass

    def pin(self, digests: Collection[str]) -> None:
        pass

    def failure(self, ref: AdapterRef) -> None: ...


class _NoBytes(HostAdapterCache[None]):
    """A cache without adapters: no request needs an adapter's bytes here."""

    def __init__(self) -> None:
        self.counts = TierCounters()

    async def try_fetch(self, ref: AdapterRef, wait_s: float, *, again: bool = False) -> None:
        raise NotImplementedError(ref.name)

    async def prefetch(self, ref: AdapterRef) -> None: ...

    def invalidate(self, digest: str) -> None: ...


class _Activities(TenantsService):
    """A tenants service that only keeps the adapters' statistics."""

    def __init__(self) -> None:
        self._stats = AdapterStatsTable(time.time)

    async def note_activity(self, rows: Sequence[tuple[ActivityKey, Activity]]) -> None:
        self._stats.add(rows)

    async def adapter_stats(self, ref: AdapterRef, *, tenant_id: str | None) -> ActivityStats:
        return self._stats.stats(ref, tenant_id=tenant_id)


class _Nowhere:
    """A placement in which no adapter is on a device."""

    def __init__(self) -> None:
        self.view = PlacementView()

    async def residency(self, digest: str) -> list[Residency]:  # noqa: ARG002
        return []


class _Dropper:
    async def unload_adapter(self, replica_id: str, digest: str) -> int:  # noqa: ARG002
        return 0


def fill(registry: Registry, num_adapters: int) -> None:
    """Write names a000000, a000001, … as if each had been loaded."""
    common = {
        "base_digest": registry.database.base_digest,
        "tenant_id": "default",
        "owner": "default",
        "state": State.LOADED,
        "generation": 1,
        "max_rank": 16,
        "size_bytes": 1 << 20,
        "extra_bytes": 0,
        "is_zero": False,
        "has_score_head": False,
        "pinned": False,
        "traffic_weight": 1.0,
        "registered_s": time.time(),
        "text": "",
        "description": "",
        "invocation_tokens": "",
        "metadata": "",
        "defaults": "",
    }
    with registry.database.write() as connection:
        revision = registry.database.next_revision(connection)
        for start in range(0, num_adapters, _BATCH):
            names = [f"a{index:06d}" for index in range(start, min(start + _BATCH, num_adapters))]
            rows: list[dict[str, Any]] = [
                common
                | {"name": name, "source": name, "uri": f"/adapters/{name}", "digest": secrets.token_hex(32)}
                | {"revision": revision}
                for name in names
            ]
            _insert(connection, adapters, rows)
            happened = {"base_digest": registry.database.base_digest, "tenant_id": "default", "time_s": time.time()}
            _insert(connection, events, [happened | {"name": name, "event": "registered"} for name in names])


def _insert(connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]]) -> None:
    """Rows of one shape, as fast as the database takes them: this is not what is measured."""
    if connection.dialect.name != "postgresql":
        connection.execute(insert(table), rows)
        return
    driver: Any = connection.connection.driver_connection
    with driver.cursor() as cursor, cursor.copy(f"COPY {table.name} ({', '.join(rows[0])}) FROM STDIN") as copy:
        for row in rows:
            copy.write_row(tuple(row.values()))


async def measure(url: str, num_adapters: int, num_samples: int) -> list[tuple[str, str]]:
    """(what, how much) for each line of the table."""
    results: list[tuple[str, str]] = []
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started_s = time.perf_counter()
    registry = Registry(url, "base")
    registry_service = RegistryService(registry, _InstantStore(), TierEvents())
    results.append(("the registry's process opens the database", _ms(time.perf_counter() - started_s)))
    started_s = time.perf_counter()
    view, held, slowest_s = RegistryView(), None, 0.0
    while True:
        page_s = time.perf_counter()
        news = await registry_service.change_feed.table.newer(held, "ingress", 60.0)
        assert news is not None, "there is more"
        held, changes = news
        view.take(changes)
        slowest_s = max(slowest_s, time.perf_counter() - page_s)
        if changes.is_last:
            break
    assert view.num_adapters == num_adapters
    results.append(("an ingress copies it (without the sending)", _ms(time.perf_counter() - started_s)))
    results.append(("  of that, the longest either side is busy at once", _ms(slowest_s)))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory
    results.append(("memory of both, in this process", f"{grown / 1024:.0f} MiB"))
    draw = random.Random(0)

    def name() -> str:
        return f"a{draw.randrange(num_adapters):06d}"

    for what, call in _database_calls(registry, name).items():
        results.append((f"the database: {what}", await _median_time(partial(asyncio.to_thread, call), num_samples)))

    store: StoreService[None] = StoreService(
        StoreParts(
            registry,
            registry_service,
            _NoBytes(),
            Preloader(registry, registry_service),
            LazyRegistrations(registry, registry_service, FailureBackoff()),
            auto_registration=cast(Any, None),
            uploads=cast(Any, None),
            apply_settings=cast(Any, None),
        ),
        lambda: None,
    )
    activities, placer = _Activities(), cast(Any, _Nowhere())
    rates = PricingContext(Prices({}, "base"), "base")
    service = SimpleNamespace(
        tracer=None,
        model_config=ModelConfig(name="base", uri="unused"),
        exact_base_name="base",
        base_name="base",
        registry=view,
        accounting=RequestAccounting(TenantMirror(), activities, rates, "bench", time.time),
        adapter_metrics=AdapterMetrics(activities),
        adapter_admin=AdapterAdmin(cast(StoreService[SharedAdapter], store), cast(Any, _Dropper()), placer),
        placer=placer,
        new_project_limits=NO_LIMITS,
        adapters_config=AdaptersConfig(),
        preprocessor=SimpleNamespace(
            limits=SimpleNamespace(max_body_bytes=4 << 20),
            max_model_len=2048,
            resolver=SimpleNamespace(is_base=lambda name: name == "base"),
        ),
        observe=lambda *_: None,
    )
    transport = httpx.ASGITransport(make_app(cast(IngressService, service), HttpPolicy()))
    async with httpx.AsyncClient(transport=transport, base_url="http://registry") as http:

        async def get(path: str) -> None:
            (await http.get(path)).raise_for_status()

        routes: dict[str, Callable[[], Awaitable[None]]] = {
            "GET /v1/models?limit=20&after=": lambda: get(f"/v1/models?limit=20&after={name()}"),
            "GET /v1/models?limit=100&after=": lambda: get(f"/v1/models?limit=100&after={name()}"),
            "GET /v1/models?limit=1000&after=": lambda: get(f"/v1/models?limit=1000&after={name()}"),
            "GET /v1/loras?limit=100&after=": lambda: get(f"/v1/loras?limit=100&after={name()}"),
            "GET /v1/models/{name}": lambda: get(f"/v1/models/{name()}"),
            "GET /v1/loras/{name}": lambda: get(f"/v1/loras/{name()}"),
        }
        for what, ask in routes.items():
            results.append((what, await _median_time(ask, num_samples)))
        names = [name() for _ in range(10_000)]
        started_s = time.perf_counter()
        assert all(view.resolve(item, "user 1", DEFAULT_TENANT) is not None for item in names)
        lookup_us = 1e6 * (time.perf_counter() - started_s) / len(names)
        results.append(("a request's name looked up", f"{lookup_us:.2f} µs"))

        async def register() -> None:
            body = {"name": f"new{secrets.token_hex(4)}", "path": "new", "wait": True}
            (await http.post("/v1/loras", json=body)).raise_for_status()

        apply_us: list[float] = []
        following = asyncio.create_task(_follow(registry_service, view, held, apply_us))
        results.append(
            ("POST /v1/loras, wait (without reading)", await _median_time(register, max(5, num_samples // 10)))
        )
        results.append(("  of that, an ingress takes over the name", f"{sorted(apply_us)[len(apply_us) // 2]:.0f} µs"))
        started_s = time.perf_counter()
        num_lazy = min(num_adapters, MAX_LAZY)
        for start in range(0, num_lazy, BATCH):
            numbers = range(start, min(start + BATCH, num_lazy))
            adapters = [{"name": f"lazy{number:06d}", "path": f"s3://bucket/{number:06d}"} for number in numbers]
            (await http.post("/v1/loras/manifest", json={"adapters": adapters})).raise_for_status()
        seconds = time.perf_counter() - started_s
        assert view.adapter(f"lazy{num_lazy - 1:06d}", DEFAULT_TENANT) is not None, "every ingress knows them"
        results.append(
            (
                f"POST /v1/loras/manifest: {num_lazy:,} more names, registered lazily, {BATCH:,} a call",
                f"{seconds:.2f} s",
            )
        )
        following.cancel()
    registry.close()
    return results


def _database_calls(registry: Registry, name: Callable[[], str]) -> dict[str, Callable[[], object]]:
    """The registry's database calls behind its routes."""
    catalog, event_log = registry.catalog, registry.event_log
    with registry.database.read() as connection:
        sample = select(events.c.public_id).order_by(func.random()).limit(1000)
        event_ids = connection.scalars(sample).all()
    return {
        "one name": lambda: catalog.get(name(), tenant_id="default"),
        "the events of one name": lambda: event_log.events(name(), tenant_id="default"),
        "a page of 100 events": lambda: event_log.events(before=random.choice(event_ids), tenant_id="default"),
        "a page of 1,000 events": lambda: event_log.events(
            before=random.choice(event_ids), limit=1000, tenant_id="default"
        ),
        "a page of a tenant without events": lambda: event_log.events(tenant_id="quiet"),
    }


async def _follow(registry_service: RegistryService, view: RegistryView, held: Version, apply_us: list[float]) -> None:
    """Follow the registry like an ingress: request changes, apply them, repeat."""
    while True:
        news = await registry_service.change_feed.table.newer(held, "ingress", 60.0)
        assert news is not None, "something changes all the time"
        held, changes = news
        assert len(changes.rows) <= BATCH, "changes are sent, not the table"
        started_s = time.perf_counter()
        view.apply(changes.rows)
        apply_us.append(1e6 * (time.perf_counter() - started_s))


async def _median_time(work: Callable[[], Awaitable[object]], num_samples: int) -> str:
    seconds = []
    for _ in range(num_samples):
        started_s = time.perf_counter()
        await work()
        seconds.append(time.perf_counter() - started_s)
    seconds.sort()
    return f"{_ms(seconds[len(seconds) // 2])}, worst of {num_samples}: {_ms(seconds[-1])}"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.2f} ms"


def run(num_adapters: int, num_samples: int, folder: Path, url: str | None = None) -> str:
    """Fill, measure, and the table as text."""
    url = url or sqlite_url(folder / "registry.sqlite")
    registry = Registry(url, "base")
    fill(registry, num_adapters)
    registry.close()
    results = asyncio.run(measure(url, num_adapters, num_samples))
    lines = [f"| {num_adapters:,} adapters registered | |", "|---|---|", *(f"| {a} | {b} |" for a, b in results)]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--adapters", type=int, default=100_000)
    parser.add_argument("--samples", type=int, default=200, help="requests per line")
    parser.add_argument("--database", help="an empty database of PostgreSQL; without it a file of SQLite")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(run(arguments.adapters, arguments.samples, Path(folder), arguments.database))


if __name__ == "__main__":
    main()
