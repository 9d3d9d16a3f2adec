"""Where runs of rank rows may lie, and who owns which.

In: lengths in units (a unit is the rank alignment) that are powers of two. Out: runs. Rule: a run starts at a multiple
of its length, as in a buddy allocator, so two freed neighbours always make one run of twice the length. The free ones
are kept by their lengths, so that finding one does not grow with the number of units. Who may be asked to leave, and
what that costs, is for the caller to say.
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
    """The owners of `num_units` units. `excluded` is always a run that must not be touched, or None."""

    def __init__(self, num_units: int) -> None:
        self.num_units = num_units
        self._owners: list[Owner | None] = [None] * num_units
        self._places: dict[int, tuple[RowRange, ...]] = {}  # by length, as they are asked for
        #: Starts of the free runs that no longer free one holds, in order; by length, the shortest first.
        self._free: dict[int, list[int]] = {1 << power: [] for power in range(num_units.bit_length())}
        start = 0
        for length in reversed(self._free):
            if num_units & length:
                self._free[length].append(start)
                start += length

    @property
    def max_length(self) -> int:
        """The longest run there can be; 0 if there are no units."""
        return 1 << (self.num_units.bit_length() - 1) if self.num_units else 0

    def places(self, length: int) -> tuple[RowRange, ...]:
        """Every place where a run of this length may lie, the lowest first."""
        places = self._places.get(length)
        if places is None:
            starts = range(0, self.num_units - length + 1, length)
            places = self._places[length] = tuple(RowRange(start, length) for start in starts)
        return places

    def owners(self, run: RowRange) -> list[Owner]:
        """Who owns units of this run, each once, the lowest first."""
        owners = dict.fromkeys(self._owners[run.start : run.start + run.length])
        return [owner for owner in owners if owner is not None]

    def assign(self, run: RowRange, owner: Owner) -> None:
        """Everything in the run is free and becomes this owner's."""
        assert self._is_free(run), "two adapters share a row"
        self._owners[run.start : run.end] = [owner] * run.length
        held = run
        while not self._remove_free(held):  # the free run that holds it is halved down to it
            self._add_free(self._buddy(held))
            held = self._parent(held)

    def free(self, run: RowRange) -> None:
        """The run, which has one owner, is free from now on."""
        self._owners[run.start : run.end] = [None] * run.length
        while self._remove_free(self._buddy(run)):
            run = self._parent(run)
        self._add_free(run)

    def best_fit(self, length: int, excluded: RowRange | None) -> RowRange | None:
        """A free run in the shortest free one that has room for it beside `excluded`, so that long runs stay whole."""
        for room, starts in self._free.items():
            if room < length:
                continue
            for start in starts:
                runs = (RowRange(at, length) for at in range(start, start + room, length))
                if (run := next((run for run in runs if not run.overlaps(excluded)), None)) is not None:
                    return run
        return None

    def cheapest(self, length: int, cost: Callable[[list[Owner]], Any], excluded: RowRange | None) -> RowRange | None:
        """The place that costs least to clear, the lowest of equals.

        `cost` maps the owners of a place to something that compares, or to None if one of them must stay.
        """
        best: tuple[Any, RowRange] | None = None
        priced: list[Owner] | None = None
        for run in self.places(length):
            if run.overlaps(excluded) or (owners := self.owners(run)) == priced:
                continue  # what the place before it costs, this one costs, too
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
        """Whether this was one of the free runs, which it is no longer."""
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
        """The run of twice the length that holds this one."""
        return RowRange(run.start & ~run.length, 2 * run.length)


def length_of(rank: int, alignment: int) -> int:
    """Units of the shortest run that holds this rank (at least 1): a power of two."""
    return 1 << (-(-rank // alignment) - 1).bit_length()
