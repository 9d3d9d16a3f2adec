"""A cover has every pair, is small, and leaves the rest to the night."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.pairwise import cover_of, pairwise


def pairs(rows: list[tuple[int, ...]]) -> set[tuple[tuple[int, int], ...]]:
    return {pair for row in rows for pair in combinations(enumerate(row), 2)}


@pytest.mark.parametrize(("sizes", "num_at_most"), [((2, 2, 2), 5), ((4, 5, 6), 36), ((3,) * 5, 18), ((3, 4), 12)])
def test_a_cover_holds_every_pair_and_few_rows(sizes: tuple[int, ...], num_at_most: int) -> None:
    cover = cover_of(sizes)
    assert pairs(cover) == pairs(list(product(*(range(size) for size in sizes))))
    assert len(cover) <= num_at_most
    assert cover == cover_of(sizes)


@pytest.mark.parametrize("sizes", [(7,), (3, 7), (2, 5, 4)])
def test_with_a_strength_of_one_each_value_is_there_once(sizes: tuple[int, ...]) -> None:
    cover = cover_of(sizes, 1)
    values = {(column, index) for column, size in enumerate(sizes) for index in range(size)}
    assert {value for row in cover for value in enumerate(row)} == values
    assert len(cover) == max(sizes)


def test_what_has_no_short_name_is_named_by_its_place() -> None:
    ids = [case.id for case in pairwise({"a": ["x" * 99, object(), len]}).args[1]]
    assert ids == ["str0", "object1", "len"]


def test_combinations_outside_the_cover_are_nightly() -> None:
    names, cases = pairwise({"a, b": [(1, 2), (3, 4)], "c": ["x", [0]], "d": [float, None]}).args
    assert names == ["a", "b", "c", "d"]
    assert {case.values for case in cases if case.values[2] == "x"} == {
        (a, b, "x", d) for a, b in ((1, 2), (3, 4)) for d in (float, None)
    }
    assert cases[0].id == "1-2-x-float"
    assert cases[-1].id == "3-4-[0]-None"
    nightly = [case for case in cases if case.marks]
    assert len(cases) == 8
    assert len(nightly) == 8 - len(cover_of((2, 2, 2)))
    assert {mark.name for case in nightly for mark in case.marks} == {"nightly"}
