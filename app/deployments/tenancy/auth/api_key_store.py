"""Service accounts and API keys in the database. Each call is one transaction; thread-safe.

To rotate a key, create another for the service account and let the old one expire later: both are valid in between.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from sqlalchemy import ColumnElement, Connection, Table, and_, or_, select, update

from app.deployments.registry.db.database import Database
from app.deployments.registry.db.tables import rows_after
from app.deployments.registry.db.tenant_tables import api_keys, projects, service_accounts
from app.deployments.registry.models import not_found_error
from app.deployments.tenancy.audited_transaction import AuditedTransaction, audited_transaction, checked_name, new_id
from app.deployments.tenancy.auth.key_crypto import new_key
from app.deployments.tenancy.models import ApiKey, IssuedKey, Role, ServiceAccount
from app.engine.errors import InvalidRequest

#: The longest life of a key, counted from its creation or from a change of its expiry: ten years.
MAX_LIFE_S = 10 * 365 * 86_400


class ApiKeyStore:
    """Raises NotFound for unknown ids, InvalidRequest for invalid values."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._base = database.base_digest

    def create_account(
        self,
        project_id: str,
        name: str,
        *,
        with_key: bool,
        expires_in_s: int | None,
        role: Role = "member",
        actor: str,
    ) -> tuple[ServiceAccount, IssuedKey | None]:
        """A service account and, with `with_key`, its first key; `role` says what its keys may do."""
        with audited_transaction(self._database, actor) as change:
            change.active_project(project_id)
            account_id = new_id("svc_acct")
            name = checked_name(name, "service account")
            shown_role = role if with_key or role != "member" else "none"  # OpenAI's word until it has a key
            change.insert(
                service_accounts, id=account_id, project_id=project_id, name=name, role=shown_role,
                created_s=change.now_s,
            )  # fmt: skip
            change.audit("service_account.created", account_id, project_id, name=name)
            issued = _issue(change, "Secret Key", expires_in_s, project_id, account_id, role) if with_key else None
            return ServiceAccount(account_id, project_id, name, shown_role, change.now_s), issued

    def update_account(
        self, project_id: str, account_id: str, *, name: str | None = None, role: Role | None = None, actor: str
    ) -> tuple[ServiceAccount, list[ApiKey]]:
        """Change the name, or the role with all keys' rights; None keeps a value. Returns the account and its keys."""
        new = {"name": None if name is None else checked_name(name, "service account"), "role": role}
        changes = {field: value for field, value in new.items() if value is not None}
        with audited_transaction(self._database, actor) as change:
            row = change.row(service_accounts, account_id, "service account", project_id=project_id, deleted_s=None)
            if changes:
                change.update(service_accounts, account_id, **changes)
            if role is not None:
                change.update_all(api_keys, (api_keys.c.service_account_id == account_id,), role=role)
            change.audit("service_account.updated", account_id, project_id, **changes)
            return _account({**row, **changes}), self._keys_of(change.connection, account_id)

    def delete_account(self, project_id: str, account_id: str, *, actor: str) -> list[ApiKey]:
        """Delete the account and revoke its keys; returns them."""
        with audited_transaction(self._database, actor) as change:
            change.row(service_accounts, account_id, "service account", project_id=project_id, deleted_s=None)
            change.update(service_accounts, account_id, deleted_s=change.now_s)
            change.audit("service_account.deleted", account_id, project_id)
            of_account = api_keys.c.service_account_id == account_id
            change.update_all(api_keys, (of_account, api_keys.c.revoked_s.is_(None)), revoked_s=change.now_s)
            return self._keys_of(change.connection, account_id)

    def account(self, project_id: str, account_id: str) -> ServiceAccount:
        place = (service_accounts.c.project_id == project_id, service_accounts.c.deleted_s.is_(None))
        with self._database.read() as connection:
            row = self._row(connection, service_accounts, account_id, *place)
        if row is None:
            raise not_found_error("service account", account_id)
        return _account(row)

    def accounts(self, project_id: str, limit: int, after: str | None) -> list[ServiceAccount]:
        place = (service_accounts.c.project_id == project_id, service_accounts.c.deleted_s.is_(None))
        with self._database.read() as connection:
            self._check_project(connection, project_id)
            return [_account(row) for row in self._page(connection, service_accounts, limit, after, *place)]

    def create_key(
        self, project_id: str, account_id: str, name: str, expires_in_s: int | None, *, actor: str
    ) -> IssuedKey:
        """Another key of a service account."""
        with audited_transaction(self._database, actor) as change:
            change.active_project(project_id)
            row = change.row(service_accounts, account_id, "service account", project_id=project_id, deleted_s=None)
            role: Role = "member" if row["role"] == "none" else row["role"]
            return _issue(change, name, expires_in_s, project_id, account_id, role)

    def create_admin_key(self, name: str, expires_in_s: int | None, *, actor: str) -> IssuedKey:
        with audited_transaction(self._database, actor) as change:
            return _issue(change, name, expires_in_s, None, None, "member")

    def expire_key(self, project_id: str, key_id: str, expires_in_s: int, *, actor: str) -> ApiKey:
        """Let a key expire this many seconds from now."""
        with audited_transaction(self._database, actor) as change:
            row = change.row(api_keys, key_id, "API key", project_id=project_id, revoked_s=None)
            if not _key(row).is_valid(change.now_s):
                raise InvalidRequest(f"key {key_id} has expired; make another one")
            expires_s = change.now_s + _checked_life(expires_in_s)
            change.update(api_keys, key_id, expires_s=expires_s)
            change.audit("api_key.updated", key_id, project_id, expires_s=expires_s)
            return _key({**row, "expires_s": expires_s})

    def revoke_key(self, project_id: str | None, key_id: str, *, actor: str) -> ApiKey:
        """Revoke a project's key or, with None, an admin key."""
        with audited_transaction(self._database, actor) as change:
            row = change.row(api_keys, key_id, "API key", project_id=project_id, revoked_s=None)
            change.update(api_keys, key_id, revoked_s=change.now_s)
            change.audit("api_key.deleted", key_id, project_id)
            return _key({**row, "revoked_s": change.now_s})

    def key(self, project_id: str | None, key_id: str) -> ApiKey:
        with self._database.read() as connection:
            row = self._row(
                connection, api_keys, key_id, api_keys.c.project_id == project_id, api_keys.c.revoked_s.is_(None)
            )
        if row is None:
            raise not_found_error("API key", key_id)
        return _key(row)

    def keys(self, project_id: str | None, limit: int, after: str | None, *, is_newest_first: bool) -> list[ApiKey]:
        """The keys of a project or, with None, the admin keys, without revoked ones."""
        place = (api_keys.c.project_id == project_id, api_keys.c.revoked_s.is_(None))
        with self._database.read() as connection:
            if project_id is not None:
                self._check_project(connection, project_id)
            rows = self._page(connection, api_keys, limit, after, *place, is_newest_first=is_newest_first)
            return [_key(row) for row in rows]

    def note_use(self, used_s: Mapping[str, float]) -> None:
        """Record when keys were last used, by id; older times change nothing."""
        with self._database.write() as connection:
            for key_id, time_s in used_s.items():
                place = and_(api_keys.c.base_digest == self._base, api_keys.c.id == key_id)
                older = or_(api_keys.c.last_used_s.is_(None), api_keys.c.last_used_s < time_s)
                connection.execute(update(api_keys).where(place, older).values(last_used_s=time_s))

    def newer(self, connection: Connection, revision: int) -> list[ApiKey]:
        """Keys changed since a revision; 0 gives all."""
        query = select(api_keys).where(api_keys.c.base_digest == self._base, api_keys.c.revision > revision)
        return [_key(row) for row in connection.execute(query).mappings()]

    def _keys_of(self, connection: Connection, account_id: str) -> list[ApiKey]:
        mine = and_(api_keys.c.base_digest == self._base, api_keys.c.service_account_id == account_id)
        return [_key(row) for row in connection.execute(select(api_keys).where(mine)).mappings()]

    def _check_project(self, connection: Connection, project_id: str) -> None:
        if self._row(connection, projects, project_id) is None:
            raise not_found_error("project", project_id)

    def _row(
        self, connection: Connection, table: Table, row_id: str, *conditions: ColumnElement[bool]
    ) -> Mapping[Any, Any] | None:
        query = select(table).where(table.c.base_digest == self._base, table.c.id == row_id, *conditions)
        return connection.execute(query).mappings().first()

    def _page(
        self,
        connection: Connection,
        table: Table,
        limit: int,
        after: str | None,
        *conditions: ColumnElement[bool],
        is_newest_first: bool = False,
    ) -> Sequence[Mapping[Any, Any]]:
        """Up to `limit` rows in order of creation, after the one with the id `after`."""
        query = select(table).where(table.c.base_digest == self._base, *conditions)
        last = None if after is None else self._row(connection, table, after)
        if after is not None and last is None:
            raise not_found_error("entry", after)
        query = rows_after(query, table, last, is_newest_first=is_newest_first).limit(limit)
        return connection.execute(query).mappings().all()


