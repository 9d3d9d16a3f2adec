"""Buddy allocator of rank rows: where runs of rows may lie, and who owns them.

Lengths are powers of two in units of the rank alignment. A run starts at a multiple of its length, so two free
neighbours always merge into a run of twice the length. Free runs are kept by length, so that finding one does not grow
with the number of units. The caller decides what may be evicted and at which cost.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Generic, NamedTuple, TypeVar

Owner = TypeVar("Owner", bound=Hashable)


class RowRange(NamedTuple):
    """Units [start, start + length)."""

    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length

    def overlaps(self, other: RowRange | None) -> bool:
        """Whether the two share a unit; nothing overlaps None."""
        return other is not None and self.start < other.end and other.start < self.end


class RowAllocator(Generic[Owner]):
    """The owners of `num_units` units. `excluded` is always a run that must not be used, or None."""

    def __init__(self, num_units: int) -> None:
        self.num_units = num_units
        self._owners: list[Owner | None] = [None] * num_units
        self._places: dict[int, tuple[RowRange, ...]] = {}  # by length, computed on first use
        #: Sorted starts of the maximal free runs, by length, the shortest first.
        self._free: dict[int, list[int]] = {1 << power: [] for power in range(num_units.bit_length())}
        start = 0
        for length in reversed(self._free):
            if num_units & length:
                self._free[length].append(start)
                start += length

    @property
    def max_length(self) -> int:
        """The longest possible run; 0 without units."""
        return 1 << (self.num_units.bit_length() - 1) if self.num_units else 0

    def places(self, length: int) -> tuple[RowRange, ...]:
        """All positions of a run of this length, the lowest first."""
        places = self._places.get(length)
        if places is None:
            starts = range(0, self.num_units - length + 1, length)
            places = self._places[length] = tuple(RowRange(start, length) for start in starts)
        return places

    def owners(self, run: RowRange) -> list[Owner]:
        """The owners of units in this run, each once, the lowest first."""
        owners = dict.fromkeys(self._owners[run.start : run.start + run.length])
        return [owner for owner in owners if owner is not None]

    def assign(self, run: RowRange, owner: Owner) -> None:
        """Give a free run to this owner."""
        assert self._is_free(run), "two adapters share a row"
        self._owners[run.start : run.end] = [owner] * run.length
        held = run
        while not self._remove_free(held):  # split the free run that contains it
            self._add_free(self._buddy(held))
            held = self._parent(held)

    def free(self, run: RowRange) -> None:
        """Free a run that has one owner."""
        self._owners[run.start : run.end] = [None] * run.length
        while self._remove_free(self._buddy(run)):
            run = self._parent(run)
        self._add_free(run)

    def best_fit(self, length: int, excluded: RowRange | None) -> RowRange | None:
        """A free run, taken from the shortest free one with room for it outside `excluded`, so that long runs stay
        whole."""
        for room, starts in self._free.items():
            if room < length:
                continue
            for start in starts:
                runs = (RowRange(at, length) for at in range(start, start + room, length))
                if (run := next((run for run in runs if not run.overlaps(excluded)), None)) is not None:
                    return run
        return None

    def cheapest(self, length: int, cost: Callable[[list[Owner]], Any], excluded: RowRange | None) -> RowRange | None:
        """The run with the lowest eviction cost, the lowest position of equals.

        `cost` maps a run's owners to a comparable value, or to None if one of them must stay.
        """
        best: tuple[Any, RowRange] | None = None
        priced: list[Owner] | None = None
        for run in self.places(length):
            if run.overlaps(excluded) or (owners := self.owners(run)) == priced:
                continue  # same owners as the run before, same cost
            priced = owners
            price = cost(owners)
            if price is not None and (best is None or price < best[0]):
                best = price, run
        return None if best is None else best[1]

    def check(self, runs: Iterable[tuple[RowRange, Owner]]) -> None:
        """Assert that these runs and no others have owners; for tests."""
        expected: list[Owner | None] = [None] * self.num_units
        for run, owner in runs:
            assert run.start % run.length == 0, "a run starts at a multiple of its length"
            assert run.end <= self.num_units
            for unit in range(run.start, run.end):
                assert expected[unit] is None, "two adapters share a row"
                expected[unit] = owner
        assert expected == self._owners
        free = [RowRange(start, length) for length, starts in self._free.items() for start in starts]
        assert all(map(self._is_free, free))
        assert sum(run.length for run in free) == expected.count(None), "a free unit is in one free run"
        assert not any(self._buddy(run) in free for run in free), "two free buddies are one run"

    def _is_free(self, run: RowRange) -> bool:
        return self._owners[run.start : run.end].count(None) == run.length

    def _remove_free(self, run: RowRange) -> bool:
        """Remove a run from the free ones; False if it is not among them."""
        starts = self._free.get(run.length, [])
        at = bisect_left(starts, run.start)
        if at == len(starts) or starts[at] != run.start:
            return False
        del starts[at]
        return True

    def _add_free(self, run: RowRange) -> None:
        insort(self._free[run.length], run.start)

    @staticmethod
    def _buddy(run: RowRange) -> RowRange:
        """The other half of the run of twice the length."""
        return RowRange(run.start ^ run.length, run.length)

    @staticmethod
    def _parent(run: RowRange) -> RowRange:
        """The run of twice the length that contains this one."""
        return RowRange(run.start & ~run.length, 2 * run.length)


def length_of(rank: int, alignment: int) -> int:
    """Units of the shortest run for this rank (at least 1): a power of two."""
    return 1 << (-(-rank // alignment) - 1).bit_length()
