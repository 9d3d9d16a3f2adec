"""The first admin key, and checks that no service is open to a network by accident.

The key is written to the registry's database, so the service need not run; a running one knows it within seconds.
"""

from __future__ import annotations

import ipaddress
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, MutableMapping
from typing import TYPE_CHECKING

from app.config import ADMIN_KEY, DIGEST, MANAGEMENT_TOKEN, AppConfig
from app.deployments.tenancy.auth.key_crypto import environment_digest
from app.engine.errors import ConfigError

if TYPE_CHECKING:
    from app.deployments.registry.registry import Registry

#: Printed at the start of a service that requires no key.
OPEN_NOTICE = (
    "there are no API keys: any client on this machine has access; "
    "`polylora create-admin-key` makes the first admin key"
)

#: Seconds for a service to read its registry's keys and publish them to its ingresses.
_PUBLISH_S = 0.5


def make_admin_key(settings: AppConfig, sleep: Callable[[float], None] = time.sleep) -> str:
    """A new admin key for the services of these settings. Raises ConfigError, NotReady.

    If a service runs, this returns when it has read the registry again, so the next command may use the key.
    """
    from app.deployments.tenancy.service import SYNC_INTERVAL_S
    from app.deployments.tenancy.tenant_store import TenantStore

    registry = _open_registry(settings)
    try:
        value = TenantStore(registry.database).keys.create_admin_key("keygen", None, actor="shell").value
        if registry.stores.others():
            sleep(SYNC_INTERVAL_S + _PUBLISH_S)
        return value
    finally:
        registry.close()


def check_exposure(settings: AppConfig, host: str, environ: Mapping[str, str]) -> None:
    """Raises ConfigError if a network could reach a service that requires no key."""
    has_key = environ.get(ADMIN_KEY) or environ.get(f"{ADMIN_KEY}{DIGEST}")
    if settings.http.auth != "auto" or has_key or _is_loopback(host) or _has_keys(settings):
        return
    raise ConfigError(
        f"the service would listen on {host} without any API key; make one with `polylora create-admin-key`, set "
        f"{ADMIN_KEY}, or allow access without keys by http.auth: open"
    )


def keep_digests(environ: MutableMapping[str, str]) -> None:
    """Replace the admin key and the management token by their SHA-256, which is all that child processes inherit.

    Raises ConfigError.
    """
    for name in (ADMIN_KEY, MANAGEMENT_TOKEN):
        if digest := environment_digest(environ, name):
            environ[f"{name}{DIGEST}"] = digest
            environ.pop(name, None)


def is_open(url: str) -> bool:
    """Whether a running service answers without a key."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(f"{url}/v1/models?limit=1", timeout=30):
            return True
    except (urllib.error.URLError, OSError):
        return False


def _has_keys(settings: AppConfig) -> bool:
    from app.deployments.tenancy.tenant_store import TenantStore

    registry = _open_registry(settings)
    try:
        return bool(TenantStore(registry.database).since(0).keys)
    finally:
        registry.close()


def _open_registry(settings: AppConfig) -> Registry:
    from app.deployments.registry.registry import open_registry
    from app.engine.models.checkpoint import open_model

    checkpoint = open_model(settings.model.uri, settings.model.name, settings.engine.arithmetic)
    return open_registry(settings, checkpoint.spec.digest)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
