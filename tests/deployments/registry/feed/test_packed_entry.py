"""An adapter comes out of its packed form as it went in."""

from __future__ import annotations

from dataclasses import fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.deployments.registry.feed.packed_entry import pack_entry, unpack_entry, unpack_ref
from app.deployments.registry.models import CatalogEntry
from app.engine.adapters.card import AdapterRef
from tests.budgets import examples

texts = st.text(st.characters(), max_size=40)
counts = st.integers(0, 2**62)
times = st.floats(0, 1e10)
digests = st.one_of(st.sampled_from(["", "d1", "A" * 64, "g" * 64, "é" * 64, " " + "0" * 63, "0 " * 32]), st.binary(
    min_size=32, max_size=32).map(bytes.hex))  # fmt: skip
refs = st.builds(AdapterRef, texts, digests, texts, counts, texts)
entries = st.builds(
    CatalogEntry, refs, counts, counts, times, texts, st.booleans(), times, st.none() | times, texts, counts, texts,
    texts, st.lists(counts, max_size=5).map(tuple),
)  # fmt: skip


@given(entry=entries)
@settings(max_examples=examples(200), deadline=None)
def test_what_is_unpacked_is_what_was_packed(entry: CatalogEntry) -> None:
    packed = pack_entry(entry)
    assert unpack_entry(packed, entry.tenant_id, entry.name) == entry
    assert unpack_ref(packed, entry.tenant_id, entry.name) == entry.ref


def other(value: object) -> object:
    """Not this value."""
    return {bool: lambda: True, str: lambda: "other", type(None): lambda: 7.0, tuple: lambda: (3, 1 << 40)}.get(
        type(value), lambda: 9
    )()


@pytest.mark.parametrize("field", [field.name for field in fields(CatalogEntry) if field.name != "ref"])
def test_every_field_is_packed(field: str) -> None:
    """One that is added to entries has to be added to their packed form."""
    plain = CatalogEntry(AdapterRef("a", "d" * 64, "t"), 8, 64, 0.0, "ada")
    values = {each.name: getattr(plain, each.name) for each in fields(CatalogEntry)}
    entry = CatalogEntry(**values | {field: other(values[field])})  # type: ignore[arg-type]
    assert entry != plain
    assert unpack_entry(pack_entry(entry), "t", "a") == entry


def test_a_usual_entry_takes_few_bytes() -> None:
    ref = AdapterRef("customer-0000001", "0123456789abcdef" * 4, "default", 3, "/adapters/customer-0000001")
    entry = CatalogEntry(ref, 16, 1 << 20, 1.7e9, "http 10.0.0.1", source="customer-0000001")
    assert len(pack_entry(entry)) < 192
