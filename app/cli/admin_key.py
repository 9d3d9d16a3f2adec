"""The first admin key, and whether a service would be open to everybody.

In: the settings of a service. Out: a key, printed once; or the refusal to listen on a network without any; or an
environment that processes may inherit. What is read and written is the registry's database, so the service need not
run; one that runs knows the key within seconds.
"""

from __future__ import annotations

import ipaddress
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, MutableMapping

from app.config import ADMIN_KEY, DIGEST, MANAGEMENT_TOKEN, AppConfig, without_password
from app.deployments.tenancy.auth.key_crypto import environment_digest
from app.engine.errors import ConfigError

#: What is said at start of a service that lets everybody in who can reach it.
OPEN_NOTICE = (
    "there are no API keys: whoever is on this machine is let in. `polylora keygen --admin` makes the first admin key"
)

#: How long a service may take to read its registry's keys and to tell its ingresses, seconds.
_READ_AND_TOLD_S = 0.5


def make_admin_key(settings: AppConfig, sleep: Callable[[float], None] = time.sleep) -> str:
    """An admin key that the services of these settings take from now on. Raises ConfigError, NotReady.

    Where one runs it returns when that service has read its registry again: what is typed next may use the key.
    """
    from app.deployments.registry.registry import open_registry
    from app.deployments.tenancy.service import LOOK_INTERVAL_S
    from app.deployments.tenancy.tenant_store import TenantStore
    from app.engine.models.checkpoint import open_model

    registry = open_registry(settings, open_model(settings.model.uri, settings.model.name).spec.digest)
    try:
        value = TenantStore(registry.database).keys.create_admin_key("keygen", None, actor="shell").value
        if registry.stores.others():
            sleep(LOOK_INTERVAL_S + _READ_AND_TOLD_S)
        return value
    finally:
        registry.close()


def registered_in(settings: AppConfig) -> str:
    """What an operator should know of a key that was just made, beside its value."""
    url = settings.adapters.registry_url
    place = without_password(url) if url else settings.adapters.state_dir
    return f"the registry in {place} holds the key now; services that use it ask everybody for a key from here on"


def check_open_door(settings: AppConfig, host: str, environ: Mapping[str, str]) -> None:
    """Raises ConfigError if a network could reach a service that asks nobody for a key."""
    has_key = environ.get(ADMIN_KEY) or environ.get(f"{ADMIN_KEY}{DIGEST}")
    if settings.http.auth != "auto" or has_key or _is_loopback(host) or _has_keys(settings):
        return
    raise ConfigError(
        f"the service would listen on {host} without any API key; make one with `polylora keygen --admin`, set "
        f"{ADMIN_KEY}, or let everybody in with http.auth: open"
    )


def keep_digests(environ: MutableMapping[str, str]) -> None:
    """Put the SHA-256 in the place of the admin key and the management token: processes that inherit have only that.

    Raises ConfigError.
    """
    for name in (ADMIN_KEY, MANAGEMENT_TOKEN):
        if digest := environment_digest(environ, name):
            environ[f"{name}{DIGEST}"] = digest
            environ.pop(name, None)


def is_open(url: str) -> bool:
    """Whether a service that runs answers without a key."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(f"{url}/v1/models?limit=1", timeout=30):
            return True
    except (urllib.error.URLError, OSError):
        return False


def _has_keys(settings: AppConfig) -> bool:
    from app.deployments.registry.registry import open_registry
    from app.deployments.tenancy.tenant_store import TenantStore
    from app.engine.models.checkpoint import open_model

    registry = open_registry(settings, open_model(settings.model.uri, settings.model.name).spec.digest)
    try:
        return bool(TenantStore(registry.database).since(0).keys)
    finally:
        registry.close()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
