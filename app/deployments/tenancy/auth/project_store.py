"""Projects in the database: settings, permissions, limits and shared adapters. Each call is one transaction;
thread-safe.

An archived project stays so that its usage can be read; its keys are invalid.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from sqlalchemy import Connection, and_, delete, func, insert, select

from app.deployments.registry.db.database import Database
from app.deployments.registry.db.tables import adapters, registries, rows_after
from app.deployments.registry.db.tenant_tables import adapter_shares, projects, rate_limits
from app.deployments.registry.models import LIVE_STATES, not_found_error
from app.deployments.tenancy.audited_transaction import audited_transaction, checked_name, new_id
from app.deployments.tenancy.auth.key_crypto import SecretCipher, derived_salt
from app.deployments.tenancy.models import NO_LIMITS, UNLIMITED, RateLimit, Tenant, TenantLimits
from app.deployments.tenancy.quota.limits import AdapterQuotaError
from app.engine.errors import InvalidRequest
from app.model_names import check_model_id, check_name

#: Weights outside this range are mistakes that would starve a tenant.
MIN_WEIGHT, MAX_WEIGHT = 0.001, 1000.0
MAX_MODEL_IDS = 10_000
#: Projects whose limits are selected by id; for more, all limits are read.
MAX_NAMED_ROWS = 1000

#: Settings that `configure` may change.
_SETTINGS = ("weight", "enforce", "max_concurrent", "max_adapters", "max_adapter_bytes", "calls_per_min", "hub_token")
#: A bearer token of the hub.
_HUB_TOKEN = re.compile(r"[!-~]{1,1024}")


class ProjectStore:
    """Raises NotFound for unknown projects, InvalidRequest for invalid values."""

    def __init__(
        self, database: Database, environ: Mapping[str, str] | None = None, *, base_digest: str | None = None
    ) -> None:
        """`environ` may have the key that hub tokens are encrypted by. `base_digest`: of the base model with the
        projects; default: the database's. Raises ConfigError."""
        self._database = database
        self._base = base_digest or database.base_digest
        self._cipher = SecretCipher(os.environ if environ is None else environ)

    def create(self, name: str, *, actor: str, limits: TenantLimits = NO_LIMITS) -> Tenant:
        with audited_transaction(self._database, actor) as change:
            project_id = new_id("proj")
            change.insert(
                projects,
                id=project_id,
                name=checked_name(name, "project"),
                created_s=change.now_s,
                weight=1.0,
                enforce=True,
                salt_secret=secrets.token_hex(32),
                salt_version=1,
                model_ids="[]",
                max_concurrent=limits.max_concurrent,
                max_adapters=limits.max_adapters,
                max_adapter_bytes=limits.max_adapter_bytes,
                spend_cents=limits.spend_cents,
                calls_per_min=limits.calls_per_min,
            )
            for model, rate in limits.rates.items():
                change.insert(rate_limits, project_id=project_id, model=model, **asdict(rate))
            change.audit("project.created", project_id, project_id, name=name)
            return self._tenant(change.connection, project_id)

    def rename(self, project_id: str, name: str, *, actor: str) -> Tenant:
        with audited_transaction(self._database, actor) as change:
            change.active_project(project_id)
            change.update(projects, project_id, name=checked_name(name, "project"))
            change.audit("project.updated", project_id, project_id, name=name)
            return self._tenant(change.connection, project_id)

    def archive(self, project_id: str, *, actor: str) -> Tenant:
        """Archive a project; a second time changes nothing."""
        with audited_transaction(self._database, actor) as change:
            if change.row(projects, project_id, "project")["archived_s"] is None:
                change.update(projects, project_id, archived_s=change.now_s)
                change.audit("project.archived", project_id, project_id)
            return self._tenant(change.connection, project_id)

    def configure(self, project_id: str, settings: Mapping[str, Any], *, actor: str) -> Tenant:
        """Change the settings that OpenAI's objects lack (`_SETTINGS`). A hub token is stored encrypted, and no record
        has it."""
        if unknown := settings.keys() - set(_SETTINGS):
            raise InvalidRequest(f"a tenant has no setting {min(unknown)[:80]!r}")
        weight = settings.get("weight", 1.0)
        if not (math.isfinite(weight) and MIN_WEIGHT <= weight <= MAX_WEIGHT):
            raise InvalidRequest(f"weight is {weight:g}; it is from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}", param="weight")
        for name in _SETTINGS[2:-1]:
            _check_limit(name, settings.get(name))
        stored, shown = dict(settings), dict(settings)
        if token := settings.get("hub_token"):
            if not _HUB_TOKEN.fullmatch(token):
                raise InvalidRequest("hub_token is no token: 1 to 1024 printable ASCII characters", param="hub_token")
            stored["hub_token"], shown["hub_token"] = self._cipher.encrypt(token, self._context(project_id)), "set"
        with audited_transaction(self._database, actor) as change:
            change.active_project(project_id)
            change.update(projects, project_id, **stored)
            change.audit("project.updated", project_id, project_id, **shown)
            return self._tenant(change.connection, project_id)

    def hub_token(self, project_id: str) -> str | None:
        """The hub token of a project; None if it has none, or there is no such project. Raises NotReady."""
        query = select(projects.c.hub_token).where(projects.c.base_digest == self._base, projects.c.id == project_id)
        with self._database.read() as connection:
            encrypted = connection.scalar(query)
        return None if encrypted is None else self._cipher.decrypt(encrypted, self._context(project_id))

    def _context(self, project_id: str) -> str:
        return f"project {project_id} (base model {self._base[:12]})"

    def rotate_salt(self, project_id: str, *, actor: str) -> Tenant:
        """Change the salt, so that nothing cached of the project is found again."""
        with audited_transaction(self._database, actor) as change:
            version = change.active_project(project_id)["salt_version"] + 1
            change.update(projects, project_id, salt_version=version)
            change.audit("project.updated", project_id, project_id, salt_version=version)
            return self._tenant(change.connection, project_id)

    def permit_models(self, project_id: str, mode: str | None, model_ids: Collection[str], *, actor: str) -> Tenant:
        """Allow or deny these models and adapters; mode None allows all."""
        if mode not in (None, "allow_list", "deny_list"):
            raise InvalidRequest(f"mode is {mode[:80]!r}; it is allow_list or deny_list", param="mode")
        if len(model_ids) > MAX_MODEL_IDS:
            raise InvalidRequest(f"{len(model_ids)} models exceed {MAX_MODEL_IDS}", param="model_ids")
        for each in model_ids:
            check_model_id(each)
        with audited_transaction(self._database, actor) as change:
            change.active_project(project_id)
            change.update(projects, project_id, model_mode=mode, model_ids=json.dumps(sorted(set(model_ids))))
            change.audit("project.updated", project_id, project_id, model_mode=mode, models=len(model_ids))
            return self._tenant(change.connection, project_id)

    def limit_rates(self, project_id: str, model: str, changes: Mapping[str, int], *, actor: str) -> Tenant:
        """Change a model's rate limits; `UNLIMITED` and above become None."""
        check_model_id(model)
        for name, value in changes.items():
            _check_limit(name, value)
        with audited_transaction(self._database, actor) as change:
            change.active_project(project_id)
            place = and_(
                rate_limits.c.base_digest == self._base,
                rate_limits.c.project_id == project_id,
                rate_limits.c.model == model,
            )
            old = change.connection.execute(select(rate_limits).where(place)).mappings().first()
            values = asdict(RateLimit() if old is None else _rate(old))
            values |= {name: None if value >= UNLIMITED else value for name, value in changes.items()}
            change.connection.execute(delete(rate_limits).where(place))
            if any(value is not None for value in values.values()):
                change.insert(rate_limits, project_id=project_id, model=model, **values)
            change.update(projects, project_id)
            change.audit("rate_limit.updated", model, project_id, **changes)
            return self._tenant(change.connection, project_id)

    def limit_spend(self, project_id: str, cents: int | None, *, actor: str) -> Tenant:
        """Set the spend limit per calendar month (UTC); None means unlimited."""
        _check_limit("threshold_amount", cents)
        with audited_transaction(self._database, actor) as change:
            change.active_project(project_id)
            change.update(projects, project_id, spend_cents=cents)
            change.audit("project.updated", project_id, project_id, spend_cents=cents)
            return self._tenant(change.connection, project_id)

    def share(self, owner_id: str, name: str, project_ids: Collection[str], *, actor: str) -> list[Tenant]:
        """Share an adapter name of `owner_id` with exactly these projects. Returns all whose view may have changed."""
        check_name(name)
        place = and_(
            adapter_shares.c.base_digest == self._base,
            adapter_shares.c.owner_id == owner_id,
            adapter_shares.c.name == name,
        )
        with audited_transaction(self._database, actor) as change:
            change.active_project(owner_id)
            for project_id in project_ids:
                change.active_project(project_id)
            before = set(change.connection.scalars(select(adapter_shares.c.project_id).where(place)))
            change.connection.execute(delete(adapter_shares).where(place))
            rows = [
                {"base_digest": self._base, "owner_id": owner_id, "name": name, "project_id": project_id}
                for project_id in sorted(set(project_ids) - {owner_id})
            ]
            if rows:
                change.connection.execute(insert(adapter_shares), rows)
            change.audit("resource.shared", name, owner_id, projects=sorted(project_ids))
            concerned = sorted(before | set(project_ids))
            for project_id in concerned:
                change.update(projects, project_id)
            return [self._tenant(change.connection, each) for each in concerned]

    def shares(self, owner_id: str) -> dict[str, list[str]]:
        """The projects that each adapter name of `owner_id` is shared with."""
        query = select(adapter_shares.c.name, adapter_shares.c.project_id).where(
            adapter_shares.c.base_digest == self._base, adapter_shares.c.owner_id == owner_id
        )
        found: dict[str, list[str]] = defaultdict(list)
        with self._database.read() as connection:
            for name, project_id in connection.execute(query.order_by(adapter_shares.c.name)):
                found[name].append(project_id)
        return dict(found)

    def get(self, project_id: str) -> Tenant:
        with self._database.read() as connection:
            return self._tenant(connection, project_id)

    def page(self, limit: int, after: str | None, *, with_archived: bool) -> list[Tenant]:
        """Up to `limit` projects, oldest first, after the one with the id `after`."""
        query = select(projects).where(projects.c.base_digest == self._base)
        if not with_archived:
            query = query.where(projects.c.archived_s.is_(None))
        with self._database.read() as connection:
            last = None if after is None else self._row(connection, after)
            rows = connection.execute(rows_after(query, projects, last).limit(limit)).mappings().all()
            return self._tenants(connection, rows)

    def newer(self, connection: Connection, revision: int) -> list[Tenant]:
        """Projects changed since a revision; 0 gives all."""
        query = select(projects).where(projects.c.base_digest == self._base, projects.c.revision > revision)
        rows = connection.execute(query).mappings().all()
        return self._tenants(connection, rows, is_all=revision == 0 or len(rows) > MAX_NAMED_ROWS)

    def _tenant(self, connection: Connection, project_id: str) -> Tenant:
        return self._tenants(connection, [self._row(connection, project_id)])[0]

    def _row(self, connection: Connection, project_id: str) -> Mapping[Any, Any]:
        query = select(projects).where(projects.c.base_digest == self._base, projects.c.id == project_id)
        row = connection.execute(query).mappings().first()
        if row is None:
            raise not_found_error("project", project_id)
        return row

    def _tenants(
        self, connection: Connection, rows: Sequence[Mapping[Any, Any]], *, is_all: bool = False
    ) -> list[Tenant]:
        limits = select(rate_limits).where(rate_limits.c.base_digest == self._base)
        shared = select(adapter_shares).where(adapter_shares.c.base_digest == self._base)
        if not is_all:
            ids = [row["id"] for row in rows]
            limits = limits.where(rate_limits.c.project_id.in_(ids))
            shared = shared.where(adapter_shares.c.project_id.in_(ids))
        rates: dict[str, dict[str, RateLimit]] = defaultdict(dict)
        for row in connection.execute(limits).mappings():
            rates[row["project_id"]][row["model"]] = _rate(row)
        shares: dict[str, set[tuple[str, str]]] = defaultdict(set)
        for row in connection.execute(shared).mappings():
            shares[row["project_id"]].add((row["owner_id"], row["name"]))
        return [_tenant(row, rates[row["id"]], frozenset(shares[row["id"]])) for row in rows]


