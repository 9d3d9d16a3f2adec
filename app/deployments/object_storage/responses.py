"""Stored responses in the database.

A tenant has a maximum number and size; the oldest are deleted for new ones. An expired response is NotFound.
"""

from __future__ import annotations

from sqlalchemy import ColumnElement, Connection, delete, func, insert, select

from app.deployments.object_storage.models import StoredResponse
from app.deployments.registry.db.database import Database
from app.deployments.registry.db.storage_tables import responses
from app.deployments.registry.models import not_found_error

#: What the error for a missing response adds: with OpenAI a response is stored unless its request says no.
_WAY_OUT = "; a response is stored if its request has store: true"


class ResponseStore:
    """Every call is one transaction. Raises NotFound for what the tenant does not have."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def keep(self, response: StoredResponse, *, tenant_id: str, life_s: float, max_count: int, max_bytes: int) -> None:
        """Deletes the tenant's oldest responses beyond `max_count`, or beyond `max_bytes` in total. A repeated call
        changes nothing: its first answer may have been lost."""
        now_s = self._database.clock()
        size_bytes = len(response.items.encode()) + len(response.body.encode())
        with self._database.write() as connection:
            connection.execute(delete(responses).where(*self._mine(tenant_id), responses.c.id == response.id))
            connection.execute(
                insert(responses).values(
                    base_digest=self._database.base_digest,
                    id=response.id,
                    tenant_id=tenant_id,
                    created_s=now_s,
                    expires_s=now_s + life_s,
                    size_bytes=size_bytes,
                    items=response.items,
                    body=response.body,
                )
            )
            order = (responses.c.created_s.desc(), responses.c.id.desc())
            places = (
                select(
                    responses.c.id,
                    func.row_number().over(order_by=order).label("place"),
                    func.sum(responses.c.size_bytes).over(order_by=order).label("bytes"),
                )
                .where(*self._mine(tenant_id))
                .subquery()
            )
            beyond = select(places.c.id).where((places.c.place > max_count) | (places.c.bytes > max_bytes))
            ids = list(connection.scalars(beyond))
            if ids:
                connection.execute(delete(responses).where(*self._mine(tenant_id), responses.c.id.in_(ids)))

    def get(self, response_id: str, *, tenant_id: str) -> StoredResponse:
        with self._database.read() as connection:
            return self._get(connection, response_id, tenant_id)

    def delete(self, response_id: str, *, tenant_id: str) -> None:
        with self._database.write() as connection:
            self._get(connection, response_id, tenant_id)
            connection.execute(delete(responses).where(*self._mine(tenant_id), responses.c.id == response_id))

    def forget_expired(self, connection: Connection) -> None:
        ours = responses.c.base_digest == self._database.base_digest
        connection.execute(delete(responses).where(ours, responses.c.expires_s <= self._database.clock()))

    def _get(self, connection: Connection, response_id: str, tenant_id: str) -> StoredResponse:
        present = responses.c.expires_s > self._database.clock()
        query = select(responses).where(*self._mine(tenant_id), present, responses.c.id == response_id)
        row = connection.execute(query).mappings().first()
        if row is None:
            raise not_found_error("response", response_id, _WAY_OUT)
        return StoredResponse(row["id"], row["items"], row["body"])

    def _mine(self, tenant_id: str) -> tuple[ColumnElement[bool], ...]:
        return (responses.c.base_digest == self._database.base_digest, responses.c.tenant_id == tenant_id)
