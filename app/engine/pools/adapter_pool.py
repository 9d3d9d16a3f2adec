"""Which adapter occupies which rank rows of the device tables.

In: a content digest, a rank and the bytes held beside the rows ("extras": DoRA, norms, whole
modules). Out: an adapter slot, a run of rows and, sometimes, a write to perform. Slot 0 is the base
model: rank 0, never given away, never written. Runs are buddies: their length is the alignment times
a power of two and they start at a multiple of their length, so two freed neighbours always make one
run of twice the rank. A pinned adapter is never moved or evicted; idle ones stay until their rows,
slot or bytes are wanted and leave in the order of a policy (`eviction`: cost is the bytes to write
again, room the rows held). Those an operator keeps are never evicted at all.
Moving bytes is the backend's job; this module keeps the books.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from app.engine.errors import AdapterKeptOut, AdapterTooLarge
from app.engine.pools.eviction import NEVER, EvictionOrder, EvictionPolicy, Priority


class AdapterGrant(NamedTuple):
    """A pinned place in the tables. With `needs_write`, the rows must be written before their first use."""

    adapter_slot: int
    row_start: int
    num_rows: int
    needs_write: bool
    evicted: tuple[str, ...]


class ResidentAdapter(NamedTuple):
    """One line of the residency report."""

    digest: str
    rank: int
    row_start: int
    num_rows: int
    num_refs: int
    extra_bytes: int = 0


@dataclass(slots=True)
class _Resident:
    digest: str
    rank: int
    adapter_slot: int
    start: int  # in units of the alignment
    units: int
    num_refs: int
    uses: int
    size_bytes: int
    priority: Priority
    extra_bytes: int


class _Reservation(NamedTuple):
    digest: str
    start: int
    units: int
    extra_bytes: int


class AdapterPool:
    """digest -> adapter slot -> run of rows, with pins and an order among the unpinned."""

    def __init__(
        self,
        adapter_rank_rows: int,
        rank_alignment: int,
        max_adapter_slots: int,
        max_extra_bytes: int = 0,
        policy: EvictionPolicy = "lru",
    ) -> None:
        self.max_extra_bytes = max_extra_bytes
        self.rank_alignment = rank_alignment
        self.num_units = adapter_rank_rows // rank_alignment
        self.max_adapter_slots = max_adapter_slots
        self._residents: dict[str, _Resident] = {}
        self._owner: list[_Resident | None] = [None] * self.num_units
        self._free_slots = list(range(max_adapter_slots - 1, 0, -1))
        self._order = EvictionOrder(policy)
        self._pinned: frozenset[str] = frozenset()
        self._reservation: _Reservation | None = None
        self._vacated: list[int] = []  # slots whose extras nobody has released yet
        self.num_evictions = 0

    @property
    def max_rank(self) -> int:
        """The largest rank that fits an empty pool."""
        if self.num_units == 0 or self.max_adapter_slots < 2:
            return 0
        return self.rank_alignment << (self.num_units.bit_length() - 1)

    @property
    def num_rows_free(self) -> int:
        """Rows held by no adapter, idle ones counted as held."""
        return (self.num_units - sum(entry.units for entry in self._residents.copy().values())) * self.rank_alignment

    @property
    def extra_bytes(self) -> int:
        """Bytes of extras held, those of idle adapters counted."""
        return sum(entry.extra_bytes for entry in self._residents.copy().values())

    def check_extras(self, name: str, extra_bytes: int) -> None:
        """Raise AdapterTooLarge if an adapter with this many bytes of extras can never be held."""
        if extra_bytes > self.max_extra_bytes:
            raise AdapterTooLarge(
                f"adapter {name!r} holds {extra_bytes} bytes beside its rank rows (DoRA, biases, norms, whole modules "
                f"or token rows) but this engine keeps at most {self.max_extra_bytes}; raise "
                "engine.adapter_extra_bytes or train fewer whole modules"
            )

    def check_rank(self, name: str, rank: int) -> None:
        """Raise AdapterTooLarge if an adapter of this rank can never be held."""
        if rank > self.max_rank:
            raise AdapterTooLarge(
                f"adapter {name!r} has rank {rank} but this model's pool holds at most rank {self.max_rank} "
                f"({self.num_units * self.rank_alignment} rank rows, {self.max_adapter_slots - 1} adapter slots "
                "beside the base); raise engine.adapter_rank_rows or register an adapter of lower rank"
            )

    def check_room(self, name: str, digest: str, rank: int, extra_bytes: int = 0) -> None:
        """Raise AdapterKeptOut if what operators keep here leaves no room for this adapter, whatever else leaves."""
        if digest in self._residents:
            return
        pinned = [entry for entry in self._residents.values() if entry.digest in self._pinned]
        if len(pinned) >= self.max_adapter_slots - 1:
            lack = f"an adapter slot: all {len(pinned)} are taken; raise engine.max_adapter_slots"
        elif extra_bytes and sum(entry.extra_bytes for entry in pinned) + extra_bytes > self.max_extra_bytes:
            held = sum(entry.extra_bytes for entry in pinned)
            lack = f"{extra_bytes} bytes: {held} of {self.max_extra_bytes} are taken; raise engine.adapter_extra_bytes"
        elif all(self._is_pinned_window(start, self._units(rank)) for start in self._windows(self._units(rank))):
            alignment = self.rank_alignment
            taken = sum(entry.units for entry in pinned) * alignment
            lack = (
                f"a run of {self._units(rank) * alignment} rank rows: {taken} of {self.num_units * alignment} are "
                "taken; raise engine.adapter_rank_rows"
            )
        else:
            return
        raise AdapterKeptOut(
            f"pinned adapters leave no room for adapter {name!r}. It needs {lack}, or unpin an adapter"
        )

    def pin(self, digests: Iterable[str]) -> None:
        """From now on exactly these are never evicted once they are resident; `drop` frees them all the same.

        A reservation that stands in their way ends; its holder has to ask again.
        """
        self._pinned = frozenset(digests)
        held = self._reservation
        if held is not None and self._is_pinned_window(held.start, held.units):
            self._reservation = None

    def is_resident(self, digest: str) -> bool:
        return digest in self._residents

    def acquire(self, digest: str, rank: int, extra_bytes: int = 0, size_bytes: int = 0) -> AdapterGrant | None:
        """Pin an adapter, making room if need be; None if it must wait for pins to leave.

        `size_bytes`: what writing it takes, for the policy "cost". AdapterTooLarge if it never fits;
        `check_room` says if it cannot while others are kept. Rows and bytes under another adapter's
        reservation are not touched.
        """
        assert rank > 0, "an adapter has at least one rank row; the base is slot 0 and never acquired"
        resident = self._residents.get(digest)
        if resident is not None:
            return self._reference(resident)
        self.check_rank(digest, rank)
        self.check_extras(digest, extra_bytes)
        if not self._may_take_adapter_slot(digest) or not self._may_hold(digest, extra_bytes):
            return None
        units = self._units(rank)
        if digest in self._pinned:
            start = self._lowest_window(units, digest)
        else:
            start = self._free_run(units, digest)
            if start is None:
                start = self._cheapest_window(units, digest)
        if start is None:
            return None
        evicted = [self._give_up(entry) for entry in self._occupants(start, units)]
        if not self._free_slots:
            idle = min((e for e in self._residents.values() if self._may_go(e)), key=lambda e: e.priority)
            evicted.append(self._give_up(idle))
        while extra_bytes and self.extra_bytes + extra_bytes > self.max_extra_bytes:
            idle = min(
                (e for e in self._residents.values() if self._may_go(e) and e.extra_bytes), key=lambda e: e.priority
            )
            evicted.append(self._give_up(idle))
        priority = self._order.used(1, size_bytes / units)
        slot = self._free_slots.pop()
        resident = _Resident(digest, rank, slot, start, units, 1, 1, size_bytes, priority, extra_bytes)
        self._residents[digest] = resident
        self._owner[start : start + units] = [resident] * units
        self.cancel_reservation(digest)
        self.num_evictions += len(evicted)
        return self._grant(resident, needs_write=True, evicted=tuple(evicted))

    def release(self, digest: str) -> None:
        """Give one pin back. The adapter stays resident until its rows are wanted."""
        resident = self._residents[digest]
        assert resident.num_refs > 0, "reference released twice"
        resident.num_refs -= 1
        resident.priority = self._order.touched(resident.priority)

    def drop(self, digest: str) -> int:
        """Free an unpinned adapter's rows, kept or not; how many were freed (0 if it is absent or still pinned)."""
        resident = self._residents.get(digest)
        if resident is None or resident.num_refs > 0:
            return 0
        self._evict(resident)
        return resident.units * self.rank_alignment

    def take_vacated(self) -> list[int]:
        """Slots whose adapters have gone and whose extras are to be released; each is told once."""
        vacated, self._vacated = self._vacated, []
        return vacated

    def reserve(self, digest: str, rank: int, extra_bytes: int = 0) -> None:
        """Keep a window of rows, a slot and the bytes for an adapter that has waited too long.

        The window with the fewest pins, and none that is kept, is chosen. Until the holder acquires, or
        cancels, nothing else is placed or pinned anew there, nor adapters with extras that leave too few
        bytes, so the pins in the way can only leave. One reservation at a time: a second one is ignored and
        has to ask again.
        """
        if self._reservation is not None or digest in self._residents:
            return
        self.check_rank(digest, rank)
        units = self._units(rank)
        slot_is_short = not self._free_slots and not any(map(self._may_go, self._residents.values()))

        def pressure(start: int) -> tuple[bool, int, Priority]:
            entries = self._occupants(start, units)
            dearest = max((entry.priority for entry in entries), default=NEVER)
            return (slot_is_short and not entries, sum(entry.num_refs for entry in entries), dearest)

        windows = [start for start in self._windows(units) if not self._is_pinned_window(start, units)]
        if windows:  # else it is refused by `check_room`
            self._reservation = _Reservation(digest, min(windows, key=pressure), units, extra_bytes)

    def cancel_reservation(self, digest: str) -> None:
        """The holder no longer needs its reservation; nothing happens if it holds none."""
        if self._reservation is not None and self._reservation.digest == digest:
            self._reservation = None

    @property
    def reserved_for(self) -> str | None:
        return self._reservation.digest if self._reservation is not None else None

    def residents(self) -> tuple[ResidentAdapter, ...]:
        """Who is in the tables, by row."""
        alignment = self.rank_alignment
        entries = sorted(self._residents.copy().values(), key=lambda entry: entry.start)
        return tuple(
            ResidentAdapter(e.digest, e.rank, e.start * alignment, e.units * alignment, e.num_refs, e.extra_bytes)
            for e in entries
        )

    def check(self) -> None:
        """Assert that every row and slot is accounted for; for tests."""
        expected: list[_Resident | None] = [None] * self.num_units
        for entry in self._residents.values():
            assert entry.start % entry.units == 0, "a run starts at a multiple of its length"
            assert entry.units * self.rank_alignment >= entry.rank
            assert entry.start + entry.units <= self.num_units
            for unit in range(entry.start, entry.start + entry.units):
                assert expected[unit] is None, "two adapters share a row"
                expected[unit] = entry
        assert expected == self._owner
        used = [entry.adapter_slot for entry in self._residents.values()]
        assert sorted(used + self._free_slots) == list(range(1, self.max_adapter_slots))
        assert self.extra_bytes <= self.max_extra_bytes

    def _reference(self, resident: _Resident) -> AdapterGrant | None:
        if self._is_reserved(resident.start, resident.units, resident.digest):
            return None
        if resident.digest not in self._pinned:  # what is kept has its slot and bytes for good
            if resident.num_refs == 0 and not self._may_take_adapter_slot(resident.digest):
                return None
            if not self._may_hold(resident.digest, resident.extra_bytes):
                return None
        resident.num_refs += 1
        resident.uses += 1
        resident.priority = self._order.used(resident.uses, resident.size_bytes / resident.units)
        return self._grant(resident, needs_write=False, evicted=())

    def _grant(self, resident: _Resident, *, needs_write: bool, evicted: tuple[str, ...]) -> AdapterGrant:
        alignment = self.rank_alignment
        return AdapterGrant(
            resident.adapter_slot, resident.start * alignment, resident.units * alignment, needs_write, evicted
        )

    def _units(self, rank: int) -> int:
        """Length of the run for a rank, in units: a power of two."""
        return rows_of(rank, self.rank_alignment) // self.rank_alignment

    def _may_go(self, entry: _Resident) -> bool:
        return entry.num_refs == 0 and entry.digest not in self._pinned

    def _is_pinned_window(self, start: int, units: int) -> bool:
        return any(entry.digest in self._pinned for entry in self._occupants(start, units))

    def _windows(self, units: int) -> range:
        return range(0, self.num_units - units + 1, units)

    def _occupants(self, start: int, units: int) -> list[_Resident]:
        found: dict[str, _Resident] = {}
        for entry in self._owner[start : start + units]:
            if entry is not None:
                found[entry.digest] = entry
        return list(found.values())

    def _is_reserved(self, start: int, units: int, digest: str) -> bool:
        held = self._reservation
        if held is None or held.digest == digest:
            return False
        return start < held.start + held.units and held.start < start + units

    def _may_take_adapter_slot(self, digest: str) -> bool:
        """Whether a slot can be had for one more pinned adapter, leaving one for a reservation's holder."""
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
        return stays + reserved + extra_bytes <= self.max_extra_bytes

    def _free_run(self, units: int, digest: str) -> int | None:
        """Best fit: the free window whose free buddy run is smallest, so large runs stay whole."""
        best: tuple[int, int] | None = None
        for start in self._windows(units):
            if any(self._owner[start : start + units]) or self._is_reserved(start, units, digest):
                continue
            size = units
            while True:
                wider = start - start % (2 * size)
                if wider + 2 * size > self.num_units or any(self._owner[wider : wider + 2 * size]):
                    break
                size *= 2
            if best is None or size < best[0]:
                best = (size, start)
        return best[1] if best is not None else None

    def _cheapest_window(self, units: int, digest: str) -> int | None:
        """The window without pins whose dearest adapter is the cheapest to give up."""
        best: tuple[Priority, int, int] | None = None
        for start in self._windows(units):
            if self._is_reserved(start, units, digest):
                continue
            entries = self._occupants(start, units)
            if not all(map(self._may_go, entries)):
                continue
            candidate = (max(entry.priority for entry in entries), len(entries), start)
            if best is None or candidate < best:
                best = candidate
        return best[2] if best is not None else None

    def _lowest_window(self, units: int, digest: str) -> int | None:
        """For what is kept: the first window that can be had, so that the rows of such adapters lie together."""
        for start in self._windows(units):
            if all(map(self._may_go, self._occupants(start, units))) and not self._is_reserved(start, units, digest):
                return start
        return None

    def _give_up(self, resident: _Resident) -> str:
        """As `_evict`, for room."""
        self._order.gave_up(resident.priority)
        return self._evict(resident)

    def _evict(self, resident: _Resident) -> str:
        assert resident.num_refs == 0, "an adapter in use is never evicted"
        del self._residents[resident.digest]
        self._owner[resident.start : resident.start + resident.units] = [None] * resident.units
        self._free_slots.append(resident.adapter_slot)
        if resident.extra_bytes:
            self._vacated.append(resident.adapter_slot)
        return resident.digest


def rows_of(rank: int, alignment: int) -> int:
    """Rank rows that an adapter takes: the shortest run that holds its rank."""
    return alignment << (-(-rank // alignment) - 1).bit_length()
