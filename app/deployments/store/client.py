"""How every process asks the adapter store: a typed method per call.

In: the store's actor. Out: what `StoreService` answers, or the exception that it raised. Every method has the name and
the signature of the service's; mypy checks each call against it. All of them raise ActorAway (a NotReady) while the
store restarts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence

from app.deployments.links.published import Changes, Version
from app.deployments.links.ray_calls import Callee
from app.deployments.registry.entries import (
    AliasEntry,
    AliasVersion,
    AuditRecord,
    CatalogEntry,
    Description,
    Event,
    Generation,
    LoadRequest,
    Registered,
    Registration,
    RegistryJob,
    Unload,
)
from app.deployments.registry.pins import Pins
from app.deployments.registry.view import Entry, Key
from app.deployments.store.counts import Tier
from app.deployments.store.service import StoreService
from app.deployments.store.shared import SharedAdapter
from app.engine.adapters.card import AdapterRef

#: Between two questions for an adapter that is being read. The longest is well below `reads.ABANDON_S`.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 5.0

#: The service as it runs in the actor.
_Service = StoreService[SharedAdapter]


class StoreClient:
    """Several may share an actor."""

    def __init__(self, actor: Callee) -> None:
        self._actor = actor

    async def preload(self, settings: str | None = None) -> None:
        """Tell a service's settings, and register the adapters that they name; returns when all are served."""
        await self._actor.call(_Service.preload, settings)

    # -- adapters and their names -------------------------------------------------------------------

    async def load(self, request: LoadRequest) -> RegistryJob:
        """Begin to load an adapter. Raises InvalidRequest, UnsafeSource."""
        return await self._actor.call(_Service.load, request)

    async def load_and_wait(self, request: LoadRequest) -> tuple[RegistryJob, CatalogEntry]:
        """Load an adapter; when this returns every ingress serves it. Raises what made it fail."""
        return await self._actor.call(_Service.load_and_wait, request)

    async def register(self, registrations: Sequence[Registration], *, tenant_id: str, who: str) -> Registered:
        """Make names known without reading their adapters: all, or none. Raises InvalidRequest, UnsafeSource."""
        return await self._actor.call(_Service.register, registrations, tenant_id=tenant_id, who=who)

    async def read(self, name: str, *, tenant_id: str, who: str) -> tuple[RegistryJob | None, CatalogEntry]:
        """Load a registered name that is not read yet; no job if it is. Raises NotFound and what made it fail."""
        return await self._actor.call(_Service.read, name, tenant_id=tenant_id, who=who)

    async def read_for_request(self, name: str, *, tenant_id: str, who: str) -> None:
        """`read`, for who uses adapters. Raises AdapterUnreadable, which names no place of the server."""
        await self._actor.call(_Service.read_for_request, name, tenant_id=tenant_id, who=who)

    async def resolve(self, name: str, *, tenant_id: str, who: str) -> bool:
        """Look for a name that nobody has registered: True when every ingress serves it. Raises what reading raises."""
        return await self._actor.call(_Service.resolve, name, tenant_id=tenant_id, who=who)

    async def upload(self, request: LoadRequest, config: bytes, weights: bytes) -> tuple[RegistryJob, CatalogEntry]:
        """`load_and_wait` of an adapter's two files; the source of the request is not read."""
        return await self._actor.call(_Service.upload, request, config, weights)

    async def begin_unload(self, name: str, *, tenant_id: str, who: str) -> tuple[Unload, CatalogEntry | None]:
        """Take a name out of service; `end_unload` follows when its rows are free. Raises NotFound, AdapterBusy."""
        return await self._actor.call(_Service.begin_unload, name, tenant_id=tenant_id, who=who)

    async def end_unload(self, unload: Unload) -> RegistryJob:
        """No device has rows of it any more: free the host's copy too, and be done."""
        return await self._actor.call(_Service.end_unload, unload)

    async def left_unloads(self, seen_to: Collection[str]) -> list[Unload]:
        """Unloads that nobody sees to, for the caller to end; `seen_to`: ids of jobs that it sees to already."""
        return await self._actor.call(_Service.left_unloads, seen_to)

    async def is_used(self, digest: str) -> bool:
        """Whether any name means these contents."""
        return await self._actor.call(_Service.is_used, digest)

    async def gone(self, digests: Collection[str]) -> list[str]:
        """Those of these contents that names have meant and none means any more."""
        return await self._actor.call(_Service.gone, digests)

    async def configure(
        self,
        name: str,
        *,
        tenant_id: str,
        who: str,
        pinned: bool | None = None,
        traffic_weight: float | None = None,
        description: str | None = None,
    ) -> CatalogEntry:
        """Change how a name is treated (None: as it is). Raises NotFound, AdapterTooLarge for a pin too many."""
        return await self._actor.call(
            _Service.configure,
            name,
            tenant_id=tenant_id,
            who=who,
            pinned=pinned,
            traffic_weight=traffic_weight,
            description=description,
        )

    async def put_alias(self, name: str, targets: Mapping[str, float], *, tenant_id: str, who: str) -> AliasEntry:
        """Send an alias's requests to these adapters, by weight. Raises InvalidRequest, NotFound."""
        return await self._actor.call(_Service.put_alias, name, targets, tenant_id=tenant_id, who=who)

    async def promote_alias(self, name: str, target: str, *, tenant_id: str, who: str) -> AliasEntry:
        """Send all of an alias's requests to one of its targets. Raises InvalidRequest, NotFound."""
        return await self._actor.call(_Service.promote_alias, name, target, tenant_id=tenant_id, who=who)

    async def roll_back_alias(self, name: str, version: int | None, *, tenant_id: str, who: str) -> AliasEntry:
        """Bring back a version; None: the one before the last change. Raises InvalidRequest, NotFound."""
        return await self._actor.call(_Service.roll_back_alias, name, version, tenant_id=tenant_id, who=who)

    async def remove_alias(self, name: str, *, tenant_id: str, who: str) -> AliasEntry:
        """Forget an alias. Raises NotFound."""
        return await self._actor.call(_Service.remove_alias, name, tenant_id=tenant_id, who=who)

    async def alias_versions(self, name: str, *, tenant_id: str) -> list[AliasVersion]:
        """Everything an alias has stood for, newest first. Raises NotFound."""
        return await self._actor.call(_Service.alias_versions, name, tenant_id=tenant_id)

    # -- what is known of them ----------------------------------------------------------------------

    async def describe(self, name: str, *, tenant_id: str) -> Description:
        """Raises NotFound for a name that nobody ever asked for."""
        return await self._actor.call(_Service.describe, name, tenant_id=tenant_id)

    async def job(self, job_id: str, *, tenant_id: str) -> RegistryJob:
        """A job as it stands now. Raises NotFound."""
        return await self._actor.call(_Service.job, job_id, tenant_id=tenant_id)

    async def generations(self, name: str, *, tenant_id: str) -> list[Generation]:
        """Everything a name has meant, newest first."""
        return await self._actor.call(_Service.generations, name, tenant_id=tenant_id)

    async def events(self, name: str | None, *, limit: int, before: str | None, tenant_id: str) -> list[Event]:
        """What happened, newest first; `before` is the id of the last record of the page before this one."""
        return await self._actor.call(_Service.events, name, limit=limit, before=before, tenant_id=tenant_id)

    async def audit(self, name: str | None, *, limit: int, before: str | None, tenant_id: str) -> list[AuditRecord]:
        """Who asked for what, newest first; `before` as with `events`."""
        return await self._actor.call(_Service.audit, name, limit=limit, before=before, tenant_id=tenant_id)

    async def hot(self, limit: int) -> list[CatalogEntry]:
        """What a new replica should hold before it is ready, beside what is pinned: the hottest first."""
        return await self._actor.call(_Service.hot, limit)

    async def stats(self) -> dict[Tier, dict[str, float]]:
        """What the tiers of the store did and hold."""
        return await self._actor.call(_Service.stats)

    # -- what replicas need -------------------------------------------------------------------------

    async def fetch(self, ref: AdapterRef) -> SharedAdapter:
        """The packed adapter with this digest. Raises AdapterUnreadable if it cannot be read.

        While it is being read the store is asked again and again; when this is cancelled nobody asks, and reading ends.
        """
        pause_s = FIRST_PAUSE_S
        shared = await self._actor.call(_Service.fetch, ref)
        while shared is None:
            await asyncio.sleep(pause_s)
            pause_s = min(1.5 * pause_s, LONGEST_PAUSE_S)
            shared = await self._actor.call(_Service.fetch, ref, again=True)
        return shared

    async def expect(self, ref: AdapterRef) -> None:
        """Begin what `fetch` will ask for soon. What goes wrong is for `fetch` to meet."""
        await self._actor.call(_Service.expect, ref)

    async def lost(self, digest: str) -> None:
        """What `fetch` answered does not resolve any more: read the adapter again."""
        await self._actor.call(_Service.lost, digest)

    async def observe(
        self, replica_id: str, loaded: Sequence[str], unloaded: Sequence[str], used_s: Mapping[str, float]
    ) -> None:
        """What came to and left a replica's device, and when requests last used which digests (Unix time)."""
        await self._actor.call(_Service.observe, replica_id, loaded, unloaded, used_s)

    # -- published tables (`links.watched`) -----------------------------------------------------------

    async def watch(
        self, held: Version | None, watcher_id: str, timeout_s: float
    ) -> tuple[Version, Changes[Key, Entry]] | None:
        """A page of the registry's table that `held` lacks, as soon as there is one; None after `timeout_s`."""
        return await self._actor.call(_Service.watch, held, watcher_id, timeout_s)

    async def watch_pins(self, held: Version | None, watcher_id: str, timeout_s: float) -> tuple[Version, Pins] | None:
        """The pinned adapters, as soon as they differ from `held`; None after `timeout_s`."""
        return await self._actor.call(_Service.watch_pins, held, watcher_id, timeout_s)

    async def watch_shares(
        self, held: Version | None, watcher_id: str, timeout_s: float
    ) -> tuple[Version, Changes[str, float]] | None:
        """The expected shares of the traffic that `held` lacks, as soon as there are some; None after `timeout_s`."""
        return await self._actor.call(_Service.watch_shares, held, watcher_id, timeout_s)
