"""Patterns of remote sources, and which of them a project may load.

A pattern is a URL prefix (`adapters.urls`) or a hub repository with `*` (`adapters.hub`). `{tenant}` in it stands for
the id of a project, which may load what the pattern gives with its own id. A pattern without `{tenant}` is open to
every project.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from app.config import AdaptersConfig
from app.engine.adapters.strict_json import short
from app.engine.errors import UnsafeSource

TENANT = "{tenant}"
_HUB = "hf://"


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
    if not is_for_one:
        return "" if url.startswith(prefix) else None
    same = re.escape(rest).replace(re.escape(TENANT), r"\1")
    match = re.match(rf"{re.escape(first)}([\w-]+){same}", url, re.ASCII)
    return None if match is None else match[1]


def matches_repository(patterns: Sequence[str], uri: str, tenant_id: str | None) -> bool:
    """Whether one of these patterns (`org/name`, with `*`) has the repository of `hf://org/name@revision`.

    `tenant_id` None: `{tenant}` may be any project's id.
    """
    repository = uri.removeprefix(_HUB).partition("@")[0]
    tenant = r"[\w-]+" if tenant_id is None else re.escape(tenant_id)
    return any(
        re.fullmatch(
            re.escape(pattern).replace(re.escape(TENANT), tenant).replace(r"\*", "[^/]*"), repository, re.ASCII
        )
        for pattern in patterns
    )


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