class AdapterQuota:
    """The catalog's check at registration: number and total bytes of a project's adapters, of all base models.

    Called inside the transaction and after the change, so concurrent loads cannot pass together.
    """

    def __init__(self, base_digest: str) -> None:
        """`base_digest`: of the base model with the projects."""
        self._base = base_digest

    def __call__(self, connection: Connection, tenant_id: str) -> None:
        """Raises AdapterQuotaError. Unknown projects, and those whose limits are not enforced, pass."""
        columns = projects.c
        query = select(columns.max_adapters, columns.max_adapter_bytes).where(
            columns.base_digest == self._base, columns.id == tenant_id, columns.enforce.is_(True)
        )
        row = connection.execute(query).first()
        if row is None or (row.max_adapters is None and row.max_adapter_bytes is None):
            return
        usage = select(func.count(), func.coalesce(func.sum(adapters.c.size_bytes), 0)).where(
            adapters.c.base_digest.in_(select(registries.c.base_digest)),  # a condition on it uses the primary key
            adapters.c.tenant_id == tenant_id,
            adapters.c.state.in_(LIVE_STATES),
        )
        number, size_bytes = connection.execute(usage).one()
        _check_quota("max_adapters", "adapters", number, row.max_adapters)
        _check_quota("max_adapter_bytes", "bytes of adapters", size_bytes, row.max_adapter_bytes)


