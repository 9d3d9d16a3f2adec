"""The store's process put together: what every part of it is given, and by whom.

In: the service's configuration, and where packed adapters are put. Out: the parts of a `StoreService`. The only place
that knows all of them; importing it takes a second, so only the process that runs the store does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from app.config import AppConfig
from app.deployments.registry.books import open_registry
from app.deployments.registry.lifecycle import Lifecycle
from app.deployments.registry.tier_events import TierEvents
from app.deployments.store.counts import TierCounts
from app.deployments.store.library import open_library
from app.deployments.store.service import StoreParts
from app.deployments.store.store import AdapterStore
from app.deployments.tenants.quota import AdapterQuota
from app.engine.adapters.isolation.packing import PackedAdapter
from app.engine.models.checkpoint import open_model
from app.engine.open import served_features

H = TypeVar("H")


def open_store(config: AppConfig, put: Callable[[PackedAdapter], H], counts: TierCounts) -> StoreParts[H]:
    """Opens the base's description, the registry, the disk tier and the sources. Raises ConfigError, NotReady.

    `put` makes of a packed adapter what `fetch` answers; it is called in threads. `counts` hears what the tiers do.
    """
    adapters = config.adapters
    checkpoint = open_model(config.model.uri, config.model.name)
    registry = open_registry(config, checkpoint.spec.digest)
    registry.catalog.check_quota = AdapterQuota(checkpoint.spec.digest)
    pinned = {entry.ref.digest for entry in registry.catalog.pinned()}
    events = TierEvents()  # first: the tiers tell it, the registry follows it
    library = open_library(adapters, checkpoint, served_features(config.engine), counts, events, pinned=pinned)
    store = AdapterStore(
        library,
        put,
        events,
        max_bytes=adapters.host_cache_bytes,
        policy=adapters.host_eviction,
        counts=counts,
        trusted=adapters.signing.trusted,
    )
    lifecycle = Lifecycle(registry, store, events, reserved_names=(config.model.name,))
    return StoreParts(registry, lifecycle, store, adapters.preload)
