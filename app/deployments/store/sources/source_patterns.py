"""Patterns of remote sources, and which of them a project may load.

A pattern is a URL prefix (`adapters.urls`) or a hub repository with `*` (`adapters.hub`). `{tenant}` in it stands for
the id of a project, which may load what the pattern gives with its own id. A pattern without `{tenant}` is open to
every project.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from string import ascii_letters, digits

from app.config import AdaptersConfig
from app.engine.adapters.strict_json import short
from app.engine.errors import UnsafeSource

TENANT = "{tenant}"
_HUB = "hf://"
_ID_CHARS = ascii_letters + digits + "_-"


def prefixes_for(prefixes: Sequence[str], url: str) -> tuple[str, ...]:
    """The prefixes, with a project's id in place of `{tenant}`, that allow this URL and what it may redirect to.

    Empty if none allows it.
    """
    tenants = {tenant for prefix in prefixes if (tenant := _tenant(prefix, url)) is not None}
    return tuple(
        {prefix.replace(TENANT, tenant) for prefix in prefixes for tenant in tenants if tenant or TENANT not in prefix}
    )


def _tenant(prefix: str, url: str) -> str | None:
    """The project's id with which this prefix begins the URL, "" without `{tenant}`; None if it does not."""
    first, is_for_one, rest = prefix.partition(TENANT)
    tenant = ""
    if is_for_one:
        tenant = _leading_id(url[len(first) :]).removesuffix(_leading_id(rest))
        if not tenant:
            return None
    return tenant if url.startswith(prefix.replace(TENANT, tenant)) else None


def _leading_id(text: str) -> str:
    """The characters of an id with which a text begins."""
    return text[: len(text) - len(text.lstrip(_ID_CHARS))]


def matches_repository(patterns: Sequence[str], uri: str, tenant_id: str | None) -> bool:
    """Whether one of these patterns (`org/name`, with `*`) has the repository of `hf://org/name@revision`.

    `tenant_id` None: `{tenant}` may be any project's id.
    """
    repository = uri.removeprefix(_HUB).partition("@")[0].split("/")
    wanted = [pattern.replace(TENANT, "*" if tenant_id is None else tenant_id).split("/") for pattern in patterns]
    return len(repository) == 2 and any(all(map(fnmatchcase, repository, pattern)) for pattern in wanted)


def check_project_source(config: AdaptersConfig, tenant_id: str, source: str) -> None:
    """Raise UnsafeSource for a URI that is not this project's. Other rules are the fetchers'."""
    if source.startswith(_HUB):
        if not matches_repository(config.hub or (), source, tenant_id):
            raise UnsafeSource(
                f"{short(source)} is no repository that this project may load; adapters.hub names them, with "
                f"{TENANT} for a project's id"
            )
        return
    own = tuple(prefix.replace(TENANT, tenant_id) for prefix in config.urls)
    if prefixes_for(config.urls, source) and not source.startswith(own):
        raise UnsafeSource(f"{short(source)} is outside this project's part of adapters.urls")
