"""Where runs of rank rows may lie, and who owns which.

In: lengths in units (a unit is the rank alignment) that are powers of two. Out: runs. Rule: a run starts at a multiple
of its length, as in a buddy allocator, so two freed neighbours always make one run of twice the length. Who may be
asked to leave, and what that costs, is for the caller to say.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any, Generic, NamedTuple, TypeVar

Owner = TypeVar("Owner", bound=Hashable)


class Run(NamedTuple):
    """Units [start, start + length)."""

    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length

    def overlaps(self, other: Run | None) -> bool:
        """Whether the two share a unit; nothing overlaps None."""
        return other is not None and self.start < other.end and other.start < self.end


class RowRuns(Generic[Owner]):
    """The owners of `num_units` units. `closed` is always a run that must not be touched, or None."""

    def __init__(self, num_units: int) -> None:
        self.num_units = num_units
        self._owners: list[Owner | None] = [None] * num_units
        self._places: dict[int, tuple[Run, ...]] = {}  # by length, as they are asked for

    @property
    def max_length(self) -> int:
        """The longest run there can be; 0 if there are no units."""
        return 1 << (self.num_units.bit_length() - 1) if self.num_units else 0

    def places(self, length: int) -> tuple[Run, ...]:
        """Every place where a run of this length may lie, the lowest first."""
        places = self._places.get(length)
        if places is None:
            starts = range(0, self.num_units - length + 1, length)
            places = self._places[length] = tuple(Run(start, length) for start in starts)
        return places

    def owners(self, run: Run) -> list[Owner]:
        """Who owns units of this run, each once, the lowest first."""
        owners = dict.fromkeys(self._owners[run.start : run.start + run.length])
        return [owner for owner in owners if owner is not None]

    def give(self, run: Run, owner: Owner) -> None:
        """Everything in the run is free and becomes this owner's."""
        assert self._is_free(run), "two adapters share a row"
        self._owners[run.start : run.end] = [owner] * run.length

    def take_back(self, run: Run) -> None:
        """The run is free from now on."""
        self._owners[run.start : run.end] = [None] * run.length

    def best_fit(self, length: int, closed: Run | None) -> Run | None:
        """A free run whose surrounding free buddy run is the shortest, so that long runs stay whole."""
        best: tuple[int, Run] | None = None
        for run in self.places(length):
            if self._owners[run.start] is not None or run.overlaps(closed) or not self._is_free(run):
                continue
            room = self._free_around(run)
            if best is None or room < best[0]:
                best = room, run
        return None if best is None else best[1]

    def cheapest(self, length: int, cost: Callable[[list[Owner]], Any], closed: Run | None) -> Run | None:
        """The place that costs least to clear, the lowest of equals.

        `cost` maps the owners of a place to something that compares, or to None if one of them must stay.
        """
        best: tuple[Any, Run] | None = None
        for run in self.places(length):
            if (closed is not None and run.overlaps(closed)) or (price := cost(self.owners(run))) is None:
                continue
            if best is None or price < best[0]:
                best = price, run
        return None if best is None else best[1]

    def check(self, runs: Iterable[tuple[Run, Owner]]) -> None:
        """Assert that these runs and no others have owners; for tests."""
        expected: list[Owner | None] = [None] * self.num_units
        for run, owner in runs:
            assert run.start % run.length == 0, "a run starts at a multiple of its length"
            assert run.end <= self.num_units
            for unit in range(run.start, run.end):
                assert expected[unit] is None, "two adapters share a row"
                expected[unit] = owner
        assert expected == self._owners

    def _is_free(self, run: Run) -> bool:
        return self._owners[run.start : run.end].count(None) == run.length

    def _free_around(self, run: Run) -> int:
        """Length of the longest free buddy run that holds this free one."""
        while True:
            wider = Run(run.start - run.start % (2 * run.length), 2 * run.length)
            if wider.end > self.num_units or not self._is_free(wider):
                return run.length
            run = wider


def length_of(rank: int, alignment: int) -> int:
    """Units of the shortest run that holds this rank (at least 1): a power of two."""
    return 1 << (-(-rank // alignment) - 1).bit_length()
