"""Which adapter occupies which rank rows of the device tables.

In: a content digest, the rank rows it needs and the bytes held beside them ("extras": DoRA, norms, whole modules).
Out: an adapter slot, a run of rows and, sometimes, a write to perform. Slot 0 is the base model: rank 0, never given
away, never written. An adapter that sequences reference is never moved or evicted. Idle ones stay until their rows,
slot or bytes are wanted, and leave in the order of a policy (`eviction`: the cost is the bytes to write again, the room
is the rows held). Adapters that an operator pinned are never evicted at all.
Where runs of rows may lie is decided in `row_runs`; moving bytes is the backend's job. This module keeps the books.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from app.engine.config import EvictionPolicy
from app.engine.errors import AdapterPoolFull
from app.engine.pools.eviction import NEVER, EvictionOrder, Priority, TenantQuota
from app.engine.pools.row_allocator import RowAllocator, RowRange, length_of
from app.engine.pools.table_limits import TableLimits
from app.engine.stats import ResidentAdapter


class AdapterGrant(NamedTuple):
    """A referenced place in the tables. With `needs_write`, the rows must be written before their first use."""

    adapter_slot: int
    row_start: int
    num_rows: int
    needs_write: bool
    evicted: tuple[str, ...]


@dataclass(slots=True, eq=False)
class _Resident:
    digest: str
    num_needed: int
    adapter_slot: int
    run: RowRange
    num_refs: int
    uses: int
    size_bytes: int
    priority: Priority
    extra_bytes: int


class _Reservation(NamedTuple):
    digest: str
    run: RowRange
    extra_bytes: int


class AdapterPool:
    """digest -> adapter slot -> run of rows, with references and an order among the unreferenced."""

    def __init__(
        self,
        lora_pool_rows: int,
        rank_alignment: int,
        max_loras: int,
        max_extra_bytes: int = 0,
        policy: EvictionPolicy = "lru",
    ) -> None:
        self._runs: RowAllocator[_Resident] = RowAllocator(lora_pool_rows // rank_alignment)
        self._alignment = rank_alignment
        self.limits = TableLimits(
            num_rows=self._runs.num_units * rank_alignment,
            rank_alignment=rank_alignment,
            max_loras=max_loras,
            max_extra_bytes=max_extra_bytes,
            max_rank=self._runs.max_length * rank_alignment if max_loras > 1 else 0,
        )
        self._residents: dict[str, _Resident] = {}
        self._free_slots = list(range(max_loras - 1, 0, -1))
        self._order = EvictionOrder(policy)
        self._tenant_quota = TenantQuota()
        self._pinned: frozenset[str] = frozenset()
        self._reservation: _Reservation | None = None
        self._pending_free: list[int] = []  # slots whose extras nobody has released yet
        self.num_evictions = 0

    @property
    def num_rows_free(self) -> int:
        """Rows held by no adapter, idle ones counted as held."""
        return (
            self.limits.num_rows - sum(entry.run.length for entry in self._residents.copy().values()) * self._alignment
        )

    @property
    def extra_bytes(self) -> int:
        """Bytes of extras held, those of idle adapters counted."""
        return sum(entry.extra_bytes for entry in self._residents.copy().values())

    @property
    def num_referenced(self) -> int:
        """Adapters that are in use."""
        return sum(1 for entry in self._residents.values() if entry.num_refs)

    @property
    def num_pending_free(self) -> int:
        """Slots that `take_pending_free` would return."""
        return len(self._pending_free)

    @property
    def reserved_for(self) -> str | None:
        return self._reservation.digest if self._reservation is not None else None

    def check_room(self, name: str, digest: str, num_needed: int, extra_bytes: int = 0) -> None:
        """Raise AdapterPoolFull if pinned adapters leave no room for this adapter, whatever else leaves."""
        if digest in self._residents:
            return
        length = self._length(num_needed)
        pinned = [entry for entry in self._residents.values() if entry.digest in self._pinned]
        held_bytes = sum(entry.extra_bytes for entry in pinned)
        if len(pinned) >= self.limits.max_loras - 1:
            lack = f"an adapter slot: all {len(pinned)} are taken; raise engine.max_loras"
        elif extra_bytes and held_bytes + extra_bytes > self.limits.max_extra_bytes:
            lack = (
                f"{extra_bytes} bytes: {held_bytes} of {self.limits.max_extra_bytes} are taken; "
                "raise engine.extra_weights_bytes"
            )
        elif all(map(self._has_pinned, self._runs.places(length))):
            taken = sum(entry.run.length for entry in pinned) * self._alignment
            lack = (
                f"a run of {length * self._alignment} rank rows: {taken} of {self.limits.num_rows} are taken; "
                "raise engine.lora_pool_rows"
            )
        else:
            return
        raise AdapterPoolFull(
            f"pinned adapters leave no room for adapter {name!r}. It needs {lack}, or unpin an adapter"
        )

    def pin(self, digests: Iterable[str]) -> None:
        """From now on exactly these are never evicted once they are resident; `unload` frees them all the same.

        A reservation that stands in their way ends; its holder has to ask again.
        """
        self._pinned = frozenset(digests)
        if self._reservation is not None and self._has_pinned(self._reservation.run):
            self._reservation = None

    def is_resident(self, digest: str) -> bool:
        return digest in self._residents

    def acquire(
        self, digest: str, num_needed: int, extra_bytes: int = 0, size_bytes: int = 0, tenant_id: str = ""
    ) -> AdapterGrant | None:
        """Reference an adapter, making room if need be; None if it must wait for references to others to end.

        `size_bytes`: what writing it takes, for the policy "cost". AdapterTooLarge if it never fits;
        `check_room` says if it cannot while others are pinned. Rows and bytes under another adapter's
        reservation are not touched, nor rows that others keep (`shares`) from a tenant that has more than its share,
        unless nothing runs or the rows are reserved for it.
        """
        assert num_needed > 0, "an adapter has at least one rank row; the base is slot 0 and never acquired"
        resident = self._residents.get(digest)
        if resident is not None:
            return self._reference(resident, tenant_id)
        self.limits.check_rows(digest, num_needed)
        self.limits.check_extras(digest, extra_bytes)
        if not self._may_take_adapter_slot(digest) or not self._may_hold(digest, extra_bytes):
            return None
        run = self._find_run(digest, self._length(num_needed), tenant_id)
        if run is None:
            return None
        evicted = self._make_room(run, extra_bytes, tenant_id)
        priority = self._order.on_use(1, size_bytes / run.length)
        slot = self._free_slots.pop()
        resident = _Resident(digest, num_needed, slot, run, 1, 1, size_bytes, priority, extra_bytes)
        self._residents[digest] = resident
        self._runs.assign(run, resident)
        self._tenant_quota.record_use(digest, run.length, tenant_id)
        self.cancel_reservation(digest)
        self.num_evictions += len(evicted)
        return self._grant(resident, needs_write=True, evicted=tuple(evicted))

    def release(self, digest: str) -> None:
        """Give one reference back. The adapter stays resident until its rows are wanted."""
        resident = self._residents[digest]
        assert resident.num_refs > 0, "reference released twice"
        resident.num_refs -= 1
        resident.priority = self._order.on_release(resident.priority)

    def unload(self, digest: str) -> int:
        """Free an unreferenced adapter's rows, pinned or not.

        Returns how many were freed: 0 if the adapter is absent or still referenced.
        """
        resident = self._residents.get(digest)
        if resident is None or resident.num_refs > 0:
            return 0
        self._evict(resident)
        return resident.run.length * self._alignment

    def take_pending_free(self) -> list[int]:
        """Slots whose adapters have gone and whose extras are to be released; each is told once."""
        vacated, self._pending_free = self._pending_free, []
        return vacated

    def reserve(self, digest: str, num_needed: int, extra_bytes: int = 0) -> None:
        """Set a run of rows, a slot and the bytes aside for an adapter that has waited too long.

        The run with the fewest references, and no pinned adapter, is chosen. Until the holder acquires, or
        cancels, nothing else is placed or referenced anew there, nor adapters with extras that leave too few
        bytes, so the references in the way can only end. There is one reservation at a time: a second one is
        ignored and has to ask again.
        """
        if self._reservation is not None or digest in self._residents:
            return
        self.limits.check_rows(digest, num_needed)
        slot_is_short = not self._free_slots and not any(map(self._may_go, self._residents.values()))

        def pressure(entries: list[_Resident]) -> tuple[bool, int, Priority] | None:
            if any(entry.digest in self._pinned for entry in entries):
                return None
            dearest = max((entry.priority for entry in entries), default=NEVER)
            return (slot_is_short and not entries, sum(entry.num_refs for entry in entries), dearest)

        run = self._runs.cheapest(self._length(num_needed), pressure, None)
        if run is not None:  # else it is refused by `check_room`
            self._reservation = _Reservation(digest, run, extra_bytes)

    def cancel_reservation(self, digest: str) -> None:
        """The holder no longer needs its reservation; nothing happens if it holds none."""
        if self.reserved_for == digest:
            self._reservation = None

    def residents(self) -> tuple[ResidentAdapter, ...]:
        """Who is in the tables, by row."""
        alignment = self._alignment
        entries = sorted(self._residents.copy().values(), key=lambda entry: entry.run.start)
        return tuple(
            ResidentAdapter(
                e.digest, e.num_needed, e.run.start * alignment, e.run.length * alignment, e.num_refs, e.extra_bytes
            )
            for e in entries
        )

    def check(self) -> None:
        """Assert that every row and slot is accounted for; for tests."""
        self._runs.check((entry.run, entry) for entry in self._residents.values())
        assert all(entry.run.length * self._alignment >= entry.num_needed for entry in self._residents.values())
        used = [entry.adapter_slot for entry in self._residents.values()]
        assert sorted(used + self._free_slots) == list(range(1, self.limits.max_loras))
        assert self.extra_bytes <= self.limits.max_extra_bytes

    def _reference(self, resident: _Resident, tenant_id: str) -> AdapterGrant | None:
        if resident.run.overlaps(self._closed_to(resident.digest)):
            return None
        if resident.digest not in self._pinned:  # a pinned adapter has its slot and bytes for good
            if resident.num_refs == 0 and not self._may_take_adapter_slot(resident.digest):
                return None
            if not self._may_hold(resident.digest, resident.extra_bytes):
                return None
        resident.num_refs += 1
        resident.uses += 1
        self._tenant_quota.record_use(resident.digest, resident.run.length, tenant_id)
        resident.priority = self._order.on_use(resident.uses, resident.size_bytes / resident.run.length)
        return self._grant(resident, needs_write=False, evicted=())

    def _grant(self, resident: _Resident, *, needs_write: bool, evicted: tuple[str, ...]) -> AdapterGrant:
        alignment, run = self._alignment, resident.run
        return AdapterGrant(resident.adapter_slot, run.start * alignment, run.length * alignment, needs_write, evicted)

    def _length(self, num_needed: int) -> int:
        return length_of(num_needed, self._alignment)

    def _may_go(self, entry: _Resident) -> bool:
        return entry.num_refs == 0 and entry.digest not in self._pinned

    def _has_pinned(self, run: RowRange) -> bool:
        return any(entry.digest in self._pinned for entry in self._runs.owners(run))

    def _closed_to(self, digest: str) -> RowRange | None:
        """The run that is reserved for another adapter."""
        held = self._reservation
        return None if held is None or held.digest == digest else held.run

    def _may_take_adapter_slot(self, digest: str) -> bool:
        """Whether a slot can be had for one more referenced adapter, leaving one for a reservation's holder."""
        supply = len(self._free_slots) + sum(map(self._may_go, self._residents.values()))
        held = self._reservation
        return supply > (0 if held is None or held.digest == digest else 1)

    def _may_hold(self, digest: str, extra_bytes: int) -> bool:
        """Whether this adapter's extras fit beside those that stay and those a reservation keeps room for."""
        if extra_bytes == 0:
            return True
        held = self._reservation
        reserved = 0 if held is None or held.digest == digest else held.extra_bytes
        stays = sum(e.extra_bytes for e in self._residents.values() if e.digest != digest and not self._may_go(e))
        return stays + reserved + extra_bytes <= self.limits.max_extra_bytes

    def _find_run(self, digest: str, length: int, tenant_id: str) -> RowRange | None:
        """A free run, or else the one whose dearest adapter is the cheapest to give up, others' share being dearest.

        A pinned adapter takes the lowest run that can be had, so that the rows of such adapters lie together.
        """

        num_units = self._runs.num_units
        has_right = (
            self.reserved_for == digest
            or self._tenant_quota.has_room(tenant_id, length, num_units)
            or not self.num_referenced  # nothing runs that could end
        )

        def price(entries: list[_Resident]) -> tuple[bool, Priority, int] | None:
            if not all(map(self._may_go, entries)):
                return None
            is_protected = any(self._tenant_quota.is_protected(entry.digest, tenant_id, num_units) for entry in entries)
            if is_protected and not has_right:
                return None
            return is_protected, max([entry.priority for entry in entries], default=NEVER), len(entries)

        excluded = self._closed_to(digest)
        if digest in self._pinned:
            return self._runs.cheapest(length, lambda entries: 0 if all(map(self._may_go, entries)) else None, excluded)
        return self._runs.best_fit(length, excluded) or self._runs.cheapest(length, price, excluded)

    def _make_room(self, run: RowRange, extra_bytes: int, tenant_id: str) -> list[str]:
        """Evict whoever has these rows, and for a slot and the bytes whoever is idle; returns their digests."""

        def price(entry: _Resident) -> tuple[bool, Priority]:
            return self._tenant_quota.is_protected(entry.digest, tenant_id, self._runs.num_units), entry.priority

        evicted = [self._give_up(entry) for entry in self._runs.owners(run)]
        if not self._free_slots:
            idle = min((e for e in self._residents.values() if self._may_go(e)), key=price)
            evicted.append(self._give_up(idle))
        while extra_bytes and self.extra_bytes + extra_bytes > self.limits.max_extra_bytes:
            idle = min((e for e in self._residents.values() if self._may_go(e) and e.extra_bytes), key=price)
            evicted.append(self._give_up(idle))
        return evicted

    def _give_up(self, resident: _Resident) -> str:
        """As `_evict`, for room."""
        self._order.on_evict(resident.priority)
        return self._evict(resident)

    def _evict(self, resident: _Resident) -> str:
        assert resident.num_refs == 0, "an adapter in use is never evicted"
        del self._residents[resident.digest]
        self._runs.free(resident.run)
        self._tenant_quota.remove(resident.digest)
        self._free_slots.append(resident.adapter_slot)
        if resident.extra_bytes:
            self._pending_free.append(resident.adapter_slot)
        return resident.digest


def rows_of(rank: int, alignment: int) -> int:
    """Rank rows that an adapter takes whose modules all have this rank, and that any of this rank takes at most."""
    return alignment * length_of(rank, alignment)
