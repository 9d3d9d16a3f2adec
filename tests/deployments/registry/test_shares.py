"""The shares that placement is told follow the registry's weights, within a tenth."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from app.deployments.registry.entries import AliasEntry, AliasTarget, CatalogEntry
from app.deployments.registry.shares import ShareBook
from tests.deployments.registry.steered import KEYS, entries, entry


@given(changes=st.lists(st.tuples(st.sampled_from(KEYS), entries), max_size=30))
def test_following_changes_is_starting_anew(
    changes: list[tuple[tuple[str, str], tuple[str, float, bool] | None]],
) -> None:
    book = ShareBook()
    now: dict[tuple[str, str], CatalogEntry] = {}
    for key, values in changes:
        now.pop(key, None)
        new = None
        if values is not None:
            digest, weight, pinned = values
            new = now[key] = entry(key, digest, weight, pinned=pinned)
        before = book.value
        assert book.apply(key, new) == (book.value != before)
        fresh = ShareBook(now.values()).value
        assert set(book.value) == set(fresh)
        for digest, share in fresh.items():
            assert share / 1.1 <= book.value[digest] <= share * 1.1


def test_a_share_is_the_weight_over_the_sum_and_grows_stale_by_a_tenth_at_most() -> None:
    book = ShareBook([entry(("default", f"n{index}"), f"d{index}") for index in range(96)])
    alias = AliasEntry("alias", (AliasTarget("n1", 1.0),), 1, 0.0, tenant_id="default")
    assert not book.apply(("default", "alias"), alias)
    assert book.apply(("default", "heavy"), entry(("default", "heavy"), "heavy", 4.0))
    assert book.value == {"heavy": 0.04}
    told = [book.apply(("default", f"m{index}"), entry(("default", f"m{index}"), "m")) for index in range(11)]
    assert told == [False] * 10 + [True]
    assert book.value == {"heavy": 4 / 111}
