"""Ids in place of numbers: one for each, and no other means anything."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from app.deployments.ingress.opaque_ids import OpaqueIds

IDS = OpaqueIds(b"ada's", "event")


@given(st.integers(0, 2**63 - 1))
def test_a_number_comes_back(number: int) -> None:
    assert IDS.number_of(IDS.id_of(number)) == number
    assert OpaqueIds(b"ada's", "event").id_of(number) == IDS.id_of(number)
    for others in (OpaqueIds(b"bob's", "event"), OpaqueIds(b"ada's", "audit")):
        assert others.number_of(IDS.id_of(number)) is None


@given(number=st.integers(0, 2**40), place=st.integers(0, 47), letter=st.characters(max_codepoint=300))
def test_an_id_that_is_changed_means_nothing(number: int, place: int, letter: str) -> None:
    told = IDS.id_of(number)
    changed = told[:place] + letter + told[place + 1 :]
    assert (IDS.number_of(changed) is None) == (changed != told)
    for other in ("", told[:-1], told + "a", f"{told}\n", str(number), 48 * "0"):
        assert IDS.number_of(other) is None


def test_ids_of_numbers_that_follow_have_nothing_in_common() -> None:
    """Each digit of an id takes all values, whatever stays the same in the numbers."""
    told = [IDS.id_of(number) for number in range(2000)]
    for digits in zip(*told, strict=True):
        assert len(set(digits)) == 16
