"""The store's process put together: what every part of it is given, and by whom.

In: the service's configuration, and where packed adapters are put. Out: the parts of a `StoreService`, and the way in
which other settings reach them while they work. The only place that knows all of them; importing it takes a second, so
only the process that runs the store does.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import ValidationError

from app.config import AdaptersConfig, AppConfig
from app.deployments.registry.jobs.auto_registration import AutoRegistration, SourcePaths
from app.deployments.registry.jobs.lazy_registrations import LazyRegistrations
from app.deployments.registry.pins import PinLimits
from app.deployments.registry.registry import open_registry
from app.deployments.registry.service import RegistryService
from app.deployments.registry.tier_events import TierEvents
from app.deployments.store.adapter_reader import AdapterReader, open_adapter_reader
from app.deployments.store.failure_backoff import FailureBackoff
from app.deployments.store.host_cache import HostAdapterCache
from app.deployments.store.service import StoreParts
from app.deployments.store.sources.resolvers import open_resolvers
from app.deployments.store.tier_counters import TierCounters
from app.deployments.store.uploads import Uploads
from app.deployments.tenancy.auth.project_store import AdapterQuota
from app.engine.adapters.combining.combination import Combination
from app.engine.adapters.combining.combine import combine
from app.engine.adapters.sandbox.packing import PackedAdapter, pack_adapter, unpack_adapter
from app.engine.factory import served_features
from app.engine.models.checkpoint import open_model
from app.engine.models.spec import ModelSpec

logger = logging.getLogger(__name__)

H = TypeVar("H")


class OpenStore(Generic[H]):
    """Opens the base's description, the registry, the disk tier and the sources."""

    def __init__(
        self,
        config: AppConfig,
        put: Callable[[PackedAdapter], H],
        held: Callable[[H], PackedAdapter],
        counts: TierCounters,
        *,
        actor: str = "",
    ) -> None:
        """`put` makes of a packed adapter what `fetch` answers, and `get_object` the reverse; they are called in threads.
        `counts` hears what the tiers do.

        `actor` names this process over restarts: what it was told in its former life counts for more than `config`.
        Raises ConfigError, NotReady.
        """
        self._counts = counts
        self._checkpoint = open_model(config.model.uri, config.model.name)
        digest = self._checkpoint.spec.digest
        self._registry = open_registry(config, digest, actor=actor, check_quota=AdapterQuota(digest))
        self._registry.stores.enter()
        config = _told(self._registry.stores.settings) or config
        self._settings = config.for_store.model_dump_json()
        self._registry.use(PinLimits.of(config), (config.model.name,))
        uploads = Path(config.adapters.state_dir).expanduser() / "uploads" / config.store_key
        self._uploads = Uploads(uploads, config.adapters.disk_cache_bytes, time.monotonic)
        self._events = TierEvents()  # first: the tiers tell it, the registry follows it
        adapters = config.adapters
        self._store = HostAdapterCache(
            self._open_library(config),
            put,
            self._events,
            max_bytes=adapters.host_cache_bytes,
            policy=adapters.host_eviction,
            counts=counts,
            trusted=adapters.signing.trust,
            compose=partial(merge_adapters, self._checkpoint.spec, held),
        )
        names = (config.model.name,)
        self._lifecycle = RegistryService(
            self._registry, self._store, self._events, reserved_names=names, sweep=self._uploads.sweep
        )
        self._resolution = AutoRegistration(
            self._registry, self._store, self._lifecycle, FailureBackoff(), _places(config.adapters)
        )
        unread = LazyRegistrations(self._registry, self._lifecycle, FailureBackoff())
        self._taking = asyncio.Lock()
        self.parts = StoreParts(
            self._registry,
            self._lifecycle,
            self._store,
            adapters.preload,
            unread,
            self.take,
            self._resolution,
            self._uploads,
            _roots(adapters),
        )

    async def take(self, settings: str) -> StoreParts[H]:
        """Work with other settings from now on; equal ones change nothing.

        Raises ConfigError for settings that cannot be; then nothing has changed.
        """
        async with self._taking:
            config = AppConfig.model_validate_json(settings).for_store
            settings = config.model_dump_json()
            if settings != self._settings:
                adapters = config.adapters
                places = await asyncio.to_thread(_places, adapters)
                library = await asyncio.to_thread(self._open_library, config)
                await asyncio.to_thread(self._registry.stores.keep_settings, settings)
                self._store.use(
                    library,
                    max_bytes=adapters.host_cache_bytes,
                    policy=adapters.host_eviction,
                    trusted=adapters.signing.trust,
                )
                self._resolution.use(places)
                names = frozenset((config.model.name,))
                self._registry.use(PinLimits.of(config), names)
                self._lifecycle.reserved_names = names
                self._settings = settings
                self.parts = self.parts._replace(preloaded=adapters.preload, roots=_roots(adapters))
                logger.info("the store works with other settings from now on")
        return self.parts

    def _open_library(self, config: AppConfig) -> AdapterReader:
        pinned = {entry.ref.digest for entry in self._registry.catalog.pinned()}
        served = served_features(config.engine)
        return open_adapter_reader(
            config.adapters,
            self._checkpoint,
            served,
            self._counts,
            self._events,
            pinned=pinned,
            uploads=self._uploads.root,
        )


def _places(config: AdaptersConfig) -> SourcePaths:
    return SourcePaths(open_resolvers(config), config.negative_cache_ttl_s, config.source_timeout_s)


def _roots(config: AdaptersConfig) -> Sequence[Path]:
    return tuple(Path(root) for root in config.roots)


def _told(settings: str | None) -> AppConfig | None:
    if settings is None:
        return None
    try:
        return AppConfig.model_validate_json(settings)
    except ValidationError as error:  # of another version of the code
        logger.warning("the settings that this store was told before are not understood: %s", error)
        return None


def merge_adapters(
    spec: ModelSpec, held: Callable[[H], PackedAdapter], composition: Combination, parts: Sequence[H]
) -> PackedAdapter:
    """A `store.Compose` once it has its first two arguments: the parts' combination, for this base.

    `get_object` gives what `put` has put. Nothing is read, and the parts stay as they are. Raises CompositionRefused.
    """
    packed = [held(part) for part in parts]
    adapters = [unpack_adapter(one.header, one.arrays) for one in packed]
    return pack_adapter(combine(composition, adapters, spec))
