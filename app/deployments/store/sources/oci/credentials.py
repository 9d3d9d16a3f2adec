"""Credentials of registries, from Docker's configuration: `config.json` in DOCKER_CONFIG, else in ~/.docker.

`docker login` and `oras login` write it, and a mounted Kubernetes secret of the type dockerconfigjson is one. It is
read for every download, so credentials may rotate. Credential helpers are programs, and are not run.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from app.engine.errors import SourceError

#: Docker Hub's name in references, the host of its API, and its name in Docker's configuration.
DOCKER_HUB, DOCKER_HUB_API, _DOCKER_HUB_KEY = "docker.io", "registry-1.docker.io", "index.docker.io"
_MAX_CONFIG_BYTES = 1 << 20


class Credentials(NamedTuple):
    """What Docker's configuration has for one registry. All empty: anonymous."""

    user: str = ""
    password: str = ""
    identity_token: str = ""
    registry_token: str = ""
    #: Whether the configuration names a helper for this registry, which was not run.
    has_helper: bool = False

    def __repr__(self) -> str:
        return f"Credentials(user={self.user!r}, ...)"

    @property
    def basic(self) -> str | None:
        """The header `Authorization` with user name and password."""
        if not self.user:
            return None
        return "Basic " + base64.b64encode(f"{self.user}:{self.password}".encode()).decode()


def docker_config_path(environ: Mapping[str, str]) -> Path:
    folder = environ.get("DOCKER_CONFIG")
    return (Path(folder) if folder else Path("~/.docker").expanduser()) / "config.json"


def read_credentials(path: Path, registry: str) -> Credentials:
    """The credentials for a registry (`host` or `host:port`). Raises SourceError for a file that cannot be read."""
    try:
        with path.open("rb") as file:
            config = json.loads(file.read(_MAX_CONFIG_BYTES))
    except FileNotFoundError:
        return Credentials()
    except (OSError, ValueError, RecursionError) as error:
        raise SourceError(f"the registries' credentials in {path} cannot be read: {type(error).__name__}") from error
    auths = _section(config, "auths")
    wanted = _DOCKER_HUB_KEY if registry == DOCKER_HUB else registry
    entry = next((value for key, value in auths.items() if _host(key) == wanted), None)
    has_helper = bool(_section(config, "credHelpers").get(registry) or config.get("credsStore"))
    if not isinstance(entry, dict) or not entry:  # docker leaves an empty entry beside its helper's
        return Credentials(has_helper=has_helper)
    user, password = _user_and_password(path, registry, entry)
    identity, token = (str(entry.get(key) or "") for key in ("identitytoken", "registrytoken"))
    return Credentials(user, password, identity, token, has_helper)


def _section(config: Any, key: str) -> dict[str, Any]:
    section = config.get(key) if isinstance(config, dict) else None
    return section if isinstance(section, dict) else {}


def _host(key: str) -> str:
    """`host:port` of a key: docker writes hosts, and URLs such as https://index.docker.io/v1/."""
    return key.partition("://")[2].partition("/")[0] if "://" in key else key.removesuffix("/")


def _user_and_password(path: Path, registry: str, entry: Mapping[str, Any]) -> tuple[str, str]:
    encoded = entry.get("auth")
    if not encoded:
        return str(entry.get("username") or ""), str(entry.get("password") or "")
    try:
        user, separator, password = base64.b64decode(encoded, validate=True).decode().partition(":")
    except (binascii.Error, ValueError, TypeError):
        separator = ""
    if not separator:
        raise SourceError(f"{path}: auths: {registry}: 'auth' is not the base64 of user:password")
    return user, password.rstrip("\0")