def _issue(
    change: AuditedTransaction,
    name: str,
    expires_in_s: int | None,
    project_id: str | None,
    account_id: str | None,
    role: Role,
) -> IssuedKey:
    made = new_key(is_admin=project_id is None)
    values: dict[str, Any] = {
        "id": new_id("key"),
        "digest": made.digest,
        "redacted": made.redacted,
        "name": checked_name(name, "key"),
        "created_s": change.now_s,
        "project_id": project_id,
        "service_account_id": account_id,
        "expires_s": None if expires_in_s is None else change.now_s + _checked_life(expires_in_s),
        "role": role,
    }
    change.insert(api_keys, is_admin=project_id is None, **values)
    change.audit("api_key.created", values["id"], project_id, name=name)
    return IssuedKey(ApiKey(**values), made.value)


def _checked_life(seconds: int) -> int:
    if not 1 <= seconds <= MAX_LIFE_S:
        raise InvalidRequest(
            f"expires_in_seconds is {seconds}; it is from 1 to {MAX_LIFE_S}", param="expires_in_seconds"
        )
    return seconds


def _key(row: Mapping[Any, Any]) -> ApiKey:
    return ApiKey(**{field.name: row[field.name] for field in fields(ApiKey)})


def _account(row: Mapping[Any, Any]) -> ServiceAccount:
    return ServiceAccount(row["id"], row["project_id"], row["name"], row["role"], row["created_s"])
