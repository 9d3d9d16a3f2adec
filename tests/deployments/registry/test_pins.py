"""The pins that tiers and replicas are told are those of the registry, and no more than fit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.config import load_config
from app.deployments.registry.models import CatalogEntry
from app.deployments.registry.pins import PinLimits, PinTable
from app.engine.errors import AdapterTooLarge
from app.engine.pools.adapter_pool import AdapterPool
from tests.deployments.registry.steered import KEYS, entries, entry


@given(changes=st.lists(st.tuples(st.sampled_from(KEYS), entries), max_size=30))
def test_following_changes_is_starting_anew(
    changes: list[tuple[tuple[str, str], tuple[str, float, bool] | None]],
) -> None:
    book = PinTable()
    now: dict[tuple[str, str], CatalogEntry] = {}
    for key, values in changes:
        now.pop(key, None)
        new = None
        if values is not None:
            digest, weight, pinned = values
            new = now[key] = entry(key, digest, weight, pinned=pinned)
        before = book.value
        assert book.apply(key, new) == (book.value != before)
        assert book.value == PinTable(now.values()).value
        assert book.value.digests == {item.ref.digest for item in now.values() if item.pinned}
        weights = [item.traffic_weight for item in book.value.entries]
        assert weights == sorted(weights, reverse=True)


def test_limits_are_a_part_of_what_the_service_has() -> None:
    settings = {"engine": {"lora_pool_rows": 100, "max_loras": 9}, "adapters": {"max_pinned_fraction": 0.25}}
    limits = PinLimits.of(load_config(settings, environ={}))
    assert (limits.rank_rows, limits.adapter_slots) == (25, 2)
    assert limits.host_bytes == 128 << 20
    assert limits.extra_bytes == 64 << 20
    assert limits.rank_alignment == 8


@pytest.mark.parametrize(("rows", "slots", "largest"), [(512, 255, 512), (100, 9, 64), (7, 9, 0), (512, 1, 0)])
def test_an_adapter_that_no_engine_could_hold_is_refused(rows: int, slots: int, largest: int) -> None:
    engine = {"lora_pool_rows": rows, "max_loras": slots, "extra_weights_bytes": 100}
    room = PinLimits.of(load_config({"engine": engine}, environ={})).alone
    room.check("a", largest, 100)
    assert AdapterPool(rows, 8, slots).limits.max_rank == largest, "what an engine says of itself"
    with pytest.raises(
        AdapterTooLarge, match=f"'a' has rank {largest + 1} and .* rank {largest}; raise engine.lora_pool_rows"
    ):
        room.check("a", largest + 1, 0)
    with pytest.raises(AdapterTooLarge, match=r"'a' takes 101 bytes .* at most 100; raise engine.extra_weights_bytes"):
        room.check("a", 0, 101)


def test_pins_are_counted_in_the_rows_of_the_device() -> None:
    """Eight adapters of rank 8 take 64 rows of a CPU engine and 128 of a GPU's."""
    pinned = [entry(("default", f"n{index}"), f"d{index}", pinned=True) for index in range(8)]
    for device, is_enough in (("cpu", True), ("cuda", False)):
        settings = {"engine": {"lora_pool_rows": 127, device: {}}, "adapters": {"max_pinned_fraction": 1.0}}
        limits = PinLimits.of(load_config(settings, environ={}))
        if is_enough:
            limits.check("n7", pinned)
        else:
            with pytest.raises(AdapterTooLarge, match="8 pinned adapters would take 128 rank rows and may take 127"):
                limits.check("n7", pinned)
