"""The adapter pool: which adapter occupies which rank rows and which slot of the device's tables.

Slot 0 is the base model: rank 0, never assigned, never written. An adapter with references is never moved or evicted.
Idle ones stay until their rows, slot or extra bytes (DoRA, norms, whole modules) are needed, and leave in the order of
the eviction policy (`eviction`: cost is the bytes to write again, size the rows held). Pinned adapters are not evicted,
unless they lie so scattered that a longer run finds no place: then idle ones in its way are, to be loaded again beside
the others. `row_allocator` knows where runs of rows may lie; the backend copies weights. This module only does the
accounting.
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
    """A referenced slot and rows. With `needs_write`, the rows must be written before their first use."""

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
    """digest -> adapter slot -> run of rows, with reference counts and an eviction order."""

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
        self._pending_free: list[int] = []  # evicted slots whose extra weights are still on the device
        self.num_evictions = 0

    @property
    def num_rows_free(self) -> int:
        """Rows held by no adapter; idle adapters hold theirs."""
        return (
            self.limits.num_rows - sum(entry.run.length for entry in self._residents.copy().values()) * self._alignment
        )

    @property
    def extra_bytes(self) -> int:
        """Bytes of extra weights held, idle adapters included."""
        return sum(entry.extra_bytes for entry in self._residents.copy().values())

    @property
    def num_referenced(self) -> int:
        """Adapters in use."""
        return sum(1 for entry in self._residents.values() if entry.num_refs)

    @property
    def num_pending_free(self) -> int:
        """Slots that `take_pending_free` would return."""
        return len(self._pending_free)

    @property
    def reserved_for(self) -> str | None:
        return self._reservation.digest if self._reservation is not None else None

    def check_room(self, digest: str, num_needed: int, extra_bytes: int = 0) -> None:
        """Raise AdapterPoolFull, for all tenants with these contents, if pinned adapters leave no room for them."""
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
        elif all(map(self._has_pinned, self._runs.places(length))) and not self._run_over_pinned(length):
            taken = sum(entry.run.length for entry in pinned) * self._alignment
            lack = (
                f"a run of {length * self._alignment} rank rows: {taken} of {self.limits.num_rows} are taken; "
                "raise engine.lora_pool_rows"
            )
        else:
            return
        raise AdapterPoolFull(f"pinned adapters leave no room for this adapter. It needs {lack}, or unpin an adapter")

    def pin(self, digests: Iterable[str]) -> None:
        """Pin exactly these adapters: once resident they stay; `unload` frees them all the same.

        A reservation of rows that a pinned adapter now holds ends; its holder has to reserve again.
        """
        self._pinned = frozenset(digests)
        if self._reservation is not None and self._has_pinned(self._reservation.run):
            self._reservation = None

    def is_resident(self, digest: str) -> bool:
        return digest in self._residents

    def acquire(
        self, digest: str, num_needed: int, extra_bytes: int = 0, size_bytes: int = 0, tenant_id: str = ""
    ) -> AdapterGrant | None:
        """Reference an adapter and evict others if needed; None if it must wait for references to others to end.

        `size_bytes`: bytes to write, for the policy "cost". AdapterTooLarge if it never fits; `check_room` says
        whether pinned adapters are in the way. Rows and bytes under another adapter's reservation are not used. A
        tenant above its quota gets no rows that other tenants' quotas protect, unless nothing runs or the rows are
        reserved for it.
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
        if run is None or any(entry.num_refs for entry in self._runs.owners(run)):
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
        """Release one reference. The adapter stays resident until its rows are needed."""
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
        """Slots whose adapters were evicted and whose extra weights must be freed; each is returned once."""
        slots, self._pending_free = self._pending_free, []
        return slots

    def reserve(self, digest: str, num_needed: int, extra_bytes: int = 0) -> None:
        """Reserve a run of rows, a slot and the bytes for an adapter that has waited too long.

        The run with the fewest references, without pinned adapters if possible, is chosen. Until the holder acquires or
        cancels, no other adapter is placed or referenced there, and none with extra weights that leave too few bytes,
        so the references in the way can only end. There is one reservation at a time: a second one is ignored.
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

        length = self._length(num_needed)
        run = self._runs.cheapest(length, pressure, None) or self._run_over_pinned(length)
        if run is not None:  # else `check_room` refuses it
            self._reservation = _Reservation(digest, run, extra_bytes)

    def cancel_reservation(self, digest: str) -> None:
        """Cancel the adapter's reservation, if it holds one."""
        if self.reserved_for == digest:
            self._reservation = None

    def residents(self) -> tuple[ResidentAdapter, ...]:
        """The resident adapters, by row."""
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
        if resident.run.overlaps(self._rows_reserved_for_others(resident.digest)):
            return None
        if resident.digest not in self._pinned:  # a pinned adapter keeps its slot and bytes
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

    def _rows_reserved_for_others(self, digest: str) -> RowRange | None:
        """The rows that are reserved for another adapter."""
        held = self._reservation
        return None if held is None or held.digest == digest else held.run

    def _may_take_adapter_slot(self, digest: str) -> bool:
        """Whether one more adapter can be referenced, with a slot left for a reservation's holder."""
        supply = len(self._free_slots) + sum(map(self._may_go, self._residents.values()))
        held = self._reservation
        return supply > (0 if held is None or held.digest == digest else 1)

    def _may_hold(self, digest: str, extra_bytes: int) -> bool:
        """Whether this adapter's extra weights fit in addition to those that stay and those that are reserved."""
        if extra_bytes == 0:
            return True
        held = self._reservation
        reserved = 0 if held is None or held.digest == digest else held.extra_bytes
        stays = sum(e.extra_bytes for e in self._residents.values() if e.digest != digest and not self._may_go(e))
        return stays + reserved + extra_bytes <= self.limits.max_extra_bytes

    def _find_run(self, digest: str, length: int, tenant_id: str) -> RowRange | None:
        """A free run, or else the run with the cheapest eviction; adapters protected by other tenants' quotas cost
        most, and a run with pinned ones, which may be in use, is the last resort.

        A pinned adapter takes the lowest possible run, so that the rows of pinned adapters lie together.
        """
        num_units = self._runs.num_units
        has_right = (
            self.reserved_for == digest
            or self._tenant_quota.has_room(tenant_id, length, num_units)
            or not self.num_referenced  # nothing runs, so waiting would not help
        )

        def price(entries: list[_Resident]) -> tuple[bool, Priority, int] | None:
            if not all(map(self._may_go, entries)):
                return None
            is_protected = any(self._tenant_quota.is_protected(entry.digest, tenant_id, num_units) for entry in entries)
            if is_protected and not has_right:
                return None
            return is_protected, max([entry.priority for entry in entries], default=NEVER), len(entries)

        excluded = self._rows_reserved_for_others(digest)
        if digest in self._pinned:
            run = self._runs.cheapest(length, lambda entries: 0 if all(map(self._may_go, entries)) else None, excluded)
        else:
            run = self._runs.best_fit(length, excluded) or self._runs.cheapest(length, price, excluded)
        return run or self._run_over_pinned(length, excluded)

    def _run_over_pinned(self, length: int, excluded: RowRange | None = None) -> RowRange | None:
        return _run_over_pinned(self._runs, self._pinned, length, excluded)

    def _make_room(self, run: RowRange, extra_bytes: int, tenant_id: str) -> list[str]:
        """Evict the owners of these rows, and idle adapters for a slot and the bytes; returns their digests."""

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
        """Evict an adapter to make room, and let the eviction order know."""
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


def _run_over_pinned(
    runs: RowAllocator[_Resident], pinned: frozenset[str], length: int, excluded: RowRange | None
) -> RowRange | None:
    """If pinned adapters lie in every run, but their rows and this run fit together: the run to take from them.

    The one with the fewest references, and the highest of equals: those evicted are loaded again into the lowest runs.
    Its owners are shorter, so that two adapters never evict each other in turn.
    """

    def pressure(entries: list[_Resident]) -> tuple[int, int] | None:
        is_shorter = all(entry.run.length < length for entry in entries)
        return (sum(entry.num_refs for entry in entries), -entries[0].run.start) if is_shorter else None

    def is_pinned(entry: _Resident) -> bool:
        return entry.digest in pinned

    num_pinned = sum(entry.run.length for entry in filter(is_pinned, runs.owners(RowRange(0, runs.num_units))))
    fits = num_pinned + length <= runs.num_units
    is_everywhere = all(any(map(is_pinned, runs.owners(run))) for run in runs.places(length))
    return runs.cheapest(length, pressure, excluded) if fits and is_everywhere else None


def rows_of(rank: int, alignment: int) -> int:
    """Rank rows of an adapter whose modules all have this rank; the most that any of this rank takes."""
    return alignment * length_of(rank, alignment)
