"""A new replica holds the hottest adapters that fit, evicts the coldest of them first, and starts whatever fits."""

from __future__ import annotations

import pytest

from app.deployments.registry.entries import CatalogEntry
from app.deployments.replica.warm_up import hottest_that_fit, warm_adapters, warm_up
from app.engine.adapters.card import AdapterRef
from app.engine.adapters.lora import LoraAdapter
from app.engine.backend import BackendLimits
from app.engine.config import EngineConfig
from app.engine.engine import Engine
from app.engine.errors import AdapterFormatError, AdapterMismatch, AdapterTooLarge, EngineFailure, NotReady
from tests.fakes import FakeBackend, fake_adapter, fake_spec

LIMITS = BackendLimits(num_kv_blocks=32, block_size=8, adapter_rank_rows=32, rank_alignment=8, max_adapter_slots=16)


def residents(engine: Engine) -> set[str]:
    return {resident.digest for resident in engine.stats().residents}


def named(*adapters: LoraAdapter) -> list[tuple[AdapterRef, LoraAdapter]]:
    return [(AdapterRef(f"a{index}", adapter.card.digest), adapter) for index, adapter in enumerate(adapters)]


def entry(max_rank: int, extra_bytes: int = 0) -> CatalogEntry:
    return CatalogEntry(AdapterRef(f"r{max_rank}", f"d{max_rank}"), max_rank, 64, 0.0, extra_bytes=extra_bytes)


def test_the_hot_set_is_resident_and_leaves_from_its_cold_end() -> None:
    engine = Engine(FakeBackend(LIMITS), EngineConfig())
    hot = [fake_adapter(name, 8) for name in "abcd"]
    assert warm_adapters(engine, named(*hot)) == []
    assert residents(engine) == {adapter.card.digest for adapter in hot}
    assert engine.stats().num_running == engine.stats().num_waiting == 0
    for coldest in reversed(range(1, 4)):
        newcomer = fake_adapter(f"new{coldest}", 8)
        assert warm_adapters(engine, named(newcomer)) == []
        assert {adapter.card.digest for adapter in hot[:coldest]} <= residents(engine)
        assert hot[coldest].card.digest not in residents(engine)


@pytest.mark.parametrize(
    ("max_ranks", "num_rows", "alignment", "chosen"),
    [
        ([], 64, 8, []),
        ([8, 8, 8], 16, 8, [8, 8]),
        ([8, 8, 8], 16, 16, [8]),
        ([1, 1], 16, 8, [1, 1]),
        ([9, 8], 16, 8, [9]),
        ([64, 8], 63, 8, [8]),
        ([16, 128, 48, 8], 128, 8, [16, 48, 8]),
        ([16, 33, 24, 8], 96, 16, [16, 33, 8]),
    ],
)
def test_the_hottest_come_first_and_those_that_do_not_fit_hold_up_nobody(
    max_ranks: list[int], num_rows: int, alignment: int, chosen: list[int]
) -> None:
    entries = [entry(max_rank) for max_rank in max_ranks]
    room = {"num_rank_rows": num_rows, "rank_alignment": alignment, "extra_bytes": 0}
    found = hottest_that_fit(entries, num_adapters=9, **room)
    assert [item.max_rank for item in found] == chosen
    assert hottest_that_fit(entries, num_adapters=1, **room) == found[:1]


def test_what_the_hottest_hold_beside_their_rows_fits_too() -> None:
    entries = [entry(8, 60), entry(9, 50), entry(16, 40), entry(4)]
    found = hottest_that_fit(entries, num_adapters=9, num_rank_rows=512, rank_alignment=8, extra_bytes=100)
    assert [item.max_rank for item in found] == [8, 16, 4]


def test_adapters_that_no_longer_fit_are_left_out_with_the_reason() -> None:
    """What the registry remembers may be of a time when the settings were others."""
    backend = FakeBackend(LIMITS)
    engine = Engine(backend, EngineConfig())
    good, large, foreign = fake_adapter("good", 8), fake_adapter("large", 64), fake_adapter("f", 8, base_digest="old")
    refused = dict(warm_adapters(engine, named(large, foreign, good)))
    assert {ref.name: type(error) for ref, error in refused.items()} == {"a0": AdapterTooLarge, "a1": AdapterMismatch}
    assert "'a0' has rank 64" in str(refused[AdapterRef("a0", large.card.digest)])
    assert residents(engine) == {good.card.digest}
    engine.keep_adapters([good.card.digest])
    wide = fake_adapter("wide", 32)
    ((ref, error),) = warm_adapters(engine, named(wide))
    assert isinstance(error, NotReady)
    assert ref.digest == wide.card.digest
    backend.write_error = AdapterFormatError("a broken row")
    ((_, error),) = warm_adapters(engine, named(fake_adapter("broken", 8)))
    assert error is backend.write_error
    backend.write_error = None
    assert warm_adapters(engine, named(fake_adapter("next", 8))) == []
    engine.check()


def test_an_engine_that_fails_while_it_warms_is_not_ready() -> None:
    backend = FakeBackend(LIMITS)
    engine = Engine(backend, EngineConfig())
    backend.fail_at = 0
    with pytest.raises(EngineFailure, match="on fire"):
        warm_adapters(engine, named(fake_adapter("a", 8)))
    with pytest.raises(EngineFailure, match="on fire"):
        warm_up(engine, fake_spec())


@pytest.mark.parametrize(
    ("changes", "config"),
    [
        ({}, {}),
        ({"adapter_rank_rows": 0}, {}),
        ({"adapter_rank_rows": 4}, {}),
        ({"max_adapter_slots": 1}, {}),
        ({"num_kv_blocks": 4}, {}),
        ({}, {"max_waiting": 1}),
        ({}, {"max_context": 12}),
        ({}, {"max_context": 2}),
    ],
)
def test_any_settings_that_load_warm_up(changes: dict[str, int], config: dict[str, int]) -> None:
    limits = LIMITS.__class__(**{name: getattr(LIMITS, name) for name in LIMITS.__dataclass_fields__} | changes)
    engine = Engine(FakeBackend(limits), EngineConfig.model_validate(config))
    warm_up(engine, fake_spec())
    assert residents(engine) == set()
    assert engine.stats().num_running == engine.stats().num_waiting == 0
    assert (engine.stats().num_tokens_generated > 0) == (config.get("max_context") != 2)
    engine.check()
