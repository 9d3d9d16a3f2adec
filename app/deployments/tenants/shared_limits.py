"""What is taken of limits where several processes lend them: in the registry's database, a row per meter.

In: what one owner's ingresses want. Out: what each gets, by the rules of `lending`. Owners of several services cannot
reach each other, but all of them have the database. Rule: each call is one transaction and writers take turns, so what
all owners together have lent is never above a limit. What an owner's ingresses hold counts while that owner lives. Of
rates the database's clock says how much time has passed: those of owners, which may differ, only say which month it is.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sqlalchemy import Connection, and_, bindparam, delete, false, insert, or_, select, update

from app.deployments.registry.database import Database
from app.deployments.registry.tenant_tables import shared_limits
from app.deployments.tenants.lending import Asked, Counter, Grant, Owners, Want, lend, new_counter
from app.deployments.tenants.limits import PERIOD_S, CountCounter, Meter, MeterKind, RateCounter, month_of
from app.engine.errors import NotReady

_PLACE = and_(*(column == bindparam(f"its_{column.name}") for column in shared_limits.primary_key))
_CHANGE = update(shared_limits).where(_PLACE).values(state=bindparam("new_state"))
_BEGIN = insert(shared_limits)
#: Of more projects than this all rows are read: databases bound how many values a statement has.
_MAX_NAMED = 1000
#: How a state names a holder that has units (`_state`); who has only used some is named without the bracket.
_HOLDS = "{}: ["


class _Now(NamedTuple):
    """One moment: by the clock of the owner that calls, and by the database's."""

    owner_s: float
    database_s: float


@dataclass(slots=True)
class _Row:
    """`owner_of`: to which owner each holder belongs. `state`: as it is in the database; empty if it is not there."""

    counter: Counter
    owner_of: dict[str, str] = field(default_factory=dict)
    month: str = ""
    state: str = ""


