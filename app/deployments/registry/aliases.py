"""Aliases: names that stand for adapters by weight, for canaries, promotion and rollback.

Every change is a new version. Versions are stored, so a rollback is one write and restores exactly what was in force.
An alias points only to registered adapters and the base; a target may have a version, and then the alias serves no
other contents. `view.choose_target` picks the target of a request. A public alias may have the base's name: requests
for that name go to its targets, among which that name still means the base.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Select, and_, insert, or_, select, update

from app.deployments.registry.db.database import Database
from app.deployments.registry.db.tables import adapters, alias_targets, aliases, name_condition
from app.deployments.registry.event_log import NewEvent, record_audit, record_events
from app.deployments.registry.feed.view import Entry, Key
from app.deployments.registry.models import LIVE_STATES, AliasEntry, AliasTarget, AliasVersion, not_found_error
from app.engine.errors import InvalidRequest, ModelNotFound, NotFound
from app.model_names import split_version
from app.redaction import without_keys

MAX_TARGETS = 16

#: The targets of the version in force.
_IN_FORCE = and_(
    alias_targets.c.base_digest == aliases.c.base_digest,
    alias_targets.c.tenant_id == aliases.c.tenant_id,
    alias_targets.c.name == aliases.c.name,
    alias_targets.c.version == aliases.c.version,
)


class Aliases:
    """Every call is one transaction."""

    def __init__(self, database: Database, base_names: Collection[str] = ()) -> None:
        """base_names: names of the base model, which an alias may point to and no adapter may have."""
        self.base_names = frozenset(base_names)
        self._database = database
        self._base = database.base_digest

    def put(self, name: str, targets: Mapping[str, float], *, tenant_id: str, who: str) -> AliasEntry:
        """Send an alias's requests to these adapters, by weight. Raises InvalidRequest, NotFound."""
        _check_weights(targets)
        with self._database.write() as connection:
            return self._put(connection, name, targets, tenant_id, who)

    def promote(self, name: str, target: str, *, tenant_id: str, who: str) -> AliasEntry:
        """Send all of an alias's requests to one of its targets. Raises NotFound, InvalidRequest."""
        with self._database.write() as connection:
            if not is_alias(connection, self._base, tenant_id, name):
                raise _absent(name)
            targets = self._entry(connection, tenant_id, name).targets
            if all(item.name != target for item in targets):
                known = ", ".join(repr(item.name) for item in targets)
                raise InvalidRequest(
                    f"{without_keys(target)[:80]!r} is no target of alias {name!r}, which has {known}", param="target"
                )
            return self._put(connection, name, {target: 1.0}, tenant_id, who)

    def rollback(self, name: str, version: int | None = None, *, tenant_id: str, who: str) -> AliasEntry:
        """Restore a version, by default the one before the last change. Raises NotFound, InvalidRequest."""
        key = name_condition(aliases, self._base, tenant_id, name)
        with self._database.write() as connection:
            old = connection.execute(select(aliases).where(*key, aliases.c.removed.is_(False))).mappings().first()
            if old is None:
                raise _absent(name)
            target_version = old["previous_version"] if version is None else version
            targets = self._targets(connection, tenant_id, name, target_version) if target_version is not None else ()
            if not targets:
                raise InvalidRequest(
                    f"alias {name!r} has no "
                    f"{'earlier version' if target_version is None else f'version {target_version}'}; "
                    f"it is at version {old['version']}",
                    param="version",
                )
            self._check_targets(connection, tenant_id, [item.name for item in targets])
            connection.execute(
                update(aliases)
                .where(*key)
                .values(version=target_version, previous_version=old["version"], **self._change(connection))
            )
            self._record(
                connection, who, "roll back alias", name, tenant_id, {"from": old["version"], "to": target_version}
            )
            return self._entry(connection, tenant_id, name)

    def remove(self, name: str, *, tenant_id: str, who: str) -> AliasEntry:
        """Remove an alias; version numbers continue if it is put again. Raises NotFound."""
        key = name_condition(aliases, self._base, tenant_id, name)
        with self._database.write() as connection:
            if not is_alias(connection, self._base, tenant_id, name):
                raise _absent(name)
            entry = self._entry(connection, tenant_id, name)
            connection.execute(update(aliases).where(*key).values(removed=True, **self._change(connection)))
            self._record(connection, who, "remove alias", name, tenant_id, {"version": entry.version})
        return entry

    def get(self, name: str, *, tenant_id: str) -> AliasEntry | None:
        with self._database.read() as connection:
            is_here = is_alias(connection, self._base, tenant_id, name)
            return self._entry(connection, tenant_id, name) if is_here else None

    def entries(self) -> list[AliasEntry]:
        """All aliases in order of name."""
        query = _with_targets(self._base).where(aliases.c.removed.is_(False))
        with self._database.read() as connection:
            return [entry for _, entry in _read(connection, query)]

    def versions(self, name: str, *, tenant_id: str) -> list[AliasVersion]:
        """Everything an alias has stood for, newest first. Raises NotFound."""
        query = (
            select(alias_targets.c.version, alias_targets.c.target, alias_targets.c.weight)
            .where(*name_condition(alias_targets, self._base, tenant_id, name))
            .order_by(alias_targets.c.version.desc(), alias_targets.c.target)
        )
        with self._database.read() as connection:
            if not is_alias(connection, self._base, tenant_id, name):
                raise _absent(name)
            in_force = self._entry(connection, tenant_id, name).version
            rows = connection.execute(query).all()
        targets: dict[int, list[AliasTarget]] = defaultdict(list)
        for version, target, weight in rows:
            targets[version].append(AliasTarget(target, weight))
        return [AliasVersion(version, tuple(of), version == in_force) for version, of in targets.items()]

    def _put(
        self, connection: Connection, name: str, targets: Mapping[str, float], tenant_id: str, who: str
    ) -> AliasEntry:
        key = name_condition(aliases, self._base, tenant_id, name)
        place = {"base_digest": self._base, "tenant_id": tenant_id, "name": name}
        if _is_adapter(connection, self._base, tenant_id, name):
            raise InvalidRequest(f"{name!r} is an adapter; choose another name for the alias", param="name")
        self._check_targets(connection, tenant_id, targets)
        old = connection.execute(select(aliases).where(*key)).mappings().first()
        version = 1 if old is None else old["last_version"] + 1
        values = {
            "version": version,
            "previous_version": None if old is None or old["removed"] else old["version"],
            "last_version": version,
            "removed": False,
            **self._change(connection),
        }
        if old is None:
            connection.execute(insert(aliases).values(**place, **values))
        else:
            connection.execute(update(aliases).where(*key).values(**values))
        rows = [place | {"version": version, "target": target, "weight": weight} for target, weight in targets.items()]
        connection.execute(insert(alias_targets), rows)
        self._record(connection, who, "put alias", name, tenant_id, {"version": version, "targets": dict(targets)})
        return self._entry(connection, tenant_id, name)

    def _change(self, connection: Connection) -> dict[str, float]:
        """Columns that every change sets."""
        return {"updated_s": self._database.clock(), "revision": self._database.next_revision(connection)}

    def _entry(self, connection: Connection, tenant_id: str, name: str) -> AliasEntry:
        row = (
            connection.execute(select(aliases).where(*name_condition(aliases, self._base, tenant_id, name)))
            .mappings()
            .one()
        )
        return _alias(row, self._targets(connection, tenant_id, name, row["version"]))

    def _targets(self, connection: Connection, tenant_id: str, name: str, version: int) -> tuple[AliasTarget, ...]:
        query = select(alias_targets.c.target, alias_targets.c.weight).where(
            *name_condition(alias_targets, self._base, tenant_id, name), alias_targets.c.version == version
        )
        rows = connection.execute(query.order_by(alias_targets.c.target)).all()
        return tuple(AliasTarget(target, weight) for target, weight in rows)

    def _check_targets(
        self, connection: Connection, tenant_id: str, targets: Mapping[str, float] | Sequence[str]
    ) -> None:
        absent = {
            target
            for target in targets
            if not self._is_base(target) and not _is_adapter(connection, self._base, tenant_id, target)
        }
        if absent:
            raise ModelNotFound(
                f"no adapter is registered as {without_keys(min(absent))[:80]!r}; register it before an alias points "
                "to it"
            )

    def _is_base(self, target: str) -> bool:
        name, version = split_version(target)
        return name in self.base_names and (version is None or version.is_of(self._base))

    def _record(
        self, connection: Connection, who: str, action: str, name: str, tenant_id: str, detail: Mapping[str, Any]
    ) -> None:
        record_audit(connection, self._database, who, action, name, tenant_id, detail)
        record_events(connection, self._database, [NewEvent(action, name, tenant_id, detail=json.dumps(detail))])


