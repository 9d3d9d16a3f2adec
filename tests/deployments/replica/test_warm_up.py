"""A new replica holds the hottest adapters that fit, and evicts the coldest of them first."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from app.deployments.registry.models import CatalogEntry
from app.deployments.registry.pins import Pins
from app.deployments.replica import warm_up as module
from app.deployments.replica.warm_up import WarmUp, hottest_that_fit, load_adapters, wait_for_pins
from app.deployments.rpc.long_poll_client import LongPollValue
from app.deployments.rpc.long_poll_host import Version
from app.engine.adapters.adapter import LoraAdapter
from app.engine.adapters.card import AdapterRef
from app.engine.backend import BackendLimits
from app.engine.config import EngineConfig
from app.engine.engine import Engine
from app.engine.engine_thread import EngineThread
from app.engine.errors import (
    AdapterFormatError,
    AdapterMismatch,
    AdapterTooLarge,
    ConfigError,
    EngineFailure,
    NotReady,
)
from tests.fakes import FakeBackend, fake_adapter

LIMITS = BackendLimits(num_kv_blocks=32, block_size=8, lora_pool_rows=32, rank_alignment=8, max_loras=16)


class Bench:
    """An engine that runs, over a fake device."""

    def __init__(self) -> None:
        self.backend = FakeBackend(LIMITS)
        self._engine = Engine(self.backend, EngineConfig())
        self.thread = EngineThread(self._engine, lambda _: None)
        self.thread.start()

    def residents(self) -> set[str]:
        return {resident.digest for resident in self.thread.stats().residents}

    def stop(self) -> None:
        if self.thread.failure is None:  # else its books are not to be trusted
            self._engine.check()
        assert self.thread.stop(60)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.stop()


def named(*adapters: LoraAdapter) -> list[tuple[AdapterRef, LoraAdapter]]:
    return [(AdapterRef(f"a{index}", adapter.card.digest, "t"), adapter) for index, adapter in enumerate(adapters)]


def entry(max_rank: int, extra_bytes: int = 0) -> CatalogEntry:
    return CatalogEntry(
        AdapterRef(f"r{max_rank}", f"d{max_rank}", "t"), max_rank, 64, 0.0, "ada", extra_bytes=extra_bytes
    )


async def test_the_hot_set_is_resident_and_leaves_from_its_cold_end(bench: Bench) -> None:
    hot = [fake_adapter(name, 8) for name in "abcd"]
    assert await load_adapters(bench.thread, named(*hot)) == []
    assert bench.residents() == {adapter.card.digest for adapter in hot}
    assert bench.thread.stats().num_running == bench.thread.stats().num_waiting == 0
    for coldest in reversed(range(1, 4)):
        newcomer = fake_adapter(f"new{coldest}", 8)
        assert await load_adapters(bench.thread, named(newcomer)) == []
        assert {adapter.card.digest for adapter in hot[:coldest]} <= bench.residents()
        assert hot[coldest].card.digest not in bench.residents()


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


async def test_adapters_that_no_longer_fit_are_left_out_with_the_reason(bench: Bench) -> None:
    """What the registry remembers may be of a time when the settings were others."""
    engine, backend = bench.thread, bench.backend
    good, large, foreign = fake_adapter("good", 8), fake_adapter("large", 64), fake_adapter("f", 8, base_digest="old")
    refused = dict(await load_adapters(engine, named(large, foreign, good)))
    assert {ref.name: type(error) for ref, error in refused.items()} == {"a0": AdapterTooLarge, "a1": AdapterMismatch}
    assert "'a0' needs 64 rank rows" in str(refused[AdapterRef("a0", large.card.digest, "t")])
    assert bench.residents() == {good.card.digest}
    engine.pin_adapters([good.card.digest])
    wide = fake_adapter("wide", 32)
    ((ref, error),) = await load_adapters(engine, named(wide))
    assert isinstance(error, NotReady)
    assert ref.digest == wide.card.digest
    backend.write_error = AdapterFormatError("a broken row")
    ((_, error),) = await load_adapters(engine, named(fake_adapter("broken", 8)))
    assert error is backend.write_error
    backend.write_error = None
    assert await load_adapters(engine, named(fake_adapter("next", 8))) == []


async def test_an_engine_that_fails_meanwhile_is_not_ready(bench: Bench) -> None:
    bench.backend.write_error = RuntimeError("the fake device is on fire")
    with pytest.raises(EngineFailure, match="on fire"):
        await load_adapters(bench.thread, named(fake_adapter("a", 8), fake_adapter("b", 8)))


class Sources:
    """The store of a warm-up: what was used most, and adapters that come, do not come, or never end."""

    def __init__(self, *hot: LoraAdapter) -> None:
        self.adapters = {adapter.card.digest: adapter for adapter in hot}
        self.hot_entries = [entry_of(adapter) for adapter in hot]
        self.hot_error: Exception | None = None
        self.broken: dict[str, Exception] = {}
        self.endless: set[str] = set()

    async def hot(self, limit: int) -> list[CatalogEntry]:
        if self.hot_error is not None:
            raise self.hot_error
        return self.hot_entries[:limit]

    async def fetch(self, ref: AdapterRef) -> LoraAdapter:
        if ref.digest in self.endless:
            await asyncio.Event().wait()
        if ref.digest in self.broken:
            raise self.broken[ref.digest]
        return self.adapters[ref.digest]


def entry_of(adapter: LoraAdapter) -> CatalogEntry:
    return CatalogEntry(AdapterRef("an adapter", adapter.card.digest, "t"), adapter.card.max_rank, 64, 0.0, "ada")


CONFIG = EngineConfig(lora_pool_rows=32, max_loras=16)


async def test_what_is_pinned_comes_before_what_was_used_most_and_stays(bench: Bench) -> None:
    hot = [fake_adapter(name, 8) for name in "abcd"]
    pinned = fake_adapter("pinned", 8)
    sources = Sources(*hot)
    sources.adapters[pinned.card.digest] = pinned
    read = await WarmUp(bench.thread, CONFIG, sources, sources).run(Pins((entry_of(pinned),)))
    assert read == [pinned, *hot[:3]], "the coldest has no room beside them"
    assert bench.residents() == {adapter.card.digest for adapter in read}
    assert await load_adapters(bench.thread, named(*(fake_adapter(f"new{index}", 8) for index in range(4)))) == []
    assert pinned.card.digest in bench.residents()


async def test_what_cannot_be_read_is_left_out(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    good, broken, endless = (fake_adapter(name, 8) for name in ("good", "broken", "endless"))
    sources = Sources(broken, endless, good)
    sources.broken[broken.card.digest] = AdapterFormatError("no weights in it")
    sources.endless.add(endless.card.digest)
    assert await WarmUp(bench.thread, CONFIG, sources, sources, timeout_s=0.05).run(Pins()) == [good]
    assert bench.residents() == {good.card.digest}
    assert "cannot fetch adapter an adapter: no weights in it" in caplog.text
    assert "not fetched within 0.05 s" in caplog.text


@pytest.mark.parametrize("error", [NotReady("the database is away"), ConfigError("is damaged"), TypeError("no such")])
async def test_a_replica_starts_though_nobody_knows_what_was_used(
    bench: Bench, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    sources = Sources()
    sources.hot_error = error
    assert await WarmUp(bench.thread, CONFIG, sources, sources).run(Pins()) == []
    assert str(error) in caplog.text


class PinTable:
    """The store's answers about pins, the last one for ever; None: it does not answer."""

    def __init__(self, *answers: Exception | Pins | None) -> None:
        self.answers = list(answers)

    async def watch_pins(self, *_: object) -> tuple[Version, Pins]:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if answer is None:
            await asyncio.Event().wait()
        if isinstance(answer, Exception):
            raise answer
        assert answer is not None
        return Version("a life", 1), answer


async def test_pins_are_waited_for_while_the_registry_restarts_and_no_longer(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REGISTRY_RETRY_S", 0.0)
    pins = Pins((entry(8),))

    async def found(*answers: Exception | Pins | None) -> Pins:
        table = PinTable(*answers)
        pinned: LongPollValue[Pins] = LongPollValue(table.watch_pins, "me", Pins())
        await wait_for_pins(table, pinned, "me")
        return pinned.value

    assert await found(NotReady("it restarts"), NotReady("it restarts"), pins) == pins
    assert caplog.records == []
    assert await found(ConfigError("damaged")) == Pins()
    monkeypatch.setattr(module, "REGISTRY_TIMEOUT_S", 0.02)
    assert await found(NotReady("the database is away")) == Pins()
    assert await found(None) == Pins()
    told = [record.getMessage() for record in caplog.records]
    assert ["damaged" in told[0], "is away" in told[1], "no answer" in told[2]] == [True] * 3
