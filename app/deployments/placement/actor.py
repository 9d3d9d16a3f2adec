"""The placement actor: one `PlacementService` for all ingresses of an application and the replicas of a base model.

It publishes the placement table, so no request waits for this actor. After a crash it starts empty and is complete
again with the next reports. It exits when nothing calls it any more (`IdleShutdown`).
"""

from __future__ import annotations

import time

from app.config import AppConfig
from app.deployments.placement.service import PlacementService, TrafficShareChanges
from app.deployments.rpc.actor_proxy import actor_proxy
from app.deployments.rpc.idle_shutdown import IdleShutdown
from app.deployments.rpc.long_poll_client import Watch
from app.deployments.rpc.named_actor import FoundActor, NamedActor, exit_actor
from app.deployments.store.service import StoreService
from app.deployments.store.shared_adapter import SharedAdapter
from app.logging import start_log


class PlacementActor(PlacementService):
    """`PlacementService` that exits when nothing calls it any more."""

    def __init__(self, config_json: str) -> None:
        self._idle_shutdown = IdleShutdown(exit_actor, time.monotonic)
        config = AppConfig.model_validate_json(config_json)
        start_log(config.logs, "placement")
        super().__init__(config.placement, _watch_traffic_shares, self._idle_shutdown.touch, time.monotonic)


def placement_actor(config: AppConfig, app_name: str) -> NamedActor:
    """The actor's name and factory: one per application and base model, because their replicas must not share a
    table.

    `config` is what a new actor starts with; later settings come with the replicas' reports.
    """
    suffix = "" if config.tenants.base_uri is None else f"-{config.store_key}"
    return NamedActor(f"placement-{app_name}{suffix}", PlacementActor, config.model_dump_json())


def placement_service(config: AppConfig, app_name: str) -> PlacementService:
    """The application's placement service, as its ingresses and replicas call it."""
    return actor_proxy(PlacementService, placement_actor(config, app_name))


def _watch_traffic_shares(store: str) -> Watch[TrafficShareChanges]:
    return actor_proxy(StoreService[SharedAdapter], FoundActor(store)).watch_traffic_shares