def changed_aliases(connection: Connection, base_digest: str, after: int) -> list[tuple[int, Key, Entry | None]]:
    """(revision, key, alias or None if removed) of changes after `after`; after 0: only aliases that exist."""
    query = _with_targets(base_digest)
    query = query.where(aliases.c.revision > after) if after else query.where(aliases.c.removed.is_(False))
    return [
        (row["revision"], (entry.tenant_id, entry.name), None if row["removed"] else entry)
        for row, entry in _read(connection, query)
    ]


def is_alias(connection: Connection, base_digest: str, tenant_id: str, name: str) -> bool:
    query = select(aliases.c.name).where(
        *name_condition(aliases, base_digest, tenant_id, name), aliases.c.removed.is_(False)
    )
    return connection.scalar(query) is not None


def aliases_to(connection: Connection, base_digest: str, tenant_id: str, target: str) -> Sequence[str]:
    """Names of the aliases whose version in force points to this adapter."""
    query = (
        select(aliases.c.name)
        .join(alias_targets, _IN_FORCE)
        .where(
            aliases.c.base_digest == base_digest,
            aliases.c.tenant_id == tenant_id,
            aliases.c.removed.is_(False),
            or_(alias_targets.c.target == target, alias_targets.c.target.startswith(f"{target}@", autoescape=True)),
        )
        .order_by(aliases.c.name)
    )
    return connection.scalars(query).all()


