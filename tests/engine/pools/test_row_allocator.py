"""Runs are buddies: none overlap, long ones stay whole, and the cheapest to clear is found."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.engine.pools.row_allocator import RowAllocator, RowRange, length_of
from tests.budgets import examples

LENGTHS = st.sampled_from([1, 2, 4, 8])


def free_units(runs: dict[int, RowRange], num_units: int) -> set[int]:
    return set(range(num_units)) - {unit for run in runs.values() for unit in range(run.start, run.end)}


@settings(max_examples=examples(300), deadline=None)
@given(num_units=st.integers(0, 40), data=st.data())
def test_any_giving_and_taking_keeps_buddies(num_units: int, data: st.DataObject) -> None:
    runs: RowAllocator[int] = RowAllocator(num_units)
    given_to: dict[int, RowRange] = {}
    for owner in range(data.draw(st.integers(1, 30))):
        if given_to and data.draw(st.booleans()):
            gone = data.draw(st.sampled_from(sorted(given_to)))
            runs.free(given_to.pop(gone))
        length = data.draw(LENGTHS)
        start = data.draw(st.integers(-1, num_units))
        closed = None if start < 0 else RowRange(start, 4)
        free = free_units(given_to, num_units)
        fits = [
            place
            for place in (RowRange(at, length) for at in range(0, num_units - length + 1, length))
            if set(range(place.start, place.end)) <= free and not place.overlaps(closed)
        ]
        assert runs.places(length) == tuple(RowRange(at, length) for at in range(0, num_units - length + 1, length))
        run = runs.best_fit(length, closed)
        assert (run in fits) if fits else run is None
        if run is None:
            continue
        assert room_around(run, free, num_units) == min(room_around(place, free, num_units) for place in fits)
        runs.assign(run, owner)
        given_to[owner] = run
        runs.check((run, owner) for owner, run in given_to.items())
        whole = RowRange(0, num_units)
        assert runs.owners(whole) == sorted(given_to, key=lambda owner: given_to[owner].start)


def room_around(run: RowRange, free: set[int], num_units: int) -> int:
    """By brute force: the longest free buddy run around a free one."""
    lengths = [run.length << power for power in range(7)]
    around = {length: run.start - run.start % length for length in lengths}
    held = [
        length
        for length, start in around.items()
        if start + length <= num_units and set(range(start, start + length)) <= free
    ]
    return max(length for length in held if all(shorter in held for shorter in lengths if shorter <= length))


@settings(max_examples=examples(200), deadline=None)
@given(
    prices=st.lists(st.one_of(st.none(), st.integers(0, 5)), max_size=24),
    length=LENGTHS,
    closed_start=st.integers(-1, 24),
)
def test_the_cheapest_place_is_the_lowest_of_equals(prices: list[int | None], length: int, closed_start: int) -> None:
    """Every unit has an owner of its own; one without a price must stay."""
    runs: RowAllocator[int] = RowAllocator(len(prices))
    for unit in range(len(prices)):
        runs.assign(RowRange(unit, 1), unit)

    def cost(owners: list[int]) -> int | None:
        found = [prices[owner] for owner in owners]
        return None if None in found else sum(price for price in found if price is not None)

    closed = None if closed_start < 0 else RowRange(closed_start, 2)
    costs = {
        place: price
        for place in runs.places(length)
        if not place.overlaps(closed) and (price := cost(list(range(place.start, place.end)))) is not None
    }
    expected = min(costs, key=lambda place: (costs[place], place.start), default=None)
    assert runs.cheapest(length, cost, closed) == expected


def test_a_run_that_somebody_has_is_not_given_twice() -> None:
    runs: RowAllocator[str] = RowAllocator(4)
    runs.assign(RowRange(0, 2), "a")
    with pytest.raises(AssertionError, match="two adapters share a row"):
        runs.assign(RowRange(1, 1), "b")


def test_finding_a_free_run_looks_at_no_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool has a unit for each rank row: a walk over them would hold up the step."""
    runs: RowAllocator[int] = RowAllocator(1 << 16)
    for owner in range(1000):
        runs.assign(RowRange(64 * owner, 1), owner)
    monkeypatch.setattr(runs, "_owners", None)
    assert runs.best_fit(1, None) == RowRange(1, 1)
    assert runs.best_fit(64, None) == RowRange(64_000, 64)
    assert runs.best_fit(2, excluded=RowRange(2, 2)) == RowRange(66, 2)


def test_a_long_run_is_priced_once_for_all_the_short_ones_in_it() -> None:
    runs: RowAllocator[str] = RowAllocator(48)
    for start, owner in enumerate("abc"):
        runs.assign(RowRange(16 * start, 16), owner)
    asked: list[list[str]] = []

    def cost(owners: list[str]) -> int:
        asked.append(owners)
        return {"a": 2, "b": 1, "c": 1}[owners[0]]

    assert runs.cheapest(1, cost, None) == RowRange(16, 1)
    assert asked == [["a"], ["b"], ["c"]]


@given(rank=st.integers(1, 300), alignment=st.sampled_from([1, 8, 16]))
def test_a_run_is_the_shortest_power_of_two_that_holds_the_rank(rank: int, alignment: int) -> None:
    length = length_of(rank, alignment)
    assert length & (length - 1) == 0
    assert length * alignment >= rank
    assert length == 1 or length // 2 * alignment < rank


@given(num_units=st.integers(0, 100))
def test_the_longest_run_fits_and_twice_of_it_does_not(num_units: int) -> None:
    runs: RowAllocator[str] = RowAllocator(num_units)
    if not num_units:
        assert runs.max_length == 0
        return
    assert runs.best_fit(runs.max_length, None) == RowRange(0, runs.max_length)
    assert runs.best_fit(2 * runs.max_length, None) is None
