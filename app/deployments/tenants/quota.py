"""How many adapters a project may have, and how large together.

In: the transaction that registers one. Out: nothing, or a refusal that undoes it. Rule: it is asked inside of the
transaction and after the change, so that loads at the same time cannot pass together.
"""

from __future__ import annotations

from sqlalchemy import Connection, func, select

from app.deployments.registry.entries import MEANT_STATES
from app.deployments.registry.tables import adapters
from app.deployments.registry.tenant_tables import projects
from app.deployments.tenants.limits import AdapterQuotaReached


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
            adapters.c.base_digest == self._base, adapters.c.tenant_id == tenant_id, adapters.c.state.in_(MEANT_STATES)
        )
        number, size_bytes = connection.execute(held).one()
        _check("max_adapters", "adapters", number, row.max_adapters)
        _check("max_adapter_bytes", "bytes of adapters", size_bytes, row.max_adapter_bytes)


def _check(setting: str, what: str, would_have: int, may_have: int | None) -> None:
    if may_have is not None and would_have > may_have:
        raise AdapterQuotaReached(
            f"the project would have {would_have} {what} and may have {may_have}; unload one, or raise {setting}",
            "adapters",
            None,
        )