def _with_targets(base_digest: str) -> Select[Any]:
    return (
        select(aliases, alias_targets.c.target, alias_targets.c.weight)
        .join(alias_targets, _IN_FORCE)
        .where(aliases.c.base_digest == base_digest)
        .order_by(aliases.c.tenant_id, aliases.c.name, alias_targets.c.target)
    )


def _read(connection: Connection, query: Select[Any]) -> list[tuple[Mapping[Any, Any], AliasEntry]]:
    """Each alias's row and entry; `query` returns one row per target."""
    targets: dict[Key, list[AliasTarget]] = defaultdict(list)
    alias_rows: dict[Key, Mapping[Any, Any]] = {}
    for row in connection.execute(query).mappings():
        key = (row["tenant_id"], row["name"])
        alias_rows[key] = row
        targets[key].append(AliasTarget(row["target"], row["weight"]))
    return [(row, _alias(row, tuple(targets[key]))) for key, row in alias_rows.items()]


def _is_adapter(connection: Connection, base_digest: str, tenant_id: str, name: str) -> bool:
    """Whether an adapter of this name, and version if it has one, is registered."""
    is_present = (*name_condition(adapters, base_digest, tenant_id, name), adapters.c.state.in_(LIVE_STATES))
    return connection.scalar(select(adapters.c.name).where(*is_present)) is not None


def _check_weights(targets: Mapping[str, float]) -> None:
    if not 1 <= len(targets) <= MAX_TARGETS:
        raise InvalidRequest(f"an alias has 1 to {MAX_TARGETS} targets, not {len(targets)}", param="targets")
    for target, weight in targets.items():
        if not (math.isfinite(weight) and weight > 0):
            raise InvalidRequest(
                f"target {target[:80]!r} has weight {weight}; a weight is a number above 0", param="targets"
            )


def _alias(row: Mapping[Any, Any], targets: tuple[AliasTarget, ...]) -> AliasEntry:
    return AliasEntry(
        row["name"], targets, row["version"], row["updated_s"], row["previous_version"], tenant_id=row["tenant_id"]
    )


def _absent(name: str) -> NotFound:
    return not_found_error("alias", name, "; GET /v1/aliases lists them")
