"""How many adapters a project may have, and how large together.

In: the transaction that registers one. Out: nothing, or a refusal that undoes it. Rule: it is asked inside of the
transaction and after the change, so that loads at the same time cannot pass together.
"""

from __future__ import annotations

from sqlalchemy import Connection, func, select

from app.deployments.registry.entries import State
from app.deployments.registry.tables import adapters
from app.deployments.tenants.limits import AdapterQuotaReached
from app.deployments.tenants.tables import projects


class AdapterQuota:
    """The check that the catalog makes when it registers an adapter."""

    def __init__(self, base_digest: str) -> None:
        self._base = base_digest

    def __call__(self, connection: Connection, tenant_id: str) -> None:
        """Raises AdapterQuotaReached. What is no project has no limit, nor has one whose limits are not enforced."""
        columns = projects.c
        query = select(columns.max_adapters, columns.max_adapter_bytes).where(
            columns.base_digest == self._base, columns.id == tenant_id, columns.enforce.is_(True)
        )
        row = connection.execute(query).first()
        if row is None or (row.max_adapters is None and row.max_adapter_bytes is None):
            return
        held = select(func.count(), func.coalesce(func.sum(adapters.c.size_bytes), 0)).where(
            adapters.c.base_digest == self._base, adapters.c.tenant_id == tenant_id, adapters.c.state == State.LOADED
        )
        number, size_bytes = connection.execute(held).one()
        if row.max_adapters is not None and number > row.max_adapters:
            raise AdapterQuotaReached(
                f"the project would have {number} adapters and may have {row.max_adapters}; unload one, or raise "
                "max_adapters",
                "adapters",
                None,
            )
        if row.max_adapter_bytes is not None and size_bytes > row.max_adapter_bytes:
            raise AdapterQuotaReached(
                f"the project's adapters would have {size_bytes} bytes and may have {row.max_adapter_bytes}; unload "
                "one, or raise max_adapter_bytes",
                "adapters",
                None,
            )