class SharedLimits:
    """Called in threads. `spent` tells what a tenant has spent in a time's month so far, as the ledger has it.

    Each call raises NotReady, and changes nothing, when the database does not answer. So does `lend` when it answers
    only after `deadline_s` of `monotonic`, when nobody waits any more; the others, which take longer the more rows
    there are, have done what they should however late.
    """

    def __init__(
        self,
        database: Database,
        spent: Callable[[Connection, str, float], int],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._database = database
        self._spent = spent
        self.monotonic = monotonic

    def lend(self, owners: Owners, asked: Asked, now_s: float, deadline_s: float) -> list[Grant]:
        """As `Lender.lend`."""
        with self._database.write() as connection:
            now = self._now(connection, now_s)
            rows = self._rows(connection, owners, dict(zip(_meters(asked.wants), asked.limits, strict=True)), now)
            grants = self._lend(rows, owners, asked, now_s)
            self._write(connection, rows, now)
            self._check(deadline_s)
            return grants

    def left(self, owners: Owners, limits: Mapping[Meter, int], now_s: float) -> list[int]:
        """How much of each limit is neither used nor lent to an ingress."""
        with self._database.read() as connection:
            rows = self._rows(connection, owners, limits, self._now(connection, now_s))
        asked = Asked("", [Want(meter) for meter in limits], list(limits.values()))
        return [grant.remaining for grant in self._lend(rows, owners, asked, now_s)]

    def bring(self, owners: Owners, counters: Mapping[Meter, Counter], now_s: float) -> None:
        """Add what an owner has counted by itself, up to now, to what all count from now on."""
        limits = {meter: counter.limit for meter, counter in counters.items()}
        with self._database.write() as connection:
            now = self._now(connection, now_s)
            rows = self._rows(connection, owners, limits, now)
            for meter, brought in counters.items():
                row = rows[meter]
                if isinstance(row.counter, RateCounter):
                    assert isinstance(brought, RateCounter), "its kind says what a meter counts"
                    row.counter.charge(brought.owed(now_s), now_s)
                    continue
                assert isinstance(brought, CountCounter), "its kind says what a meter counts"
                spent = self._spent(connection, meter.tenant_id, now_s) if meter.kind == "spend" else 0
                row.counter.used = max(row.counter.used, brought.used, spent)
                row.counter.used_by |= brought.used_by
                row.counter.held |= brought.held
                row.counter.left |= brought.left
                row.counter.reckon(spent)
                row.owner_of |= dict.fromkeys(brought.held, owners.mine)
            self._write(connection, rows, now)

    def held_by(self, holders: Collection[str]) -> list[Meter]:
        """Of which meters any of these ingresses holds units, tenant by tenant. Nobody waits for it."""
        columns = shared_limits.c
        names = [columns.state.contains(_HOLDS.format(json.dumps(holder)), autoescape=True) for holder in holders]
        query = select(columns.project_id, columns.kind, columns.model).order_by(columns.project_id)
        query = query.where(columns.base_digest == self._database.base_digest, or_(false(), *names))
        with self._database.read() as connection:
            return [Meter(*place) for place in connection.execute(query)]

    def forget(self, owners: Owners, meters: Collection[Meter], now_s: float) -> None:
        """What ingresses that are gone held of these meters is free, for all owners."""
        with self._database.write() as connection:
            now = self._now(connection, now_s)
            kept = self._kept(connection, sorted({meter.tenant_id for meter in meters}))
            its = {meter: _read(meter, kept[meter], owners, 0, now) for meter in meters if meter in kept}
            self._write(connection, its, now)

    def left_behind(self, owners: Owners, now_s: float) -> list[str]:
        """Tenants of whose money ingresses that are gone held some, whosever they were. Nobody waits for it."""
        with self._database.read() as connection:
            now, kept = self._now(connection, now_s), self._kept(connection, None, "spend")
        rows = {meter.tenant_id: _read(meter, state, owners, 0, now) for meter, state in kept.items()}
        return [tenant_id for tenant_id, row in rows.items() if _count(row).left and row.month == month_of(now_s)]

    def reckon(self, owners: Owners, in_ledger: Mapping[str, int], now_s: float) -> None:
        """So much has each tenant spent in the month of that time, as the ledger has it."""
        with self._database.write() as connection:
            now, kept = self._now(connection, now_s), self._kept(connection, sorted(in_ledger), "spend")
            rows = {meter: _read(meter, state, owners, 0, now) for meter, state in kept.items()}
            its = {meter: row for meter, row in rows.items() if row.month == month_of(now_s)}
            for meter, row in its.items():
                if meter.tenant_id in in_ledger:
                    _count(row).reckon(in_ledger[meter.tenant_id])
            self._write(connection, its, now)

    def take(self, owners: Owners, now_s: float) -> dict[Meter, Counter]:
        """All that is counted here, for the last owner that lives to count on by itself; from here on nothing is."""
        with self._database.write() as connection:
            now, kept = self._now(connection, now_s), self._kept(connection, None)
            rows = {meter: _read(meter, state, owners, 0, now) for meter, state in kept.items()}
            connection.execute(delete(shared_limits).where(shared_limits.c.base_digest == self._database.base_digest))
        return {meter: row.counter for meter, row in rows.items() if row.month in ("", month_of(now_s))}

    def _check(self, deadline_s: float) -> None:
        """Raises NotReady, which undoes the transaction: units that nobody hears of would be lost."""
        if self.monotonic() > deadline_s:
            raise NotReady("the registry's database answered too late for limits; ask again")

    def _now(self, connection: Connection, now_s: float) -> _Now:
        return _Now(now_s, self._database.now_s(connection))

    @staticmethod
    def _lend(rows: Mapping[Meter, _Row], owners: Owners, asked: Asked, now_s: float) -> list[Grant]:
        grants = []
        for want, limit in zip(asked.wants, asked.limits, strict=True):
            row = rows[want.meter]
            grants.append(lend(row.counter, asked.holder, want, limit, now_s))
            row.owner_of[asked.holder] = owners.mine
        return grants

    # -- rows -------------------------------------------------------------------------------------------

    def _rows(
        self, connection: Connection, owners: Owners, limits: Mapping[Meter, int], now: _Now
    ) -> dict[Meter, _Row]:
        """Those of these meters, new ones for what nobody has asked for yet."""
        kept = self._kept(connection, sorted({meter.tenant_id for meter in limits}))
        rows = {}
        for meter, limit in limits.items():
            row = _read(meter, kept[meter], owners, limit, now) if meter in kept else _Row(new_counter(meter, limit))
            if meter.kind == "spend" and row.month < (month := month_of(now.owner_s)):
                spent = self._spent(connection, meter.tenant_id, now.owner_s)
                row = _Row(new_counter(meter, limit, spent), month=month, state=row.state)
            rows[meter] = row
        return rows

    def _kept(
        self, connection: Connection, tenant_ids: Sequence[str] | None, kind: MeterKind | None = None
    ) -> dict[Meter, str]:
        columns = shared_limits.c
        query = select(columns.project_id, columns.kind, columns.model, columns.state)
        query = query.where(columns.base_digest == self._database.base_digest)
        if tenant_ids is not None and len(tenant_ids) <= _MAX_NAMED:
            query = query.where(columns.project_id.in_(tenant_ids))
        if kind is not None:
            query = query.where(columns.kind == kind)
        return {Meter(*place): state for *place, state in connection.execute(query)}

    def _write(self, connection: Connection, rows: Mapping[Meter, _Row], now: _Now) -> None:
        new, changed = [], []
        for meter, row in rows.items():
            if (state := _state(row, now)) == row.state:
                continue
            place = {"base_digest": self._database.base_digest, "project_id": meter.tenant_id}
            place |= {"kind": meter.kind, "model": meter.model}
            if row.state:
                changed.append({f"its_{name}": value for name, value in place.items()} | {"new_state": state})
            else:
                new.append({**place, "state": state})
        if changed:
            connection.execute(_CHANGE, changed)
        if new:
            connection.execute(_BEGIN, new)


def _meters(wants: Sequence[Want]) -> list[Meter]:
    return [want.meter for want in wants]


def _read(meter: Meter, state: str, owners: Owners, limit: int, now: _Now) -> _Row:
    """A row whose counter has forgotten the ingresses of dead owners and those that are gone.

    A rate is by the owner's clock. Where the database's clock was set back no time has passed; what is owed is paid
    from then on.
    """
    kept: dict[str, Any] = json.loads(state)
    if meter.kind in PERIOD_S:
        rate = RateCounter(kept["limit"], PERIOD_S[meter.kind])
        rate.charge(kept["owed"], now.owner_s - max(0.0, now.database_s - kept["at_s"]))
        return _Row(rate, state=state)
    counter = CountCounter(limit, kept["used"], is_spent=meter.kind == "spend")
    counter.used_by, counter.left, counter.booked = kept["used_by"], kept.get("left", {}), kept.get("booked", 0)
    counter.held = {holder: units for holder, (_, units) in kept["held"].items()}
    owner_of = {holder: owner for holder, (owner, _) in kept["held"].items()}
    counter.forget(each for each, owner in owner_of.items() if owner not in owners.living or each in owners.gone)
    return _Row(counter, {holder: owner_of[holder] for holder in counter.held}, kept["month"], state)


def _count(row: _Row) -> CountCounter:
    assert isinstance(row.counter, CountCounter), "its kind says what a meter counts"
    return row.counter


def _state(row: _Row, now: _Now) -> str:
    counter = row.counter
    kept: dict[str, Any]
    if isinstance(counter, RateCounter):
        kept = {"limit": counter.limit, "owed": counter.owed(now.owner_s), "at_s": now.database_s}
    else:
        held = {holder: [row.owner_of[holder], units] for holder, units in counter.held.items() if units}
        # Of money also who has used none is kept: what the first report says counts as known.
        kept = {"month": row.month, "used": counter.used, "used_by": counter.used_by, "held": held}
        if counter.left:
            kept |= {"left": counter.left, "booked": counter.booked}
    return json.dumps(kept, sort_keys=True)
