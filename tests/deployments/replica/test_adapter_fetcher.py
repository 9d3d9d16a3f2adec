"""Adapters come from the store's shared memory; memory that is lost is asked for once more."""

from __future__ import annotations

import asyncio
import time

import pytest
from ray.exceptions import ObjectLostError, OwnerDiedError

from app.deployments.replica import adapter_fetcher as module
from app.deployments.replica.adapter_fetcher import AdapterFetcher, MappedAdapters
from app.deployments.rpc.actor_unavailable import ActorUnavailable
from app.deployments.store.shared_adapter import SharedAdapter
from app.engine.adapters.card import AdapterRef
from app.engine.adapters.sandbox.packing import pack_adapter
from app.engine.errors import AdapterFormatError, NotReady
from tests.fakes import fake_adapter

ADAPTER = fake_adapter("a", 8)
REF = AdapterRef("a", ADAPTER.card.digest, "t")


class FakeStore:
    """Returns the given answers and raises the given exceptions; an object error is raised by the memory it returns."""

    def __init__(self, *answers: Exception | None) -> None:
        self.answers = list(answers)
        self.lost_digests: list[str] = []

    async def fetch(self, ref: AdapterRef) -> SharedAdapter:
        assert ref == REF
        answer = self.answers.pop(0)
        if answer is not None and not isinstance(answer, ObjectLostError):
            raise answer
        packed = pack_adapter(ADAPTER)
        arrays = []
        for array in packed.arrays:
            arrays.append(asyncio.get_running_loop().create_future())
            if answer is None:
                arrays[-1].set_result(array)
            else:
                arrays[-1].set_exception(answer)
                arrays[-1].exception()  # only the first is asked for
        return SharedAdapter(packed.header, arrays)  # type: ignore[arg-type]

    async def invalidate(self, digest: str) -> None:
        self.lost_digests.append(digest)


def away() -> ActorUnavailable:
    return ActorUnavailable("the store does not answer", retry_after_s=1)


def dead() -> OwnerDiedError:
    return OwnerDiedError("00" * 28, None, "")


async def test_an_adapter_is_what_was_packed() -> None:
    store = FakeStore(None)
    adapter = await AdapterFetcher(store, time.monotonic).fetch(REF)
    assert adapter.card == ADAPTER.card
    for key, pair in ADAPTER.weights.items():
        assert (adapter.weights[key].a == pair.a).all()
        assert (adapter.weights[key].b == pair.b).all()
    assert store.lost_digests == []


@pytest.mark.parametrize("first", [away(), dead()], ids=["the store is away", "its memory is lost"])
async def test_what_is_lost_is_asked_for_again(first: Exception) -> None:
    store = FakeStore(first, None)
    adapter = await AdapterFetcher(store, time.monotonic, retry_s=0.0).fetch(REF)
    assert (adapter.card, store.lost_digests) == (ADAPTER.card, [REF.digest])


async def test_a_store_is_waited_for_while_its_node_is_replaced() -> None:
    seconds = iter(range(100))
    store = FakeStore(*(away() for _ in range(20)), dead(), None)
    fetcher = AdapterFetcher(store, lambda: next(seconds), retry_s=0.0, wait_s=30)
    assert (await fetcher.fetch(REF)).card == ADAPTER.card
    assert store.answers == []


async def test_a_store_that_stays_away_is_not_ready() -> None:
    seconds = iter(range(100))
    store = FakeStore(*(away() for _ in range(20)))
    with pytest.raises(NotReady, match="cannot fetch adapter 'a': the adapter store has been down for 5 s") as caught:
        await AdapterFetcher(store, lambda: next(seconds), retry_s=0.0, wait_s=5).fetch(REF)
    assert not isinstance(caught.value, ActorUnavailable)
    assert len(store.answers) == 15


async def test_what_the_adapter_is_to_blame_for_is_not_asked_again() -> None:
    store, began_s = FakeStore(AdapterFormatError("no weights in it")), time.monotonic()
    with pytest.raises(AdapterFormatError, match="no weights"):
        await AdapterFetcher(store, time.monotonic, retry_s=600.0).fetch(REF)
    assert time.monotonic() - began_s < 600.0


async def test_the_adapters_used_last_stay_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two, three = (fake_adapter(name, 8) for name in ("one", "two", "three"))
    monkeypatch.setattr(module, "MAX_MAPPED_BYTES", 2 * one.card.size_bytes)
    adapters = MappedAdapters(AdapterFetcher(FakeStore(), time.monotonic))
    adapters.add(one)
    adapters.add(two)
    assert adapters.get(one.card.digest) is one
    adapters.add(three)
    assert list(adapters.digests) == [one.card.digest, three.card.digest]
    adapters.remove(one.card.digest)
    assert adapters.get(one.card.digest) is None
    monkeypatch.setattr(module, "MAX_MAPPED_BYTES", 0)
    adapters.add(two)
    assert list(adapters.digests) == [two.card.digest], "the last one stays however large it is"
