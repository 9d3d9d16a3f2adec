"""The registry of one base model, opened: its parts share the database and nothing else."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from sqlalchemy import Connection

from app.config import AdaptersConfig, AppConfig, without_password
from app.deployments.registry.aliases import Aliases
from app.deployments.registry.catalog import Catalog
from app.deployments.registry.db.database import Database, sqlite_url
from app.deployments.registry.event_log import EventLog
from app.deployments.registry.feed.change_query import ChangeQuery
from app.deployments.registry.jobs.job_table import Jobs
from app.deployments.registry.jobs.store_leases import StoreLeases
from app.deployments.registry.pins import PinLimits
from app.private_folder import make_private


class Registry:
    """Methods of the parts may be called from several threads; each call is one transaction."""

    def __init__(
        self,
        url: str,
        base_digest: str,
        pin_limits: PinLimits = PinLimits(),  # noqa: B008  (frozen)
        clock: Callable[[], float] = time.time,
        *,
        actor: str = "",
        base_names: Collection[str] = (),
        base_uri: str = "",
        check_quota: Callable[[Connection, str], None] = lambda *_: None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """base_names: what clients call the base model; base_uri: where it is from. `actor` names this process over
        restarts (`StoreLeases`). `check_quota`: see `Catalog`. `clock` gives the Unix times that are stored,
        `monotonic` seconds that clock changes do not affect.

        Raises ConfigError, NotReady.
        """
        self.base_uri = base_uri
        self.database = Database(url, base_digest, clock)
        self.stores = StoreLeases(self.database, actor, monotonic)
        self.change_query = ChangeQuery(self.database)
        self.catalog = Catalog(self.database, pin_limits, check_quota)
        self.aliases = Aliases(self.database, base_names)
        self.jobs = Jobs(self.database, self.stores.id)
        self.event_log = EventLog(self.database)

    def reconfigure(self, pin_limits: PinLimits, base_names: Collection[str]) -> None:
        """Work with other settings from now on."""
        self.catalog.pin_limits = pin_limits
        self.aliases.base_names = frozenset(base_names)

    def close(self) -> None:
        self.database.close()


def open_registry(
    config: AppConfig,
    base_digest: str,
    *,
    tenants_digest: str | None = None,
    actor: str = "",
    check_quota: Callable[[Connection, str], None] = lambda *_: None,
    environ: Mapping[str, str] | None = None,
) -> Registry:
    """The configured database, or the SQLite file of the base model with the projects (`tenants_digest`; default: this
    one). Raises ConfigError, NotReady."""
    make_private(Path(config.adapters.state_dir))
    url = database_url(config.adapters, tenants_digest or base_digest, os.environ if environ is None else environ)
    return Registry(
        url,
        base_digest,
        PinLimits.of(config),
        actor=actor,
        base_names=(config.model.name,),
        base_uri=config.model.uri,
        check_quota=check_quota,
    )


def database_url(adapters: AdaptersConfig, base_digest: str, environ: Mapping[str, str]) -> str:
    """Where the registry is, with the password from the environment."""
    if adapters.registry_url is None:
        return sqlite_url(Path(adapters.state_dir) / f"catalog-{base_digest[:12]}.sqlite")
    given = environ.get("POLYLORA_REGISTRY_URL", "")
    return given if without_password(given) == adapters.registry_url else adapters.registry_url
