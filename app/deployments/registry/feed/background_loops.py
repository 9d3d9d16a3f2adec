"""What a store does all the time for its registry: it follows the database and keeps the books.

In: the registry and what is published of it. Out: two loops that never end by themselves. One publishes what other
processes have changed, tells them what this one's ingresses hold, and takes up loads whose process has died. The other
writes down use and forgets what is too old. Rule: whatever is raised costs one turn, and is in the log once.
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

#: How long ingresses have to take over what others have changed before the beat says that they do not hold it.
_TAKE_OVER_S = 0.5
#: How often the journal and the jobs are trimmed.
TRIM_INTERVAL_S = 600.0


async def sync_loop(registry: Registry, published: ChangeFeed, loads: LoadJobs) -> None:
    """Publish what others change, and beat; until cancelled."""
    held, beat_s = -1, -BEAT_INTERVAL_S

    async def turn() -> None:
        nonlocal held, beat_s
        await published.publish_newer()
        revision = published.revision
        if revision != held or time.monotonic() - beat_s >= BEAT_INTERVAL_S:
            is_settled = await published.table.settled(_TAKE_OVER_S)
            held, beat_s = revision if is_settled else held, time.monotonic()
            beat = await _to_its_end(registry.stores.beat, max(held, 0))
            await loads.adopt(beat.adopted)

    await repeat(turn, POLL_INTERVAL_S, "following the registry's database")


async def maintenance_loop(registry: Registry, use: LastUsed, sweep: Callable[[Collection[str]], object]) -> None:
    """Write down use, forget what is too old, and tell `sweep` which uploads are in use; until cancelled."""
    trimmed_s = time.monotonic()

    async def turn() -> None:
        nonlocal trimmed_s
        await use.write()
        await asyncio.to_thread(lambda: sweep(uploads_in_use(registry.database)))
        if time.monotonic() - trimmed_s >= TRIM_INTERVAL_S:
            trimmed_s = time.monotonic()
            await asyncio.to_thread(trim, registry.database)

    await asyncio.sleep(WRITE_INTERVAL_S)
    await repeat(turn, WRITE_INTERVAL_S, "keeping the registry's books")


async def _to_its_end(beat: Callable[[int], Heartbeat], revision: int) -> Heartbeat:
    """In a thread, which is waited for when this is cancelled: or a store that has left would say that it lives."""
    beating = asyncio.ensure_future(asyncio.to_thread(beat, revision))
    try:
        return await asyncio.shield(beating)
    except asyncio.CancelledError:
        await asyncio.wait([beating])
        raise
