"""An ingress's copy of the tenants and keys, for authentication without a remote call.

A key is looked up by its SHA-256, so the time of a look-up reveals nothing about any key; the match is compared in
constant time.
"""

from __future__ import annotations

import hmac
import math
from collections.abc import Iterator
from typing import NamedTuple

from app.deployments.rpc.long_poll_client import TableSync
from app.deployments.rpc.long_poll_host import Changes
from app.deployments.tenancy.auth.key_crypto import key_digest
from app.deployments.tenancy.models import ApiKey, Tenant, TenantKey, TenantRow
from app.engine.errors import NotReady

#: How long keys are honoured by an ingress that cannot reach the table's owner. A store that is restarted, or moves to
#: another node, is back within a minute.
MAX_TABLE_AGE_S = 300.0


class KnownKey(NamedTuple):
    """A valid key; `tenant` is None for an admin key."""

    key: ApiKey
    tenant: Tenant | None


class TenantMirror:
    """One event loop; 100,000 keys are a dictionary of 100,000."""

    def __init__(self) -> None:
        self._tenants: dict[str, Tenant] = {}
        self._keys: dict[str, ApiKey] = {}
        self._digests: dict[str, str] = {}  # a key's id -> its digest
        self._sync: TableSync[TenantKey, TenantRow] = TableSync()
        #: When the table's owner last answered, in Unix time; a client of the table sets it.
        self.confirmed_s = math.inf
        self.has_keys = False  # never reset: losing the table must not disable authentication

    @property
    def num_tenants(self) -> int:
        return len(self._tenants)

    def take(self, page: Changes[TenantKey, TenantRow]) -> None:
        """Apply a page of the table."""
        for key, row in self._sync.changes(page, self._table_keys).items():
            self._apply(key, row)

    def tenant(self, tenant_id: str) -> Tenant | None:
        return self._tenants.get(tenant_id)

    def find(self, value: str, now_s: float) -> KnownKey | None:
        """The key with this value and its tenant, if it is valid now.

        Raises NotReady for a key that may have been revoked meanwhile, because the table is older than
        `MAX_TABLE_AGE_S`.
        """
        digest = key_digest(value)
        key = self._keys.get(digest)
        if key is None or not hmac.compare_digest(key.digest, digest):
            return None
        return self._with_tenant(key, now_s)

    def find_id(self, key_id: str, now_s: float) -> KnownKey | None:
        """`find` for the key with this id, whose holder was authenticated before."""
        key = self.key(key_id)
        return None if key is None else self._with_tenant(key, now_s)

    def _with_tenant(self, key: ApiKey, now_s: float) -> KnownKey | None:
        if not key.is_valid(now_s):
            return None
        if now_s - self.confirmed_s > MAX_TABLE_AGE_S:
            raise NotReady(
                f"this ingress has not reached the store for {MAX_TABLE_AGE_S:g} s and does not know which API keys "
                "were revoked; try again",
                retry_after_s=5,
            )
        if key.project_id is None:
            return KnownKey(key, None)
        tenant = self._tenants.get(key.project_id)
        return None if tenant is None or tenant.archived_s is not None else KnownKey(key, tenant)

    def key(self, key_id: str) -> ApiKey | None:
        """The key with this id, valid or not."""
        return self._keys.get(self._digests.get(key_id, ""))

    def _table_keys(self) -> Iterator[TenantKey]:
        yield from (("tenant", each) for each in self._tenants)
        yield from (("key", each) for each in self._keys)

    def _apply(self, key: TenantKey, row: TenantRow | None) -> None:
        kind, name = key
        if isinstance(row, Tenant):
            self._tenants[name] = row
        elif isinstance(row, ApiKey):
            self._keys[name] = row
            self._digests[row.id] = name
            self.has_keys = True
        elif kind == "tenant":
            self._tenants.pop(name, None)
        else:
            old = self._keys.pop(name, None)
            if old is not None:
                del self._digests[old.id]
