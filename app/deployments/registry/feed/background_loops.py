"""The two loops of a registry's process: following the database, and its maintenance.

An exception ends only the turn that raised it and is logged once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection

from app.deployments.registry.db.retention import trim, uploads_in_use
from app.deployments.registry.feed.change_feed import POLL_INTERVAL_S, ChangeFeed
from app.deployments.registry.jobs.load_jobs import LoadJobs
from app.deployments.registry.jobs.store_leases import BEAT_INTERVAL_S, Heartbeat
from app.deployments.registry.last_used import WRITE_INTERVAL_S, LastUsed
from app.deployments.registry.registry import Registry
from app.deployments.rpc.background_tasks import repeat

#: How long the heartbeat waits for ingresses to receive new changes before it reports an older revision.
_SETTLE_S = 0.5
#: How often old events, audit records and jobs are deleted.
TRIM_INTERVAL_S = 600.0


async def sync_loop(registry: Registry, published: ChangeFeed, loads: LoadJobs) -> None:
    """Publish other processes' changes, send heartbeats and adopt the loads of dead processes; until cancelled."""
    settled, beat_s = -1, -BEAT_INTERVAL_S

    async def turn() -> None:
        nonlocal settled, beat_s
        await published.publish_newer()
        revision = published.revision
        if revision != settled or time.monotonic() - beat_s >= BEAT_INTERVAL_S:
            is_settled = await published.table.settled(_SETTLE_S)
            settled, beat_s = revision if is_settled else settled, time.monotonic()
            beat = await _beat_to_completion(registry.stores.beat, max(settled, 0))
            await loads.adopt(beat.adopted)

    await repeat(turn, POLL_INTERVAL_S, "following the registry's database")


async def maintenance_loop(registry: Registry, use: LastUsed, sweep: Callable[[Collection[str]], object]) -> None:
    """Store last uses, delete old rows, and call `sweep` with the uploads in use; until cancelled."""
    trimmed_s = time.monotonic()

    async def turn() -> None:
        nonlocal trimmed_s
        await use.write()
        await asyncio.to_thread(lambda: sweep(uploads_in_use(registry.database)))
        if time.monotonic() - trimmed_s >= TRIM_INTERVAL_S:
            trimmed_s = time.monotonic()
            await asyncio.to_thread(trim, registry.database)

    await asyncio.sleep(WRITE_INTERVAL_S)
    await repeat(turn, WRITE_INTERVAL_S, "the registry's maintenance")


async def _beat_to_completion(beat: Callable[[int], Heartbeat], revision: int) -> Heartbeat:
    """Send a heartbeat in a thread and wait for it even when cancelled: it must not follow the message that this store
    leaves.
    """
    beating = asyncio.ensure_future(asyncio.to_thread(beat, revision))
    try:
        return await asyncio.shield(beating)
    except asyncio.CancelledError:
        await asyncio.wait([beating])
        raise
