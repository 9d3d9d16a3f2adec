"""Entries with pins and weights, for the tests of `pins` and `shares`."""

from __future__ import annotations

from hypothesis import strategies as st

from app.deployments.registry.models import CatalogEntry
from app.engine.adapters.card import AdapterRef

KEYS = [("default", "a"), ("default", "b"), ("other", "a"), ("other", "c")]


def entry(key: tuple[str, str], digest: str, weight: float = 1.0, *, pinned: bool = False) -> CatalogEntry:
    ref = AdapterRef(key[1], digest, key[0])
    return CatalogEntry(ref, 8, 64, 0.0, "ada", pinned=pinned, traffic_weight=weight)


#: What becomes of a name: (digest, weight, pinned), or None when it goes.
entries = st.one_of(
    st.none(),
    st.builds(
        lambda digest, weight, pinned: (digest, weight, pinned),
        st.sampled_from(["d1", "d2", "d3"]),
        st.sampled_from([0.0, 0.5, 1.0, 1.0, 2.0, 8.0]),
        st.booleans(),
    ),
)
