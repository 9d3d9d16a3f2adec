"""Opens the store's process: constructs its parts and applies other settings while they work.

It imports everything, which takes a second, so only the store's process imports it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import ValidationError

from app.config import AdaptersConfig, AppConfig, registry_place
from app.deployments.registry.jobs.auto_registration import AutoRegistration, ResolverSettings
from app.deployments.registry.jobs.failure_backoff import FailureBackoff
from app.deployments.registry.jobs.lazy_registrations import LazyRegistrations
from app.deployments.registry.jobs.preload import Preloader
from app.deployments.registry.pins import PinLimits
from app.deployments.registry.registry import open_registry
from app.deployments.registry.service import RegistryService
from app.deployments.registry.tier_events import TierEvents
from app.deployments.store.adapter_reader import AdapterReader, open_adapter_reader
from app.deployments.store.host_cache import HostAdapterCache
from app.deployments.store.service import StoreParts
from app.deployments.store.sources.resolvers import open_resolvers
from app.deployments.store.tier_counters import TierCounters
from app.deployments.store.upload_copies import UploadCopies
from app.deployments.store.uploads import Uploads
from app.deployments.tenancy.auth.project_store import AdapterQuota, ProjectStore
from app.engine.adapters.sandbox.packing import PackedAdapter
from app.engine.factory import served_features
from app.engine.models.checkpoint import open_model

logger = logging.getLogger(__name__)

H = TypeVar("H")


class ConfiguredStore(Generic[H]):
    """The store's parts, opened with the base model's description, and the settings that they work with."""

    def __init__(
        self,
        config: AppConfig,
        put: Callable[[PackedAdapter], H],
        get: Callable[[H], PackedAdapter],
        counts: TierCounters,
        *,
        actor: str = "",
    ) -> None:
        """`put` turns a packed adapter into what `fetch` returns, and `get` is its inverse; both are called in threads.
        `counts` counts what the tiers do.

        `actor` names this process over restarts: the settings of its former life override `config`. Raises ConfigError,
        NotReady.
        """
        self._counts = counts
        self._checkpoint = open_model(config.model.uri, config.model.name, config.engine.arithmetic)
        digest = self._checkpoint.spec.digest
        self._tenants_digest = digest
        if (base_uri := config.tenants.base_uri) is not None:
            self._tenants_digest = open_model(base_uri, base_uri, config.tenants.base_compute).spec.digest
        check_quota = AdapterQuota(self._tenants_digest)
        self._registry = open_registry(
            config, digest, tenants_digest=self._tenants_digest, actor=actor, check_quota=check_quota
        )
        self._registry.stores.enter()
        config = _saved_config(self._registry.stores.settings) or config
        self._settings = config.for_store.model_dump_json()
        self._registry.reconfigure(PinLimits.of(config), (config.model.name,))
        uploads = Path(config.adapters.state_dir).expanduser().resolve() / "uploads" / config.store_key
        is_on_one_machine = registry_place(config.adapters).startswith("file ")
        copies = None if is_on_one_machine else UploadCopies(self._registry.database)
        self._uploads = Uploads(uploads, config.adapters.disk_cache_bytes, time.monotonic, copies)
        self._events = TierEvents()  # first: the tiers send to it, the registry follows it
        adapters = config.adapters
        self._store = HostAdapterCache(
            self._open_reader(config),
            put,
            self._events,
            max_bytes=adapters.host_cache_bytes,
            policy=adapters.host_eviction,
            counts=counts,
            trusted=adapters.signing.trust,
            get=get,
        )
        self._registry_service = RegistryService(self._registry, self._store, self._events, sweep=self._uploads.sweep)
        self._auto_registration = AutoRegistration(
            self._registry,
            self._store,
            self._registry_service,
            FailureBackoff(),
            _resolver_settings(config.adapters, config.model.name),
        )
        lazy_registrations = LazyRegistrations(self._registry, self._registry_service, FailureBackoff())
        self._preloader = Preloader(self._registry, self._registry_service)
        self._preloader.configure(adapters.preload, _roots(adapters))
        self._reconfiguring = asyncio.Lock()
        self.parts = StoreParts(
            self._registry,
            self._registry_service,
            self._store,
            self._preloader,
            lazy_registrations,
            self._auto_registration,
            self._uploads,
            self.apply_settings,
        )

    async def apply_settings(self, settings: str) -> None:
        """Work with other settings from now on; equal ones change nothing.

        Raises ConfigError for invalid settings, without changing anything.
        """
        async with self._reconfiguring:
            config = AppConfig.model_validate_json(settings).for_store
            settings = config.model_dump_json()
            if settings != self._settings:
                adapters = config.adapters
                resolver_settings = await asyncio.to_thread(_resolver_settings, adapters, config.model.name)
                reader = await asyncio.to_thread(self._open_reader, config)
                await asyncio.to_thread(self._registry.stores.save_settings, settings)
                self._store.reconfigure(
                    reader,
                    max_bytes=adapters.host_cache_bytes,
                    policy=adapters.host_eviction,
                    trusted=adapters.signing.trust,
                )
                self._auto_registration.reconfigure(resolver_settings)
                self._registry.reconfigure(PinLimits.of(config), (config.model.name,))
                self._settings = settings
                self._preloader.configure(adapters.preload, _roots(adapters))
                logger.info("the store has applied new settings")

    def _open_reader(self, config: AppConfig) -> AdapterReader:
        pinned = {entry.ref.digest for entry in self._registry.catalog.pinned_entries()}
        supported_features = served_features(config.engine)
        return open_adapter_reader(
            config.adapters,
            self._checkpoint,
            supported_features,
            self._counts,
            self._events,
            pinned=pinned,
            uploads=self._uploads.folder,
            own_token=ProjectStore(self._registry.database, base_digest=self._tenants_digest).hub_token,
        )


def _resolver_settings(config: AdaptersConfig, base_name: str) -> ResolverSettings:
    return ResolverSettings(open_resolvers(config, base_name), config.negative_cache_ttl_s, config.source_timeout_s)


def _roots(config: AdaptersConfig) -> Sequence[Path]:
    return tuple(Path(root) for root in config.roots)


def _saved_config(settings: str | None) -> AppConfig | None:
    if settings is None:
        return None
    try:
        return AppConfig.model_validate_json(settings)
    except ValidationError as error:  # of another version of the code
        logger.warning("the saved settings of this store are invalid and are ignored: %s", error)
        return None