def _rate(row: Mapping[Any, Any]) -> RateLimit:
    return RateLimit(row["requests_per_min"], row["tokens_per_min"], row["requests_per_day"])


def _tenant(row: Mapping[Any, Any], rates: Mapping[str, RateLimit], shared: frozenset[tuple[str, str]]) -> Tenant:
    names = ("max_concurrent", "max_adapters", "max_adapter_bytes", "spend_cents", "calls_per_min")
    limits = TenantLimits(rates, *(row[name] for name in names))
    return Tenant(
        row["id"],
        row["name"],
        row["created_s"],
        row["archived_s"],
        row["weight"],
        derived_salt(bytes.fromhex(row["salt_secret"]), row["salt_version"]),
        row["enforce"],
        row["model_mode"],
        frozenset(json.loads(row["model_ids"])),
        limits,
        shared,
        row["hub_token"] is not None,
    )


def _check_limit(name: str, value: int | None) -> None:
    if value is not None and value < 0:
        raise InvalidRequest(f"{name} is {value}; a limit is 0 or more", param=name)


def _check_quota(setting: str, what: str, would_have: int, may_have: int | None) -> None:
    if may_have is not None and would_have > may_have:
        raise AdapterQuotaError(
            f"the project would have {would_have} {what} and may have {may_have}; unload one, or raise {setting}",
            "adapters",
            None,
        )
