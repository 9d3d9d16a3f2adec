"""What the start of a store costs where a former one left much: `python -m load_tests.control.bench_store_start`.

In: how many objects lie on its disk, and how many loads were not finished. Out: a Markdown table: how long it takes
stock of the disk, and for how long it holds its event loop at a time while it takes up the loads and the first of them
are read. Reading costs nothing here. Rule: what holds the loop is counted in CPU time of its thread from one look to
the next, with the wall's beside, so that other work on the machine is not taken for ours.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import secrets
import tempfile
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from sqlalchemy import func, insert, select

from app.deployments.registry.db.database import sqlite_url
from app.deployments.registry.db.tables import jobs
from app.deployments.registry.models import ReadAdapter, State
from app.deployments.registry.registry import Registry
from app.deployments.registry.service import RegistryService
from app.deployments.registry.tier_events import TierEvents
from app.deployments.store.disk_tier import DiskTier
from app.deployments.store.tier_counters import TierCounters
from app.engine.adapters.card import AdapterCard

#: So many loads are read; the others wait for their source, as they would for a host that does not answer.
FIRST_LOADS = 200


class InstantStore:
    """Reading costs nothing here: it is not what is measured. After `max_loads` it never ends."""

    cached_digests: frozenset[str] = frozenset()

    def __init__(self, max_loads: float = math.inf) -> None:
        self._max_loads = max_loads
        self._num_loads = 0

    async def load(self, source: str, tenant_id: str) -> ReadAdapter:  # noqa: ARG002
        self._num_loads += 1
        if self._num_loads > self._max_loads:
            await asyncio.Event().wait()
        card = AdapterCard(secrets.token_hex(32), "base", 16, ("q_proj",), "float32", 1 << 20)
        return ReadAdapter(f"/adapters/{source}", card)

    def host(self, source: str) -> str:  # noqa: ARG002
        return "local"

    def invalidate(self, digest: str) -> None:
        pass

    def pin(self, digests: Collection[str]) -> None:
        pass


class Held(NamedTuple):
    """The longest that an event loop was held at once, by its thread's own time and by the wall's; seconds."""

    cpu_s: float
    wall_s: float


def take_stock(folder: Path, num_objects: int) -> tuple[float, float]:
    """Seconds, and of the CPU, of a store's start for what is on its disk: objects of two empty files each."""
    for index in range(num_objects):
        each = folder / "objects" / f"{index:064x}"
        each.mkdir(parents=True)
        (each / "entry.json").write_text(
            '{"files": {"adapter_config.json": 0, "adapter_model.safetensors": 0}, "load_s": 0.1}'
        )
        for file in ("adapter_config.json", "adapter_model.safetensors"):
            (each / file).touch()
    started_s, cpu_s = time.perf_counter(), time.process_time()
    tier = DiskTier(folder, 1 << 50, "lru", TierCounters(), TierEvents())
    took = time.perf_counter() - started_s, time.process_time() - cpu_s
    assert len(tier.digests) == num_objects
    tier.close()
    return took


async def resume(url: str, num_loads: int) -> Held:
    """A store takes up so many loads of a dead one, in an empty database."""
    registry = Registry(url, "base")
    now_s = time.time()
    left = {
        "base_digest": "base", "tenant_id": "default", "kind": "load", "state": State.REQUESTED, "owner": "dead",
        "requested_by": "bench", "created_s": now_s, "updated_s": now_s,
    }  # fmt: skip
    rows = [
        left | {"id": f"{index:032x}", "name": f"n{index}", "source": f"s{index}", "number": index}
        for index in range(num_loads)
    ]
    with registry.database.write() as connection:
        connection.execute(insert(jobs), rows)
    num_read = min(FIRST_LOADS, num_loads)
    lifecycle = RegistryService(registry, InstantStore(num_read), TierEvents())
    is_loaded = select(func.count()).select_from(jobs).where(jobs.c.state == State.LOADED)

    def num_loaded() -> int:
        with registry.database.read() as connection:
            return int(connection.execute(is_loaded).scalar_one())

    cpu_s = wall_s = 0.0
    lifecycle.start()
    looking = asyncio.create_task(asyncio.to_thread(num_loaded))
    while not looking.done() or looking.result() < num_read:
        if looking.done():
            looking = asyncio.create_task(asyncio.to_thread(num_loaded))
        began = time.thread_time(), time.perf_counter()
        await asyncio.sleep(0)
        cpu_s = max(cpu_s, time.thread_time() - began[0])
        wall_s = max(wall_s, time.perf_counter() - began[1])
    await lifecycle.close()
    registry.close()
    return Held(cpu_s, wall_s)


def run(num_objects: int, num_loads: int, folder: Path) -> str:
    took_s, cpu_s = take_stock(folder / "disk", num_objects)
    held = asyncio.run(resume(sqlite_url(folder / "jobs.sqlite"), num_loads))
    rows = {
        f"a store starts with {num_objects:,} objects on its disk": (took_s, cpu_s),
        f"{num_loads:,} loads of a dead store are taken up: its event loop is held for at most": (
            held.wall_s,
            held.cpu_s,
        ),
    }
    lines = [f"| {what} | {1e3 * wall_s:.0f} ms | {1e3 * cpu_s:.0f} ms |" for what, (wall_s, cpu_s) in rows.items()]
    return "\n".join(["| | measured | of that CPU |", "|---|---|---|", *lines])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="What the start of a store costs where a former one left much.")
    parser.add_argument("--objects", type=int, default=100_000)
    parser.add_argument("--loads", type=int, default=8_000)
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        print(run(chosen.objects, chosen.loads, Path(folder)))


if __name__ == "__main__":
    main()
