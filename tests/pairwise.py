"""Parametrized tests whose default run is a cover of all pairs of values; the other combinations are nightly.

Most mistakes show with one value or with two together, and a cover finds those with a fraction of the product's cases:
4 x 5 x 6 values are 120 cases, of which some 30 hold every pair.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest

#: What is longer is named by its type and place.
MOST_CHARS = 60


def pairwise(values: Mapping[str, Iterable[Any]], *, strength: int = 2) -> pytest.MarkDecorator:
    """As one `pytest.mark.parametrize` for every item, with each combination that the cover lacks marked `nightly`.

    A key "form, dtype" names two parameters whose values come as tuples. With a strength of 1 the cover holds each
    value once, for parameters that have nothing to do with each other.
    """
    columns = [list(column) for column in values.values()]
    num_names = [len(key.split(",")) for key in values]
    names = [name.strip() for key in values for name in key.split(",")]
    cover = set(cover_of([len(column) for column in columns], strength))
    cases = []
    for indices in product(*(range(len(column)) for column in columns)):
        parts = [column[index] for column, index in zip(columns, indices, strict=True)]
        case = [one for part, count in zip(parts, num_names, strict=True) for one in (part if count > 1 else [part])]
        at = [index for index, count in zip(indices, num_names, strict=True) for _ in range(count)]
        marks = () if indices in cover else pytest.mark.nightly
        cases.append(pytest.param(*case, id="-".join(map(_id, case, at)), marks=marks))
    return pytest.mark.parametrize(names, cases)


def cover_of(sizes: Sequence[int], strength: int = 2) -> list[tuple[int, ...]]:
    """Rows of indices below `sizes` with every combination of indices of `strength` columns; always the same rows.

    Greedy: the next row is the first of those with most combinations that are missing.
    """
    strength = min(strength, len(sizes))
    rows = list(product(*(range(size) for size in sizes)))
    held = [set(combinations(enumerate(row), strength)) for row in rows]
    missing = set().union(*held)
    cover: list[tuple[int, ...]] = []
    while missing:
        best = max(range(len(rows)), key=lambda row: len(held[row] & missing))
        cover.append(rows[best])
        missing -= held[best]
    return cover


def _id(value: Any, index: int) -> str:
    """A value's part of the test's name: the same in every process."""
    name = value.__name__ if hasattr(value, "__name__") else str(value)
    return name if len(name) <= MOST_CHARS and " at 0x" not in name else f"{type(value).__name__}{index}"
