"""The placement actor: `PlacementService` for all ingresses and replicas of one application.

In: their calls. Out: the placement table, published to whoever watches, so that no request waits for this actor. It
starts empty after a crash and is right again with the next reports. When nobody calls any more, it ends (`attendance`).
"""

from __future__ import annotations

import time

from app.config import AppConfig
from app.deployments.placement.service import PlacementService, ShareChanges
from app.deployments.rpc.actor_proxy import actor_proxy
from app.deployments.rpc.idle_shutdown import IdleShutdown
from app.deployments.rpc.long_poll_client import Watch
from app.deployments.rpc.named_actor import FoundActor, NamedActor, exit_actor
from app.deployments.store.service import StoreService
from app.deployments.store.shared_adapter import SharedAdapter
from app.logging import start_log


class PlacementActor(PlacementService):
    """`PlacementService` that leaves when nobody calls any more."""

    def __init__(self, config_json: str) -> None:
        self._idle_shutdown = IdleShutdown(exit_actor, time.monotonic)
        config = AppConfig.model_validate_json(config_json)
        start_log(config.logs, "placement")
        super().__init__(config.placement, _watch_shares, self._idle_shutdown.touch, time.monotonic)


def placement_actor(config: AppConfig, app_name: str) -> NamedActor:
    """One per application, whatever its settings: replicas of two services must not stand on one table.

    `config` is what it starts with if it is not there; replicas tell it of other settings.
    """
    return NamedActor(f"placement-{app_name}", PlacementActor, config.model_dump_json())


def placement_service(config: AppConfig, app_name: str) -> PlacementService:
    """The placement of an application, as its ingresses and replicas call it."""
    return actor_proxy(PlacementService, placement_actor(config, app_name))


def _watch_shares(store: str) -> Watch[ShareChanges]:
    return actor_proxy(StoreService[SharedAdapter], FoundActor(store)).watch_shares
